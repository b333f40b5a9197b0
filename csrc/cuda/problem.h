// What one launch works on, and the shape of its tiles.
//     forward         centres q        neighbours k, v     y  = sum p v                      p = w exp(s - lse)
//     query_gradient  centres q, dy    neighbours k, v     dq = sum ds k                    ds = p (dy . v - delta)
//     key_gradient    centres k, v     neighbours q, dy    dk = sum ds q,  dv = sum p dy
#pragma once

#include <cmath>

#include "../attention_cuda.h"
#include "device.h"

namespace sfno_dist::cuda {

enum class Pass { forward, query_gradient, key_gradient };
enum class Number { float32, tf32, bfloat16, float16 };  // how inputs are stored and multiplied

constexpr int kTileCentres = 64, kWarpCentres = 16;
constexpr int kSliceChannels = 64;  // of the results that a block makes; wider heads take several blocks
constexpr int kTileRows = 4;        // at most
constexpr int kRowBatch = 32;       // neighbour rows whose arcs are held at once

// The points of one side; `windows` [rows, 3] as in attention.h, or NULL for queries: rows alike from `first` on.
struct Side {
    const int64_t *windows;
    int32_t first, count, nlon, step;  // step: ticks between columns
    uint64_t unit;                     // angle_unit(nlon)

    __device__ int first_column(int row) const { return windows ? int(windows[3 * row]) : first; }
    __device__ int columns(int row) const { return windows ? int(windows[3 * row + 1]) : count; }
    // Row index, or for keys the position of the row's first column: what the row stride is multiplied with.
    __device__ int start(int row) const { return windows ? int(windows[3 * row + 2]) : row; }
};

struct Launch {
    sfno_dist_attention call;
    Side centre, neighbour;
    const sfno_dist_tile *tiles;
    int32_t tile_count, splits;
    int32_t warps, stages;                      // of a block; stages: chunks of neighbours in shared memory
    int32_t chunk;                              // neighbours in one, at most kChunk
    int32_t ticks;                              // around the circle
    uint64_t half_tick_unit;                    // angle_unit(2 ticks)
    int64_t centre_width_stride, neighbour_width_stride;  // of half_widths
    // Of every query, for backward: -log2(e) lse and delta   [batches, heads, query_rows, query_columns]
    float2 *statistics;
    float *partials;  // [batches * heads, splits, kTileCentres, partial_width]
};

__host__ __device__ inline int partial_width(const sfno_dist_attention &call, Pass pass) {
    if (pass == Pass::forward) return int(call.value_depth) + 2;  // sum of p v, then maximum and sum of p
    return int(call.depth + (pass == Pass::key_gradient ? call.value_depth : 0));
}

__host__ __device__ inline int64_t query_index(const sfno_dist_attention &call, int64_t field, int row, int column) {
    return (field * call.query_rows + row) * call.query_columns + column;
}

__host__ __device__ inline int64_t rounded_up(int64_t size, int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

// What softmax exponents are made of: powers of 2, as that is what devices compute.
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
// -log2(e) lse; a query without keys has lse = -inf, and all its probabilities are 0.
__device__ __forceinline__ float negative_lse(float lse) { return lse == -HUGE_VALF ? lse : -kLog2E * lse; }

// Angles are fractions of the circle in 32 bits, so that differences wrap around as the circle does. With at most
// kMostTicks ticks a tick has 256 units and rounding errors stay below 70. Arcs are widened by half a tick, so whether
// a point lies on an arc is exact.
constexpr int kMostTicks = 1 << 24;
constexpr int kAngleShift = 20;  // angle of n parts = n * (2^52 / parts of the circle) / 2^20

__host__ __device__ inline uint64_t angle_unit(int64_t parts) { return (uint64_t(1) << 52) / uint64_t(parts); }
__device__ __forceinline__ uint32_t angle(int32_t part, uint64_t unit) {
    return uint32_t(uint64_t(part) * unit >> kAngleShift);
}

}  // namespace sfno_dist::cuda
