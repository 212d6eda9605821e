//! Definition of every result, one element at a time.

use super::{Element, Reduction};
use half::{bf16, f16};

/// Element in memory, and its value in the arithmetic of its type.
trait Scalar: Copy {
    /// Type of the arithmetic.
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
    f64, f64, |value| value, |value| value
);

/// Calls a function that is generic over [`Scalar`] with the type of an element.
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
    // SAFETY: the caller's; every value of the bytes is one of the type.
    unsafe { source.cast::<S>().add(index).read_unaligned() }.value()
}

unsafe fn write<S: Scalar>(target: *mut u8, index: usize, value: S::Value) {
    // SAFETY: the caller's.
    unsafe { target.cast::<S>().add(index).write_unaligned(S::rounded(value)) }
}
