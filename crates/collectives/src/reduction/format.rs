//! Elements in memory and their values in arithmetic, by block.

use super::float8_bits::{e4m3_of, e5m2_of, f32_of_e4m3, f32_of_e5m2};
use super::half_bits::{f16_of, f32_of};

/// Element conversion between memory and arithmetic. The loops are inlined into functions that may use wider
/// instructions.
pub(super) trait Format {
    /// Element in memory; any bits are valid.
    type Stored: Copy;
    /// Element in arithmetic.
    type Value: Copy;

    /// The same format in functions that enable AVX2 and F16C.
    type Avx2: Format<Value = Self::Value>;

    /// Exact element values.
    fn widen<const N: usize>(stored: [Self::Stored; N]) -> [Self::Value; N];

    /// Elements nearest to values, ties to even; NaN without payload.
    fn narrow<const N: usize>(values: [Self::Value; N]) -> [Self::Stored; N];
}

/// Type with its own arithmetic.
pub(super) trait Plain: Copy {
    /// The same value; a NaN without sign and payload.
    fn canonical(self) -> Self;
}

macro_rules! integers {
    ($($type:ty)*) => {$(
        impl Plain for $type {
            #[inline(always)]
            fn canonical(self) -> $type {
                self
            }
        }
    )*};
}

integers!(u8 i8 u16 i16 u32 i32 u64 i64);

macro_rules! floats {
    ($($type:ty)*) => {$(
        impl Plain for $type {
            #[inline(always)]
            fn canonical(self) -> $type {
                if self.is_nan() { <$type>::NAN } else { self }
            }
        }
    )*};
}

floats!(f32 f64);

impl<T: Plain> Format for T {
    type Stored = T;
    type Value = T;
    type Avx2 = T;

    #[inline(always)]
    fn widen<const N: usize>(stored: [T; N]) -> [T; N] {
        stored
    }

    #[inline(always)]
    fn narrow<const N: usize>(mut values: [T; N]) -> [T; N] {
        for value in &mut values {
            *value = value.canonical();
        }
        values
    }
}

/// `bool`: a byte that is true if not 0, and 0 or 1 in arithmetic.
pub(super) struct Truth;

impl Format for Truth {
    type Stored = u8;
    type Value = u8;
    type Avx2 = Truth;

    #[inline(always)]
    fn widen<const N: usize>(mut stored: [u8; N]) -> [u8; N] {
        for byte in &mut stored {
            *byte = (*byte != 0).into();
        }
        stored
    }

    #[inline(always)]
    fn narrow<const N: usize>(values: [u8; N]) -> [u8; N] {
        Truth::widen(values)
    }
}

/// bfloat16, computed in float32.
pub(super) struct Brain;

impl Format for Brain {
    type Stored = u16;
    type Value = f32;
    type Avx2 = Brain;

    #[inline(always)]
    fn widen<const N: usize>(stored: [u16; N]) -> [f32; N] {
        let mut values = [0.0; N];
        for (value, bits) in values.iter_mut().zip(stored) {
            *value = f32::from_bits(u32::from(bits) << 16);
        }
        values
    }

    #[inline(always)]
    fn narrow<const N: usize>(values: [f32; N]) -> [u16; N] {
        let mut stored = [0; N];
        for (stored, value) in stored.iter_mut().zip(values) {
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            *stored = if value.is_nan() { 0x7fc0 } else { rounded } as u16;
        }
        stored
    }
}

/// 8-bit floats, computed in float32; converted by integer operations.
macro_rules! float8 {
    ($($(#[$about:meta])* $name:ident, $widen:ident, $narrow:ident;)*) => {$(
        $(#[$about])*
        pub(super) struct $name;

        impl Format for $name {
            type Stored = u8;
            type Value = f32;
            type Avx2 = $name;

            #[inline(always)]
            fn widen<const N: usize>(stored: [u8; N]) -> [f32; N] {
                let mut values = [0.0; N];
                for (value, code) in values.iter_mut().zip(stored) {
                    *value = $widen(code);
                }
                values
            }

            #[inline(always)]
            fn narrow<const N: usize>(values: [f32; N]) -> [u8; N] {
                let mut stored = [0; N];
                for (stored, value) in stored.iter_mut().zip(values) {
                    *stored = $narrow(value);
                }
                stored
            }
        }
    )*};
}

float8!(
    /// `float8_e4m3fn`.
    E4m3, f32_of_e4m3, e4m3_of;
    /// `float8_e5m2`.
    E5m2, f32_of_e5m2, e5m2_of;
);

/// binary16, computed in float32; converted by integer operations.
pub(super) struct Half;

impl Format for Half {
    type Stored = u16;
    type Value = f32;
    #[cfg(target_arch = "x86_64")]
    type Avx2 = HalfF16c;
    #[cfg(not(target_arch = "x86_64"))]
    type Avx2 = Half;

    #[inline(always)]
    fn widen<const N: usize>(stored: [u16; N]) -> [f32; N] {
        let mut values = [0.0; N];
        for (value, bits) in values.iter_mut().zip(stored) {
            *value = f32_of(bits);
        }
        values
    }

    #[inline(always)]
    fn narrow<const N: usize>(values: [f32; N]) -> [u16; N] {
        let mut stored = [0; N];
        for (stored, value) in stored.iter_mut().zip(values) {
            *stored = f16_of(value);
        }
        stored
    }
}

/// binary16, computed in float32; converted by F16C instructions. Only for functions that enable them.
#[cfg(target_arch = "x86_64")]
pub(super) struct HalfF16c;

#[cfg(target_arch = "x86_64")]
impl Format for HalfF16c {
    type Stored = u16;
    type Value = f32;
    type Avx2 = HalfF16c;

    #[inline(always)]
    fn widen<const N: usize>(stored: [u16; N]) -> [f32; N] {
        use std::arch::x86_64::{__m128i, __m256, _mm256_cvtph_ps};
        let mut values = [0.0; N];
        let (blocks, rest) = values.as_chunks_mut::<8>();
        let (stored, last) = stored.as_chunks::<8>();
        for (values, stored) in blocks.iter_mut().zip(stored) {
            // SAFETY: types with equal size without invalid bits; the caller's function enables F16C.
            *values = unsafe {
                let stored = std::mem::transmute::<[u16; 8], __m128i>(*stored);
                std::mem::transmute::<__m256, [f32; 8]>(_mm256_cvtph_ps(stored))
            };
        }
        for (value, bits) in rest.iter_mut().zip(last) {
            *value = f32_of(*bits);
        }
        values
    }

    #[inline(always)]
    fn narrow<const N: usize>(values: [f32; N]) -> [u16; N] {
        use std::arch::x86_64::{__m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtps_ph};
        let mut stored = [0; N];
        let (blocks, rest) = stored.as_chunks_mut::<8>();
        let values = <f32 as Format>::narrow(values);
        let (values, last) = values.as_chunks::<8>();
        for (stored, values) in blocks.iter_mut().zip(values) {
            // SAFETY: as in `widen`.
            *stored = unsafe {
                let values = std::mem::transmute::<[f32; 8], __m256>(*values);
                let stored = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
                std::mem::transmute::<__m128i, [u16; 8]>(stored)
            };
        }
        for (stored, value) in rest.iter_mut().zip(last) {
            *stored = f16_of(*value);
        }
        stored
    }
}
