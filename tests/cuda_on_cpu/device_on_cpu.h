// csrc/cuda/device.h on the CPU: copies, tensor-core tiles and conversions, bit for bit where a device promises bits.
#pragma once

#include <cstdlib>

#include "cuda_on_cpu.h"

namespace sfno_dist::cuda {

#define SFNO_DIST_LAUNCH(kernel, grid, threads, shared_bytes, stream, ...) \
    cuda_on_cpu::launch(#kernel, grid, threads, shared_bytes, [&] { kernel(__VA_ARGS__); })

constexpr unsigned kAllLanes = 0xffffffffu;

inline unsigned char *dynamic_shared() { return (unsigned char *)cuda_on_cpu::dynamic_shared(); }
inline void copy_async(void *to, const void *from, int valid) { cuda_on_cpu::copy_later(to, from, 16, size_t(valid)); }
inline void copy_pair_async(void *to, const void *from, bool valid) {
    cuda_on_cpu::copy_later(to, from, 8, valid ? 8 : 0);
}
inline void commit_copies() { cuda_on_cpu::end_copy_group(); }
template <int UNDER_WAY> void wait_for_copies() { cuda_on_cpu::finish_copies(UNDER_WAY); }

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// As far off as the PTX manual lets ex2.approx.ftz be, 2^-22 of the result, to a side that hangs on the argument.
inline float exp2_fast(float x) {
    const float y = std::exp2(x);
    if (x == 0.0f || !std::isnormal(y)) return std::isinf(y) || x != x || x == 0.0f ? y : 0.0f;
    return y * (bits_of(x) * 0x9e3779b9u >> 31 ? 1.0f + 0x1p-22f : 1.0f - 0x1p-22f);
}

inline uint32_t tf32_bits(float x) {
    const uint32_t bits = bits_of(x);
    return x != x || std::isinf(x) ? bits : (bits + 0x1000u) & ~0x1fffu;
}
inline uint32_t bfloat16_bits(float x) {
    const uint32_t bits = bits_of(x);
    return x != x ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline uint32_t float16_bits(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000u;
    const float size = std::fabs(x);
    if (x != x) return 0x7fffu;
    if (size == 0.0f) return sign;
    if (size >= 65520.0f) return sign | 0x7c00u;
    int exponent = 0;
    std::frexp(size, &exponent);  // size in [2^(exponent - 1), 2^exponent)
    const int lowest_bit = std::max(exponent - 11, -24);
    const uint32_t significand = uint32_t(std::nearbyint(std::ldexp(size, -lowest_bit)));
    // A significand that rounds up to 2^11 carries into the exponent by the same addition.
    return sign | (significand + (uint32_t(lowest_bit + 24) << 10));
}
inline uint32_t bfloat16_pair(float low, float high) { return bfloat16_bits(low) | bfloat16_bits(high) << 16; }
inline uint32_t float16_pair(float low, float high) { return float16_bits(low) | float16_bits(high) << 16; }
inline float float16_to_float(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? std::ldexp(float(1024 + fraction), exponent - 25)
                                      : std::ldexp(float(fraction), -24);
    return bits >> 15 ? -size : size;
}

struct MatrixRows {  // of load_matrices
    const void *row;
    uint32_t (*to)[4];
    bool transposed;

    static void resolve(MatrixRows *const lanes[32]) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            uint16_t values[8][8];
            for (int r = 0; r < 8; ++r) {
                if (uintptr_t(lanes[8 * matrix + r]->row) % 16) std::abort();  // a device would stop here too
                std::memcpy(values[r], lanes[8 * matrix + r]->row, 16);
            }
            for (int l = 0; l < 32; ++l) {
                const int r = l / 4, c = 2 * (l % 4);
                const uint32_t low = lanes[l]->transposed ? values[c][r] : values[r][c];
                const uint32_t high = lanes[l]->transposed ? values[c + 1][r] : values[r][c + 1];
                (*lanes[l]->to)[matrix] = low | high << 16;
            }
        }
    }
};
inline void load_matrices(uint32_t (&to)[4], const void *row, CUDA_ON_CPU_PLACE) {
    MatrixRows own = {row, &to, false};
    cuda_on_cpu::collective<MatrixRows, MatrixRows::resolve>(own, {file, line});
}
inline void load_matrices_transposed(uint32_t (&to)[4], const void *row, CUDA_ON_CPU_PLACE) {
    MatrixRows own = {row, &to, true};
    cuda_on_cpu::collective<MatrixRows, MatrixRows::resolve>(own, {file, line});
}

// One lane's part of sums [16, 8] += a [16, K] b [K, 8]; registers hold PACKED numbers each (K = 8 PACKED).
template <int PACKED, float (*WIDEN)(uint16_t)> struct Multiplication {
    float (*sums)[4];
    const uint32_t (*a)[4];
    uint32_t b[2];

    static float number(uint32_t bits, int which) {
        if constexpr (PACKED == 1) return float_of(bits & ~0x1fffu);
        else return WIDEN(uint16_t(bits >> 16 * which));
    }
    static void resolve(Multiplication *const lanes[32]) {
        constexpr int K = 8 * PACKED;
        float a[16][K], b[K][8];
        for (int l = 0; l < 32; ++l)
            for (int i = 0; i < 4; ++i)
                for (int which = 0; which < PACKED; ++which) {
                    const int k = PACKED * (l % 4) + which + i / 2 * (K / 2);
                    a[l / 4 + i % 2 * 8][k] = number((*lanes[l]->a)[i], which);
                    if (i < 2) b[PACKED * (l % 4) + which + i * (K / 2)][l / 4] = number(lanes[l]->b[i], which);
                }
        for (int l = 0; l < 32; ++l)
            for (int i = 0; i < 4; ++i) {
                const int row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
                float sum = (*lanes[l]->sums)[i];
                for (int k = 0; k < K; ++k) sum += a[row][k] * b[k][column];
                (*lanes[l]->sums)[i] = sum;
            }
    }
    static void together(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, cuda_on_cpu::Place at) {
        Multiplication own = {&sums, &a, {b0, b1}};
        cuda_on_cpu::collective<Multiplication, resolve>(own, at);
    }
};

inline float bfloat16_to_float(uint16_t bits);

#define SFNO_DIST_MMA(name, packed, widen)                                                                  \
    inline void name(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CUDA_ON_CPU_PLACE) { \
        Multiplication<packed, widen>::together(sums, a, b0, b1, {file, line});                             \
    }
SFNO_DIST_MMA(multiply_bfloat16, 2, bfloat16_to_float)
SFNO_DIST_MMA(multiply_float16, 2, float16_to_float)
SFNO_DIST_MMA(multiply_tf32, 1, nullptr)

// Host side: a device with the shared memory of an H100, or less where a test asks for less.
inline const char *last_launch() { return nullptr; }
inline const char *use_device(int) { return nullptr; }
inline const char *shared_bytes_of_device(int, int *bytes) {
    const char *named = std::getenv("CUDA_ON_CPU_SHARED_BYTES");
    *bytes = named ? std::atoi(named) : 227 << 10;
    return nullptr;
}
template <class Kernel> const char *allow_shared_bytes(Kernel, int) { return nullptr; }
inline const char *memory_kind() { return "cpu"; }

}  // namespace sfno_dist::cuda
