// The C interface of the CUDA kernels: checks, and the choice of kernels.
#include "attention_cuda.h"

#include <exception>
#include <numeric>
#include <stdexcept>
#include <string>

#include "cuda/launch.h"

namespace sfno_dist::cuda {

extern const Passes float32_passes, tf32_passes, bfloat16_passes, float16_passes;

namespace {

const Passes &chosen_passes(const sfno_dist_attention &call, const sfno_dist_schedule &schedule) {
    switch (call.dtype) {
        case SFNO_DIST_FLOAT32: return schedule.allow_tf32 ? tf32_passes : float32_passes;
        case SFNO_DIST_BFLOAT16: return bfloat16_passes;
        case SFNO_DIST_FLOAT16: return float16_passes;
    }
    throw std::invalid_argument("the CUDA kernels take float32, bfloat16 or float16, got dtype " +
                                std::to_string(call.dtype) + ": convert, or choose backend='reference'");
}

void check(const sfno_dist_attention &call, const sfno_dist_schedule &schedule) {
    constexpr int64_t most = 0x7fffffff, widest = 256;
    if (call.depth < 1 || call.depth > widest || call.value_depth < 1 || call.value_depth > widest)
        throw std::invalid_argument("heads may have 1 to 256 channels, got " + std::to_string(call.depth) +
                                    " of query and key and " + std::to_string(call.value_depth) +
                                    " of value: use more heads");
    const int64_t ticks = std::lcm(call.query_nlon, call.key_nlon);
    if (ticks > kMostTicks)
        throw std::invalid_argument("rows of " + std::to_string(call.query_nlon) + " queries and " +
                                    std::to_string(call.key_nlon) + " keys have a least common multiple of " +
                                    std::to_string(ticks) + ", more than 2^24: choose numbers with a common divisor");
    const int64_t tiles = std::max(schedule.query_tiles, schedule.key_tiles);
    if (tiles * call.batches * call.heads > most / kMostWarps || call.key_points > most ||
        call.batches * call.heads * call.query_rows * call.query_columns > most * 4)
        throw std::invalid_argument("too much for one launch: " + std::to_string(call.batches) + " batches of " +
                                    std::to_string(call.heads) + " heads: cut the batch");
}

int64_t workspace_numbers(const sfno_dist_attention &call, const sfno_dist_schedule &schedule) {
    const int of_queries = std::max(partial_width(call, Pass::forward), partial_width(call, Pass::query_gradient));
    const int64_t of_keys = partial_width(call, Pass::key_gradient);
    const int64_t partials = std::max(schedule.query_splits * int64_t(of_queries), schedule.key_splits * of_keys);
    const int64_t statistics = 2 * call.query_rows * call.query_columns;  // forward has no use for them
    return call.batches * call.heads * (kTileCentres * partials + statistics);
}

thread_local std::string message;

template <class Run> int guarded(const sfno_dist_attention *call, const sfno_dist_schedule *schedule, Run run) {
    try {
        check(*call, *schedule);
        const Passes &passes = chosen_passes(*call, *schedule);
        if (call->batches * call->heads > 0) run(passes);
        return 0;
    } catch (const std::exception &error) {
        message = error.what();
        return 1;
    }
}

}  // namespace
}  // namespace sfno_dist::cuda

int sfno_dist_cuda_forward(const sfno_dist_attention *call, const sfno_dist_schedule *schedule) {
    return sfno_dist::cuda::guarded(call, schedule, [&](auto &passes) { passes.forward(*call, *schedule); });
}

int sfno_dist_cuda_backward(const sfno_dist_attention *call, const sfno_dist_schedule *schedule) {
    return sfno_dist::cuda::guarded(call, schedule, [&](auto &passes) { passes.backward(*call, *schedule); });
}

int64_t sfno_dist_cuda_workspace(const sfno_dist_attention *call, const sfno_dist_schedule *schedule) {
    return int64_t(sizeof(float)) * sfno_dist::cuda::workspace_numbers(*call, *schedule);
}

const char *sfno_dist_cuda_message(void) { return sfno_dist::cuda::message.c_str(); }
const char *sfno_dist_cuda_memory(void) { return sfno_dist::cuda::memory_kind(); }
int64_t sfno_dist_schedule_size(void) { return int64_t(sizeof(sfno_dist_schedule)); }
