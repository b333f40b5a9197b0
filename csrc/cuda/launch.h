// The launches of either pass for one kind of number. Host code: nothing here waits, allocates or copies.
#pragma once

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "small_kernels.h"
#include "tile_kernel.h"

namespace sfno_dist::cuda {

inline void require(const char *failure, const char *what) {
    if (failure) throw std::runtime_error(std::string(what) + ": " + failure);
}

template <Number NUMBER> class Launches {
    const sfno_dist_attention &call;
    const sfno_dist_schedule &schedule;
    const unsigned fields;

   public:
    Launches(const sfno_dist_attention &call, const sfno_dist_schedule &schedule)
        : call(call), schedule(schedule), fields(unsigned(call.batches * call.heads)) {
        require(use_device(schedule.device), "choosing the device");
    }

    void forward() { pass<Pass::forward>(call.value_depth); }

    void backward() {
        const int64_t queries = fields * call.query_rows * call.query_columns, per_block = kSmallThreads / 32;
        SFNO_DIST_LAUNCH(delta_kernel<NUMBER>, dim3(unsigned(rounded_up(queries, per_block) / per_block)),
                         kSmallThreads, 0, schedule.stream, problem(Pass::query_gradient));
        require(last_launch(), "launching the delta kernel");
        if (call.dq.data) pass<Pass::query_gradient>(call.depth);
        if (call.dk.data && call.dv.data) pass<Pass::key_gradient>(std::max(call.depth, call.value_depth));
    }

   private:
    Launch problem(Pass pass) const {
        const bool keys = pass == Pass::key_gradient;
        const int64_t ticks = std::lcm(call.query_nlon, call.key_nlon);
        const int64_t first = (call.first_column % call.query_nlon + call.query_nlon) % call.query_nlon;
        const Side of_queries = {nullptr, int32_t(first), int32_t(call.query_columns), int32_t(call.query_nlon),
                                 int32_t(ticks / call.query_nlon), angle_unit(call.query_nlon)};
        const Side of_keys = {call.key_windows, 0, 0, int32_t(call.key_nlon), int32_t(ticks / call.key_nlon),
                              angle_unit(call.key_nlon)};
        Launch launch = {};
        launch.call = call;
        launch.centre = keys ? of_keys : of_queries;
        launch.neighbour = keys ? of_queries : of_keys;
        launch.tiles = keys ? schedule.key_schedule : schedule.query_schedule;
        launch.tile_count = int32_t(keys ? schedule.key_tiles : schedule.query_tiles);
        launch.splits = keys ? schedule.key_splits : schedule.query_splits;
        launch.ticks = int32_t(ticks);
        launch.half_tick_unit = angle_unit(2 * ticks);
        launch.centre_width_stride = keys ? 1 : call.key_rows;
        launch.neighbour_width_stride = keys ? call.key_rows : 1;
        launch.statistics = (float2 *)schedule.workspace;
        launch.partials = schedule.workspace + 2 * fields * call.query_rows * call.query_columns;
        return launch;
    }

    // As many warps as fit, and two chunks of neighbours where they do too. The last choice always fits into the
    // 99 KiB that devices since compute capability 8.0 have at least.
    template <Pass PASS> int fit(Launch &launch) const {
        int available = 0;
        require(shared_bytes_of_device(schedule.device, &available), "asking the device for its shared memory");
        constexpr int kChunk = Products<NUMBER>::kChunk;
        const int choices[][3] = {{4, 2, kChunk}, {4, 1, kChunk}, {2, 1, kChunk}, {1, 1, kChunk}, {1, 1, kChunk / 2}};
        size_t bytes = 0;
        for (const auto &choice : choices) {
            launch.warps = choice[0], launch.stages = choice[1], launch.chunk = choice[2];
            bytes = SharedMemory<NUMBER, PASS>(launch, nullptr).bytes;
            if (bytes <= size_t(available)) return int(bytes);
        }
        throw std::invalid_argument("heads of " + std::to_string(call.depth) + " and " +
                                    std::to_string(call.value_depth) + " channels need " + std::to_string(bytes) +
                                    " bytes of shared memory and this device has " + std::to_string(available) +
                                    ": use more heads, or 16-bit inputs");
    }

    template <Pass PASS> void pass(int64_t width) {
        Launch launch = problem(PASS);
        if (launch.tile_count == 0) return;
        const int bytes = fit<PASS>(launch);
        require(allow_shared_bytes(tile_kernel<NUMBER, PASS>, bytes), "asking for shared memory");
        const unsigned blocks = unsigned(launch.tile_count) * fields * unsigned(kMostWarps / launch.warps);
        const unsigned slices = unsigned(rounded_up(width, kSliceChannels) / kSliceChannels);
        SFNO_DIST_LAUNCH((tile_kernel<NUMBER, PASS>), dim3(blocks, slices), unsigned(32 * launch.warps), size_t(bytes),
                         schedule.stream, launch);
        require(last_launch(), "launching a tile kernel");
        if (launch.splits == 0) return;
        SFNO_DIST_LAUNCH((merge_kernel<NUMBER, PASS>), dim3(unsigned(launch.splits) * fields), kSmallThreads, 0,
                         schedule.stream, launch);
        require(last_launch(), "launching a merge kernel");
    }
};

struct Passes {
    void (*forward)(const sfno_dist_attention &, const sfno_dist_schedule &);
    void (*backward)(const sfno_dist_attention &, const sfno_dist_schedule &);
};

template <Number NUMBER> constexpr Passes passes() {
    return {[](const sfno_dist_attention &call, const sfno_dist_schedule &schedule) {
                Launches<NUMBER>(call, schedule).forward();
            },
            [](const sfno_dist_attention &call, const sfno_dist_schedule &schedule) {
                Launches<NUMBER>(call, schedule).backward();
            }};
}

}  // namespace sfno_dist::cuda
