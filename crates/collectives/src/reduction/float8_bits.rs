//! Branch-free conversions for 8-bit floats, which compilers vectorise. `collectives/float8.cuh` has the same for
//! kernels.

use super::half_bits;

/// Exact value for a `float8_e4m3fn` number.
#[inline(always)]
pub(super) fn f32_of_e4m3(code: u8) -> f32 {
    let code = u32::from(code);
    // Exponent and mantissa at the float32 positions: 2^120 too small, also for subnormal numbers.
    let small = f32::from_bits((code & 0x7f) << 20);
    let finite = (small * f32::from_bits((127 + 120) << 23)).to_bits();
    let magnitude = if code & 0x7f == 0x7f { 0x7fc0_0000 } else { finite };
    f32::from_bits(magnitude | (code & 0x80) << 24)
}

/// Nearest `float8_e4m3fn` number, ties to even; the NaN without sign beyond 464, halfway between the largest number, 448,
/// and the next one.
#[inline(always)]
pub(super) fn e4m3_of(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Below 2^-6: the sum with 2^14 has the subnormal unit, 2^-9, in its last place.
    let offset = 16384f32;
    let subnormal = (f32::from_bits(magnitude) + offset).to_bits().wrapping_sub(offset.to_bits());
    // A carry from the mantissa increments the exponent.
    let odd = (magnitude >> 20) & 1;
    let normal = magnitude.wrapping_sub(120 << 23).wrapping_add(0x7_ffff + odd) >> 20;
    let rounded = if magnitude < (127 - 6) << 23 { subnormal } else { normal };
    let signed = rounded | (bits >> 24) & 0x80;
    (if magnitude > 464f32.to_bits() { 0x7f } else { signed }) as u8
}

/// Exact value for a `float8_e5m2` number.
#[inline(always)]
pub(super) fn f32_of_e5m2(code: u8) -> f32 {
    half_bits::f32_of(u16::from(code) << 8)
}

/// Nearest `float8_e5m2` number, ties to even; infinity from 61440, halfway between the largest number, 57344, and 2^16.
/// NaN without sign and payload.
#[inline(always)]
pub(super) fn e5m2_of(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Below 2^-14: the sum with 2^7 has the subnormal unit, 2^-16, in its last place.
    let offset = 128f32;
    let subnormal = (f32::from_bits(magnitude) + offset).to_bits().wrapping_sub(offset.to_bits());
    // A carry from the mantissa increments the exponent, up to infinity.
    let odd = (magnitude >> 21) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xf_ffff + odd) >> 21;
    let finite = if magnitude < (127 - 14) << 23 { subnormal } else { normal };
    let rounded = if magnitude >= 61440f32.to_bits() { 0x7c } else { finite };
    let signed = rounded | (bits >> 24) & 0x80;
    (if magnitude > 0x7f80_0000 { 0x7e } else { signed }) as u8
}
