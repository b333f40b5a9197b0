// The two register-blocked products that everything is made of, over lanes = centres of a tile:
//     scores      out[key, lane] = sum_c packed[c, lane] * rows[key, c]
//     accumulate  out[lane, c] = out[lane, c] * scale[lane] + sum_key weights[key, lane] * rows[key, c]
// On a 16-register machine 12 accumulators and their operands fill the registers exactly.
#pragma once

#include "vector.h"

namespace sfno_dist::SFNO_DIST_ISA {

template <int VECTORS> constexpr int kKeysAtOnce = VECTORS == 1 || kVectorRegisters > 16 ? 12 : 6;

template <class T, int KEYS, int VECTORS>
void scores_block(const T *packed, int64_t depth, const T *rows, int64_t stride, T *out) {
    constexpr int L = VECTORS * kLanes<T>;
    Vector<T> sum[KEYS][VECTORS] = {};
    // Rows are addressed as three per pointer (0, 1 and 2 strides away): 12 pointers would not fit the registers.
    const T *base[(KEYS + 2) / 3];
#pragma GCC unroll 4
    for (int i = 0; i < (KEYS + 2) / 3; ++i) base[i] = rows + 3 * i * stride;
    for (int64_t c = 0; c < depth; ++c, packed += L) {
        Vector<T> centre[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) centre[v] = load(packed + v * kLanes<T>);
#pragma GCC unroll 12
        for (int key = 0; key < KEYS; ++key) {
            const Vector<T> value = splat(base[key / 3][key % 3 * stride]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) sum[key][v] += value * centre[v];
        }
#pragma GCC unroll 4
        for (int i = 0; i < (KEYS + 2) / 3; ++i) ++base[i];
    }
#pragma GCC unroll 12
    for (int key = 0; key < KEYS; ++key)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) store(out + key * L + v * kLanes<T>, sum[key][v]);
}

template <class T, int VECTORS, int KEYS = kKeysAtOnce<VECTORS>>
SFNO_DIST_INLINE void scores_of(int keys, const T *packed, int64_t depth, const T *rows, int64_t stride, T *out) {
    if constexpr (KEYS > 0) {
        if (keys == KEYS) scores_block<T, KEYS, VECTORS>(packed, depth, rows, stride, out);
        else scores_of<T, VECTORS, KEYS - 1>(keys, packed, depth, rows, stride, out);
    }
}

// Scores of any number of keys, in blocks of nearly equal size: a block of few keys waits for its own additions.
template <class T, int VECTORS>
void scores(const T *packed, int64_t depth, const T *rows, int64_t stride, int keys, T *out) {
    for (int blocks = (keys + kKeysAtOnce<VECTORS> - 1) / kKeysAtOnce<VECTORS>; blocks > 0; --blocks) {
        const int now = (keys + blocks - 1) / blocks;
        scores_of<T, VECTORS>(now, packed, depth, rows, stride, out);
        rows += now * stride, out += now * VECTORS * kLanes<T>, keys -= now;
    }
}

// Consecutive neighbours of one row: where their values lie, where their weights lie in the chunk, and which of
// them each pair of lanes needs (the weights of the others are exactly 0).
template <class T, int LANES> struct Piece {
    const T *rows[2];
    int64_t stride[2];
    int at, count, row;
    int begin[LANES / 2], end[LANES / 2];
};

// What one register block of `accumulate` works on: some lanes, some channels, all pieces.
template <class T, int LANES> struct Block {
    const Piece<T, LANES> *pieces;
    int count, operand, lane;
    const T *weights, *scale;
    T *out;
    int64_t out_width, channel;
    bool fresh;  // nothing in out yet
};

template <class T, int LANES, int ROWS, int WIDTH> void accumulate_block(const Block<T, LANES> &block) {
    Vector<T> sum[ROWS][WIDTH] = {};
    const int pair = block.lane / 2;
    for (const Piece<T, LANES> *piece = block.pieces; piece < block.pieces + block.count; ++piece) {
        int begin = piece->begin[pair], end = piece->end[pair];
        if constexpr (ROWS == 4) {
            begin = smaller(begin, piece->begin[pair + 1]), end = larger(end, piece->end[pair + 1]);
        }
        const int64_t stride = piece->stride[block.operand];
        const T *row = piece->rows[block.operand] + begin * stride + block.channel;
        const T *weight = block.weights + int64_t(piece->at + begin) * LANES + block.lane;
        for (int key = begin; key < end; ++key, row += stride, weight += LANES) {
            Vector<T> value[WIDTH];
#pragma GCC unroll 4
            for (int w = 0; w < WIDTH; ++w) value[w] = load(row + w * kLanes<T>);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const Vector<T> p = splat(weight[r]);
#pragma GCC unroll 4
                for (int w = 0; w < WIDTH; ++w) sum[r][w] += p * value[w];
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
        T *to = block.out + r * block.out_width + block.channel;
        const Vector<T> factor = splat(block.scale ? block.scale[block.lane + r] : T(1));
#pragma GCC unroll 4
        for (int w = 0; w < WIDTH; ++w) {
            T *at = to + w * kLanes<T>;
            store(at, block.fresh ? sum[r][w] : load(at) * factor + sum[r][w]);
        }
    }
}

// width is a multiple of the vector length; the sum over a chunk starts at 0, which keeps long sums accurate.
// Four lanes by three vectors (four where registers are many) measured best: few loads for each multiplication,
// and enough independent sums to hide its latency.
template <class T, int LANES>
void accumulate(const Piece<T, LANES> *pieces, int count, int operand, const T *weights, int64_t width, const T *scale,
                bool fresh, T *out) {
    constexpr int VL = kLanes<T>, ROWS = LANES < 4 ? LANES : 4, WIDEST = kVectorRegisters > 16 ? 4 : 3;
    for (int64_t channel = 0, now = 0; channel < width; channel += now * VL) {
        const int64_t left = (width - channel) / VL;
        now = left == WIDEST + 1 && left % 2 == 0 ? left / 2 : smaller(left, int64_t(WIDEST));  // 2 + 2, not 3 + 1
        for (int lane = 0; lane < LANES; lane += ROWS) {
            T *to = out + lane * width;
            const Block<T, LANES> block = {pieces, count, operand, lane, weights, scale, to, width, channel, fresh};
            if (now == 4) accumulate_block<T, LANES, ROWS, 4>(block);
            else if (now == 3) accumulate_block<T, LANES, ROWS, 3>(block);
            else if (now == 2) accumulate_block<T, LANES, ROWS, 2>(block);
            else accumulate_block<T, LANES, ROWS, 1>(block);
        }
    }
}

}  // namespace sfno_dist::SFNO_DIST_ISA
