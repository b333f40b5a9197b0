// The two products of a tile, by one warp for its 16 centres: scores of a chunk of neighbours, and sums over it.
//     scores[i, j] = sum_c centre[i, c] neighbour[j, c]          results[i, c] += sum_j weights[i, j] neighbour[j, c]
// A lane holds 4 numbers of each block of 16 centres x 8 neighbours or channels: number e of block n belongs to centre
// row_of(slot_of(e)) and to neighbour column(n, e). Each kind of number places them as suits its products.
// `active` has 4 bits for each block of 8 neighbours, all 0 where no centre of the warp attends to any of them.
#pragma once

#include "problem.h"

namespace sfno_dist::cuda {

constexpr int kResultBlocks = kSliceChannels / 8;

__device__ __forceinline__ int lane_id() { return int(threadIdx.x) & 31; }
__device__ __forceinline__ bool is_active(uint32_t active, int block) { return active >> 4 * block & 15u; }

// The places that tensor cores give to their results.
struct TensorCoreLayout {
    static constexpr int kLanesPerRow = 4, kRows = 2;  // kRows: different centres among a lane's numbers
    __device__ static int row_of(int slot) { return lane_id() / 4 + 8 * slot; }
    __device__ static int slot_of(int e) { return e / 2; }
    __device__ static int column(int n, int e) { return 8 * n + 2 * (lane_id() % 4) + e % 2; }

    // The lane's channels of one of its centres, to a row that may be written 16 bytes at a time where `aligned`.
    template <class P, class T>
    __device__ static void store(T *row, int channels, bool aligned, const float (&results)[kResultBlocks][4],
                                 int slot) {
#pragma unroll
        for (int m = 0; m < kResultBlocks; ++m) {
            const int channel = 8 * m + 2 * (lane_id() % 4);
            const float first = slot == 0 ? results[m][0] : results[m][2];
            const float second = slot == 0 ? results[m][1] : results[m][3];
            if (aligned && channel + 1 < channels) {
                if constexpr (sizeof(T) == 4) *(float2 *)(row + channel) = make_float2(first, second);
                else *(uint32_t *)(row + channel) = P::pair(first, second);
            } else {
                if (channel < channels) P::put(first, row + channel);
                if (channel + 1 < channels) P::put(second, row + channel + 1);
            }
        }
    }
};

template <Number NUMBER> struct Products;

// 16-bit numbers on tensor cores, 16 channels or neighbours at a time.
template <Number NUMBER> struct SixteenBitProducts : TensorCoreLayout {
    using Stored = uint16_t;
    static constexpr int kChunk = 32, kPad = 16, kScratch = 0;
    static constexpr int kBlocks = kChunk / 8;

    __device__ static float widened(Stored x) {
        return NUMBER == Number::bfloat16 ? bfloat16_to_float(x) : float16_to_float(x);
    }
    __device__ static uint32_t pair(float low, float high) {
        return NUMBER == Number::bfloat16 ? bfloat16_pair(low, high) : float16_pair(low, high);
    }
    __device__ static void put(float x, Stored *to) { *to = Stored(pair(x, 0.0f)); }
    __device__ static void put(float x, float *to) { *to = x; }
    __device__ static void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        if constexpr (NUMBER == Number::bfloat16) multiply_bfloat16(sums, a, b0, b1);
        else multiply_float16(sums, a, b0, b1);
    }

    __device__ static void score(const Stored *centre, const Stored *neighbour, int stride, int width, uint32_t active,
                                 float (&scores)[kBlocks][4]) {
        const int lane = lane_id();
        centre += lane % 16 * stride + lane / 16 * 8;
        neighbour += (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
        for (int c = 0; c < width; c += 16) {
            uint32_t a[4], b[4];
            load_matrices(a, centre + c);
#pragma unroll
            for (int n = 0; n < kBlocks; n += 2) {
                if (!is_active(active, n) && !is_active(active, n + 1)) continue;
                load_matrices(b, neighbour + n * 8 * stride + c);
                multiply(scores[n], a, b[0], b[1]);
                multiply(scores[n + 1], a, b[2], b[3]);
            }
        }
    }

    __device__ static void accumulate(const float (&weights)[kBlocks][4], const Stored *neighbour, int stride,
                                      int channels, uint32_t active, float (&results)[kResultBlocks][4], float *) {
        const int lane = lane_id();
        neighbour += lane % 16 * stride + lane / 16 * 8;
#pragma unroll
        for (int n = 0; n < kBlocks; n += 2) {
            if (!is_active(active, n) && !is_active(active, n + 1)) continue;
            // Weights lie where scores lay, which is where the left operand of a product wants them.
            const uint32_t a[4] = {pair(weights[n][0], weights[n][1]), pair(weights[n][2], weights[n][3]),
                                   pair(weights[n + 1][0], weights[n + 1][1]),
                                   pair(weights[n + 1][2], weights[n + 1][3])};
#pragma unroll
            for (int m = 0; m < kResultBlocks; m += 2) {
                if (8 * m >= channels) break;
                uint32_t b[4];
                load_matrices_transposed(b, neighbour + n * 8 * stride + m * 8);
                multiply(results[m], a, b[0], b[1]);
                multiply(results[m + 1], a, b[2], b[3]);
            }
        }
    }
};
template <> struct Products<Number::bfloat16> : SixteenBitProducts<Number::bfloat16> {};
template <> struct Products<Number::float16> : SixteenBitProducts<Number::float16> {};

// float32 rounded to tf32 on tensor cores, 8 channels or neighbours at a time.
template <> struct Products<Number::tf32> : TensorCoreLayout {
    using Stored = float;
    static constexpr int kChunk = 32, kPad = 32, kScratch = 0;
    static constexpr int kBlocks = kChunk / 8;

    __device__ static float widened(Stored x) { return x; }
    __device__ static void put(float x, Stored *to) { *to = x; }

    __device__ static void score(const Stored *centre, const Stored *neighbour, int stride, int width, uint32_t active,
                                 float (&scores)[kBlocks][4]) {
        const int lane = lane_id();
        centre += lane / 4 * stride + lane % 4;
        neighbour += lane / 4 * stride + lane % 4;
        for (int c = 0; c < width; c += 8) {
            const uint32_t a[4] = {tf32_bits(centre[c]), tf32_bits(centre[8 * stride + c]), tf32_bits(centre[c + 4]),
                                   tf32_bits(centre[8 * stride + c + 4])};
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) {
                if (!is_active(active, n)) continue;
                const Stored *b = neighbour + n * 8 * stride + c;
                multiply_tf32(scores[n], a, tf32_bits(b[0]), tf32_bits(b[4]));
            }
        }
    }

    __device__ static void accumulate(const float (&weights)[kBlocks][4], const Stored *neighbour, int stride,
                                      int channels, uint32_t active, float (&results)[kResultBlocks][4], float *) {
        const int lane = lane_id();
        neighbour += lane % 4 * 2 * stride + lane / 4;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
            if (!is_active(active, n)) continue;
            // A product may take its neighbours in any order: even ones first, as the lanes hold the weights.
            const uint32_t a[4] = {tf32_bits(weights[n][0]), tf32_bits(weights[n][2]), tf32_bits(weights[n][1]),
                                   tf32_bits(weights[n][3])};
#pragma unroll
            for (int m = 0; m < kResultBlocks; ++m) {
                if (8 * m >= channels) break;
                const Stored *b = neighbour + n * 8 * stride + m * 8;
                multiply_tf32(results[m], a, tf32_bits(b[0]), tf32_bits(b[stride]));
            }
        }
    }
};

// float32 in ordinary arithmetic. 8 lanes share a row and a lane holds 4 rows: 8 loads of 4 numbers serve 64
// multiplications of scores, 12 loads 128 of sums.
template <> struct Products<Number::float32> {
    using Stored = float;
    static constexpr int kChunk = 32, kPad = 32;
    static constexpr int kBlocks = kChunk / 8;
    static constexpr int kWeightStride = kChunk + 4, kScratch = kWarpCentres * kWeightStride;  // numbers per warp
    static constexpr int kLanesPerRow = 8, kRows = 4;

    __device__ static int row_of(int slot) { return lane_id() / 8 + 4 * slot; }
    __device__ static int slot_of(int e) { return e; }
    __device__ static int column(int n, int) { return 8 * n + lane_id() % 8; }

    template <class P>
    __device__ static void store(float *row, int channels, bool aligned, const float (&results)[kResultBlocks][4],
                                 int slot) {
#pragma unroll
        for (int m = 0; m < kResultBlocks; m += 4) {
            const int channel = 8 * m + 4 * (lane_id() % 8);
            float four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                four[i] = slot < 2 ? (slot == 0 ? results[m + i][0] : results[m + i][1])
                                   : (slot == 2 ? results[m + i][2] : results[m + i][3]);
            if (aligned && channel + 3 < channels)
                *(float4 *)(row + channel) = make_float4(four[0], four[1], four[2], four[3]);
            else
                for (int i = 0; i < 4 && channel + i < channels; ++i) row[channel + i] = four[i];
        }
    }

    __device__ static float widened(Stored x) { return x; }
    __device__ static void put(float x, Stored *to) { *to = x; }

    __device__ static void score(const Stored *centre, const Stored *neighbour, int stride, int width, uint32_t active,
                                 float (&scores)[kBlocks][4]) {
        const int lane = lane_id();
        centre += lane / 8 * stride;
        neighbour += lane % 8 * stride;
        for (int c = 0; c < width; c += 4) {
            float4 a[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = *(const float4 *)(centre + 4 * e * stride + c);
#pragma unroll
            for (int n = 0; n < kBlocks; ++n) {
                if (!is_active(active, n)) continue;
                const float4 b = *(const float4 *)(neighbour + n * 8 * stride + c);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    scores[n][e] += a[e].x * b.x + a[e].y * b.y + a[e].z * b.z + a[e].w * b.w;
            }
        }
    }

    __device__ static void accumulate(const float (&weights)[kBlocks][4], const Stored *neighbour, int stride,
                                      int channels, uint32_t active, float (&results)[kResultBlocks][4],
                                      float *scratch) {
        const int lane = lane_id();
        // Through shared memory, as each lane needs the weights that 7 others hold   [kWarpCentres, kWeightStride]
        __syncwarp();
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scratch[row_of(e) * kWeightStride + column(n, e)] = weights[n][e];
        __syncwarp();
        scratch += lane / 8 * kWeightStride;
        neighbour += 4 * (lane % 8);
        for (int j = 0; j < kChunk; j += 4) {
            if (!is_active(active, j / 8)) continue;
            alignas(16) float a[4][4];
#pragma unroll
            for (int e = 0; e < 4; ++e) *(float4 *)a[e] = *(const float4 *)(scratch + 4 * e * kWeightStride + j);
#pragma unroll
            for (int m = 0; m < kResultBlocks; m += 4) {
                if (8 * m >= channels) break;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float4 b = *(const float4 *)(neighbour + (j + i) * stride + 8 * m);
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        results[m][e] += a[e][i] * b.x;
                        results[m + 1][e] += a[e][i] * b.y;
                        results[m + 2][e] += a[e][i] * b.z;
                        results[m + 3][e] += a[e][i] * b.w;
                    }
                }
            }
        }
    }
};

}  // namespace sfno_dist::cuda
