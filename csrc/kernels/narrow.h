// Narrow arcs: one centre at a time, lanes are channels. Where a centre has few neighbours a tile of many centres
// spends most of its scores on neighbours that only other lanes need; here every product is one that counts.
// A neighbour's channels are contiguous, a centre's sums stay in registers. The passes are those of program.h.
#pragma once

#include "program.h"

namespace sfno_dist::SFNO_DIST_ISA {

template <class S, Pass PASS> class Narrow {
    using T = Compute<S>;
    static_assert(kStoredAsComputed<S>, "values are read where they lie");
    static constexpr int VL = kLanes<T>, kMost = kMostNarrow + VL;
    static constexpr bool kForward = PASS == Pass::forward, kKeys = PASS == Pass::key_gradient;

    const sfno_dist_attention &call;
    const Direction &direction;
    const Task &task;
    Values<S> centre[2], neighbour[2], result[2];
    ArcRow *arcs;
    static constexpr int kTogether = 8;  // centres whose arcs are found at once
    Tile<kTogether> tile;
    int32_t first[kMostNarrow][kTogether], last[kMostNarrow][kTogether];  // their arcs in each neighbour row
    int count;              // neighbours of the centre at hand
    const T *rows[2][kMost];  // their values; beyond `count` copies of the first, with weight 0
    alignas(kVectorBytes) T factor[kMost], lse[kMost], delta[kMost], score[kMost], other[kMost];

   public:
    Narrow(const sfno_dist_attention &call, const Direction &direction, const Task &task, void *scratch)
        : call(call), direction(direction), task(task), arcs((ArcRow *)scratch) {
        const int64_t depths[2] = {call.depth, call.value_depth};
        const sfno_dist_tensor mine[2] = {kKeys ? call.k : call.q, kKeys ? call.v : call.dy};
        const sfno_dist_tensor theirs[2] = {kKeys ? call.q : call.k, kKeys ? call.dy : call.v};
        const sfno_dist_tensor results[2] = {kKeys ? call.dk : call.dq, kForward ? call.y : call.dv};
        for (int i = 0; i < 2; ++i) {
            centre[i] = Values<S>(mine[i], task, direction.centre, depths[i]);
            neighbour[i] = Values<S>(theirs[i], task, direction.neighbour, depths[i]);
            result[i] = Values<S>(results[i], task, direction.centre, depths[i]);
        }
    }

    void run() {
        for (int row = task.first_row; row < task.end_row; ++row) {
            const int arc_rows = find_arc_rows(direction, row, 1, arcs);
            for (int column = task.first_column; column < task.end_column; column += kTogether) {
                tile.place(direction, task, row, column);
                for (int i = 0; i < arc_rows; ++i) {
                    tile.find_arcs(direction.neighbour, arcs[i]);
                    __builtin_memcpy(first[i], tile.first, sizeof tile.first);
                    __builtin_memcpy(last[i], tile.last, sizeof tile.last);
                }
                for (int lane = 0; lane < kTogether; ++lane) {
                    if (tile.local[lane] < 0) continue;
                    gather(arc_rows, lane);
                    if constexpr (kForward) attend(row, tile.local[lane]);
                    else differentiate(row, tile.local[lane]);
                }
            }
        }
    }

   private:
    int64_t statistic(int row, int local) const {  // index of a query's lse and delta
        return ((task.batch * call.heads + task.head) * call.query_rows + row) * call.query_columns + local;
    }

    // A query whose keys all have weight 0 has lse = -inf; its probabilities are 0.
    static T finite_lse(T value) { return value == -kInfinity<T> ? kInfinity<T> : value; }

    void gather(int arc_rows, int lane) {
        count = 0;
        for (int i = 0; i < arc_rows; ++i) {
            const int row = arcs[i].row;
            for_each_run(direction.neighbour, row, first[i][lane], last[i][lane],
                         [&](int32_t, int32_t local, int32_t held) {
                             for (int j = local; j < local + held; ++j) add(row, j);
                         });
        }
        for (int j = count; count > 0 && j < count + VL; ++j) {
            rows[0][j] = rows[0][0], rows[1][j] = rows[1][0];
            factor[j] = T(0), lse[j] = lse[0], delta[j] = delta[0];
        }
    }

    SFNO_DIST_INLINE void add(int row, int local) {
        rows[0][count] = neighbour[0].at(row, local);
        rows[1][count] = neighbour[1].at(row, local);
        if constexpr (kKeys) {
            const int64_t query = statistic(row, local);
            lse[count] = finite_lse(((const T *)call.lse)[query]);
            delta[count] = ((const T *)call.delta)[query];
            factor[count] = T(1);
        } else {
            factor[count] = T(call.key_weights[row]);
        }
        ++count;
    }

    // out[j] = centre . rows[j], VL neighbours at a time: their partial sums are turned on their side and added.
    void dots(const T *values, int64_t depth, const T *const *from, T *out) const {
        for (int j = 0; j < count; j += VL, from += VL) {
            Vector<T> sum[VL] = {};
            for (int64_t c = 0; c < depth; c += VL) {
                const Vector<T> own = load(values + c);
#pragma GCC unroll 16
                for (int i = 0; i < VL; ++i) sum[i] += own * load(from[i] + c);
            }
            transpose<T>(sum);
#pragma GCC unroll 4
            for (int half = VL / 2; half > 0; half /= 2)
#pragma GCC unroll 8
                for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
            store(out + j, sum[0]);
        }
    }

    template <int WIDTH> void add_up_block(const T *weights, const T *const *from, int64_t c, T scale, T *to) const {
        Vector<T> sum[WIDTH] = {};
        for (int j = 0; j < count; ++j) {
            const Vector<T> weight = splat(weights[j]);
#pragma GCC unroll 8
            for (int w = 0; w < WIDTH; ++w) sum[w] += weight * load(from[j] + c + w * VL);
        }
#pragma GCC unroll 8
        for (int w = 0; w < WIDTH; ++w) store(to + c + w * VL, sum[w] * scale);
    }

    // to = scale * sum_j weights[j] rows[j]
    void add_up(const T *weights, const T *const *from, int64_t depth, T scale, T *to) const {
        int64_t c = 0;
        for (; c + 8 * VL <= depth; c += 8 * VL) add_up_block<8>(weights, from, c, scale, to);
        for (; c + 4 * VL <= depth; c += 4 * VL) add_up_block<4>(weights, from, c, scale, to);
        for (; c < depth; c += VL) add_up_block<1>(weights, from, c, scale, to);
    }

    void attend(int row, int local) {
        T *y = result[1].at(row, local);
        dots(centre[0].at(row, local), call.depth, rows[0], score);
        T top = -kInfinity<T>;
        for (int j = 0; j < count; ++j) top = score[j] > top ? score[j] : top;
        const Vector<T> reference = splat(top == -kInfinity<T> ? T(0) : top);
        Vector<T> sums = {};
        for (int j = 0; j < count; j += VL) {
            const Vector<T> weight = load(factor + j);
            Vector<T> p = weight * exponential(load(score + j) - reference);
            p = weight == T(0) ? Vector<T>{} : p;  // beyond the last neighbour
            store(score + j, p);
            sums += p;
        }
        T sum = T(0);
        for (int i = 0; i < VL; ++i) sum += sums[i];
        ((T *)call.lse)[statistic(row, local)] = sum == T(0) ? -kInfinity<T> : top + logarithm(sum);
        add_up(score, rows[1], call.value_depth, sum == T(0) ? T(0) : T(1) / sum, y);
    }

    // p = w exp(s - lse), ds = p (dy . v - delta), then the sums over neighbours.
    void differentiate(int row, int local) {
        dots(centre[0].at(row, local), call.depth, rows[0], score);
        dots(centre[1].at(row, local), call.value_depth, rows[1], other);
        const int64_t query = kKeys ? 0 : statistic(row, local);
        const Vector<T> own_lse = splat(kKeys ? T(0) : finite_lse(((const T *)call.lse)[query]));
        const Vector<T> own_delta = splat(kKeys ? T(0) : ((const T *)call.delta)[query]);
        const Vector<T> own_weight = splat(kKeys ? T(call.key_weights[row]) : T(1));
        for (int j = 0; j < count; j += VL) {
            const Vector<T> log_sum = kKeys ? load(lse + j) : own_lse, less = kKeys ? load(delta + j) : own_delta;
            const Vector<T> weight = own_weight * load(factor + j);
            const Vector<T> p = weight * exponential(load(score + j) - log_sum);
            store(score + j, p * (load(other + j) - less));
            store(other + j, p);
        }
        add_up(score, rows[0], call.depth, T(1), result[0].at(row, local));
        if constexpr (kKeys) add_up(other, rows[1], call.value_depth, T(1), result[1].at(row, local));
    }

    static float logarithm(float x) { return __builtin_logf(x); }
    static double logarithm(double x) { return __builtin_log(x); }
};

}  // namespace sfno_dist::SFNO_DIST_ISA
