// Rows of channels between global and shared memory, and how a block's shared memory is laid out.
#pragma once

#include "neighbours.h"
#include "products.h"

namespace sfno_dist::cuda {

// One tensor of a side, for one batch and head: the channels from `first` on that a block needs.
template <class Stored> struct Channels {
    const Stored *data;
    int64_t row_stride, column_stride;
    int count, padded;  // padded: as many as the products read, zeros beyond `count`
    bool aligned;       // every row begins at a multiple of 16 bytes

    __device__ Channels(const sfno_dist_tensor &tensor, int batch, int head, int first, int count, int padded)
        : row_stride(tensor.row_stride), column_stride(tensor.column_stride), count(count), padded(padded) {
        const int64_t offset = batch * tensor.batch_stride + head * tensor.head_stride + first;
        data = (const Stored *)tensor.data + offset;
        const uint64_t all = uint64_t(data) | uint64_t(row_stride | column_stride) * sizeof(Stored);
        aligned = all % 16 == 0;
    }

    __device__ Stored *row(int2 place) const {
        return const_cast<Stored *>(data) + place.x * row_stride + place.y * column_stride;
    }

    // Rows [rows, stride] of shared memory, filled by all threads of the block; place(j) says where row j comes from.
    template <class Place> __device__ void stage(Stored *to, int stride, int rows, Place place) const {
        constexpr int kPiece = 16 / sizeof(Stored), kThreadsPerRow = 8;
        for (int j = int(threadIdx.x) / kThreadsPerRow; j < rows; j += int(blockDim.x) / kThreadsPerRow) {
            const int2 at = place(j);
            const Stored *from = row(at);
            for (int c = int(threadIdx.x) % kThreadsPerRow * kPiece; c < padded; c += kThreadsPerRow * kPiece) {
                int valid = at.x < 0 ? 0 : count - c;
                valid = valid < 0 ? 0 : valid > kPiece ? kPiece : valid;
                if (aligned) {
                    copy_async(to + j * stride + c, valid > 0 ? from + c : data, valid * int(sizeof(Stored)));
                } else {
#pragma unroll
                    for (int i = 0; i < kPiece; ++i) to[j * stride + c + i] = i < valid ? from[c + i] : Stored(0);
                }
            }
        }
    }
};

// Centres [16 warps, stride] and chunks of neighbours [chunk, stride] for each operand, then what describes them.
template <Number NUMBER, Pass PASS> struct SharedMemory {
    using P = Products<NUMBER>;
    using Stored = typename P::Stored;
    static constexpr int kSlotBuffers = 3;  // one being filled, one being loaded from, one being computed with

    Stored *centres[2], *chunks[2];
    float *scratch;
    Slots<P::kChunk> *slots;
    RowBatch *rows;
    int padded[2], stride[2];  // channels of either operand; a stride of whole rows and 16 bytes avoids bank conflicts
    size_t bytes;

    // What a block reads of the second operand: forward only the channels that it makes.
    __host__ __device__ static int second_width(const sfno_dist_attention &call) {
        const int width = int(call.value_depth);
        return PASS == Pass::forward && width > kSliceChannels ? kSliceChannels : width;
    }

    __host__ __device__ SharedMemory(const Launch &launch, unsigned char *base) {
        const int widths[2] = {int(launch.call.depth), second_width(launch.call)};
        size_t at = 0;
        const auto take = [&](size_t size) {
            unsigned char *const here = base + at;
            at += (size + 15) / 16 * 16;
            return here;
        };
        for (int i = 0; i < 2; ++i) {
            padded[i] = int(rounded_up(widths[i], P::kPad));
            stride[i] = padded[i] + 16 / int(sizeof(Stored));
            const bool has_centres = i == 0 || PASS != Pass::forward;
            const size_t row = stride[i] * sizeof(Stored);
            centres[i] = (Stored *)take(has_centres ? launch.warps * kWarpCentres * row : 0);
            chunks[i] = (Stored *)take(launch.stages * launch.chunk * row);
        }
        scratch = (float *)take(launch.warps * P::kScratch * sizeof(float));
        slots = (Slots<P::kChunk> *)take(kSlotBuffers * sizeof(Slots<P::kChunk>));
        rows = (RowBatch *)take(sizeof(RowBatch));
        bytes = at;
    }
};

}  // namespace sfno_dist::cuda
