//! Branch-free conversions for binary16, which compilers vectorise. (The conversions in `half` branch on the
//! processor.)

/// Exact value for a binary16 number.
#[inline(always)]
pub(super) fn f32_of(bits: u16) -> f32 {
    let bits = u32::from(bits);
    // Exponent and mantissa at the float32 positions: 2^112 too small, also for subnormal numbers.
    let small = f32::from_bits((bits & 0x7fff) << 13);
    let finite = (small * f32::from_bits((127 + 112) << 23)).to_bits();
    let infinite = small.to_bits() | 0x7f80_0000;
    let magnitude = if bits & 0x7c00 == 0x7c00 { infinite } else { finite };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

/// Nearest binary16 number, ties to even; NaN without sign and payload.
#[inline(always)]
pub(super) fn f16_of(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Below 2^-14: the sum with 0.5 has the subnormal unit, 2^-24, in its last place.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    // A carry from the mantissa increments the exponent, up to infinity.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    let finite = if magnitude < (127 - 14) << 23 { subnormal } else { normal };
    // From 65520, halfway between the largest number and 2^16.
    let rounded = if magnitude >= 65520f32.to_bits() { 0x7c00 } else { finite };
    let signed = rounded | (bits >> 16) & 0x8000;
    (if magnitude > 0x7f80_0000 { 0x7e00 } else { signed }) as u16
}
