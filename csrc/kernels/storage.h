// How values lie in memory (float, double, bfloat16, float16) and what they are computed in (float, double).
#pragma once

#include "problem.h"
#include "vector.h"

namespace sfno_dist::SFNO_DIST_ISA {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

template <class S> struct ComputeOf {
    typedef float type;
};
template <> struct ComputeOf<double> {
    typedef double type;
};
template <class S> using Compute = typename ComputeOf<S>::type;
template <class S> constexpr bool kStoredAsComputed = false;
template <> constexpr bool kStoredAsComputed<float> = true;
template <> constexpr bool kStoredAsComputed<double> = true;

SFNO_DIST_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
SFNO_DIST_INLINE float float_of(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

SFNO_DIST_INLINE float widened(float x) { return x; }
SFNO_DIST_INLINE double widened(double x) { return x; }
SFNO_DIST_INLINE float widened(BFloat16 x) { return float_of(uint32_t(x.bits) << 16); }
SFNO_DIST_INLINE float widened(Float16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#else
    const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // As a float with the exponent off by 112; the product is exact, for subnormals too.
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
#endif
}

// Round to nearest, ties to even.
SFNO_DIST_INLINE void narrow(float x, float *to) { *to = x; }
SFNO_DIST_INLINE void narrow(double x, double *to) { *to = x; }
SFNO_DIST_INLINE void narrow(float x, BFloat16 *to) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    to->bits = uint16_t(x != x ? 0x7fc0u : rounded);
}
SFNO_DIST_INLINE void narrow(float x, Float16 *to) {
#if defined(__F16C__)
    to->bits = uint16_t(_cvtss_sh(x, 0));
#else
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) half = 0x7e00u;
    else if (magnitude >= 0x477ff000u) half = 0x7c00u;  // 65520 and more round to infinity
    else if (magnitude < 0x38800000u) half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);  // subnormal
    else half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    to->bits = uint16_t(sign | half);
#endif
}

template <class S> inline void widen_row(const S *from, int64_t count, Compute<S> *to) {
    int64_t i = 0;
#if defined(__F16C__)
    if constexpr (sizeof(S) == 2 && !__is_same(S, BFloat16))
        for (; i + 8 <= count; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < count; ++i) to[i] = widened(from[i]);
}

// One tensor seen by the points of one side, for the task's batch and head.
template <class S> struct Values {
    S *data;
    int64_t row_stride, column_stride, depth;
    const int64_t *start;

    Values() = default;
    Values(const sfno_dist_tensor &tensor, const Task &task, const Side &side, int64_t channels)
        : data((S *)tensor.data),
          row_stride(tensor.row_stride), column_stride(tensor.column_stride), depth(channels), start(side.start) {
        if (data) data += task.batch * tensor.batch_stride + task.head * tensor.head_stride;
    }
    S *at(int row, int local) const { return data + start[row] * row_stride + local * column_stride; }
};

}  // namespace sfno_dist::SFNO_DIST_ISA
