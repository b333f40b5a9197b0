// The scheduler behind cuda_on_cpu.h.
#include "cuda_on_cpu.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// The bounds of all static shared memory; absent where a program has none.
extern "C" {
extern char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));
}

namespace cuda_on_cpu {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kPoison = 0xff;  // NaN as a number of any width, -1 as an integer

#if defined(__x86_64__)
// Saves what a called function must keep, changes stacks, restores. swapcontext makes system calls, 30 times slower.
asm(R"(
.text
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
extern "C" void cuda_on_cpu_switch(void **save, void *load);

struct Context {
    void *stack_pointer = nullptr;
    void start_at(char *stack, size_t bytes, void (*entry)()) {
        void **top = (void **)(stack + bytes) - 8;  // 16-byte aligned once `ret` has taken the entry off
        std::fill(top, top + 8, nullptr);
        top[6] = (void *)entry;
        stack_pointer = top;
    }
    static void change(Context &from, Context &to) { cuda_on_cpu_switch(&from.stack_pointer, to.stack_pointer); }
};
#else
struct Context {
    ucontext_t state;
    void start_at(char *stack, size_t bytes, void (*entry)()) {
        getcontext(&state);
        state.uc_stack.ss_sp = stack, state.uc_stack.ss_size = bytes, state.uc_link = nullptr;
        makecontext(&state, entry, 0);
    }
    static void change(Context &from, Context &to) { swapcontext(&from.state, &to.state); }
};
#endif

struct Copy {
    void *to;
    const void *from;
    size_t bytes, valid;
};

enum class State { ready, at_warp, at_block, ended };

struct Fiber {
    Context context;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    Indices indices;
    State state = State::ended;
    Place place = {};
    void *operands = nullptr;
    Resolve resolve = nullptr;
    std::deque<std::vector<Copy>> copies;  // the last group is open
};

Fiber *current = nullptr;
Context scheduler;
const std::function<void()> *kernel_body = nullptr;
std::mt19937_64 random_order(1);
std::unique_ptr<char[]> shared;
std::vector<size_t> shared_bytes_asked;  // by launches with dynamic shared memory

#if defined(__SANITIZE_ADDRESS__)
const void *scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif

void run(Fiber &fiber) {
    current = &fiber;
#if defined(__SANITIZE_ADDRESS__)
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), kStackBytes);
#endif
    Context::change(scheduler, fiber.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    current = nullptr;
}

void back_to_scheduler() {
    Fiber &fiber = *current;
#if defined(__SANITIZE_ADDRESS__)
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(fiber.state == State::ended ? nullptr : &fake, scheduler_stack,
                                   scheduler_stack_bytes);
#endif
    Context::change(fiber.context, scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    (*kernel_body)();
    finish_copies(0);
    current->state = State::ended;
    back_to_scheduler();
}

[[noreturn]] void fail(const char *kernel, const Fiber &fiber, const std::string &what) {
    const Indices &at = fiber.indices;
    const std::string place = fiber.place.file ? std::string(fiber.place.file) + ":" + std::to_string(fiber.place.line)
                                               : std::string("its start");
    throw std::runtime_error("kernel " + std::string(kernel) + ", block (" + std::to_string(at.block.x) + ", " +
                             std::to_string(at.block.y) + ", " + std::to_string(at.block.z) + "), thread " +
                             std::to_string(at.thread.x) + " at " + place + ": " + what);
}

bool same(Place a, Place b) { return a.line == b.line && !std::strcmp(a.file, b.file); }

struct Block {
    const char *kernel;
    std::vector<Fiber> &fibers;

    Fiber *warp(size_t w) { return &fibers[w * kWarp]; }
    size_t warps() const { return fibers.size() / kWarp; }

    // Runs the lanes of a warp until each waits for others; then lets a warp operation happen. False: none could run.
    bool advance(size_t w) {
        int order[kWarp], ran = 0, waiting = 0;
        for (int i = 0; i < kWarp; ++i) order[i] = i;
        std::shuffle(order, order + kWarp, random_order);
        for (const int i : order)
            if (warp(w)[i].state == State::ready) run(warp(w)[i]), ++ran;
        for (int i = 0; i < kWarp; ++i) waiting += warp(w)[i].state == State::at_warp;
        if (waiting > 0) release_warp(w);
        return ran > 0;
    }

    void release_warp(size_t w) {
        Fiber *lanes = warp(w);
        Fiber &first = *std::find_if(lanes, lanes + kWarp, [](Fiber &f) { return f.state == State::at_warp; });
        void *operands[kWarp];
        for (int i = 0; i < kWarp; ++i) {
            if (lanes[i].state != State::at_warp)
                fail(kernel, first, "a warp operation that lane " + std::to_string(i) + " does not take part in");
            if (lanes[i].resolve != first.resolve || !same(lanes[i].place, first.place))
                fail(kernel, first, "the lanes of a warp meet at different operations");
            operands[i] = lanes[i].operands;
        }
        first.resolve(operands);
        for (int i = 0; i < kWarp; ++i) lanes[i].state = State::ready;
    }

    // False: every thread has ended.
    bool release_block() {
        const auto ended = [](const Fiber &f) { return f.state == State::ended; };
        if (std::all_of(fibers.begin(), fibers.end(), ended)) return false;
        Fiber &first = *std::find_if_not(fibers.begin(), fibers.end(), ended);
        for (Fiber &fiber : fibers)
            if (fiber.state != State::at_block || !same(fiber.place, first.place))
                fail(kernel, first, "a barrier that thread " + std::to_string(fiber.indices.thread.x) +
                                        " does not reach");
        for (Fiber &fiber : fibers) fiber.state = State::ready;
        return true;
    }

    void run_to_end() {
        do {
            // One warp at a time as far as it gets, or all of them in small steps: both happen on a device.
            std::vector<size_t> able(warps());
            for (size_t w = 0; w < able.size(); ++w) able[w] = w;
            while (!able.empty()) {
                const size_t pick = random_order() % able.size();
                size_t steps = random_order() % 4 == 0 ? ~size_t(0) : random_order() % 8 + 1;
                bool ran = true;
                while (ran && steps-- > 0) ran = advance(able[pick]);
                if (!ran) able.erase(able.begin() + long(pick));
            }
        } while (release_block());
    }
};

}  // namespace

const Indices &indices() { return current->indices; }
void *dynamic_shared() { return shared.get(); }
void shuffle_threads(uint64_t seed) { random_order.seed(seed); }

void wait_for_block(Place place) {
    current->state = State::at_block, current->place = place;
    back_to_scheduler();
}

void meet_warp(void *operands, Resolve resolve, Place place) {
    current->state = State::at_warp, current->place = place;
    current->operands = operands, current->resolve = resolve;
    back_to_scheduler();
}

void copy_later(void *to, const void *from, size_t bytes, size_t valid) {
    std::memset(to, kPoison, bytes);  // whoever reads before the wait finds this
    if (current->copies.empty()) current->copies.emplace_back();
    current->copies.back().push_back({to, from, bytes, valid});
}

void end_copy_group() {
    if (current->copies.empty()) current->copies.emplace_back();
    current->copies.emplace_back();
}

void finish_copies(int groups_still_under_way) {
    // The open group does not count as under way.
    while (int(current->copies.size()) - 1 > groups_still_under_way) {
        for (const Copy &copy : current->copies.front()) {
            std::memset(copy.to, 0, copy.bytes);
            std::memcpy(copy.to, copy.from, copy.valid);
        }
        current->copies.pop_front();
    }
}

void launch(const char *kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body) {
    const size_t threads = size_t(block.x) * block.y * block.z;
    if (threads == 0 || threads % kWarp || threads != block.x || threads > 1024)
        throw std::runtime_error(std::string(kernel) + ": a block must be whole warps in x, got " +
                                 std::to_string(threads) + " threads");
    static std::vector<Fiber> fibers;
    fibers.resize(threads);
    if (shared_bytes > 0) shared_bytes_asked.push_back(shared_bytes);
    kernel_body = &body;
    shared.reset(new char[shared_bytes]);
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                std::memset(shared.get(), kPoison, shared_bytes);
                if (__start_cuda_shared)
                    std::memset(__start_cuda_shared, kPoison, size_t(__stop_cuda_shared - __start_cuda_shared));
                for (size_t t = 0; t < threads; ++t) {
                    fibers[t].indices = {dim3(unsigned(t)), dim3(x, y, z), block, grid};
                    fibers[t].state = State::ready, fibers[t].place = {}, fibers[t].copies.clear();
#if defined(__SANITIZE_ADDRESS__)
                    // A fiber that has ended never returned from its functions: their marks are still there.
                    __asan_unpoison_memory_region(fibers[t].stack.get(), kStackBytes);
#endif
                    fibers[t].context.start_at(fibers[t].stack.get(), kStackBytes, fiber_main);
                }
                Block{kernel, fibers}.run_to_end();
            }
}

}  // namespace cuda_on_cpu

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void sfno_dist_cuda_on_cpu_shuffle(uint64_t seed) { cuda_on_cpu::shuffle_threads(seed); }
EXPORT void sfno_dist_cuda_on_cpu_forget_shared_bytes() { cuda_on_cpu::shared_bytes_asked.clear(); }
EXPORT int sfno_dist_cuda_on_cpu_shared_bytes(int launch) {
    return int(cuda_on_cpu::shared_bytes_asked.at(size_t(launch)));
}
