// Kernels for the tests of cuda_on_cpu itself, some of them wrong on purpose. Each exported function returns the
// number of wrong results, or -1 where the launch was refused; `message` says why.
#include <exception>
#include <string>
#include <vector>

#include "cuda/device.h"

using namespace sfno_dist::cuda;

namespace {

constexpr int kThreads = 128, kRounds = 4;
std::string last_message;

// Each thread passes a number to the one beside it, round after round.
template <bool BEFORE_READING, bool AFTER_READING> void neighbours_kernel(int *results) {
    __shared__ int numbers[kThreads];
    const int own = int(threadIdx.x), other = (own + 1) % kThreads;
    int sum = 0;
    for (int round = 0; round < kRounds; ++round) {
        numbers[own] = own + round;
        if (BEFORE_READING) __syncthreads();
        sum += numbers[other];
        if (AFTER_READING) __syncthreads();
    }
    results[blockIdx.x * kThreads + threadIdx.x] = sum;
}

// The same within a warp, in dynamic shared memory.
template <bool WITH_BARRIER> void lanes_kernel(int *results) {
    int *const numbers = (int *)dynamic_shared();
    const int own = int(threadIdx.x), other = own / 32 * 32 + (own + 1) % 32;
    numbers[own] = own;
    if (WITH_BARRIER) __syncwarp();
    results[own] = numbers[other];
}

template <bool WAIT> void copy_kernel(const int *from, int *results) {
    int *const numbers = (int *)dynamic_shared() + 4 * threadIdx.x;
    copy_async(numbers, from + 4 * threadIdx.x, 12);
    commit_copies();
    if (WAIT) wait_for_copies<0>();
    for (int i = 0; i < 4; ++i) results[4 * threadIdx.x + i] = numbers[i];
}

void divergent_kernel(int *results) {
    if (threadIdx.x < 64) __syncthreads();
    results[threadIdx.x] = 0;
}
void lonely_lane_kernel(int *results) {
    results[threadIdx.x] = threadIdx.x == 5 ? 0 : __shfl_xor_sync(kAllLanes, 1, 1);
}
void unwritten_kernel(int *results) { results[threadIdx.x] = ((int *)dynamic_shared())[threadIdx.x]; }

void warp_operations_kernel(int *results, int *counter, int *greatest) {
    const int lane = int(threadIdx.x) % 32;
    int wrong = 0;
    wrong += __shfl_sync(kAllLanes, lane, 7) != 7;
    wrong += __shfl_xor_sync(kAllLanes, lane, 5) != (lane ^ 5);
    wrong += __shfl_up_sync(kAllLanes, lane, 3) != (lane < 3 ? lane : lane - 3);
    wrong += __shfl_down_sync(kAllLanes, lane, 3) != (lane > 28 ? lane : lane + 3);
    wrong += __ballot_sync(kAllLanes, lane % 2) != 0xaaaaaaaau;
    wrong += __any_sync(kAllLanes, lane == 9) != 1 || __all_sync(kAllLanes, lane == 9) != 0;
    wrong += __reduce_or_sync(kAllLanes, 1u << lane) != ~0u;
    atomicAdd(counter, lane), atomicMax(greatest, int(threadIdx.x));
    results[threadIdx.x] = wrong;
}

template <class Body>
int wrong_results(unsigned blocks, size_t shared_bytes, const std::vector<int> &expected, Body body) {
    std::vector<int> results(expected.size(), -1);
    try {
        SFNO_DIST_LAUNCH(body, dim3(blocks), dim3(kThreads), shared_bytes, nullptr, results.data());
    } catch (const std::exception &error) {
        last_message = error.what();
        return -1;
    }
    int wrong = 0;
    for (size_t i = 0; i < expected.size(); ++i) wrong += results[i] != expected[i];
    return wrong;
}

template <bool BEFORE, bool AFTER> int neighbours() {
    std::vector<int> expected;
    for (int i = 0; i < 3 * kThreads; ++i) {
        const int other = (i % kThreads + 1) % kThreads;
        expected.push_back(kRounds * other + kRounds * (kRounds - 1) / 2);
    }
    return wrong_results(3, 0, expected, neighbours_kernel<BEFORE, AFTER>);
}

template <bool WITH_BARRIER> int lanes() {
    std::vector<int> expected;
    for (int i = 0; i < kThreads; ++i) expected.push_back(i / 32 * 32 + (i + 1) % 32);
    return wrong_results(1, kThreads * sizeof(int), expected, lanes_kernel<WITH_BARRIER>);
}

template <bool WAIT> int copies() {
    std::vector<int> from, expected;
    for (int i = 0; i < 4 * kThreads; ++i) from.push_back(i), expected.push_back(i % 4 == 3 ? 0 : i);
    return wrong_results(1, from.size() * sizeof(int), expected,
                         [&](int *results) { copy_kernel<WAIT>(from.data(), results); });
}

// 16 x 8 sums of products of small integers, which every kind of number holds exactly.
template <int PACKED, class Multiply, class Pack> int product(Multiply multiply, Pack pack) {
    constexpr int K = 8 * PACKED;
    const auto a = [](int row, int k) { return float((3 * row + 5 * k) % 7 - 3); };
    const auto b = [](int k, int column) { return float((2 * k + column) % 5 - 2); };
    int wrong = 0;
    cuda_on_cpu::launch("product", dim3(1), dim3(32), 0, [&] {
        const int lane = int(threadIdx.x), row = lane / 4, k = PACKED * (lane % 4), column = 2 * (lane % 4);
        const auto packed_a = [&](int row, int k) { return pack(a(row, k), a(row, k + 1)); };
        const auto packed_b = [&](int k) { return pack(b(k, row), b(k + 1, row)); };
        const uint32_t of_a[4] = {packed_a(row, k), packed_a(row + 8, k), packed_a(row, k + K / 2),
                                  packed_a(row + 8, k + K / 2)};
        float sums[4] = {1.0f, 2.0f, 3.0f, 4.0f};
        multiply(sums, of_a, packed_b(k), packed_b(k + K / 2));
        for (int i = 0; i < 4; ++i) {
            float expected = float(i + 1);
            for (int k = 0; k < K; ++k) expected += a(row + i / 2 * 8, k) * b(k, column + i % 2);
            wrong += sums[i] != expected;
        }
    });
    return wrong;
}

// Four matrices of 8 x 8 numbers 64 m + 8 r + c, each lane getting (l / 4, 2 (l % 4)) or its mirror image.
int matrices() {
    int wrong = 0;
    cuda_on_cpu::launch("matrices", dim3(1), dim3(32), 512, [&] {
        uint16_t *const numbers = (uint16_t *)dynamic_shared();
        const int lane = int(threadIdx.x), r = lane / 4, c = 2 * (lane % 4);
        for (int i = 0; i < 8; ++i) numbers[8 * lane + i] = uint16_t(8 * lane + i);
        __syncwarp();
        uint32_t rows[4], columns[4];
        load_matrices(rows, numbers + 8 * lane);
        load_matrices_transposed(columns, numbers + 8 * lane);
        for (uint32_t m = 0; m < 4; ++m) {
            wrong += rows[m] != ((64 * m + 8 * r + c) | (64 * m + 8 * r + c + 1) << 16);
            wrong += columns[m] != ((64 * m + 8 * c + r) | (64 * m + 8 * c + 8 + r) << 16);
        }
    });
    return wrong;
}

int conversions() {
    int wrong = 0;
    for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
        const float x = float16_to_float(uint16_t(bits)), next = float16_to_float(uint16_t(bits + 1));
        wrong += float16_bits(x) != bits || float16_bits(-x) != (bits | 0x8000);
        if (bits < 0x7bff) wrong += float16_bits((x + next) / 2) != bits + bits % 2;  // a tie goes to the even one
    }
    wrong += !std::isnan(float16_to_float(uint16_t(float16_bits(NAN)))) || float16_bits(1e6f) != 0x7c00;
    for (uint32_t bits = 0; bits < 0x7f80; ++bits) wrong += bfloat16_bits(bfloat16_to_float(uint16_t(bits))) != bits;
    wrong += bfloat16_bits(1.00390625f) != 0x3f80 || bfloat16_bits(1.01171875f) != 0x3f82;
    return wrong + (tf32_bits(1.0f + 0x1p-11f) != bits_of(1.0f + 0x1p-10f));
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char *message() { return last_message.c_str(); }
EXPORT int barriers() { return neighbours<true, true>(); }
EXPORT int barrier_before_reading_missing() { return neighbours<false, true>(); }
EXPORT int barrier_after_reading_missing() { return neighbours<true, false>(); }
EXPORT int warp_barrier() { return lanes<true>(); }
EXPORT int warp_barrier_missing() { return lanes<false>(); }
EXPORT int copies_waited_for() { return copies<true>(); }
EXPORT int wait_for_copies_missing() { return copies<false>(); }
EXPORT int divergent_barrier() { return wrong_results(1, 0, std::vector<int>(kThreads, 0), divergent_kernel); }
EXPORT int lonely_lane() { return wrong_results(1, 0, std::vector<int>(kThreads, 1), lonely_lane_kernel); }
EXPORT int shared_memory_unwritten() {
    return wrong_results(2, kThreads * sizeof(int), std::vector<int>(kThreads, 0), unwritten_kernel);
}
EXPORT int warp_operations() {
    int counter = 0, greatest = 0;
    const int wrong = wrong_results(1, 0, std::vector<int>(kThreads, 0),
                                    [&](int *results) { warp_operations_kernel(results, &counter, &greatest); });
    return wrong + (counter != kThreads / 32 * 496) + (greatest != kThreads - 1);
}
EXPORT int tensor_core_tiles() {
    const auto tf32 = [](float x, float) { return tf32_bits(x); };
    const auto bfloat16 = [](auto &&...x) { multiply_bfloat16(x...); };
    return product<2>(bfloat16, bfloat16_pair) + product<2>([](auto &&...x) { multiply_float16(x...); }, float16_pair) +
           product<1>([](auto &&...x) { multiply_tf32(x...); }, tf32) + matrices();
}
EXPORT int number_conversions() { return conversions(); }
