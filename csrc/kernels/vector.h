// Vectors of the instruction set this file is compiled for, through the compiler's vector extension.
// Everything lives in a namespace of that instruction set and nothing comes from the standard library's
// templates, so that no code for a wider machine can be linked into a narrower path.
#pragma once

#include <cstdint>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace sfno_dist::SFNO_DIST_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectorRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kVectorRegisters = 32;
#else
constexpr int kVectorBytes = 16, kVectorRegisters = 16;
#endif

template <class T> constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <class T> struct VectorOf {
    typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T> using Vector = typename VectorOf<T>::type;

#define SFNO_DIST_INLINE inline __attribute__((always_inline))

template <class T> SFNO_DIST_INLINE Vector<T> load(const T *from) {
    Vector<T> value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}
template <class T> SFNO_DIST_INLINE void store(T *to, Vector<T> value) { __builtin_memcpy(to, &value, sizeof value); }
template <class T> SFNO_DIST_INLINE Vector<T> splat(T value) { return value - Vector<T>{}; }
template <class T> SFNO_DIST_INLINE constexpr T smaller(T a, T b) { return b < a ? b : a; }
template <class T> SFNO_DIST_INLINE T larger(T a, T b) { return a < b ? b : a; }

template <class T> constexpr T kInfinity = T(__builtin_inf());

SFNO_DIST_INLINE float logarithm(float x) { return __builtin_logf(x); }
SFNO_DIST_INLINE double logarithm(double x) { return __builtin_log(x); }

// A query whose keys all have weight 0 has lse = -inf; with +inf in its place its probabilities are 0.
template <class T> SFNO_DIST_INLINE T finite_lse(T lse) { return lse == -kInfinity<T> ? kInfinity<T> : lse; }

// exp of every lane: x = n ln 2 + r, a polynomial of r (Chebyshev interpolation on |r| <= ln 2 / 2 for float,
// the Taylor series for double), times 2^n. Below the smallest normal number exactly 0; NaN stays NaN.
SFNO_DIST_INLINE Vector<float> exponential(Vector<float> x) {
    typedef int32_t Bits __attribute__((vector_size(kVectorBytes)));
    const Vector<float> magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    x = x > 88.0f ? splat(88.0f) : x;
    const Vector<float> shifted = x * 1.44269504f + magic;
    const Vector<float> n = shifted - magic;
    const Vector<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vector<float> p = splat(0.0013941108f);
    p = p * r + 0.0083751264f;
    p = p * r + 0.0416663529f;
    p = p * r + 0.1666641551f;
    p = p * r + 0.5000000047f;
    p = p * r + 1.0000000377f;
    p = p * r + 1.0f;
    const Bits power = ((Bits)shifted - (Bits)magic + 127) << 23;
    const Vector<float> value = p * (Vector<float>)power;
    return x < -87.3f ? Vector<float>{} : value;
}

SFNO_DIST_INLINE Vector<double> exponential(Vector<double> x) {
    typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
    const Vector<double> magic = splat(6755399441055744.0);  // 1.5 * 2^52
    x = x > 709.0 ? splat(709.0) : x;
    const Vector<double> shifted = x * 1.4426950408889634 + magic;
    const Vector<double> n = shifted - magic;
    const Vector<double> r = (x - n * 0.693145751953125) - n * 1.42860682030941723e-6;
    Vector<double> p = splat(1.0 / 6227020800.0);
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const Bits power = ((Bits)shifted - (Bits)magic + 1023) << 52;
    const Vector<double> value = p * (Vector<double>)power;
    return x < -708.0 ? Vector<double>{} : value;
}

// Lanes of a and b taken in turn: a0 b0 a1 b1 ... from the lower halves (or, with upper, from the upper halves).
template <bool UPPER, class T> SFNO_DIST_INLINE Vector<T> interleave(Vector<T> a, Vector<T> b) {
    constexpr int N = kLanes<T>, U = UPPER ? N / 2 : 0;
#if defined(__clang__)
    if constexpr (N == 2) return __builtin_shufflevector(a, b, U, 2 + U);
    else if constexpr (N == 4) return __builtin_shufflevector(a, b, U, 4 + U, U + 1, 5 + U);
    else if constexpr (N == 8)
        return __builtin_shufflevector(a, b, U, 8 + U, U + 1, 9 + U, U + 2, 10 + U, U + 3, 11 + U);
    else
        return __builtin_shufflevector(a, b, U, 16 + U, U + 1, 17 + U, U + 2, 18 + U, U + 3, 19 + U, U + 4, 20 + U,
                                       U + 5, 21 + U, U + 6, 22 + U, U + 7, 23 + U);
#else
    typedef decltype(a > b) Order;
    Order order = {};
    for (int i = 0; i < N; ++i) order[i] = i / 2 + U + (i % 2 ? N : 0);
    return __builtin_shuffle(a, b, order);
#endif
}

// Square transpose in registers: log2(lanes) rounds of interleaving row i with row i + lanes / 2.
template <class T> SFNO_DIST_INLINE void transpose(Vector<T> (&rows)[kLanes<T>]) {
    constexpr int N = kLanes<T>;
#pragma GCC unroll 4
    for (int round = 1; round < N; round *= 2) {
        Vector<T> next[N];
#pragma GCC unroll 8
        for (int i = 0; i < N / 2; ++i) {
            next[2 * i] = interleave<false, T>(rows[i], rows[i + N / 2]);
            next[2 * i + 1] = interleave<true, T>(rows[i], rows[i + N / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) rows[i] = next[i];
    }
}

// Lane i of the result is the sum of the lanes of rows[i]. Each round adds pairs of rows into one and halves them.
template <class T> SFNO_DIST_INLINE Vector<T> sums_of_rows(Vector<T> (&rows)[kLanes<T>]) {
#pragma GCC unroll 4
    for (int half = kLanes<T> / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i)
            rows[i] = interleave<false, T>(rows[i], rows[i + half]) + interleave<true, T>(rows[i], rows[i + half]);
    return rows[0];
}

// The sum and the largest of a vector's lanes.
template <class T> SFNO_DIST_INLINE T total(Vector<T> x) {
#pragma GCC unroll 4
    for (int half = kLanes<T> / 2; half > 0; half /= 2) x = interleave<false, T>(x, x) + interleave<true, T>(x, x);
    return x[0];
}
template <class T> SFNO_DIST_INLINE T largest(Vector<T> x) {
#pragma GCC unroll 4
    for (int half = kLanes<T> / 2; half > 0; half /= 2) {
        const Vector<T> a = interleave<false, T>(x, x), b = interleave<true, T>(x, x);
        x = a > b ? a : b;
    }
    return x[0];
}

}  // namespace sfno_dist::SFNO_DIST_ISA
