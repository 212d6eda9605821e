// Reduction arithmetic on 16-byte units, with the same results as weft_collectives::reduction on the CPU, bit by bit.
//
// WEFT_ELEMENT and WEFT_REDUCTION select the type and the operation. Sums, products and averages for 8-bit and 16-bit
// floats are kept in float32 and rounded once, behind the division. A computed NaN is the positive quiet NaN without
// payload.
#pragma once
#include "weft/ptx.cuh"
#include "collectives/float8.cuh"

namespace weft::collectives {

enum ElementType : u32 { BOOL, U8, I8, U16, I16, U32, I32, U64, I64, F16, BF16, F32, F64, F8E4M3, F8E5M2 };
enum Operation : u32 { SUM, PRODUCT, MIN, MAX, AND, OR, XOR };

constexpr u32 ELEMENT = WEFT_ELEMENT, OPERATION = WEFT_REDUCTION;

// Stored type and arithmetic type.
template <u32 TYPE> struct Types;
template <> struct Types<BOOL> { typedef u8 Stored; typedef u32 Value; };
template <> struct Types<U8> { typedef u8 Stored; typedef u32 Value; };
template <> struct Types<I8> { typedef signed char Stored; typedef i32 Value; };
template <> struct Types<U16> { typedef u16 Stored; typedef u32 Value; };
template <> struct Types<I16> { typedef short Stored; typedef i32 Value; };
template <> struct Types<U32> { typedef u32 Stored; typedef u32 Value; };
template <> struct Types<I32> { typedef i32 Stored; typedef i32 Value; };
template <> struct Types<U64> { typedef u64 Stored; typedef u64 Value; };
template <> struct Types<I64> { typedef i64 Stored; typedef i64 Value; };
template <> struct Types<F16> { typedef u16 Stored; typedef float Value; };
template <> struct Types<BF16> { typedef u16 Stored; typedef float Value; };
template <> struct Types<F32> { typedef float Stored; typedef float Value; };
template <> struct Types<F64> { typedef double Stored; typedef double Value; };
template <> struct Types<F8E4M3> { typedef u8 Stored; typedef float Value; };
template <> struct Types<F8E5M2> { typedef u8 Stored; typedef float Value; };

typedef Types<ELEMENT>::Stored Stored;
typedef Types<ELEMENT>::Value Value;
constexpr u32 PER_UNIT = 16 / sizeof(Stored);
constexpr bool SHORT_FLOAT = ELEMENT == F16 || ELEMENT == BF16 || ELEMENT == F8E4M3 || ELEMENT == F8E5M2;
constexpr bool FLOAT = SHORT_FLOAT || ELEMENT == F32 || ELEMENT == F64;

template <class V> WEFT_DEVICE V quiet(V v) { return v; }
WEFT_DEVICE float quiet(float v) { return v == v ? v : __int_as_float(0x7FC00000); }
WEFT_DEVICE double quiet(double v) { return v == v ? v : __longlong_as_double(0x7FF8000000000000ll); }

WEFT_DEVICE Value to_value(Stored v) {
    if constexpr (ELEMENT == BOOL) return v != 0;
    else if constexpr (ELEMENT == BF16) return __uint_as_float(static_cast<u32>(v) << 16);
    else if constexpr (ELEMENT == F16) return ptx::f16_low(v);
    else if constexpr (ELEMENT == F8E4M3) return float_of_e4m3(v);
    else if constexpr (ELEMENT == F8E5M2) return ptx::f16_low(static_cast<u32>(v) << 8);
    else return static_cast<Value>(v);
}

WEFT_DEVICE Stored to_stored(Value v) {
    if constexpr (ELEMENT == BF16) return v == v ? static_cast<u16>(ptx::bf16_pair(v, 0.0f)) : 0x7FC0;
    else if constexpr (ELEMENT == F16) return v == v ? static_cast<u16>(ptx::f16_pair(v, 0.0f)) : 0x7E00;
    else if constexpr (ELEMENT == F8E4M3) return e4m3_of(v);
    else if constexpr (ELEMENT == F8E5M2) return e5m2_of(v);
    else if constexpr (FLOAT) return quiet(v);
    else return static_cast<Stored>(v);
}

template <class T> WEFT_DEVICE T lesser(T a, T b) { return a < b ? a : b; }
template <class T> WEFT_DEVICE T greater(T a, T b) { return a < b ? b : a; }
// PTX: -0 is less than +0.
WEFT_DEVICE float lesser(float a, float b) { return a != a || b != b ? quiet(a + b) : fminf(a, b); }
WEFT_DEVICE float greater(float a, float b) { return a != a || b != b ? quiet(a + b) : fmaxf(a, b); }
WEFT_DEVICE double lesser(double a, double b) { return a != a || b != b ? quiet(a + b) : fmin(a, b); }
WEFT_DEVICE double greater(double a, double b) { return a != a || b != b ? quiet(a + b) : fmax(a, b); }

// Of integers modulo 2^n: unsigned, since signed overflow is undefined.
template <class T> WEFT_DEVICE T wrapping_sum(T a, T b) { return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b)); }
template <class T> WEFT_DEVICE T wrapping_product(T a, T b) { return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b)); }

template <class V> WEFT_DEVICE V fold(V a, V b) {
    if constexpr (ELEMENT == BOOL) {
        if constexpr (OPERATION == SUM || OPERATION == MAX || OPERATION == OR) return a | b;
        else if constexpr (OPERATION == XOR) return a ^ b;
        else return a & b;
    } else if constexpr (OPERATION == MIN) return lesser(a, b);
    else if constexpr (OPERATION == MAX) return greater(a, b);
    else if constexpr (FLOAT) {
        if constexpr (OPERATION == SUM) return a + b;
        else return a * b;
    } else if constexpr (OPERATION == SUM) return wrapping_sum(a, b);
    else if constexpr (OPERATION == PRODUCT) return wrapping_product(a, b);
    else if constexpr (OPERATION == AND) return a & b;
    else if constexpr (OPERATION == OR) return a | b;
    else return a ^ b;
}

namespace cold {

__device__ __noinline__ Value divide(Value value, u32 divisor) { return value / static_cast<Value>(divisor); }

} // namespace cold

// Values in a unit.
struct Accumulator {
    Value value[PER_UNIT];

    WEFT_DEVICE explicit Accumulator(const uint4 &unit) {
        const Stored *parts = reinterpret_cast<const Stored *>(&unit);
#pragma unroll
        for (u32 i = 0; i < PER_UNIT; ++i) value[i] = to_value(parts[i]);
    }

    WEFT_DEVICE void add(const uint4 &unit) {
        const Stored *parts = reinterpret_cast<const Stored *>(&unit);
#pragma unroll
        for (u32 i = 0; i < PER_UNIT; ++i) {
            value[i] = fold(value[i], to_value(parts[i]));
            // 8-bit and 16-bit values wrap at their own width.
            if constexpr (!FLOAT && sizeof(Stored) < 4) value[i] = to_value(to_stored(value[i]));
        }
    }

    // Result; for an average, the sum divided by `divisor` and then rounded. 0: no average.
    WEFT_DEVICE uint4 unit(u32 divisor) const {
        uint4 unit;
        Stored *parts = reinterpret_cast<Stored *>(&unit);
#pragma unroll
        for (u32 i = 0; i < PER_UNIT; ++i) {
            parts[i] = to_stored(divisor == 0 ? value[i] : cold::divide(value[i], divisor));
        }
        return unit;
    }
};

} // namespace weft::collectives
