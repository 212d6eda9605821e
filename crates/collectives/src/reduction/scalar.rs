//! Definition of every result, one element at a time.

use super::{Element, Reduction};
use half::{bf16, f16};

/// Element in memory, and its value in the type's arithmetic.
trait Scalar: Copy {
    /// Arithmetic type.
    type Value: Copy;
    fn value(self) -> Self::Value;
    fn rounded(value: Self::Value) -> Self;
    fn apply(reduction: Reduction, a: Self::Value, b: Self::Value) -> Self::Value;
    fn scaled(value: Self::Value, factor: f64) -> Self::Value;
    fn divided(value: Self::Value, divisor: u32) -> Self::Value;
}

macro_rules! integer {
    ($($type:ty, $wide:ty);*) => {$(
        impl Scalar for $type {
            type Value = $type;

            fn value(self) -> $type {
                self
            }

            fn rounded(value: $type) -> $type {
                value
            }

            fn apply(reduction: Reduction, a: $type, b: $type) -> $type {
                match reduction {
                    Reduction::Sum => a.wrapping_add(b),
                    Reduction::Product => a.wrapping_mul(b),
                    Reduction::Min => a.min(b),
                    Reduction::Max => a.max(b),
                    Reduction::And => a & b,
                    Reduction::Or => a | b,
                    Reduction::Xor => a ^ b,
                }
            }

            fn scaled(value: $type, factor: f64) -> $type {
                (value as f64 * factor) as $type
            }

            fn divided(value: $type, divisor: u32) -> $type {
                (value as $wide / divisor as $wide) as $type
            }
        }
    )*};
}

integer!(u8, u64; i8, i64; u16, u64; i16, i64; u32, u64; i32, i64; u64, u64; i64, i64);

/// A `bool` in memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Truth(u8);

impl Scalar for Truth {
    type Value = bool;

    fn value(self) -> bool {
        self.0 != 0
    }

    fn rounded(value: bool) -> Truth {
        Truth(value.into())
    }

    fn apply(reduction: Reduction, a: bool, b: bool) -> bool {
        match reduction {
            Reduction::Sum | Reduction::Max | Reduction::Or => a | b,
            Reduction::Product | Reduction::Min | Reduction::And => a & b,
            Reduction::Xor => a ^ b,
        }
    }

    fn scaled(value: bool, factor: f64) -> bool {
        (f64::from(u8::from(value)) * factor) as u8 != 0
    }

    fn divided(value: bool, divisor: u32) -> bool {
        value && divisor == 1
    }
}

/// `float8_e4m3fn` in memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct E4m3(pub u8);

/// `float8_e5m2` in memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct E5m2(pub u8);

impl E4m3 {
    pub(super) fn to_f32(self) -> f32 {
        let magnitude = self.0 & 0x7f;
        let value = if magnitude == 0x7f { f64::NAN } else { number(magnitude, 3, 7) };
        if self.0 < 0x80 { value as f32 } else { -value as f32 }
    }

    pub(super) fn from_f32(value: f32) -> E4m3 {
        match nearest(value, 3, 7) {
            magnitude if value.is_nan() || magnitude > 0x7e => E4m3(0x7f),
            magnitude => E4m3(magnitude | u8::from(value.is_sign_negative()) << 7),
        }
    }
}

impl E5m2 {
    pub(super) fn to_f32(self) -> f32 {
        let value = match self.0 & 0x7f {
            0x7c => f64::INFINITY,
            0x7d.. => f64::NAN,
            magnitude => number(magnitude, 2, 15),
        };
        if self.0 < 0x80 { value as f32 } else { -value as f32 }
    }

    pub(super) fn from_f32(value: f32) -> E5m2 {
        if value.is_nan() {
            return E5m2(0x7e);
        }
        E5m2(nearest(value, 2, 15).min(0x7c) | u8::from(value.is_sign_negative()) << 7)
    }
}

/// Number for a code without sign, if all codes were finite.
fn number(code: u8, mantissa_bits: i32, bias: i32) -> f64 {
    let (exponent, mantissa) =
        (i32::from(code) >> mantissa_bits, code & ((1 << mantissa_bits) - 1));
    let fraction = f64::from(mantissa) * two_to(-mantissa_bits);
    match exponent {
        0 => fraction * two_to(1 - bias),
        _ => (1.0 + fraction) * two_to(exponent - bias),
    }
}

/// Power of two, exact within float64's normal range. Rust does not specify how precise `powi` is.
fn two_to(exponent: i32) -> f64 {
    f64::from_bits(((exponent + f64::MAX_EXP - 1) as u64) << (f64::MANTISSA_DIGITS - 1))
}

/// Code for the number nearest to a magnitude; the even one if two are equally near.
fn nearest(value: f32, mantissa_bits: i32, bias: i32) -> u8 {
    // Beyond all numbers, but small enough that the distances differ.
    let magnitude = f64::from(value).abs().min(1e9);
    let distance = |code: u8| (number(code, mantissa_bits, bias) - magnitude).abs();
    let closer = |best: u8, code: u8| {
        let (known, new) = (distance(best), distance(code));
        if new < known || (new == known && code.is_multiple_of(2)) { code } else { best }
    };
    (0..=0x7f).reduce(closer).expect("codes")
}

macro_rules! float {
    ($($type:ty, $value:ty, $widen:expr, $round:expr);*) => {$(
        impl Scalar for $type {
            type Value = $value;

            fn value(self) -> $value {
                ($widen)(self)
            }

            fn rounded(value: $value) -> $type {
                ($round)(if value.is_nan() { <$value>::NAN } else { value })
            }

            fn apply(reduction: Reduction, a: $value, b: $value) -> $value {
                let less = |a: $value, b: $value| {
                    a < b || (a == b && a.is_sign_negative() && b.is_sign_positive())
                };
                match reduction {
                    Reduction::Sum => a + b,
                    Reduction::Product => a * b,
                    _ if a.is_nan() || b.is_nan() => <$value>::NAN,
                    Reduction::Min => if less(a, b) { a } else { b },
                    Reduction::Max => if less(a, b) { b } else { a },
                    _ => unreachable!("bitwise operation on floats"),
                }
            }

            fn scaled(value: $value, factor: f64) -> $value {
                value * factor as $value
            }

            fn divided(value: $value, divisor: u32) -> $value {
                value / divisor as $value
            }
        }
    )*};
}

float!(
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
    f32, f32, |value| value, |value| value;
    f64, f64, |value| value, |value| value;
    E4m3, f32, E4m3::to_f32, E4m3::from_f32;
    E5m2, f32, E5m2::to_f32, E5m2::from_f32
);

/// Calls a function that is generic over [`Scalar`] with an element type.
macro_rules! for_element {
    ($element:expr, $function:ident $arguments:tt) => {
        match $element {
            Element::Bool => $function::<Truth> $arguments,
            Element::U8 => $function::<u8> $arguments,
            Element::I8 => $function::<i8> $arguments,
            Element::U16 => $function::<u16> $arguments,
            Element::I16 => $function::<i16> $arguments,
            Element::U32 => $function::<u32> $arguments,
            Element::I32 => $function::<i32> $arguments,
            Element::U64 => $function::<u64> $arguments,
            Element::I64 => $function::<i64> $arguments,
            Element::F16 => $function::<f16> $arguments,
            Element::Bf16 => $function::<bf16> $arguments,
            Element::F32 => $function::<f32> $arguments,
            Element::F64 => $function::<f64> $arguments,
            Element::F8E4m3 => $function::<E4m3> $arguments,
            Element::F8E5m2 => $function::<E5m2> $arguments,
        }
    };
}

/// [`super::combine_all`]; at least one source.
pub(super) unsafe fn combine_all(
    reduction: Reduction,
    element: Element,
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
) {
    // SAFETY: the caller's.
    unsafe { for_element!(element, fold(reduction, target, sources, count)) }
}

/// [`super::scale`].
pub(super) unsafe fn scale(
    element: Element,
    target: *mut u8,
    source: *const u8,
    count: usize,
    factor: f64,
) {
    // SAFETY: the caller's.
    unsafe { for_element!(element, scale_all(target, source, count, factor)) }
}

/// [`super::divide`].
pub(super) unsafe fn divide(
    element: Element,
    target: *mut u8,
    source: *const u8,
    count: usize,
    divisor: u32,
) {
    // SAFETY: the caller's.
    unsafe { for_element!(element, divide_all(target, source, count, divisor)) }
}

unsafe fn fold<S: Scalar>(
    reduction: Reduction,
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
) {
    for index in 0..count {
        // SAFETY: the caller's: `index` is below `count`.
        let read = |source: &*const u8| unsafe { read::<S>(*source, index) };
        let folded = sources.iter().map(read).reduce(|a, b| S::apply(reduction, a, b));
        let folded = folded.expect("a source");
        // SAFETY: as above.
        unsafe { write::<S>(target, index, folded) };
    }
}

unsafe fn scale_all<S: Scalar>(target: *mut u8, source: *const u8, count: usize, factor: f64) {
    for index in 0..count {
        // SAFETY: the caller's: `index` is below `count`.
        unsafe { write::<S>(target, index, S::scaled(read::<S>(source, index), factor)) };
    }
}

unsafe fn divide_all<S: Scalar>(target: *mut u8, source: *const u8, count: usize, divisor: u32) {
    for index in 0..count {
        // SAFETY: the caller's: `index` is below `count`.
        unsafe { write::<S>(target, index, S::divided(read::<S>(source, index), divisor)) };
    }
}

unsafe fn read<S: Scalar>(source: *const u8, index: usize) -> S::Value {
    // SAFETY: the caller's; every value that the bytes can have is valid for the type.
    unsafe { source.cast::<S>().add(index).read_unaligned() }.value()
}

unsafe fn write<S: Scalar>(target: *mut u8, index: usize, value: S::Value) {
    // SAFETY: the caller's.
    unsafe { target.cast::<S>().add(index).write_unaligned(S::rounded(value)) }
}
