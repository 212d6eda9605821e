//! Compares the loops with the definitions, bit for bit.

use super::scalar::{E4m3, E5m2};
use super::{
    Element, Reduction, average_all, combine, combine_all, divide, float8_bits, half_bits, narrow,
    scalar, scale, widen,
};
use half::f16;
use proptest::prelude::*;

/// Elements whose bits are random, and special ones: zeros, infinities, NaN, subnormal numbers, halfway cases.
fn vector(element: Element, count: usize) -> impl Strategy<Value = Vec<u8>> {
    let mask = u64::MAX >> (64 - 8 * element.bytes());
    let number = move |value: f64| match element {
        Element::F16 => f16::from_f64(value).to_bits().into(),
        Element::Bf16 => half::bf16::from_f64(value).to_bits().into(),
        Element::F32 => (value as f32).to_bits().into(),
        Element::F64 => value.to_bits(),
        Element::F8E4m3 => E4m3::from_f32(value as f32).0.into(),
        Element::F8E5m2 => E5m2::from_f32(value as f32).0.into(),
        _ => value as i64 as u64,
    };
    let special = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -f64::NAN, 1.0, -3.0];
    let special = prop::sample::select(special.map(number).to_vec());
    let one = prop_oneof![
        2 => any::<u64>(),
        2 => special,
        1 => (0u64..5).prop_map(move |low| low), // Subnormal.
        1 => (0u64..5).prop_map(move |high| mask - high),
        1 => (-70_000f64..70_000f64).prop_map(number),
    ];
    let bytes = move |all: Vec<u64>| {
        all.iter().flat_map(|one| one.to_ne_bytes()[..element.bytes()].to_vec()).collect()
    };
    prop::collection::vec(one, count).prop_map(bytes)
}

/// Vector at an offset from an aligned address.
struct Placed {
    memory: Vec<u64>,
    offset: usize,
    length: usize,
}

impl Placed {
    fn new(bytes: &[u8], offset: usize) -> Placed {
        let memory = vec![0; (offset + bytes.len()).div_ceil(8) + 1];
        let mut placed = Placed { memory, offset, length: bytes.len() };
        // SAFETY: the memory is longer.
        unsafe { placed.pointer().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        placed
    }

    fn pointer(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr().cast::<u8>().wrapping_add(self.offset)
    }

    fn bytes(&mut self) -> Vec<u8> {
        // SAFETY: initialised memory with this length.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.length) }.to_vec()
    }
}

/// Call target: separate memory, or one source.
#[derive(Clone, Copy, Debug)]
enum Target {
    Apart,
    Source(usize),
}

/// Call sources and where they lie.
#[derive(Clone, Debug)]
struct Case {
    element: Element,
    sources: Vec<Vec<u8>>,
    offsets: Vec<usize>,
    target: Target,
}

impl Case {
    fn count(&self) -> usize {
        self.sources[0].len() / self.element.bytes()
    }

    /// Call result in the target's place; checks that the sources and the bytes beside it are unchanged.
    fn run(&self, call: impl FnOnce(*mut u8, &[*const u8])) -> Vec<u8> {
        let place = |(bytes, &offset): (&Vec<u8>, &usize)| Placed::new(bytes, offset);
        let mut sources: Vec<Placed> = self.sources.iter().zip(&self.offsets).map(place).collect();
        let mut apart = Placed::new(&vec![0xa5; self.sources[0].len()], self.offsets[0]);
        let pointers: Vec<*mut u8> = sources.iter_mut().map(Placed::pointer).collect();
        let target = match self.target {
            Target::Apart => apart.pointer(),
            Target::Source(number) => pointers[number],
        };
        call(target, &pointers.iter().map(|pointer| pointer.cast_const()).collect::<Vec<_>>());
        for (number, source) in sources.iter_mut().enumerate() {
            assert!(*source.memory.last().unwrap() == 0, "bytes behind a source were written");
            if !matches!(self.target, Target::Source(target) if target == number) {
                assert_eq!(source.bytes(), self.sources[number], "a source was written");
            }
        }
        match self.target {
            Target::Apart => apart.bytes(),
            Target::Source(number) => sources[number].bytes(),
        }
    }

    /// The fold by definition.
    fn folded(&self, reduction: Reduction) -> Vec<u8> {
        let apart = Case { target: Target::Apart, ..self.clone() };
        // SAFETY: all vectors have `count` elements.
        apart.run(|target, sources| unsafe {
            scalar::combine_all(reduction, self.element, target, sources, self.count())
        })
    }
}

fn case(element: Element, sources: usize) -> impl Strategy<Value = Case> {
    let longest = if cfg!(miri) { 10 } else { 300usize };
    let target = prop_oneof![Just(Target::Apart), (0..sources).prop_map(Target::Source)];
    (0..longest, prop::collection::vec(0usize..8, sources), target).prop_flat_map(
        move |(count, offsets, target)| {
            prop::collection::vec(vector(element, count), sources).prop_map(move |sources| Case {
                element,
                sources,
                offsets: offsets.clone(),
                target,
            })
        },
    )
}

fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 1 } else { 64 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Runs a property for each element type.
fn for_elements(sources: usize, property: impl Fn(Case) -> Result<(), TestCaseError>) {
    for element in Element::ALL {
        let mut runner = proptest::test_runner::TestRunner::new(config());
        if let Err(error) = runner.run(&case(element, sources), &property) {
            panic!("{element}: {error}");
        }
    }
}

fn supported(element: Element) -> impl Iterator<Item = Reduction> {
    Reduction::ALL.into_iter().filter(move |reduction| reduction.supports(element))
}

#[test]
fn two_sources_combine_as_defined_and_in_either_order() {
    for_elements(2, |case| {
        for reduction in supported(case.element) {
            let count = case.count();
            // SAFETY: all vectors have `count` elements.
            let call =
                |target, a, b| unsafe { combine(reduction, case.element, target, a, b, count) };
            let seen = case.run(|target, sources| call(target, sources[0], sources[1]));
            prop_assert_eq!(&seen, &case.folded(reduction), "{}", reduction);
            let swapped = case.run(|target, sources| call(target, sources[1], sources[0]));
            prop_assert_eq!(&seen, &swapped, "{} of swapped sources", reduction);
        }
        Ok(())
    });
}

#[test]
fn many_sources_fold_as_defined() {
    for_elements(5, |case| {
        for reduction in supported(case.element) {
            // SAFETY: all vectors have `count` elements.
            let seen = case.run(|target, sources| unsafe {
                combine_all(reduction, case.element, target, sources, case.count())
            });
            prop_assert_eq!(seen, case.folded(reduction), "{}", reduction);
        }
        Ok(())
    });
}

/// Except for 8-bit and 16-bit floats, whose fold is rounded once.
#[test]
fn a_fold_has_the_bits_of_successive_combinations() {
    for_elements(3, |case| {
        if case.element.is_short_float() {
            return Ok(());
        }
        for reduction in supported(case.element) {
            let (element, count) = (case.element, case.count());
            let apart = Case { target: Target::Apart, ..case.clone() };
            // SAFETY: all vectors have `count` elements.
            let seen = apart.run(|target, sources| unsafe {
                combine(reduction, element, target, sources[0], sources[1], count);
                combine(reduction, element, target, target, sources[2], count);
            });
            prop_assert_eq!(seen, case.folded(reduction), "{}", reduction);
        }
        Ok(())
    });
}

#[test]
fn averages_and_conversions_are_rounded_once_as_defined() {
    for_elements(3, |case| {
        let (element, count) = (case.element, case.count());
        let apart = Case { target: Target::Apart, ..case.clone() };
        // SAFETY: all vectors have `count` elements.
        let seen = case.run(|to, from| unsafe { average_all(element, to, from, count, 3) });
        if !element.is_short_float() {
            // SAFETY: as above.
            let defined = apart.run(|to, from| unsafe {
                combine_all(Reduction::Sum, element, to, from, count);
                divide(element, to, to, count, 3);
            });
            prop_assert_eq!(seen, defined);
            return Ok(());
        }
        let mut wide = vec![vec![0f32; count]; 3];
        let defined = apart.run(|to, from| {
            for (wide, from) in wide.iter_mut().zip(from) {
                // SAFETY: as above; the other vector has float32 elements.
                unsafe { widen(element, wide.as_mut_ptr().cast(), *from, count, None) };
            }
            let sums: Vec<f32> = (0..count).map(|i| wide[0][i] + wide[1][i] + wide[2][i]).collect();
            // SAFETY: as above.
            unsafe { narrow(element, to, sums.as_ptr().cast(), count, 3) };
        });
        prop_assert_eq!(seen, defined);
        // A product is rounded to the element before it is widened.
        // SAFETY: as above.
        let product = apart.run(|to, from| unsafe { scale(element, to, from[0], count, 0.3) });
        let again = apart.run(|to, from| {
            // SAFETY: as above; the vector between has float32 elements.
            unsafe { widen(element, wide[0].as_mut_ptr().cast(), from[0], count, Some(0.3)) };
            // SAFETY: as above.
            unsafe { narrow(element, to, wide[0].as_ptr().cast(), count, 1) };
        });
        prop_assert_eq!(again, product);
        Ok(())
    });
}

#[test]
fn vectors_are_scaled_and_divided_as_defined() {
    for_elements(1, |case| {
        let (element, count) = (case.element, case.count());
        let apart = Case { target: Target::Apart, ..case.clone() };
        for factor in [0.1, -3.5, 0.0, 1e300, f64::NAN] {
            // SAFETY: all vectors have `count` elements.
            let seen = case.run(|to, from| unsafe { scale(element, to, from[0], count, factor) });
            // SAFETY: as above.
            let defined =
                apart.run(|to, from| unsafe { scalar::scale(element, to, from[0], count, factor) });
            prop_assert_eq!(seen, defined, "times {}", factor);
        }
        for divisor in [1, 2, 3, 7, 1000, 100_003, u32::MAX] {
            // SAFETY: as above.
            let seen = case.run(|to, from| unsafe { divide(element, to, from[0], count, divisor) });
            // SAFETY: as above.
            let defined = apart
                .run(|to, from| unsafe { scalar::divide(element, to, from[0], count, divisor) });
            prop_assert_eq!(seen, defined, "over {}", divisor);
        }
        Ok(())
    });
}

#[test]
fn every_half_widens_exactly() {
    for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 257 } else { 1 }) {
        let (seen, exact) = (half_bits::f32_of(bits), f16::from_bits(bits).to_f32());
        assert!(seen.to_bits() == exact.to_bits() || (seen.is_nan() && exact.is_nan()), "{bits}");
    }
}

#[test]
fn every_float8_widens_exactly_and_narrows_again() {
    for code in 0..=u8::MAX {
        let (seen, exact) = (float8_bits::f32_of_e4m3(code), E4m3(code).to_f32());
        assert!(seen.to_bits() == exact.to_bits() || (seen.is_nan() && exact.is_nan()), "{code}");
        assert_eq!(float8_bits::e4m3_of(seen), if seen.is_nan() { 0x7f } else { code });
        let (seen, exact) = (float8_bits::f32_of_e5m2(code), E5m2(code).to_f32());
        assert!(seen.to_bits() == exact.to_bits() || (seen.is_nan() && exact.is_nan()), "{code}");
        assert_eq!(float8_bits::e5m2_of(seen), if seen.is_nan() { 0x7e } else { code });
    }
}

/// Rounding is monotonic, so it is correct everywhere if it is correct around each midpoint.
#[test]
fn floats_round_to_the_nearest_float8() {
    // Beyond the largest number: the one that would follow it.
    let numbers = |largest: u8, value: fn(u8) -> f32, next: f32| {
        (0..=largest).map(value).chain([next, f32::MAX, f32::INFINITY]).collect::<Vec<_>>()
    };
    let e4m3 = numbers(0x7e, |code| E4m3(code).to_f32(), 480.0);
    let e5m2 = numbers(0x7b, |code| E5m2(code).to_f32(), 65536.0);
    for pair in e4m3.windows(2).chain(e5m2.windows(2)) {
        let middle = pair[0] + (pair[1] - pair[0]) / 2.0;
        for value in [middle.next_down(), middle, middle.next_up(), pair[0], pair[1], f32::NAN] {
            for value in [value, -value] {
                assert_eq!(float8_bits::e4m3_of(value), E4m3::from_f32(value).0, "{value:e}");
                assert_eq!(float8_bits::e5m2_of(value), E5m2::from_f32(value).0, "{value:e}");
            }
        }
    }
    assert_eq!(e4m3.iter().map(|value| float8_bits::e4m3_of(*value)).max(), Some(0x7f));
    assert_eq!(
        [464.0, 464.1, 61439.0, 61440.0].map(|value| E4m3::from_f32(value).0),
        [0x7e, 0x7f, 0x7f, 0x7f]
    );
    assert_eq!(
        [464.0, -61439.0, -61440.0, f32::MAX].map(|value| E5m2::from_f32(value).0),
        [0x5f, 0xfb, 0xfc, 0x7c]
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..config() })]

    #[test]
    fn any_float_rounds_to_the_nearest_float8(bits in any::<u32>(), shift in 0u32..8) {
        // Small exponents are as likely as others.
        for value in [bits, (bits >> shift) & 0x4fff_ffff].map(f32::from_bits) {
            prop_assert_eq!(float8_bits::e4m3_of(value), E4m3::from_f32(value).0, "{:e}", value);
            prop_assert_eq!(float8_bits::e5m2_of(value), E5m2::from_f32(value).0, "{:e}", value);
        }
    }

    #[test]
    fn floats_round_to_the_nearest_half(bits in any::<u32>(), near in any::<u16>(), away in -2i32..3) {
        // Halfway between two neighbours, and a little less or more.
        let lower = f16::from_bits(near & 0x7fff).to_f32();
        let upper = f16::from_bits((near & 0x7fff) + 1).to_f32();
        let halfway = (lower + (upper - lower) / 2.0).to_bits().wrapping_add_signed(away);
        for value in [bits, halfway, halfway | 1 << 31].map(f32::from_bits) {
            let expected = if value.is_nan() { 0x7e00 } else { f16::from_f32(value).to_bits() };
            prop_assert_eq!(half_bits::f16_of(value), expected, "{:e}", value);
        }
    }
}
