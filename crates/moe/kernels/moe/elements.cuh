// Row element conversion: to float32 and back, and to 8-bit floats with a scale for each block.
#pragma once
#include "moe/shape.cuh"

namespace weft::moe {

// Elements in `type` per 16 bytes.
constexpr u32 per_16(u32 type) { return 16 / bytes_of(type); }

// Widens 16 bytes to float32, for the types that are summed or cast.
template <u32 TYPE, u32 COUNT> WEFT_DEVICE void widen(uint4 v, float (&to)[COUNT]) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if constexpr (TYPE == F32) to[i] = __uint_as_float(words[i]);
        if constexpr (TYPE == BF16) to[2 * i] = __uint_as_float(words[i] << 16), to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        if constexpr (TYPE == F16) to[2 * i] = ptx::f16_low(words[i]), to[2 * i + 1] = ptx::f16_high(words[i]);
    }
}

// Rounds floats once, to nearest, ties to even, and stores them; `to` is aligned to their size, up to 16 bytes.
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

// Adds `COUNT` row elements to sums, from element `first` on; products with the weight are rounded.
template <u32 TYPE, bool WEIGHTED, u32 COUNT> WEFT_DEVICE void add_to(float (&sum)[COUNT], const u8 *row, u32 first, float weight) {
    float x[COUNT];
    if constexpr (COUNT == per_16(TYPE)) {
        widen<TYPE>(*reinterpret_cast<const uint4 *>(row + first * bytes_of(TYPE)), x);
    } else {
        static_assert(COUNT * bytes_of(TYPE) == 8, "half of 16 bytes");
        const uint2 half = *reinterpret_cast<const uint2 *>(row + first * bytes_of(TYPE));
        float both[2 * COUNT];
        widen<TYPE>(make_uint4(half.x, half.y, 0, 0), both);
#pragma unroll
        for (u32 j = 0; j < COUNT; ++j) x[j] = both[j];
    }
#pragma unroll
    for (u32 j = 0; j < COUNT; ++j) sum[j] = __fadd_rn(sum[j], WEIGHTED ? __fmul_rn(weight, x[j]) : x[j]);
}

// Calls `add` with each row that the caller adds to a sum: biases, and the previous content of an accumulated result.
// `at`: byte offset of the row, same as in the result.
template <class Add> WEFT_DEVICE void for_each_added(const Arguments &a, u64 at, Add add) {
#pragma unroll 1
    for (u32 i = 0; i < 3; ++i) {
        if (a.added[i] == 0) continue;
        const u8 *row = reinterpret_cast<const u8 *>(a.added[i] + at);
        __builtin_assume(__isGlobal(row));
        add(row);
    }
}

// Adds `COUNT` row elements in `TYPE` to sums, from element `first` on, at most 16 bytes at a time.
template <u32 TYPE, u32 COUNT> WEFT_DEVICE void add_elements(float (&sum)[COUNT], const u8 *row, u32 first) {
    constexpr u32 PIECE = COUNT < per_16(TYPE) ? COUNT : per_16(TYPE);
#pragma unroll
    for (u32 begin = 0; begin < COUNT; begin += PIECE) {
        float piece[PIECE];
#pragma unroll
        for (u32 j = 0; j < PIECE; ++j) piece[j] = sum[begin + j];
        add_to<TYPE, false>(piece, row, first + begin, 1.0f);
#pragma unroll
        for (u32 j = 0; j < PIECE; ++j) sum[begin + j] = piece[j];
    }
}

// `COUNT` elements, rounded and kept in registers, at most 16 bytes together.
template <u32 COUNT> struct Kept {
    uint4 bits;

    template <u32 TYPE> WEFT_DEVICE void keep(const float (&from)[COUNT]) { narrow<TYPE>(&bits, from); }
    template <u32 TYPE> WEFT_DEVICE void add(float (&sum)[COUNT]) const { add_to<TYPE, false>(sum, reinterpret_cast<const u8 *>(&bits), 0, 1.0f); }
};

// Eight token elements to cast, in the input type.
struct Eight {
    static constexpr u32 LOADS = bytes_of(WEFT_TOKEN_TYPE) == 4 ? 2 : 1;
    uint4 raw[LOADS];

    WEFT_DEVICE void load(const u8 *row, u32 first) {
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i)
            raw[i] = ptx::load_constant(row + first * bytes_of(WEFT_TOKEN_TYPE) + 16 * i);
    }

    // Loads from a row in shared memory.
    WEFT_DEVICE void load_shared(const u8 *row, u32 first) {
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i)
            raw[i] = *reinterpret_cast<const uint4 *>(row + first * bytes_of(WEFT_TOKEN_TYPE) + 16 * i);
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

// Scale for a block whose largest magnitude is `amax`; `stored` becomes the encoding in memory.
WEFT_DEVICE float block_scale(float amax, u32 &stored) {
    if constexpr (WEFT_SCALE_TYPE == SCALE_E8M0) {
        if (amax == 0.0f) return stored = 127, 1.0f;
        const u32 bits = __float_as_uint(__fdiv_rn(amax, 448.0f));
        // The smallest power of two that is not less; 2^-127, a subnormal, is encoded as 0.
        stored = amax <= __uint_as_float(0x04600000u) ? 0 : // 448 * 2^-127, before the quotient rounds
                  (bits >> 23) + ((bits & 0x007FFFFFu) != 0);
        return stored == 0 ? __uint_as_float(0x00400000u) : __uint_as_float(stored << 23);
    } else {
        const float scale = amax == 0.0f ? 1.0f : fmaxf(__fdiv_rn(amax, 448.0f), 1.17549435e-38f);
        stored = __float_as_uint(scale);
        return scale;
    }
}

// Largest magnitude among eight elements; NaN is ignored.
WEFT_DEVICE float magnitude(const Eight &eight) {
    float x[8], amax = 0.0f;
    eight.widen(x);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
    return amax;
}

constexpr u32 BLOCK_ELEMENTS = CAST ? SCALE_BLOCK : 8; // parsed but unused without a cast
// Lanes that hold a block with one scale, eight elements each.
constexpr u32 BLOCK_LANES = BLOCK_ELEMENTS / 8;
static_assert(BLOCK_LANES <= 32 && BLOCK_ELEMENTS % 8 == 0 && (BLOCK_LANES & (BLOCK_LANES - 1)) == 0, "a block is within a warp");

// Butterfly maximum for each of `COUNT` values over a block's lanes; COUNT and LANES are powers of two. Lanes exchange
// halves while they hold several values: lane l in a block ends with value l / (LANES / COUNT).
template <u32 COUNT, u32 LANES> WEFT_DEVICE float largest_of_block(const float (&values)[COUNT]) {
    if constexpr (LANES == 1) {
        static_assert(COUNT == 1, "a lane keeps one value");
        return values[0];
    } else if constexpr (COUNT == 1) {
        const float next[1] = {fmaxf(values[0], __shfl_xor_sync(~0u, values[0], LANES / 2))};
        return largest_of_block<1, LANES / 2>(next);
    } else {
        const bool upper = lane_of_thread() & (LANES / 2);
        float next[COUNT / 2];
#pragma unroll
        for (u32 i = 0; i < COUNT / 2; ++i) {
            const float mine = upper ? values[COUNT / 2 + i] : values[i], other = upper ? values[i] : values[COUNT / 2 + i];
            next[i] = fmaxf(mine, __shfl_xor_sync(~0u, other, LANES / 2));
        }
        return largest_of_block<COUNT / 2, LANES / 2>(next);
    }
}

// Casts `COUNT` times eight elements in a thread. Threads with the same SCALE_BLOCK elements are neighbours in a warp;
// called by all lanes. `first(i)` is the first element in the i-th eight, at least HIDDEN if there are none.
//
// One lane computes a block's scale, so that one warp-wide division serves up to as many blocks as it has lanes.
template <u32 COUNT, class First> WEFT_DEVICE void cast_eights(const Eight (&eight)[COUNT], First first, u8 *codes, u8 *scales) {
    // The value that a lane ends with belongs to eight number `lane / SPREAD` in the block.
    constexpr u32 KEPT = COUNT < BLOCK_LANES ? COUNT : BLOCK_LANES, SPREAD = BLOCK_LANES / KEPT;
    static_assert((COUNT & (COUNT - 1)) == 0, "halves are exchanged");
#pragma unroll
    for (u32 begin = 0; begin < COUNT; begin += KEPT) {
        float amax[KEPT];
#pragma unroll
        for (u32 i = 0; i < KEPT; ++i) amax[i] = magnitude(eight[begin + i]);
        u32 stored;
        const float inverse = __frcp_rn(block_scale(largest_of_block<KEPT, BLOCK_LANES>(amax), stored));
        const u32 mine = lane_of_thread() % BLOCK_LANES;
#pragma unroll
        for (u32 i = 0; i < KEPT; ++i) {
            const u32 at = first(begin + i);
            const float factor = __shfl_sync(~0u, inverse, i * SPREAD, BLOCK_LANES);
            if (mine == i * SPREAD && at / BLOCK_ELEMENTS < SCALES) {
                if constexpr (WEFT_SCALE_TYPE == SCALE_E8M0) scales[at / BLOCK_ELEMENTS] = static_cast<u8>(stored);
                else reinterpret_cast<u32 *>(scales)[at / BLOCK_ELEMENTS] = stored;
            }
            if (at >= HIDDEN) continue;
            float x[8];
            eight[begin + i].widen(x);
            u16 pairs[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) pairs[j] = ptx::e4m3_pair(__fmul_rn(x[2 * j], factor), __fmul_rn(x[2 * j + 1], factor));
            *reinterpret_cast<uint2 *>(codes + at) = make_uint2(pairs[0] | static_cast<u32>(pairs[1]) << 16, pairs[2] | static_cast<u32>(pairs[3]) << 16);
        }
    }
}

} // namespace weft::moe
