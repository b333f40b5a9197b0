// The kernels of one instruction set. CMake compiles this file once for each, with SFNO_DIST_ISA naming it.
#include "narrow.h"
#include "program.h"

namespace sfno_dist::SFNO_DIST_ISA {
namespace {

// delta = dy . y - dlse for the queries of a task.
template <class S> void delta_rows(const sfno_dist_attention &call, const Direction &direction, const Task &task) {
    using T = Compute<S>;
    const Values<S> dy(call.dy, task, direction.centre, call.value_depth);
    const Values<S> y(call.y, task, direction.centre, call.value_depth);
    for (int row = task.first_row; row < task.end_row; ++row)
        for (int column = task.first_column; column < task.end_column; ++column) {
            const S *a = dy.at(row, column), *b = y.at(row, column);
            Vector<T> sums = {};
            for (int64_t from = 0; from < call.value_depth; from += kLanes<T>) {
                T left[kLanes<T>] = {}, right[kLanes<T>] = {};
                const int64_t count = smaller(call.value_depth - from, int64_t(kLanes<T>));
                if (kStoredAsComputed<S> && count == kLanes<T>) {
                    sums += load((const T *)(a + from)) * load((const T *)(b + from));
                    continue;
                }
                widen_row(a + from, count, left);
                widen_row(b + from, count, right);
                sums += load(left) * load(right);
            }
            T delta = T(0);
            for (int i = 0; i < kLanes<T>; ++i) delta += sums[i];
            const int64_t field = task.batch * call.heads + task.head;
            const int64_t at = (field * call.query_rows + row) * call.query_columns + column;
            ((T *)call.delta)[at] = delta - (call.dlse ? ((const T *)call.dlse)[at] : T(0));
        }
}

template <class S>
void run_narrow(const sfno_dist_attention &call, const Direction &direction, const Task &task, void *scratch) {
    switch (task.pass) {
        case Pass::forward: Narrow<S, Pass::forward>(call, direction, task, scratch).run(); break;
        case Pass::query_gradient: Narrow<S, Pass::query_gradient>(call, direction, task, scratch).run(); break;
        case Pass::key_gradient: Narrow<S, Pass::key_gradient>(call, direction, task, scratch).run(); break;
        case Pass::delta: break;  // has no arcs
    }
}

template <class S, int VECTORS>
void run_tiles(const sfno_dist_attention &call, const Direction &direction, const Task &task, void *scratch) {
    switch (task.pass) {
        case Pass::forward: Program<S, VECTORS, Pass::forward>(call, direction, task, scratch).run(); break;
        case Pass::query_gradient:
            Program<S, VECTORS, Pass::query_gradient>(call, direction, task, scratch).run();
            break;
        case Pass::key_gradient:
            Program<S, VECTORS, Pass::key_gradient>(call, direction, task, scratch).run();
            break;
        case Pass::delta: delta_rows<S>(call, direction, task); break;
    }
}

template <class S>
void run_stored(const sfno_dist_attention &call, const Direction &direction, const Task &task, void *scratch) {
    if constexpr (kStoredAsComputed<S>)
        if (task.vectors == 0) return run_narrow<S>(call, direction, task, scratch);
    if (task.vectors == 1) run_tiles<S, 1>(call, direction, task, scratch);
    else run_tiles<S, 2>(call, direction, task, scratch);
}

void run(const sfno_dist_attention &call, const Direction &direction, const Task &task, void *scratch) {
    switch (call.dtype) {
        case SFNO_DIST_FLOAT32: run_stored<float>(call, direction, task, scratch); break;
        case SFNO_DIST_FLOAT64: run_stored<double>(call, direction, task, scratch); break;
        case SFNO_DIST_BFLOAT16: run_stored<BFloat16>(call, direction, task, scratch); break;
        case SFNO_DIST_FLOAT16: run_stored<Float16>(call, direction, task, scratch); break;
    }
}

size_t scratch_bytes(const sfno_dist_attention &call, const Direction *directions, size_t count) {
    int64_t rows = 0;
    for (size_t i = 0; i < count; ++i) rows = larger(rows, int64_t(directions[i].neighbour.rows));
    return call.dtype == SFNO_DIST_FLOAT64 ? Program<double, 2, Pass::forward>::scratch_bytes(call, rows)
                                           : Program<float, 2, Pass::forward>::scratch_bytes(call, rows);
}

#define SFNO_DIST_NAME_OF(isa) #isa
#define SFNO_DIST_NAME(isa) SFNO_DIST_NAME_OF(isa)

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {SFNO_DIST_NAME(SFNO_DIST_ISA), kLanes<float>, scratch_bytes, run};

}  // namespace sfno_dist::SFNO_DIST_ISA
