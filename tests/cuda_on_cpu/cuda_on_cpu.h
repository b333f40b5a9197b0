// CUDA's language for kernels, on the CPU: blocks run one after another, the threads of a block as fibers.
//
// A barrier, a warp operation or a tensor-core tile hands control back to the scheduler, which goes on with
// another thread, in an order that a seed shuffles. Shared memory is poisoned before each block, and an
// asynchronous copy arrives only when it is waited for. This proves indexing and arithmetic, and finds barriers
// and waits that are missing; it says nothing about speed, occupancy or the memory model of a real device.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// Static shared memory lies in a section of its own, so that all of it can be poisoned.
#define __shared__ static __attribute__((section("cuda_shared")))

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) int2 { int x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace cuda_on_cpu {

constexpr int kWarp = 32;

struct Place {  // of a call in the source
    const char *file;
    int line;
};

struct Indices {
    dim3 thread, block, block_size, grid;
};
const Indices &indices();  // of the thread that runs now
void *dynamic_shared();

// A barrier of the block.
void wait_for_block(Place place);

// All lanes of a warp meet. Once they have, resolve(lanes) runs once and may write the lanes' operands.
using Resolve = void (*)(void *const lanes[kWarp]);
void meet_warp(void *operands, Resolve resolve, Place place);

template <class T, void (*RESOLVE)(T *const[kWarp])> void collective(T &operands, Place place) {
    meet_warp(&operands, [](void *const lanes[kWarp]) { RESOLVE((T *const *)lanes); }, place);
}

void copy_later(void *to, const void *from, size_t bytes, size_t valid);  // beyond `valid`: zeros
void end_copy_group();
void finish_copies(int groups_still_under_way);

// Throws std::runtime_error, naming the place, where threads of a warp or block wait for different things.
void launch(const char *kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body);
void shuffle_threads(uint64_t seed);

template <class T> struct Shuffle {
    T value, result;
    int source;
    static void resolve(Shuffle *const lanes[kWarp]) {
        for (int i = 0; i < kWarp; ++i) lanes[i]->result = lanes[lanes[i]->source]->value;
    }
};
template <class T> T shuffled(T value, int source, Place place) {
    Shuffle<T> own = {value, value, source};
    collective<Shuffle<T>, Shuffle<T>::resolve>(own, place);
    return own.result;
}
inline int lane() { return int(indices().thread.x) % kWarp; }

struct Vote {
    unsigned value, either, ballot;
    static void resolve(Vote *const lanes[kWarp]) {
        unsigned either = 0, ballot = 0;
        for (int i = 0; i < kWarp; ++i) either |= lanes[i]->value, ballot |= unsigned(lanes[i]->value != 0) << i;
        for (int i = 0; i < kWarp; ++i) lanes[i]->either = either, lanes[i]->ballot = ballot;
    }
};
inline Vote vote(unsigned value, Place place) {
    Vote own = {value, 0, 0};
    collective<Vote, Vote::resolve>(own, place);
    return own;
}

}  // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::indices().thread)
#define blockIdx (cuda_on_cpu::indices().block)
#define blockDim (cuda_on_cpu::indices().block_size)
#define gridDim (cuda_on_cpu::indices().grid)

// Where a default argument of a function stands, these name the place of its call.
#define CUDA_ON_CPU_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUDA_ON_CPU_PLACE) { cuda_on_cpu::wait_for_block({file, line}); }
inline void __syncwarp(unsigned = ~0u, CUDA_ON_CPU_PLACE) { cuda_on_cpu::vote(0, {file, line}); }
template <class T> T __shfl_sync(unsigned, T value, int source, CUDA_ON_CPU_PLACE) {
    return cuda_on_cpu::shuffled(value, source % 32, {file, line});
}
template <class T> T __shfl_xor_sync(unsigned, T value, int other, CUDA_ON_CPU_PLACE) {
    return cuda_on_cpu::shuffled(value, cuda_on_cpu::lane() ^ other, {file, line});
}
template <class T> T __shfl_up_sync(unsigned, T value, int by, CUDA_ON_CPU_PLACE) {
    const int lane = cuda_on_cpu::lane();
    return cuda_on_cpu::shuffled(value, lane < by ? lane : lane - by, {file, line});
}
template <class T> T __shfl_down_sync(unsigned, T value, int by, CUDA_ON_CPU_PLACE) {
    const int lane = cuda_on_cpu::lane();
    return cuda_on_cpu::shuffled(value, lane + by > 31 ? lane : lane + by, {file, line});
}
inline unsigned __ballot_sync(unsigned, int value, CUDA_ON_CPU_PLACE) {
    return cuda_on_cpu::vote(value != 0, {file, line}).ballot;
}
inline int __any_sync(unsigned, int value, CUDA_ON_CPU_PLACE) {
    return cuda_on_cpu::vote(value != 0, {file, line}).ballot != 0;
}
inline int __all_sync(unsigned, int value, CUDA_ON_CPU_PLACE) {
    return cuda_on_cpu::vote(value != 0, {file, line}).ballot == ~0u;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value, CUDA_ON_CPU_PLACE) {
    return cuda_on_cpu::vote(value, {file, line}).either;
}

// Threads run one at a time and are never interrupted: an atomic operation is an ordinary one.
template <class T> T atomicAdd(T *at, T value) {
    const T before = *at;
    *at += value;
    return before;
}
template <class T> T atomicMax(T *at, T value) {
    const T before = *at;
    if (value > before) *at = value;
    return before;
}
