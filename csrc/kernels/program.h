// What happens to a tile: walk the arcs, take scores in chunks of neighbours, turn them into weights, accumulate.
// The three passes differ only in what a score becomes:
//     forward         centres q    neighbours k, v     weight p (online softmax)     y  = sum p v
//     query_gradient  centres q    neighbours k, v     weight ds                     dq = sum ds k
//     key_gradient    centres k    neighbours q, dy    weights ds and p              dk = sum ds q, dv = sum p dy
#pragma once

#include "products.h"
#include "storage.h"
#include "tile.h"

namespace sfno_dist::SFNO_DIST_ISA {

constexpr int kMaxPieces = 32;

template <class T> inline int64_t padded(int64_t width) { return (width + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }

// Neighbours whose scores are held at once: two operands of about 16 KiB each, so that a chunk stays in cache.
template <class T> inline int chunk_size(const sfno_dist_attention &call) {
    const int64_t bytes = larger(call.depth, call.value_depth) * int64_t(sizeof(T));
    return int(larger(int64_t(24), smaller(int64_t(120), 16384 / larger(bytes, int64_t(1)) / 12 * 12)));
}

template <class S, int VECTORS, Pass PASS> class Program {
    using T = Compute<S>;
    static constexpr int VL = kLanes<T>, L = VECTORS * VL;
    static constexpr bool kForward = PASS == Pass::forward, kKeys = PASS == Pass::key_gradient;

    const sfno_dist_attention &call;
    const Direction &direction;
    const Task &task;
    const int chunk;
    Values<S> centre[2], neighbour[2], result[2];
    T *packed[2], *weights[2], *staged[2], *sums[2];  // [depth, L], [chunk, L], [chunk, padded], [L, padded]
    ArcRow *arcs;
    Tile<L> tile;
    Piece<T, L> pieces[kMaxPieces];
    int piece_count = 0, filled = 0;
    bool fresh = true;  // no chunk of this tile has been accumulated
    Vector<T> maximum[VECTORS], total[VECTORS];                       // of the online softmax
    Vector<T> lane_lse[VECTORS], lane_delta[VECTORS], lane_weight[VECTORS];

   public:
    static size_t scratch_bytes(const sfno_dist_attention &call, int64_t neighbour_rows) {
        const int64_t widths = padded<T>(call.depth) + padded<T>(call.value_depth);
        const int64_t values = widths * (2 * L + chunk_size<T>(call)) + 2 * chunk_size<T>(call) * L;
        return size_t(values) * sizeof(T) + size_t(neighbour_rows) * sizeof(ArcRow) + 64;
    }

    Program(const sfno_dist_attention &call, const Direction &direction, const Task &task, void *scratch)
        : call(call), direction(direction), task(task), chunk(chunk_size<T>(call)) {
        const Side &side = direction.centre, &other = direction.neighbour;
        const int64_t depths[2] = {call.depth, call.value_depth};
        const sfno_dist_tensor mine[2] = {kKeys ? call.k : call.q, kKeys ? call.v : call.dy};
        const sfno_dist_tensor theirs[2] = {kKeys ? call.q : call.k, kKeys ? call.dy : call.v};
        const sfno_dist_tensor results[2] = {kKeys ? call.dk : call.dq, kForward ? call.y : call.dv};
        T *next = (T *)scratch;
        for (int i = 0; i < 2; ++i) {
            centre[i] = Values<S>(mine[i], task, side, depths[i]);
            neighbour[i] = Values<S>(theirs[i], task, other, depths[i]);
            result[i] = Values<S>(results[i], task, side, depths[i]);
            packed[i] = next, next += padded<T>(depths[i]) * L;
            sums[i] = next, next += padded<T>(depths[i]) * L;
            weights[i] = next, next += chunk * L;
            staged[i] = next, next += padded<T>(depths[i]) * chunk;
        }
        arcs = (ArcRow *)next;
    }

    void run() {
        const int columns = L / task.group_rows;
        for (int row = task.first_row; row < task.end_row; row += task.group_rows) {
            const int rows = smaller(task.group_rows, task.end_row - row);
            const int arc_rows = find_arc_rows(direction, row, rows, arcs);
            for (int column = task.first_column; column < task.end_column; column += columns) {
                tile.place(direction, task, row, column);
                begin_tile();
                prefetch_centres(row, rows, column + columns, columns);
                for (int i = 0; i < arc_rows; ++i) visit(arcs[i]);
                flush();
                end_tile();
            }
        }
    }

   private:
    int64_t statistic(int row, int local) const {  // index of a query's lse and delta
        return ((task.batch * call.heads + task.head) * call.query_rows + row) * call.query_columns + local;
    }

    void begin_tile() {
        pack(0);
        if constexpr (!kForward) pack(1);
        for (int v = 0; v < VECTORS; ++v) maximum[v] = splat(-kInfinity<T>), total[v] = Vector<T>{};
        fresh = true;
        if constexpr (!kForward)
            for (int lane = 0; lane < L; ++lane) load_lane(lane);
    }

    static void prefetch(const S *from, int64_t values) {
        const char *first = (const char *)from, *end = (const char *)(from + values);
        for (; first < end; first += 64) __builtin_prefetch(first);
    }

    // What the next tile reads first. A short arc ends before the processor has recognised a stream.
    void prefetch_centres(int first_row, int rows, int column, int columns) {
        for (int row = first_row; row < first_row + rows; ++row)
            for (int local = column; local < smaller(column + columns, direction.centre.count[row]); ++local)
                for (int i = 0; i < (kForward ? 1 : 2); ++i)
                    if (local >= 0) prefetch(centre[i].at(row, local), centre[i].depth);
    }

    // Columns that the tile to the east adds. Measured: faster forward over short arcs, nothing gained backward.
    void prefetch_neighbours(int row, int local) {
        const int end = smaller(local + tile.columns * direction.centre.step / direction.neighbour.step + 1,
                                direction.neighbour.count[row]);
        for (; local < end; ++local)
            for (int i = 0; i < 2; ++i) prefetch(neighbour[i].at(row, local), neighbour[i].depth);
    }

    // Centre values with lanes side by side  [depth, L]; 0 in empty lanes. Square blocks are transposed in registers.
    void pack(int operand) {
        const Values<S> &values = centre[operand];
        for (int group = 0; group < L; group += VL) {
            const S *from[VL];
            bool whole = true;
            for (int i = 0; i < VL; ++i) {
                const int local = tile.local[group + i];
                whole = whole && local >= 0;
                from[i] = local < 0 ? nullptr : values.at(tile.row[group + i], local);
            }
            int64_t c = 0;
            if constexpr (kStoredAsComputed<S>)
                for (; whole && c + VL <= values.depth; c += VL) {
                    Vector<T> block[VL];
                    for (int i = 0; i < VL; ++i) block[i] = load(from[i] + c);
                    transpose<T>(block);
                    for (int i = 0; i < VL; ++i) store(packed[operand] + (c + i) * L + group, block[i]);
                }
            for (; c < values.depth; ++c)
                for (int i = 0; i < VL; ++i)
                    packed[operand][c * L + group + i] = from[i] ? widened(from[i][c]) : T(0);
        }
    }

    void load_lane(int lane) {
        const bool empty = tile.local[lane] < 0;
        const int v = lane / VL, i = lane % VL;
        if constexpr (kKeys) {
            lane_weight[v][i] = empty ? T(0) : T(call.key_weights[tile.row[lane]]);
        } else {
            const int64_t at = empty ? 0 : statistic(tile.row[lane], tile.local[lane]);
            lane_lse[v][i] = empty ? T(0) : finite_lse(((const T *)call.lse)[at]);
            lane_delta[v][i] = empty ? T(0) : ((const T *)call.delta)[at];
        }
    }

    void visit(const ArcRow &arc) {
        tile.find_arcs(direction.neighbour, arc);
        int32_t first = tile.first[0], last = tile.last[0], inner_first = first, inner_last = last;
        for (int lane = 1; lane < L; ++lane) {
            first = smaller(first, tile.first[lane]), last = larger(last, tile.last[lane]);
            inner_first = larger(inner_first, tile.first[lane]), inner_last = smaller(inner_last, tile.last[lane]);
        }
        for_each_run(direction.neighbour, arc.row, first, last, [&](int32_t column, int32_t local, int32_t count) {
            while (count > 0) {
                if (filled == chunk || piece_count == kMaxPieces) flush();
                const int32_t now = smaller(count, chunk - filled);
                const bool inner = column >= inner_first && column + now - 1 <= inner_last;
                add_piece(arc.row, column, local, now, !inner);
                column += now, local += now, count -= now;
            }
        });
    }

    void add_piece(int row, int32_t column, int32_t local, int count, bool masked) {
        Piece<T, L> &piece = pieces[piece_count++];
        piece.at = filled, piece.count = count, piece.row = row;
        for (int pair = 0; pair < L / 2; ++pair) {
            const int32_t first = smaller(tile.first[2 * pair], tile.first[2 * pair + 1]);
            const int32_t last = larger(tile.last[2 * pair], tile.last[2 * pair + 1]);
            piece.begin[pair] = smaller(larger(first - column, 0), count);
            piece.end[pair] = larger(smaller(last - column + 1, count), 0);
        }
        // Scores need no whole vectors; what is accumulated does.
        stage(piece, 0, row, local, !kForward);
        stage(piece, 1, row, local, kForward || kKeys);
        if constexpr (kForward && VECTORS == 1) prefetch_neighbours(row, local + count);
        T *score = weights[kForward ? 1 : 0] + filled * L;
        scores<T, VECTORS>(packed[0], call.depth, piece.rows[0], piece.stride[0], count, score);
        if constexpr (kForward) {
            if (masked) mask(score, column, count);
        } else {
            T *other = weights[1] + filled * L;
            scores<T, VECTORS>(packed[1], call.value_depth, piece.rows[1], piece.stride[1], count, other);
            if (masked) mask(score, column, count);
            differentiate(row, local, count, score, other);
        }
        filled += count;
    }

    // Where the values can be read as they lie they are; else a converted copy padded with 0 to whole vectors.
    void stage(Piece<T, L> &piece, int operand, int row, int local, bool whole_vectors) {
        const Values<S> &values = neighbour[operand];
        const S *from = values.at(row, local);
        if constexpr (kStoredAsComputed<S>) {
            if (!whole_vectors || values.depth % VL == 0) {
                piece.rows[operand] = from, piece.stride[operand] = values.column_stride;
                return;
            }
        }
        const int64_t width = padded<T>(values.depth);
        T *to = staged[operand] + filled * width;
        piece.rows[operand] = to, piece.stride[operand] = width;
        for (int i = 0; i < piece.count; ++i, to += width, from += values.column_stride) {
            widen_row(from, values.depth, to);
            for (int64_t c = values.depth; c < width; ++c) to[c] = T(0);
        }
    }

    // Scores of neighbours outside a lane's arc become -inf, so that their weight is exactly 0.
    void mask(T *score, int32_t column, int count) {
        for (int v = 0; v < VECTORS; ++v) {
            alignas(kVectorBytes) T bounds[2][VL];
            for (int i = 0; i < VL; ++i) {
                bounds[0][i] = T(tile.first[v * VL + i] - column), bounds[1][i] = T(tile.last[v * VL + i] - column);
            }
            const Vector<T> first = load(bounds[0]), last = load(bounds[1]);
            Vector<T> key = {};
            for (int j = 0; j < count; ++j, key += T(1)) {
                T *at = score + j * L + v * VL;
                store(at, ((key >= first) & (key <= last)) ? load(at) : splat(-kInfinity<T>));
            }
        }
    }

    // score -> ds = p (dy . v - delta), other (dy . v) -> p = w exp(s - lse).
    void differentiate(int row, int local, int count, T *score, T *other) {
        const int64_t query = kKeys ? statistic(row, local) : 0;
        const T *lse = (const T *)call.lse + query, *delta = (const T *)call.delta + query;
        const Vector<T> weight = splat(kKeys ? T(0) : T(call.key_weights[row]));
        for (int j = 0; j < count; ++j)
            for (int v = 0; v < VECTORS; ++v) {
                T *s = score + j * L + v * VL, *dp = other + j * L + v * VL;
                const Vector<T> log_sum = kKeys ? splat(finite_lse(lse[j])) : lane_lse[v];
                const Vector<T> less = kKeys ? splat(delta[j]) : lane_delta[v];
                const Vector<T> p = (kKeys ? lane_weight[v] : weight) * exponential(load(s) - log_sum);
                store(s, p * (load(dp) - less));
                store(dp, p);
            }
    }

    void flush() {
        if (piece_count == 0) return;
        alignas(kVectorBytes) T scale[L];
        if constexpr (kForward) soften(scale);
        if constexpr (!kForward)
            accumulate<T, L>(pieces, piece_count, 0, weights[0], padded<T>(call.depth), nullptr, fresh,
                             sums[0]);
        if constexpr (kForward || kKeys)
            accumulate<T, L>(pieces, piece_count, 1, weights[1], padded<T>(call.value_depth),
                             kForward ? scale : nullptr, fresh, sums[1]);
        piece_count = filled = 0;
        fresh = false;
    }

    // Online softmax: scores of the chunk become w exp(s - maximum), what was summed so far is scaled to match.
    void soften(T *scale) {
        for (int v = 0; v < VECTORS; ++v) {
            T *score = weights[1] + v * VL;
            Vector<T> top = maximum[v];
            for (int j = 0; j < filled; ++j) {
                const Vector<T> s = load(score + j * L);
                top = s > top ? s : top;
            }
            const Vector<T> reference = top == -kInfinity<T> ? Vector<T>{} : top;
            const Vector<T> factor = exponential(maximum[v] - reference);
            Vector<T> sum = {};
            for (const Piece<T, L> *piece = pieces; piece < pieces + piece_count; ++piece) {
                const T weight = T(call.key_weights[piece->row]);
                for (int j = piece->at; j < piece->at + piece->count; ++j) {
                    const Vector<T> p = weight * exponential(load(score + j * L) - reference);
                    store(score + j * L, p);
                    sum += p;
                }
            }
            total[v] = total[v] * factor + sum;
            maximum[v] = top;
            store(scale + v * VL, factor);
        }
    }

    void end_tile() {
        for (int lane = 0; lane < L; ++lane) {
            if (tile.local[lane] < 0) continue;
            const int row = tile.row[lane], local = tile.local[lane];
            T factor = T(1);
            if constexpr (kForward) {
                const T sum = total[lane / VL][lane % VL], top = maximum[lane / VL][lane % VL];
                ((T *)call.lse)[statistic(row, local)] = sum == T(0) ? -kInfinity<T> : top + logarithm(sum);
                factor = sum == T(0) ? T(0) : T(1) / sum;
            }
            if constexpr (!kForward) write(0, lane, row, local, factor);
            if constexpr (kForward || kKeys) write(1, lane, row, local, factor);
        }
    }

    void write(int operand, int lane, int row, int local, T factor) {
        const int64_t depth = result[operand].depth;
        S *to = result[operand].at(row, local);
        const T *from = sums[operand] + lane * padded<T>(depth);
        int64_t c = 0;
        if constexpr (kStoredAsComputed<S>)
            for (; c + VL <= depth && !fresh; c += VL) store(to + c, load(from + c) * factor);
        for (; c < depth; ++c) narrow(fresh ? T(0) : from[c] * factor, to + c);
    }
};

}  // namespace sfno_dist::SFNO_DIST_ISA
