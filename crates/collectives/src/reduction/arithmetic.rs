//! Operations as types, for which loops are compiled separately.

/// Operation on two values.
pub(super) trait Operation<V> {
    fn apply(a: V, b: V) -> V;
}

pub(super) struct Sum;
pub(super) struct Product;
pub(super) struct Min;
pub(super) struct Max;
pub(super) struct And;
pub(super) struct Or;
pub(super) struct Xor;

macro_rules! operations {
    ($($type:ty: $($operation:ident $apply:expr),*;)*) => {$($(
        impl Operation<$type> for $operation {
            #[inline(always)]
            fn apply(a: $type, b: $type) -> $type {
                ($apply)(a, b)
            }
        }
    )*)*};
}

macro_rules! integers {
    ($($type:ty)*) => {operations!($($type:
        Sum <$type>::wrapping_add,
        Product <$type>::wrapping_mul,
        Min std::cmp::Ord::min,
        Max std::cmp::Ord::max,
        And std::ops::BitAnd::bitand,
        Or std::ops::BitOr::bitor,
        Xor std::ops::BitXor::bitxor;
    )*);};
}

integers!(u8 i8 u16 i16 u32 i32 u64 i64);

macro_rules! floats {
    ($($type:ty, $min:ident;)*) => {$(
        operations!($type:
            Sum std::ops::Add::add,
            Product std::ops::Mul::mul,
            Min $min,
            Max |a: $type, b: $type| -$min(-a, -b);
        );

        /// For two bit patterns that are neither less nor greater, the union is the same number if they are equal, -0
        /// for zeros with both signs, and otherwise a NaN.
        #[inline(always)]
        fn $min(a: $type, b: $type) -> $type {
            let neither = <$type>::from_bits(a.to_bits() | b.to_bits());
            let right = if b < a { b } else { neither };
            if a < b { a } else { right }
        }
    )*};
}

floats!(f32, min_f32; f64, min_f64;);

/// Change to one value.
pub(super) trait Map<V>: Copy {
    fn apply(self, value: V) -> V;
}

/// Product with a factor. Integers: in float64, truncated, saturating.
#[derive(Clone, Copy)]
pub(super) struct Scale(pub f64);

/// Quotient by a divisor that is at least 1. Integers: truncated.
#[derive(Clone, Copy)]
pub(super) struct Divide(pub u32);

macro_rules! maps {
    ($($type:ty: $scale:expr, $divide:expr;)*) => {$(
        impl Map<$type> for Scale {
            #[inline(always)]
            fn apply(self, value: $type) -> $type {
                ($scale)(value, self.0)
            }
        }

        impl Map<$type> for Divide {
            #[inline(always)]
            fn apply(self, value: $type) -> $type {
                ($divide)(value, self.0)
            }
        }
    )*};
}

/// Up to 32 bits, the rounded quotient in float64 is on the same side relative to every integer as the exact one, from
/// which it differs by less than 2^-32 / divisor.
macro_rules! small_integers {
    ($($type:ty)*) => {maps!($($type:
        |value: $type, factor: f64| (f64::from(value) * factor) as $type,
        |value: $type, divisor: u32| (f64::from(value) / f64::from(divisor)) as $type;
    )*);};
}

small_integers!(u8 i8 u16 i16 u32 i32);

maps!(
    u64: |value: u64, factor: f64| (value as f64 * factor) as u64,
        |value: u64, divisor: u32| value / u64::from(divisor);
    i64: |value: i64, factor: f64| (value as f64 * factor) as i64,
        |value: i64, divisor: u32| value / i64::from(divisor);
    f32: |value: f32, factor: f64| value * factor as f32,
        |value: f32, divisor: u32| value / divisor as f32;
    f64: |value: f64, factor: f64| value * factor,
        |value: f64, divisor: u32| value / f64::from(divisor);
);
