// Elements of rows: to float32 and back, and to 8-bit floats with a scale for each block.
#pragma once
#include "moe/shape.cuh"

namespace weft::moe {

// Elements of `type` in 16 bytes.
constexpr u32 per_16(u32 type) { return 16 / bytes_of(type); }

// 16 bytes of elements, as floats: of those types that are summed or cast.
template <u32 TYPE, u32 COUNT> WEFT_DEVICE void widen(uint4 v, float (&to)[COUNT]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if constexpr (TYPE == F32) to[i] = __uint_as_float(words[i]);
        if constexpr (TYPE == BF16) to[2 * i] = __uint_as_float(words[i] << 16), to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        if constexpr (TYPE == F16) to[2 * i] = ptx::f16_low(words[i]), to[2 * i + 1] = ptx::f16_high(words[i]);
    }
}

// Floats to memory, rounded once to the nearest, ties to even; `to` is aligned to all of them, up to 16 bytes.
template <u32 TYPE, u32 COUNT> WEFT_DEVICE void narrow(void *to, const float (&from)[COUNT]) {
    if constexpr (TYPE == F32) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 4)
            static_cast<float4 *>(to)[i / 4] = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    } else {
        u32 words[COUNT / 2];
#pragma unroll
        for (u32 i = 0; i < COUNT / 2; ++i)
            words[i] = TYPE == BF16 ? ptx::bf16_pair(from[2 * i], from[2 * i + 1]) : ptx::f16_pair(from[2 * i], from[2 * i + 1]);
        if constexpr (COUNT == 8) *static_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        if constexpr (COUNT == 4) *static_cast<uint2 *>(to) = make_uint2(words[0], words[1]);
    }
}

// Eight elements of a row that is to be cast, as they are loaded.
struct Eight {
    static constexpr u32 LOADS = bytes_of(WEFT_TOKEN_TYPE) == 4 ? 2 : 1;
    uint4 raw[LOADS];

    WEFT_DEVICE void load(const u8 *row, u32 first) {
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i)
            raw[i] = ptx::load_constant(row + first * bytes_of(WEFT_TOKEN_TYPE) + 16 * i);
    }

    WEFT_DEVICE void clear() {
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) raw[i] = make_uint4(0, 0, 0, 0);
    }

    WEFT_DEVICE void widen(float (&to)[8]) const {
        if constexpr (WEFT_TOKEN_TYPE == F32) {
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i) {
                float four[4];
                moe::widen<F32, 4>(raw[i], four);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) to[4 * i + j] = four[j];
            }
        } else if constexpr (WEFT_TOKEN_TYPE == BF16 || WEFT_TOKEN_TYPE == F16) {
            moe::widen<WEFT_TOKEN_TYPE, 8>(raw[0], to);
        }
    }
};

// The scale of a block whose largest magnitude is `amax`, and what stands for it in memory.
WEFT_DEVICE float block_scale(float amax, u32 &stored) {
    if constexpr (WEFT_SCALE_TYPE == SCALE_E8M0) {
        if (amax == 0.0f) return stored = 127, 1.0f;
        const u32 bits = __float_as_uint(__fdiv_rn(amax, 448.0f));
        // The smallest power of two that is not less; 2^-127 is a subnormal of its own.
        stored = bits <= 0x00400000u ? 0 : (bits >> 23) + ((bits & 0x007FFFFFu) != 0);
        return stored == 0 ? __uint_as_float(0x00400000u) : __uint_as_float(stored << 23);
    } else {
        const float scale = amax == 0.0f ? 1.0f : fmaxf(__fdiv_rn(amax, 448.0f), 1.17549435e-38f);
        stored = __float_as_uint(scale);
        return scale;
    }
}

// Casts a thread's eight elements. The threads of a block of SCALE_BLOCK elements are neighbours in a
// warp; all lanes come here. `first` is the element that the eight begin at; `real` if they exist.
WEFT_DEVICE void cast_eight(const Eight &eight, u32 first, bool real, u8 *codes, u8 *scales) {
    constexpr u32 BLOCK = CAST ? SCALE_BLOCK : 8, LANES = BLOCK / 8; // not compiled for, but parsed, where nothing is cast
    static_assert(!CAST || (LANES <= 32 && SCALE_BLOCK % 8 == 0 && (LANES & (LANES - 1)) == 0), "a block is within a warp");
    float x[8];
    eight.widen(x);
    float amax = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i])); // fmaxf passes over NaN
#pragma unroll
    for (u32 mask = LANES / 2; mask > 0; mask /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, mask));
    u32 stored;
    const float inverse = __frcp_rn(block_scale(amax, stored));
    if (!real) return;
    u16 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pairs[i] = ptx::e4m3_pair(__fmul_rn(x[2 * i], inverse), __fmul_rn(x[2 * i + 1], inverse));
    *reinterpret_cast<uint2 *>(codes + first) = make_uint2(pairs[0] | static_cast<u32>(pairs[1]) << 16, pairs[2] | static_cast<u32>(pairs[3]) << 16);
    if (first % BLOCK == 0) {
        if constexpr (WEFT_SCALE_TYPE == SCALE_E8M0) scales[first / BLOCK] = static_cast<u8>(stored);
        else reinterpret_cast<u32 *>(scales)[first / BLOCK] = stored;
    }
}

} // namespace weft::moe
