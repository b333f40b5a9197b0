// A tile from beginning to end: its arcs in chunks of neighbours, scores, weights, sums, results.
#pragma once

#include "lone_centre.h"
#include "memory.h"

namespace sfno_dist::cuda {

constexpr int kMostWarps = kTileCentres / kWarpCentres;

// Blocks that a multiprocessor shall hold at once, from which follow the registers of a thread: as many as spill none.
template <Number NUMBER, Pass PASS> constexpr int blocks_per_processor() {
    const bool wide = NUMBER == Number::float32 || NUMBER == Number::tf32;
    if (wide) return PASS == Pass::forward ? 3 : 2;
    return PASS == Pass::query_gradient ? 4 : 3;
}

template <Number NUMBER, Pass PASS> class TileProgram {
    using P = Products<NUMBER>;
    using Stored = typename P::Stored;
    using Numbers = float[P::kBlocks][4];
    static constexpr bool kForward = PASS == Pass::forward, kKeys = PASS == Pass::key_gradient;

    const Launch &launch;
    const sfno_dist_attention &call;
    const SharedMemory<NUMBER, PASS> shared;
    const int tile_index, first_centre, warp, slice;  // first_centre: of the tile's 64, where this block begins
    const int batch, head;
    const TileView view;

    uint32_t angles[P::kRows];            // of the lane's centres
    float bias[P::kRows];                 // backward: -log2(e) lse of a query; log2 w of a key
    float delta[P::kRows];                // of a query
    float maximum[P::kRows], total[P::kRows];  // forward: of the online softmax, total as far as this lane has it
    float results[2][kResultBlocks][4];   // sums of ds with the first operand, of p with the second

   public:
    __device__ TileProgram(const Launch &launch, int tile_index, int first_centre, int field, int slice)
        : launch(launch), call(launch.call), shared(launch, dynamic_shared()), tile_index(tile_index),
          first_centre(first_centre), warp(int(threadIdx.x) / 32), slice(slice), batch(field / int(call.heads)),
          head(field % int(call.heads)), view(launch, tile_index) {}

    __device__ void run() {
        stage_centres();
        begin();
        for (int row = view.tile.first_neighbour; row < view.tile.end_neighbour; row += kRowBatch) {
            __syncthreads();  // everyone has read the batch before
            if (warp == 0) find_rows<PASS>(launch, view, row, *shared.rows);
            __syncthreads();
            walk(row, shared.rows->end[kRowBatch - 1]);
        }
        if constexpr (kForward) end_softmax();
        store();
    }

   private:
    __device__ int64_t field() const { return int64_t(batch) * call.heads + head; }
    __device__ int64_t statistic(int2 place) const { return query_index(call, field(), place.x, place.y); }
    __device__ int centre(int slot) const { return first_centre + warp * kWarpCentres + P::row_of(slot); }

    // The centres' operands are centre q (and dy), or k and v; the neighbours' k and v, or q and dy.
    __device__ Channels<Stored> operand(bool of_centre, int which) const {
        const bool queries = of_centre != kKeys;
        const sfno_dist_tensor &tensor = queries ? (which == 0 ? call.q : call.dy) : (which == 0 ? call.k : call.v);
        const int first = kForward && which == 1 ? slice * kSliceChannels : 0;
        const int width = int(which == 0 ? call.depth : call.value_depth) - first;
        return {tensor, batch, head, first, width < shared.padded[which] ? width : shared.padded[which],
                shared.padded[which]};
    }

    __device__ void stage_centres() {
        const auto place = [&](int j) { return view.place(first_centre + j, launch.centre); };
        for (int which = 0; which < (kForward ? 1 : 2); ++which)
            operand(true, which)
                .stage(shared.centres[which], shared.stride[which], launch.warps * kWarpCentres, place);
        // They arrive with the first chunk.
    }

    __device__ void begin() {
#pragma unroll
        for (int slot = 0; slot < P::kRows; ++slot) {
            angles[slot] = angle(view.column_of(centre(slot), launch.centre), launch.centre.unit);
            maximum[slot] = -HUGE_VALF, total[slot] = 0.0f, bias[slot] = 0.0f, delta[slot] = 0.0f;
            const int2 place = view.place(centre(slot), launch.centre);
            if (kForward || place.x < 0) continue;
            if constexpr (kKeys) {
                const int row = view.tile.first_row + view.row_of(centre(slot));
                bias[slot] = log2f(float(call.key_weights[row]));
            } else {
                const float2 of_query = launch.statistics[statistic(place)];
                bias[slot] = of_query.x, delta[slot] = of_query.y;
            }
        }
#pragma unroll
        for (int m = 0; m < kResultBlocks; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) results[0][m][e] = results[1][m][e] = 0.0f;
    }

    // All chunks of a batch of rows. While one is computed with, the next one's copies are under way.
    __device__ void walk(int first_row, int candidates) {
        const int chunks = (candidates + launch.chunk - 1) / launch.chunk, ahead_by = launch.stages - 1;
        for (int chunk = -ahead_by; chunk < chunks; ++chunk) {
            const int ahead = chunk + ahead_by;
            if (ahead < chunks) fill_slots(first_row, ahead);
            __syncthreads();  // slots are filled, and the chunk that lay here before is done with
            if (ahead < chunks) stage_chunk(ahead);
            commit_copies();
            if (chunk < 0) continue;
            if (launch.stages == 2) wait_for_copies<1>();
            else wait_for_copies<0>();
            __syncthreads();  // the chunk is there for everyone
            compute(chunk);
        }
    }

    __device__ void fill_slots(int first_row, int chunk) {
        Slots<P::kChunk> &slots = shared.slots[chunk % shared.kSlotBuffers];
        for (int slot = int(threadIdx.x); slot < P::kChunk; slot += int(blockDim.x))
            fill_slot<PASS>(launch, view, *shared.rows, first_row, chunk * launch.chunk + slot, field(), slots, slot);
    }

    __device__ Stored *staged(int which, int chunk) const {
        return shared.chunks[which] + (launch.stages == 2 ? chunk % 2 : 0) * launch.chunk * shared.stride[which];
    }

    __device__ void stage_chunk(int chunk) {
        const Slots<P::kChunk> &slots = shared.slots[chunk % shared.kSlotBuffers];
        for (int which = 0; which < 2; ++which)
            operand(false, which)
                .stage(staged(which, chunk), shared.stride[which], launch.chunk, [&](int j) { return slots.place[j]; });
    }

    __device__ void compute(int chunk) {
        const Slots<P::kChunk> &slots = shared.slots[chunk % shared.kSlotBuffers];
        const uint32_t near = near_pairs(slots), active = __reduce_or_sync(kAllLanes, near);
        if (active == 0) return;
        Numbers p = {};
        score(0, chunk, active, p);
        float *const scratch = shared.scratch + warp * P::kScratch;
        if constexpr (kForward) {
            online_softmax(slots, near, p);
        } else {
            Numbers ds = {};
            score(1, chunk, active, ds);
            weigh(slots, near, p, ds);
            sum(ds, 0, chunk, active, scratch);
        }
        if constexpr (PASS != Pass::query_gradient) sum(p, 1, chunk, active, scratch);
    }

    // A bit for each of the lane's pairs of centre and neighbour that is one.
    __device__ uint32_t near_pairs(const Slots<P::kChunk> &slots) const {
        const uint2 *const reach = slots.reach[view.row_of(P::row_of(0))];  // all of a lane's centres share a row
        uint32_t near = 0;
#pragma unroll
        for (int n = 0; n < P::kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const uint2 arc = reach[P::column(n, e)];
                near |= uint32_t(arc.x - angles[P::slot_of(e)] <= arc.y) << (4 * n + e);
            }
        return near;
    }

    __device__ void score(int which, int chunk, uint32_t active, Numbers &scores) {
        const Stored *mine = shared.centres[which] + warp * kWarpCentres * shared.stride[which];
        P::score(mine, staged(which, chunk), shared.stride[which], shared.padded[which], active, scores);
    }

    __device__ void sum(const Numbers &weights, int which, int chunk, uint32_t active, float *scratch) {
        const int first = kForward ? 0 : slice * kSliceChannels, channels = shared.padded[which] - first;
        if (channels > 0)
            P::accumulate(weights, staged(which, chunk) + first, shared.stride[which], channels, active,
                          results[which], scratch);
    }

    // Scores to p relative to the greatest score so far; earlier sums shrink when a greater one is met.
    __device__ void online_softmax(const Slots<P::kChunk> &slots, uint32_t near, Numbers &p) {
        float greatest[P::kRows], shrink[P::kRows], base[P::kRows];
#pragma unroll
        for (int slot = 0; slot < P::kRows; ++slot) greatest[slot] = maximum[slot];
#pragma unroll
        for (int n = 0; n < P::kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float exponent = kLog2E * p[n][e] + slots.statistic[P::column(n, e)].x;
                p[n][e] = near >> (4 * n + e) & 1u ? exponent : -HUGE_VALF;
                greatest[P::slot_of(e)] = fmaxf(greatest[P::slot_of(e)], p[n][e]);
            }
#pragma unroll
        for (int slot = 0; slot < P::kRows; ++slot) {
#pragma unroll
            for (int other = 1; other < P::kLanesPerRow; other *= 2)
                greatest[slot] = fmaxf(greatest[slot], __shfl_xor_sync(kAllLanes, greatest[slot], other));
            base[slot] = greatest[slot] == -HUGE_VALF ? 0.0f : greatest[slot];
            shrink[slot] = exp2_fast(maximum[slot] - base[slot]);
            maximum[slot] = greatest[slot];
            total[slot] *= shrink[slot];
        }
#pragma unroll
        for (int n = 0; n < P::kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                p[n][e] = exp2_fast(p[n][e] - base[P::slot_of(e)]);
                total[P::slot_of(e)] += p[n][e];
            }
#pragma unroll
        for (int m = 0; m < kResultBlocks; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) results[1][m][e] *= shrink[P::slot_of(e)];
    }

    // Scores and dy . v to p and ds.
    __device__ void weigh(const Slots<P::kChunk> &slots, uint32_t near, Numbers &p, Numbers &ds) const {
#pragma unroll
        for (int n = 0; n < P::kBlocks; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int slot = P::slot_of(e);
                const float2 statistic = slots.statistic[P::column(n, e)];
                const float exponent = kLog2E * p[n][e] + statistic.x + bias[slot];
                const float of_query = kKeys ? statistic.y : delta[slot];
                const bool neighbour = near >> (4 * n + e) & 1u;
                p[n][e] = neighbour ? exp2_fast(exponent) : 0.0f;
                ds[n][e] = neighbour ? p[n][e] * (ds[n][e] - of_query) : 0.0f;
            }
    }

    // Totals over the lanes of a row; whole tiles divide by them, parts leave that to the merge.
    __device__ void end_softmax() {
#pragma unroll
        for (int slot = 0; slot < P::kRows; ++slot) {
#pragma unroll
            for (int other = 1; other < P::kLanesPerRow; other *= 2)
                total[slot] += __shfl_xor_sync(kAllLanes, total[slot], other);
            const int2 place = view.place(centre(slot), launch.centre);
            const bool first_lane = lane_id() % P::kLanesPerRow == 0;
            if (tile_index < launch.splits) {
                if (first_lane && slice == 0) {
                    float *const partial = partial_row(slot) + call.value_depth;
                    partial[0] = maximum[slot], partial[1] = total[slot];
                }
            } else if (place.x >= 0) {
                if (first_lane && slice == 0)
                    ((float *)call.lse)[statistic(place)] =
                        total[slot] == 0.0f ? -HUGE_VALF : kLn2 * (maximum[slot] + log2f(total[slot]));
                const float scale = total[slot] == 0.0f ? 0.0f : 1.0f / total[slot];
#pragma unroll
                for (int m = 0; m < kResultBlocks; ++m)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (P::slot_of(e) == slot) results[1][m][e] *= scale;
            }
        }
    }

    __device__ float *partial_row(int slot) const {
        const int64_t tile = field() * launch.splits + tile_index;
        return launch.partials + (tile * kTileCentres + centre(slot)) * partial_width(call, PASS);
    }

    // Whether any result of the warp is infinite or NaN.
    __device__ bool overflown() const {
        float zero = 0.0f;
#pragma unroll
        for (int m = 0; m < kResultBlocks; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if constexpr (!kForward) zero += 0.0f * results[0][m][e];
                if constexpr (PASS != Pass::query_gradient) zero += 0.0f * results[1][m][e];
            }
        return __any_sync(kAllLanes, zero != 0.0f);
    }

    __device__ void store() {
        if (tile_index >= launch.splits && overflown()) {  // of parts, the merge looks after
#pragma unroll 1
            for (int own = warp * kWarpCentres; own < (warp + 1) * kWarpCentres; ++own)
                LoneCentre<NUMBER, PASS>(launch, view, first_centre + own, field(), slice).run();
            return;
        }
        if constexpr (!kForward) store_result(0, kKeys ? call.dk : call.dq, int(call.depth), 0);
        if constexpr (PASS != Pass::query_gradient)
            store_result(1, kForward ? call.y : call.dv, int(call.value_depth), kForward ? 0 : int(call.depth));
    }

    __device__ void store_result(int which, const sfno_dist_tensor &tensor, int width, int partial_offset) {
        const int first = slice * kSliceChannels;
        const Channels<Stored> rows(tensor, batch, head, first, width - first, 0);
#pragma unroll
        for (int slot = 0; slot < P::kRows; ++slot) {
            const int2 place = view.place(centre(slot), launch.centre);
            if (place.x < 0) continue;
            if (tile_index < launch.splits)
                P::template store<P>(partial_row(slot) + partial_offset + first, width - first, false, results[which],
                                     slot);
            else
                P::template store<P>(rows.row(place), width - first, rows.aligned, results[which], slot);
        }
    }
};

// Blocks of one tile for all batches and heads follow one another: the tiles come with the most work first.
template <Number NUMBER, Pass PASS>
__global__ void __launch_bounds__(32 * kMostWarps, (blocks_per_processor<NUMBER, PASS>()))
    tile_kernel(const __grid_constant__ Launch launch) {
    const int fields = int(launch.call.batches * launch.call.heads), blocks_of_tile = kMostWarps / launch.warps;
    const int index = int(blockIdx.x) / fields;
    const int first_centre = index % blocks_of_tile * launch.warps * kWarpCentres;
    TileProgram<NUMBER, PASS>(launch, index / blocks_of_tile, first_centre, int(blockIdx.x) % fields,
                              int(blockIdx.y))
        .run();
}

}  // namespace sfno_dist::cuda
