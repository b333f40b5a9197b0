// Narrow arcs: one centre at a time, lanes are channels. Where a centre has few neighbours a tile of many centres
// spends most of its scores on neighbours that only other lanes need; here every product is one that counts.
// A neighbour's channels are contiguous, a centre's sums stay in registers. The passes are those of program.h.
#pragma once

#include "program.h"

namespace sfno_dist::SFNO_DIST_ISA {

// The neighbours of one centre. Those of a centre some columns to the east are the same ones turned by as many columns.
template <class T> struct Pattern {
    static constexpr int kMost = kMostNarrow + kLanes<T>;
    int64_t position;       // of the centre it was made for, in neighbour columns
    int32_t west, east;     // turned by west..east columns, every neighbour stays within its row; east < west: by none
    int count;              // neighbours; beyond them, up to whole vectors, copies of the first with factor 0
    int64_t offset[2][kMost];  // where their values lie
    int64_t statistic[kMost];  // and, of queries, lse and delta
    T factor[kMost];           // quadrature weight of keys, 1 for queries
};

// out[j] = centre . neighbour j, a vector of neighbours at a time: their partial sums are turned on their side and
// added. At most WIDTH vectors of channels at once, the centre's in registers.
template <class T, int WIDTH, int ROWS>
SFNO_DIST_INLINE void dots_block(const T *centre, const T *from, const int64_t *offset, Vector<T> *sum) {
    constexpr int VL = kLanes<T>;
    Vector<T> own[WIDTH];
#pragma GCC unroll 4
    for (int w = 0; w < WIDTH; ++w) own[w] = load(centre + w * VL);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
        const T *values = from + offset[i];
#pragma GCC unroll 4
        for (int w = 0; w < WIDTH; ++w) sum[i] += own[w] * load(values + w * VL);
    }
}

template <class T, int ROWS>
SFNO_DIST_INLINE void dots_rows(const T *centre, int64_t depth, const T *from, const int64_t *offset, T *out) {
    constexpr int VL = kLanes<T>;
    Vector<T> sum[VL] = {};
    int64_t c = 0;
    for (; c + 4 * VL <= depth; c += 4 * VL) dots_block<T, 4, ROWS>(centre + c, from + c, offset, sum);
    for (; c < depth; c += VL) dots_block<T, 1, ROWS>(centre + c, from + c, offset, sum);
    store(out, sums_of_rows<T>(sum));
}

template <class T> void dots(const T *centre, int64_t depth, const T *from, const int64_t *offset, int count, T *out) {
    constexpr int VL = kLanes<T>;
    int j = 0;
    for (; j + VL / 2 < count; j += VL) dots_rows<T, VL>(centre, depth, from, offset + j, out + j);
    if (j < count) dots_rows<T, VL / 2>(centre, depth, from, offset + j, out + j);
}

// to[c] = scale * sum_j weights[j] neighbour_j[c] for WIDTH vectors of channels; several sums hide the latency.
template <class T, int WIDTH>
SFNO_DIST_INLINE void add_up_block(const T *weights, const T *from, const int64_t *offset, int count, T scale, T *to) {
    constexpr int VL = kLanes<T>, SUMS = smaller(8 / WIDTH, VL);  // not beyond the last vector of weights
    Vector<T> sum[SUMS][WIDTH] = {};
    for (int j = 0; j < count; j += SUMS)
#pragma GCC unroll 8
        for (int i = 0; i < SUMS; ++i) {
            const Vector<T> weight = splat(weights[j + i]);
            const T *values = from + offset[j + i];
#pragma GCC unroll 8
            for (int w = 0; w < WIDTH; ++w) sum[i][w] += weight * load(values + w * VL);
        }
#pragma GCC unroll 8
    for (int w = 0; w < WIDTH; ++w) {
        Vector<T> all = sum[0][w];
#pragma GCC unroll 8
        for (int i = 1; i < SUMS; ++i) all += sum[i][w];
        store(to + w * VL, all * scale);
    }
}

template <class T>
void add_up(const T *weights, int64_t depth, const T *from, const int64_t *offset, int count, T scale, T *to) {
    constexpr int VL = kLanes<T>;
    int64_t c = 0;
    for (; c + 8 * VL <= depth; c += 8 * VL) add_up_block<T, 8>(weights, from + c, offset, count, scale, to + c);
    for (; c + 4 * VL <= depth; c += 4 * VL) add_up_block<T, 4>(weights, from + c, offset, count, scale, to + c);
    for (; c + 2 * VL <= depth; c += 2 * VL) add_up_block<T, 2>(weights, from + c, offset, count, scale, to + c);
    for (; c < depth; c += VL) add_up_block<T, 1>(weights, from + c, offset, count, scale, to + c);
}

template <class S, Pass PASS> class Narrow {
    using T = Compute<S>;
    static_assert(kStoredAsComputed<S>, "values are read where they lie");
    static constexpr int VL = kLanes<T>;
    static constexpr bool kForward = PASS == Pass::forward, kKeys = PASS == Pass::key_gradient;

    const sfno_dist_attention &call;
    const Direction &direction;
    const Task &task;
    Values<S> centre[2], neighbour[2], result[2];
    ArcRow *arcs;  // of the row at hand
    int arc_rows = 0;
    Pattern<T> pattern;
    alignas(kVectorBytes) T score[Pattern<T>::kMost], other[Pattern<T>::kMost];

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

    // Centres that lie alike between the neighbours' columns, every period-th, are visited one after another, so that
    // a pattern serves many.
    void run() {
        const Side &side = direction.centre;
        const int32_t step = direction.neighbour.step;
        int32_t period = 1;
        while (int64_t(period) * side.step % step != 0) ++period;
        const int32_t turn = int32_t(int64_t(period) * side.step / step);
        for (int row = task.first_row; row < task.end_row; ++row) {
            arc_rows = find_arc_rows(direction, row, 1, arcs);
            for (int32_t start = task.first_column; start < smaller(task.first_column + period, task.end_column);
                 ++start) {
                const int64_t tick = (int64_t(side.first[task.first_row]) + start + side.nlon) * side.step;
                int64_t position = tick / step;
                pattern.west = 0, pattern.east = -1, pattern.position = position;
                for (int32_t column = start; column < task.end_column; column += period, position += turn)
                    visit(row, column, position, int32_t(tick % step));
            }
        }
    }

   private:
    void visit(int row, int32_t column, int64_t position, int32_t ticks) {
        const Side &side = direction.centre;
        const int32_t local = column - shift_between(side, row, task.first_row);
        if (local < 0 || local >= side.count[row]) return;
        if (position - pattern.position < pattern.west || position - pattern.position > pattern.east)
            find_neighbours(position, ticks);
        const int64_t turned = position - pattern.position;
        const T *from[2];
        for (int i = 0; i < 2; ++i) from[i] = neighbour[i].data + turned * neighbour[i].column_stride;
        if constexpr (kForward) attend(row, local, from);
        else differentiate(row, local, from, turned);
    }

    void find_neighbours(int64_t position, int32_t ticks) {
        const Side &side = direction.neighbour;
        pattern.position = position, pattern.count = 0;
        pattern.west = -side.nlon, pattern.east = side.nlon;
        for (const ArcRow *arc = arcs; arc < arcs + arc_rows; ++arc) {
            const int n = arc->row;
            const int32_t first = int32_t(position) - arc->columns[0] + (ticks > arc->ticks[0]);
            const int32_t last = int32_t(position) + arc->columns[0] + (ticks + arc->ticks[0] >= side.step);
            int32_t missing = smaller(last - first + 1, side.nlon);
            for_each_run(side, n, first, first + missing - 1, [&](int32_t, int32_t local, int32_t held) {
                pattern.west = larger(pattern.west, -local);
                pattern.east = smaller(pattern.east, side.count[n] - local - held);
                for (int j = local; j < local + held; ++j) add(n, j);
                missing -= held;
            });
            if (missing > 0) pattern.west = 0, pattern.east = -1;  // what a window lacks does not turn
        }
        for (int j = pattern.count; pattern.count > 0 && j < pattern.count + VL; ++j) {
            for (int i = 0; i < 2; ++i) pattern.offset[i][j] = pattern.offset[i][0];
            pattern.factor[j] = T(0), pattern.statistic[j] = pattern.statistic[0];
        }
    }

    void add(int row, int local) {
        const int at = pattern.count++;
        for (int i = 0; i < 2; ++i) pattern.offset[i][at] = neighbour[i].at(row, local) - neighbour[i].data;
        pattern.factor[at] = kKeys ? T(1) : T(call.key_weights[row]);
        pattern.statistic[at] = kKeys ? statistic(row, local) : 0;
    }

    int64_t statistic(int row, int local) const {  // index of a query's lse and delta
        return ((task.batch * call.heads + task.head) * call.query_rows + row) * call.query_columns + local;
    }

    void attend(int row, int local, const T *const *from) {
        const int count = pattern.count;
        dots<T>(centre[0].at(row, local), call.depth, from[0], pattern.offset[0], count, score);
        Vector<T> tops = splat(-kInfinity<T>);
        for (int j = 0; j < count; j += VL) {
            const Vector<T> s = load(score + j);
            tops = s > tops ? s : tops;
        }
        const T top = largest<T>(tops);
        const Vector<T> reference = splat(top == -kInfinity<T> ? T(0) : top);
        Vector<T> sums = {};
        for (int j = 0; j < count; j += VL) {
            const Vector<T> weight = load(pattern.factor + j);
            Vector<T> p = weight * exponential(load(score + j) - reference);
            p = weight == T(0) ? Vector<T>{} : p;  // beyond the last neighbour
            store(score + j, p);
            sums += p;
        }
        const T sum = total<T>(sums);
        ((T *)call.lse)[statistic(row, local)] = sum == T(0) ? -kInfinity<T> : top + logarithm(sum);
        add_up<T>(score, call.value_depth, from[1], pattern.offset[1], count, sum == T(0) ? T(0) : T(1) / sum,
                  result[1].at(row, local));
    }

    // p = w exp(s - lse), ds = p (dy . v - delta), then the sums over neighbours.
    void differentiate(int row, int local, const T *const *from, int64_t turned) {
        const int count = pattern.count;
        dots<T>(centre[0].at(row, local), call.depth, from[0], pattern.offset[0], count, score);
        dots<T>(centre[1].at(row, local), call.value_depth, from[1], pattern.offset[1], count, other);
        const int64_t query = kKeys ? 0 : statistic(row, local);
        const T *lse = (const T *)call.lse, *delta = (const T *)call.delta;
        Vector<T> log_sum = splat(kKeys ? T(0) : finite_lse(lse[query]));
        Vector<T> less = splat(kKeys ? T(0) : delta[query]);
        const Vector<T> own_weight = splat(kKeys ? T(call.key_weights[row]) : T(1));
        for (int j = 0; j < count; j += VL) {
            if constexpr (kKeys) {
                alignas(kVectorBytes) T gathered[2][VL];
                for (int i = 0; i < VL; ++i) {
                    gathered[0][i] = finite_lse(lse[pattern.statistic[j + i] + turned]);
                    gathered[1][i] = delta[pattern.statistic[j + i] + turned];
                }
                log_sum = load(gathered[0]), less = load(gathered[1]);
            }
            const Vector<T> weight = own_weight * load(pattern.factor + j);
            const Vector<T> p = weight * exponential(load(score + j) - log_sum);
            store(score + j, p * (load(other + j) - less));
            store(other + j, p);
        }
        add_up<T>(score, call.depth, from[0], pattern.offset[0], count, T(1), result[0].at(row, local));
        if constexpr (kKeys)
            add_up<T>(other, call.value_depth, from[1], pattern.offset[1], count, T(1), result[1].at(row, local));
    }
};

}  // namespace sfno_dist::SFNO_DIST_ISA
