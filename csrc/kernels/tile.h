// A tile: as many centres as there are vector lanes, and the arcs of neighbours that each lane attends to.
// Neighbour columns are counted on an unwrapped circle, so that an arc is always first..last with first <= last.
#pragma once

#include "problem.h"
#include "vector.h"

namespace sfno_dist::SFNO_DIST_ISA {

// Half-widths of one neighbour row for each row of a tile, as whole neighbour columns and remaining ticks.
struct ArcRow {
    int32_t row;
    int32_t columns[kGroupRows];  // -1: no neighbour in this row
    int32_t ticks[kGroupRows];
};

// The neighbour rows within reach of centre rows first_row..first_row + rows - 1.
inline int find_arc_rows(const Direction &direction, int first_row, int rows, ArcRow *found) {
    int begin = direction.neighbour.rows, end = 0, count = 0;
    for (int r = first_row; r < first_row + rows; ++r) {
        begin = smaller(begin, direction.first_neighbour[r]);
        end = larger(end, direction.end_neighbour[r]);
    }
    for (int n = begin; n < end; ++n) {
        ArcRow &arc = found[count];
        bool any = false;
        for (int r = 0; r < rows; ++r) {
            const int32_t width = direction.half_widths[(first_row + r) * direction.centre_stride +
                                                        n * direction.neighbour_stride];
            arc.columns[r] = width < 0 ? -1 : width / direction.neighbour.step;
            arc.ticks[r] = width < 0 ? 0 : width % direction.neighbour.step;
            any = any || width >= 0;
        }
        arc.row = n;
        count += any && direction.neighbour.count[n] > 0;
    }
    return count;
}

// Columns from the start of row b's window to that of row a's, the nearest way around the circle.
SFNO_DIST_INLINE int32_t shift_between(const Side &side, int a, int b) {
    const int32_t shift = side.first[a] - side.first[b];
    return 2 * shift > side.nlon ? shift - side.nlon : 2 * shift < -side.nlon ? shift + side.nlon : shift;
}

template <int LANES> struct Tile {
    int columns;                // lanes of one row
    int row[LANES];
    int local[LANES];           // column within the row's window; -1: nothing in this lane
    int32_t position[LANES];    // of the centre, in whole neighbour columns
    int32_t ticks[LANES];       // and the ticks beyond
    int32_t first[LANES], last[LANES];  // the arc in the neighbour row at hand; first > last: none

    // Lanes are group_rows rows of `columns` consecutive columns from `column` on, where 0 is the first column
    // of the task's first row.
    void place(const Direction &direction, const Task &task, int group_row, int column) {
        const Side &side = direction.centre;
        const int32_t step = direction.neighbour.step;
        columns = LANES / task.group_rows;
        const int64_t origin = side.first[task.first_row];
        const int64_t tick = (origin + column + side.nlon) * side.step;
        const int32_t whole = side.step / step, part = side.step % step;
        for (int r = group_row, lane = 0; lane < LANES; ++r) {
            int32_t shift = 0, count = 0;
            if (r < task.end_row) shift = shift_between(side, r, task.first_row), count = side.count[r];
            int32_t at = int32_t(tick / step), beyond = int32_t(tick % step);
            for (int c = column; c < column + columns; ++c, ++lane) {
                row[lane] = r, position[lane] = at, ticks[lane] = beyond;
                local[lane] = c < task.end_column && c >= shift && c < shift + count ? c - shift : -1;
                at += whole, beyond += part;
                if (beyond >= step) ++at, beyond -= step;
            }
        }
    }

    // The lanes' arcs in one neighbour row: ceil((tick - width) / step) .. floor((tick + width) / step).
    void find_arcs(const Side &neighbour, const ArcRow &arc) {
        for (int lane = 0; lane < LANES; ++lane) {
            const int r = lane / columns;
            const bool none = local[lane] < 0 || arc.columns[r] < 0;
            const int32_t from = position[lane] - arc.columns[r] + (ticks[lane] > arc.ticks[r]);
            const int32_t to = position[lane] + arc.columns[r] + (ticks[lane] + arc.ticks[r] >= neighbour.step);
            first[lane] = none ? kNowhere : from;
            last[lane] = none ? -kNowhere : smaller(to, from + neighbour.nlon - 1);  // no further than once around
        }
    }

    static constexpr int32_t kNowhere = 1 << 29;
};

// Calls visit(column, local, count) for the parts of first..last (unwrapped) that row `row` holds, each contiguous.
template <class Visit>
SFNO_DIST_INLINE void for_each_run(const Side &side, int row, int32_t first, int32_t last, Visit &&visit) {
    if (first > last) return;  // no lane has an arc here: first may be kNowhere, a million turns off
    int32_t local = first - side.first[row];  // some turns off at most: cheaper to walk than to divide
    while (local >= side.nlon) local -= side.nlon;
    while (local < 0) local += side.nlon;
    while (first <= last) {
        const int32_t held = side.count[row] - local;
        if (held > 0) {
            const int32_t count = smaller(held, last - first + 1);
            visit(first, local, count);
        }
        first += side.nlon - local;
        local = 0;
    }
}

}  // namespace sfno_dist::SFNO_DIST_ISA
