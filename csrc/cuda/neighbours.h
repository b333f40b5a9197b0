// Which neighbours a tile attends to, a chunk at a time: rows -> runs of columns -> slots of a chunk.
#pragma once

#include "problem.h"

namespace sfno_dist::cuda {

// Up to kRowBatch neighbour rows of a tile. A row's candidates are the columns that it holds of the union of the arcs
// of all centres: `run` columns from `local` on, then from its first column on where the union passes the end.
struct RowBatch {
    int32_t end[kRowBatch];  // candidates of this row and the ones before
    int32_t local[kRowBatch], run[kRowBatch];
    int32_t first_column[kRowBatch], start[kRowBatch];  // as of Side
    float log2_weight[kRowBatch];                       // of a key
    // An angle x within (y - reach.x) <= reach.y, x from the row's column and y the centre's, for each row of the tile.
    uint2 reach[kTileRows][kRowBatch];
};

// The neighbours in a chunk, one per slot.
template <int CHUNK> struct Slots {
    int2 place[CHUNK];  // multiples of row and column stride; negative: nothing here
    float2 statistic[CHUNK];  // log2 w of a key, or -log2(e) lse and delta of a query
    uint2 reach[kTileRows][CHUNK];  // on the arc of centre angle x: (reach.x - x) <= reach.y
};

struct TileView {  // a tile and what does not change between its chunks
    sfno_dist_tile tile;
    int32_t shift;                  // log2 shape_rows
    int32_t first_tick, last_tick;  // of its columns, not wrapped

    __device__ TileView(const Launch &launch, int index) : tile(launch.tiles[index]) {
        shift = tile.shape_rows == 4 ? 2 : tile.shape_rows - 1;
        first_tick = tile.first_column * launch.centre.step;
        last_tick = (tile.first_column + tile.columns - 1) * launch.centre.step;
    }
    __device__ int row_of(int centre) const { return centre & (tile.shape_rows - 1); }
    __device__ int column_of(int centre, const Side &side) const {
        const int32_t column = tile.first_column + (centre >> shift);
        return column < side.nlon ? column : column - side.nlon;
    }
    // Multiples of row and column stride of a centre; negative: nothing there.
    __device__ int2 place(int centre, const Side &side) const {
        const int r = row_of(centre), row = tile.first_row + r;
        if (r >= tile.rows || centre >> shift >= tile.columns) return make_int2(-1, -1);
        int32_t local = column_of(centre, side) - side.first_column(row);
        if (local < 0) local += side.nlon;
        return local < side.columns(row) ? make_int2(side.start(row), local) : make_int2(-1, -1);
    }
};

__device__ __forceinline__ int32_t floor_divided(int32_t a, int32_t b) { return (a >= 0 ? a : a - b + 1) / b; }
__device__ __forceinline__ int32_t modulo(int32_t a, int32_t b) {
    const int32_t rest = a % b;
    return rest < 0 ? rest + b : rest;
}

// Half-width of an arc as (shift, span) so that angles x of a neighbour and y of a centre are near when
// x + shift - y <= span in 32 bits. Nothing is near: half a tick off every column, with span 0.
__device__ __forceinline__ uint2 reach_of(int32_t half_width, const Launch &launch) {
    if (half_width < 0) return make_uint2(angle(1, launch.half_tick_unit), 0u);
    if (2 * half_width + 1 >= launch.ticks) return make_uint2(0u, 0xffffffffu);
    const uint32_t widened = angle(2 * half_width + 1, launch.half_tick_unit);
    return make_uint2(widened, 2 * widened);
}

// By one warp, a row per lane. Returns the number of candidates in the batch.
template <Pass PASS>
__device__ inline int find_rows(const Launch &launch, const TileView &view, int first_row, RowBatch &batch) {
    const int lane = int(threadIdx.x) & 31, row = first_row + lane;
    const Side &side = launch.neighbour;
    int32_t candidates = 0;
    if (row < view.tile.end_neighbour) {
        int32_t widest = -1;
#pragma unroll 1
        for (int r = 0; r < view.tile.shape_rows; ++r) {
            const int64_t at = (view.tile.first_row + r) * launch.centre_width_stride;
            const int32_t width =
                r < view.tile.rows ? launch.call.half_widths[at + row * launch.neighbour_width_stride] : -1;
            batch.reach[r][lane] = reach_of(width, launch);
            widest = width > widest ? width : widest;
        }
        if (widest >= 0) {
            // ceil((first tick - width) / step) .. floor((last tick + width) / step), at most once around
            const int32_t from = -floor_divided(widest - view.first_tick, side.step);
            const int32_t to = floor_divided(view.last_tick + widest, side.step);
            const int32_t length = to - from + 1 < side.nlon ? to - from + 1 : side.nlon;
            const int32_t first_column = side.first_column(row), held = side.columns(row);
            const int32_t local = modulo(from - first_column, side.nlon);
            const int32_t end = local + length;
            const int32_t run = end < held ? length : held - local;
            const int32_t beyond = end - side.nlon < held ? end - side.nlon : held;
            batch.first_column[lane] = first_column, batch.start[lane] = side.start(row);
            if constexpr (PASS != Pass::key_gradient)
                batch.log2_weight[lane] = log2f(float(launch.call.key_weights[row]));
            batch.local[lane] = local;
            batch.run[lane] = run > 0 ? run : 0;
            candidates = (run > 0 ? run : 0) + (beyond > 0 ? beyond : 0);
        }
    }
    for (int by = 1; by < 32; by *= 2) {
        const int32_t before = __shfl_up_sync(kAllLanes, candidates, by);
        if (lane >= by) candidates += before;
    }
    batch.end[lane] = candidates;
    return __shfl_sync(kAllLanes, candidates, 31);
}

// One thread's slot: candidate `index` of the batch.
template <Pass PASS, int CHUNK>
__device__ inline void fill_slot(const Launch &launch, const TileView &view, const RowBatch &batch, int first_row,
                                 int index, int64_t field, Slots<CHUNK> &slots, int slot) {
    const Side &side = launch.neighbour;
    if (slot >= launch.chunk || index >= batch.end[kRowBatch - 1]) {
        slots.place[slot] = make_int2(-1, -1);
        slots.statistic[slot] = make_float2(0.0f, 0.0f);
#pragma unroll 1
        for (int r = 0; r < view.tile.shape_rows; ++r) slots.reach[r][slot] = reach_of(-1, launch);
        return;
    }
    int b = 0;  // the number of rows that end at or before the candidate
    for (int half = kRowBatch / 2; half > 0; half /= 2)
        if (batch.end[b + half - 1] <= index) b += half;
    const int i = b > 0 ? index - batch.end[b - 1] : index;
    const int local = i < batch.run[b] ? batch.local[b] + i : i - batch.run[b];
    int32_t column = batch.first_column[b] + local;
    if (column >= side.nlon) column -= side.nlon;
    const uint32_t at = angle(column, side.unit);
    slots.place[slot] = make_int2(batch.start[b], local);
#pragma unroll 1
    for (int r = 0; r < view.tile.shape_rows; ++r)
        slots.reach[r][slot] = make_uint2(at + batch.reach[r][b].x, batch.reach[r][b].y);
    if constexpr (PASS == Pass::key_gradient)
        copy_pair_async(&slots.statistic[slot],
                        launch.statistics + query_index(launch.call, field, first_row + b, local), true);
    else slots.statistic[slot].x = batch.log2_weight[b];
}

}  // namespace sfno_dist::cuda
