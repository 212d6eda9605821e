//! Vector reductions: exact results, and both computation paths compared.

use weft_collectives::reduction::{
    Element, Reduction, average_all, combine, combine_all, divide, scale,
};

/// Bytes for numbers.
macro_rules! bytes {
    ($($number:expr),*) => {
        [$($number.to_ne_bytes().to_vec()),*].concat()
    };
}

fn combined(reduction: Reduction, element: Element, a: &[u8], b: &[u8]) -> Vec<u8> {
    let mut target = vec![0; a.len()];
    let count = a.len() / element.bytes();
    assert_eq!(b.len(), a.len());
    // SAFETY: three vectors with `count` elements each.
    unsafe {
        combine(reduction, element, target.as_mut_ptr(), a.as_ptr(), b.as_ptr(), count);
    }
    target
}

fn folded(reduction: Reduction, element: Element, sources: &[&[u8]]) -> Vec<u8> {
    let mut target = vec![0; sources[0].len()];
    let count = target.len() / element.bytes();
    let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr()).collect();
    // SAFETY: vectors with `count` elements each.
    unsafe { combine_all(reduction, element, target.as_mut_ptr(), &pointers, count) };
    target
}

fn divided(element: Element, source: &[u8], divisor: u32) -> Vec<u8> {
    let mut target = vec![0; source.len()];
    let count = source.len() / element.bytes();
    // SAFETY: vectors with `count` elements each.
    unsafe { divide(element, target.as_mut_ptr(), source.as_ptr(), count, divisor) };
    target
}

fn scaled(element: Element, source: &[u8], factor: f64) -> Vec<u8> {
    let mut target = vec![0; source.len()];
    let count = source.len() / element.bytes();
    // SAFETY: vectors with `count` elements each.
    unsafe { scale(element, target.as_mut_ptr(), source.as_ptr(), count, factor) };
    target
}

#[test]
fn integers_wrap_and_compare_with_their_sign() {
    let (a, b) = (bytes![i8::MAX, -1i8, 7i8], bytes![1i8, 1i8, -100i8]);
    assert_eq!(combined(Reduction::Sum, Element::I8, &a, &b), bytes![i8::MIN, 0i8, -93i8]);
    assert_eq!(combined(Reduction::Min, Element::I8, &a, &b), bytes![1i8, -1i8, -100i8]);
    assert_eq!(combined(Reduction::Min, Element::U8, &a, &b), bytes![1i8, 1i8, 7i8]);
    let (a, b) = (bytes![i64::MAX, 3i64], bytes![2i64, -5i64]);
    assert_eq!(combined(Reduction::Product, Element::I64, &a, &b), bytes![-2i64, -15i64]);
    assert_eq!(combined(Reduction::Xor, Element::U64, &a, &b), bytes![i64::MAX ^ 2, 3i64 ^ -5]);
}

#[test]
fn bytes_of_bool_are_true_unless_0() {
    let (a, b) = ([0, 0, 2, 4], [0, 1, 0, 8]);
    assert_eq!(combined(Reduction::Sum, Element::Bool, &a, &b), [0, 1, 1, 1]);
    assert_eq!(combined(Reduction::Product, Element::Bool, &a, &b), [0, 0, 0, 1]);
    assert_eq!(combined(Reduction::Min, Element::Bool, &a, &b), [0, 0, 0, 1]);
    assert_eq!(combined(Reduction::Max, Element::Bool, &a, &b), [0, 1, 1, 1]);
    assert_eq!(combined(Reduction::Xor, Element::Bool, &a, &b), [0, 1, 1, 0]);
}

#[test]
fn nan_wins_and_negative_zero_is_less_than_zero() {
    let (a, b) = (bytes![f32::NAN, -0f32, 0f32, 1f32], bytes![1f32, 0f32, -0f32, 2f32]);
    let minimum = bytes![f32::NAN, -0f32, -0f32, 1f32];
    let maximum = bytes![f32::NAN, 0f32, 0f32, 2f32];
    for (a, b) in [(&a, &b), (&b, &a)] {
        assert_eq!(combined(Reduction::Min, Element::F32, a, b), minimum);
        assert_eq!(combined(Reduction::Max, Element::F32, a, b), maximum);
    }
    let (a, b) = (bytes![f64::INFINITY], bytes![f64::NEG_INFINITY]);
    assert_eq!(combined(Reduction::Sum, Element::F64, &a, &b), bytes![f64::NAN]);
}

/// 2048 + 1 is halfway between two binary16 numbers; so is 256 + 1 in bfloat16.
#[test]
fn sums_of_halves_round_after_each_operation_or_once_for_all_sources() {
    let half = |value: f32| half::f16::from_f32(value).to_ne_bytes().to_vec();
    let (large, one) = (half(2048.0), half(1.0));
    assert_eq!(combined(Reduction::Sum, Element::F16, &large, &one), half(2048.0));
    assert_eq!(folded(Reduction::Sum, Element::F16, &[&large, &one, &one]), half(2050.0));
    let brain = |value: f32| half::bf16::from_f32(value).to_ne_bytes().to_vec();
    let (large, one) = (brain(256.0), brain(1.0));
    assert_eq!(combined(Reduction::Sum, Element::Bf16, &large, &one), brain(256.0));
    assert_eq!(folded(Reduction::Sum, Element::Bf16, &[&large, &one, &one]), brain(258.0));
}

/// 16 + 1 is halfway between two e4m3 numbers, 8 + 1 in e5m2.
#[test]
fn sums_of_float8_round_once_and_overflow_to_nan_or_infinity() {
    // 16, 1, 448 and -448 in e4m3; 8, 1, 57344 and -57344 in e5m2.
    for (element, [large, one, most, least], [even, exact], [beyond, below]) in [
        (Element::F8E4m3, [0x58u8, 0x38, 0x7e, 0xfe], [0x58, 0x59], [0x7f, 0x7f]),
        (Element::F8E5m2, [0x48, 0x3c, 0x7b, 0xfb], [0x48, 0x49], [0x7c, 0xfc]),
    ] {
        let sum = |sources: &[u8]| {
            let sources: Vec<[u8; 1]> = sources.iter().map(|code| [*code]).collect();
            folded(
                Reduction::Sum,
                element,
                &sources.iter().map(|code| &code[..]).collect::<Vec<_>>(),
            )
        };
        assert_eq!(sum(&[large, one]), [even]);
        assert_eq!(sum(&[large, one, one]), [exact]);
        assert_eq!(sum(&[most, most]), [beyond]);
        assert_eq!(sum(&[least, least]), [below]);
        // The sum is in range before it is rounded.
        assert_eq!(sum(&[most, most, least]), [most]);
    }
}

#[test]
fn averages_divide_and_truncate() {
    assert_eq!(divided(Element::I32, &bytes![-7i32, 7i32], 2), bytes![-3i32, 3i32]);
    assert_eq!(divided(Element::I8, &bytes![-7i8, 100i8], 300), bytes![0i8, 0i8]);
    assert_eq!(divided(Element::U64, &bytes![u64::MAX], 3), bytes![u64::MAX / 3]);
    assert_eq!(divided(Element::F32, &bytes![1f32], 49), bytes![1f32 / 49f32]);
    assert_eq!(divided(Element::F64, &bytes![1f64], 0), bytes![1f64]);
}

#[test]
fn averages_of_short_floats_are_rounded_once_and_do_not_overflow() {
    let average = |element: Element, codes: &[u16]| {
        let sources: Vec<_> = codes.iter().map(|code| code.to_ne_bytes()).collect();
        let pointers: Vec<_> = sources.iter().map(|code| code.as_ptr()).collect();
        let mut target = [0u8; 2];
        let divisor = codes.len() as u32;
        // SAFETY: one element each.
        unsafe { average_all(element, target.as_mut_ptr(), &pointers, 1, divisor) };
        u16::from_ne_bytes(target)
    };
    // 60000 twice; the sum is beyond the largest float16. 65504 three times.
    assert_eq!(average(Element::F16, &[0x7b53, 0x7b53]), 0x7b53);
    assert_eq!(average(Element::F16, &[0x7bff, 0x7bff, 0x7bff]), 0x7bff);
    // 2^127 twice: float32 overflows as well.
    assert_eq!(average(Element::Bf16, &[0x7f00, 0x7f00]), 0x7f80);
    // (2048 + 3) / 3: 683.667 is 683.5 in float16; a rounded sum, 2052, gives 684.
    assert_eq!(average(Element::F16, &[0x6800, 0x4200, 0x0000]), 0x6157);
    assert_eq!(average(Element::Bf16, &[0x7fff, 0x3f80]), 0x7fc0);
}

#[test]
fn factors_scale_floats_and_saturate_integers() {
    assert_eq!(scaled(Element::F64, &bytes![3f64], 0.1), bytes![3f64 * 0.1]);
    assert_eq!(scaled(Element::F32, &bytes![3f32], 0.1), bytes![3f32 * 0.1f32]);
    assert_eq!(scaled(Element::I16, &bytes![-9i16, 30_000i16], 1.5), bytes![-13i16, i16::MAX]);
    assert_eq!(scaled(Element::Bool, &[2, 0], 1.5), [1, 0]);
    assert_eq!(scaled(Element::Bool, &[2, 0], 0.5), [0, 0]);
}

#[test]
fn one_source_is_copied_and_none_change_nothing() {
    let source = bytes![f32::from_bits(0x7f80_0001)];
    assert_eq!(folded(Reduction::Sum, Element::F32, &[&source]), source);
    let mut target = [5; 4];
    // SAFETY: a vector with one element.
    unsafe { combine_all(Reduction::Sum, Element::F32, target.as_mut_ptr(), &[], 1) };
    assert_eq!(target, [5; 4]);
}

#[test]
#[should_panic(expected = "xor of float16: expected bool or an integer type")]
fn bitwise_operations_on_floats_are_rejected() {
    combined(Reduction::Xor, Element::F16, &[0, 0], &[0, 0]);
}
