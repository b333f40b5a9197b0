// The C interface: checks, plans, and hands tasks to threads.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "instruction_set.h"
#include "plan.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sfno_dist {
namespace {

// Threads start with each call and end with it: nothing to lose at a fork, nothing that spins beside other pools.
constexpr double kCyclesPerThread = 3e5;  // a thread costs about 20 microseconds, so it must bring more than that

using Scratch = std::unique_ptr<void, decltype(&std::free)>;

Scratch allocate_scratch(size_t bytes) {
    constexpr size_t line = 64;
    Scratch scratch(std::aligned_alloc(line, (bytes + line - 1) / line * line), std::free);
    if (!scratch) throw std::bad_alloc();
    return scratch;
}

void run_all(const sfno_dist_attention &call, Plan &plan, const Kernels &kernels) {
    plan.order();
    const double useful = std::max(1.0, plan.cost() / kCyclesPerThread);
    const size_t limit = std::min({size_t(std::max(1, call.threads)), plan.tasks.size(), size_t(useful)});
    const size_t bytes = kernels.scratch_bytes(call, plan.all_directions(), 2);
    std::vector<Scratch> scratch;
    for (size_t i = 0; i < limit; ++i) scratch.push_back(allocate_scratch(bytes));

    std::atomic<size_t> next{0};
    const auto work = [&](void *own_scratch) {
        for (size_t i = next++; i < plan.tasks.size(); i = next++)
            kernels.run(call, plan.direction(plan.tasks[i].pass), plan.tasks[i], own_scratch);
    };
    std::vector<std::thread> others;
    for (size_t i = 1; i < limit; ++i) {
        try {
            others.emplace_back(work, scratch[i].get());
        } catch (const std::system_error &) {
            break;  // no thread to be had: those that run do all the work, with the same result
        }
    }
    if (limit > 0) work(scratch[0].get());
    for (std::thread &thread : others) thread.join();
}

// Results of many megabytes lie in memory that the system has yet to hand out: ask for it in pages of 2 MiB, which
// takes a tenth of the time of pages of 4 KiB. An advice only: nothing happens where it cannot be followed.
void advise_large_pages(const sfno_dist_attention &call, const sfno_dist_tensor &result) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = 2 << 20;
    const uintptr_t value = call.dtype == SFNO_DIST_FLOAT64 ? 8 : call.dtype == SFNO_DIST_FLOAT32 ? 4 : 2;
    const uintptr_t first = (uintptr_t(result.data) + page - 1) / page * page;
    const uintptr_t end = (uintptr_t(result.data) + uintptr_t(call.batches * result.batch_stride) * value) / page * page;
    if (result.data && first < end) madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)call, (void)result;
#endif
}

void forward(const sfno_dist_attention &call) {
    advise_large_pages(call, call.y);
    const Kernels &kernels = chosen_kernels();
    Plan plan(call, kernels.float_lanes);
    plan.add(Pass::forward);
    run_all(call, plan, kernels);
}

void backward(const sfno_dist_attention &call) {
    for (const sfno_dist_tensor *result : {&call.dq, &call.dk, &call.dv}) advise_large_pages(call, *result);
    const Kernels &kernels = chosen_kernels();
    Plan plan(call, kernels.float_lanes);
    plan.add(Pass::delta);
    run_all(call, plan, kernels);
    plan.tasks.clear();
    if (call.dq.data) plan.add(Pass::query_gradient);
    if (call.dk.data && call.dv.data) plan.add(Pass::key_gradient);
    run_all(call, plan, kernels);
}

thread_local std::string message;

int guarded(void (*run)(const sfno_dist_attention &), const sfno_dist_attention *call) {
    try {
        run(*call);
        return 0;
    } catch (const std::exception &error) {
        message = error.what();
        return 1;
    }
}

}  // namespace
}  // namespace sfno_dist

int sfno_dist_attention_forward(const sfno_dist_attention *call) {
    return sfno_dist::guarded(sfno_dist::forward, call);
}

int sfno_dist_attention_backward(const sfno_dist_attention *call) {
    return sfno_dist::guarded(sfno_dist::backward, call);
}

const char *sfno_dist_message(void) { return sfno_dist::message.c_str(); }

const char *sfno_dist_instruction_sets(void) { return sfno_dist::built_instruction_sets(); }

const char *sfno_dist_instruction_set(void) {
    try {
        return sfno_dist::chosen_kernels().name;
    } catch (const std::exception &error) {
        sfno_dist::message = error.what();
        return nullptr;
    }
}

int64_t sfno_dist_attention_size(void) { return int64_t(sizeof(sfno_dist_attention)); }
