// Conversions for 8-bit floats by integer operations, exact on every architecture and the same as in
// weft_collectives::reduction.
//
// Needs u8, u32, WEFT_DEVICE and the intrinsics below; tests compile it for the CPU.
#pragma once

namespace weft::collectives {

// Exact value for a float8_e4m3fn number. With exponent and mantissa at the float32 positions it is 2^120 too small.
WEFT_DEVICE float float_of_e4m3(u32 code) {
    const u32 finite = __float_as_uint(__fmul_rn(__uint_as_float((code & 0x7F) << 20), __uint_as_float((127u + 120u) << 23)));
    return __uint_as_float(((code & 0x7F) == 0x7F ? 0x7FC00000u : finite) | (code & 0x80) << 24);
}

// Nearest number, ties to even, in a format with BITS mantissa bits; without sign, and beyond the largest number too.
// LEAST is the float32 exponent for the least normal number. Below that number, the sum with OFFSET has the subnormal
// unit in its last place.
template <u32 BITS, u32 LEAST> WEFT_DEVICE u32 round_to_float8(u32 magnitude) {
    constexpr u32 SHIFT = 23 - BITS, OFFSET = (LEAST + 23 - BITS) << 23;
    const u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(OFFSET))) - OFFSET;
    const u32 odd = magnitude >> SHIFT & 1;
    const u32 normal = (magnitude - ((LEAST - 1) << 23) + ((1u << (SHIFT - 1)) - 1) + odd) >> SHIFT;
    return magnitude < LEAST << 23 ? subnormal : normal;
}

// Nearest float8_e4m3fn number, ties to even; the NaN without sign beyond 464, halfway between 448 and the next one.
WEFT_DEVICE u8 e4m3_of(float value) {
    const u32 bits = __float_as_uint(value), magnitude = bits & 0x7FFFFFFF;
    const u32 signed_code = round_to_float8<3, 121>(magnitude) | (bits >> 24 & 0x80);
    return static_cast<u8>(magnitude > 0x43E80000 ? 0x7F : signed_code);
}

// Nearest float8_e5m2 number, ties to even; infinity from 61440. NaN without sign and payload.
WEFT_DEVICE u8 e5m2_of(float value) {
    const u32 bits = __float_as_uint(value), magnitude = bits & 0x7FFFFFFF;
    const u32 rounded = magnitude >= 0x47700000 ? 0x7C : round_to_float8<2, 113>(magnitude);
    return static_cast<u8>(magnitude > 0x7F800000 ? 0x7E : rounded | (bits >> 24 & 0x80));
}

} // namespace weft::collectives
