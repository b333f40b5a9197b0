// The few things of a CUDA device that the kernels use beyond plain C++, each in a few lines: under nvcc the
// instruction itself, elsewhere the same thing on the CPU, with which the kernels are tested (tests/cuda_on_cpu).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "device_on_cpu.h"
#endif

namespace sfno_dist::cuda {

#if defined(__CUDACC__)

#define SFNO_DIST_LAUNCH(kernel, grid, threads, shared_bytes, stream, ...) \
    kernel<<<grid, threads, shared_bytes, (cudaStream_t)(stream)>>>(__VA_ARGS__)

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ unsigned char *dynamic_shared() {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    return shared_memory;
}

__device__ __forceinline__ uint32_t shared_address(const void *at) { return uint32_t(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 bytes from global to shared memory while the thread goes on; beyond `valid` bytes: zeros.
__device__ __forceinline__ void copy_async(void *to, const void *from, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid)
                 : "memory");
}
__device__ __forceinline__ void copy_pair_async(void *to, const void *from, bool valid) {  // 8 bytes, or zeros
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 8 : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int UNDER_WAY> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(UNDER_WAY) : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers: lane l names row l % 8 of matrix l / 8 (16 bytes) and gets, of each
// matrix, elements (l / 4, 2 (l % 4)) and the next; transposed: elements (2 (l % 4), l / 4) and the one below.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// sums [16, 8] += a [16, k] b [k, 8] on tensor cores. Lane l holds of sums the elements (l / 4, 2 (l % 4)), the next,
// and the same two 8 rows below; of a and b what the PTX manual lists for mma.m16n8k16 (k8 for tf32).
#define SFNO_DIST_MMA(name, instruction)                                                                       \
    __device__ __forceinline__ void name(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
        asm volatile(instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                          \
    }
SFNO_DIST_MMA(multiply_bfloat16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
SFNO_DIST_MMA(multiply_float16, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
SFNO_DIST_MMA(multiply_tf32, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")

// Conversions round to nearest (tf32: ties away from zero). A pair has its first number in the low half.
__device__ __forceinline__ uint32_t tf32_bits(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t bfloat16_pair(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ uint32_t float16_pair(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
__device__ __forceinline__ float float16_to_float(uint16_t bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
}
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

// Host side. Each returns NULL, or what went wrong.
inline const char *words(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return nullptr;
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorInvalidDeviceFunction:
            return "the kernels need a GPU of compute capability 8.0 or newer: choose backend='reference' on this one";
        case cudaErrorInsufficientDriver:
            return "the driver is older than the nvcc that built the kernels: update it, or build with an older nvcc";
        default: return cudaGetErrorString(error);
    }
}
inline const char *last_launch() { return words(cudaGetLastError()); }
// This library's runtime is its own, and so is what it takes for the current device.
inline const char *use_device(int device) { return words(cudaSetDevice(device)); }
inline const char *shared_bytes_of_device(int device, int *bytes) {
    return words(cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}
template <class Kernel> const char *allow_shared_bytes(Kernel kernel, int bytes) {
    return words(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}
inline const char *memory_kind() { return "cuda"; }

#endif

__device__ __forceinline__ float bfloat16_to_float(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

}  // namespace sfno_dist::cuda
