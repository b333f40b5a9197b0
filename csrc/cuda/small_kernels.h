// What happens before and after the tiles: delta of every query, and the meeting of partial results.
#pragma once

#include "lone_centre.h"

namespace sfno_dist::cuda {

constexpr int kSmallThreads = 128, kMergeBlocks = 4;  // a multiprocessor shall hold, as many as spill none

// delta = dy . y - dlse, and the exponent that lse stands for: a warp for each query.
template <Number NUMBER>
__global__ void __launch_bounds__(kSmallThreads) delta_kernel(const __grid_constant__ Launch launch) {
    using P = Products<NUMBER>;
    using Stored = typename P::Stored;
    const sfno_dist_attention &call = launch.call;
    const int64_t query = (int64_t(blockIdx.x) * kSmallThreads + threadIdx.x) / 32;
    const int64_t points = call.query_rows * call.query_columns, fields = call.batches * call.heads;
    if (query >= fields * points) return;
    const int64_t batch = query / points / call.heads, head = query / points % call.heads;
    const int64_t row = query % points / call.query_columns, column = query % call.query_columns;
    const auto at = [&](const sfno_dist_tensor &tensor) {
        return (const Stored *)tensor.data + batch * tensor.batch_stride + head * tensor.head_stride +
               row * tensor.row_stride + column * tensor.column_stride;
    };
    const Stored *const dy = at(call.dy), *const y = at(call.y);
    float sum = 0.0f;
    for (int c = lane_id(); c < call.value_depth; c += 32) sum += P::widened(dy[c]) * P::widened(y[c]);
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
    if (lane_id() == 0) {
        const float delta = sum - (call.dlse ? ((const float *)call.dlse)[query] : 0.0f);
        launch.statistics[query] = make_float2(negative_lse(((const float *)call.lse)[query]), delta);
    }
}

// The parts of one centre, a channel for each lane at a time. Returns whether the lane's results are finite.
template <Number NUMBER, Pass PASS>
__device__ __forceinline__ bool merge_centre(const Launch &launch, const TileView &view, int first_tile, int centre,
                                    int64_t field) {
    using P = Products<NUMBER>;
    using Stored = typename P::Stored;
    constexpr bool kForward = PASS == Pass::forward;
    const sfno_dist_attention &call = launch.call;
    const int width = partial_width(call, PASS), results = width - (kForward ? 2 : 0);
    const int first_width = kForward ? 0 : int(call.depth);
    const int2 place = view.place(centre, launch.centre);
    const int batch = int(field) / int(call.heads), head = int(field) % int(call.heads);
    const auto partial = [&](int part) {
        return launch.partials + ((field * launch.splits + first_tile + part) * kTileCentres + centre) * width;
    };
    bool finite = true;
#pragma unroll 1
    for (int channel = lane_id(); channel < results; channel += 32) {
        float greatest = -HUGE_VALF, total = 0.0f, sum = 0.0f;
        if constexpr (kForward)
            for (int part = 0; part < view.tile.parts; ++part) greatest = fmaxf(greatest, partial(part)[results]);
        const float base = greatest == -HUGE_VALF ? 0.0f : greatest;
        for (int part = 0; part < view.tile.parts; ++part) {
            const float *const from = partial(part);
            const float scale = kForward ? exp2_fast(from[results] - base) : 1.0f;
            if constexpr (kForward) total += scale * from[results + 1];
            sum += scale * from[channel];
        }
        if constexpr (kForward) {
            sum = total == 0.0f ? 0.0f : sum / total;
            if (channel == 0)
                ((float *)call.lse)[query_index(call, field, place.x, place.y)] =
                    total == 0.0f ? -HUGE_VALF : kLn2 * (greatest + log2f(total));
        }
        finite = finite && sum - sum == 0.0f;
        const bool second = channel >= first_width;
        const sfno_dist_tensor &tensor =
            kForward ? call.y : PASS == Pass::query_gradient ? call.dq : second ? call.dv : call.dk;
        Stored *const data = (Stored *)tensor.data + batch * tensor.batch_stride + head * tensor.head_stride;
        P::put(sum, data + place.x * tensor.row_stride + place.y * tensor.column_stride + channel -
                        (second ? first_width : 0));
    }
    return finite;
}

// The parts of one tile, for one batch and head: a block, or nothing where the tile is not the first part.
template <Number NUMBER, Pass PASS>
__global__ void __launch_bounds__(kSmallThreads, kMergeBlocks) merge_kernel(const __grid_constant__ Launch launch) {
    const sfno_dist_attention &call = launch.call;
    const int fields = int(call.batches * call.heads), first_tile = int(blockIdx.x) / fields;
    const int64_t field = int(blockIdx.x) % fields;
    const TileView view(launch, first_tile);
    if (view.tile.part != 0) return;
    const int slices = int(rounded_up(call.depth > call.value_depth ? call.depth : call.value_depth, kSliceChannels)) /
                       kSliceChannels;
    for (int centre = int(threadIdx.x) / 32; centre < kTileCentres; centre += kSmallThreads / 32) {
        if (view.place(centre, launch.centre).x < 0) continue;
        if (__all_sync(kAllLanes, merge_centre<NUMBER, PASS>(launch, view, first_tile, centre, field))) continue;
        __syncwarp();  // what was stored is stored again
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice)
            LoneCentre<NUMBER, PASS>(launch, view, centre, field, slice).run();
    }
}

}  // namespace sfno_dist::cuda
