#include "plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace sfno_dist {

namespace {

// A task is worth about this many cycles: long against taking one from the queue, short against the whole call.
constexpr double kTaskCycles = 2e6;
constexpr int kColumnBlock = 32;  // tasks are cut at multiples of the widest tile
constexpr int kBandRows = 16, kBandColumns = 64;

// Cycles of narrow.h, fitted to measurements: for a centre, each row of arcs, each neighbour, each vector of it.
constexpr double kNarrowCentre = 100.0, kNarrowRow = 10.0, kNarrowNeighbour = 8.0, kNarrowChannel = 1.0;

int32_t shifted(const Side &side, int row, int origin_row) {
    int64_t shift = int64_t(side.first[row]) - side.first[origin_row];
    if (2 * shift > side.nlon) shift -= side.nlon;
    if (2 * shift < -side.nlon) shift += side.nlon;
    return int32_t(shift);
}

}  // namespace

Plan::Plan(const sfno_dist_attention &call, int float_lanes)
    : call(call), lanes(call.dtype == SFNO_DIST_FLOAT64 ? float_lanes / 2 : float_lanes) {
    const int64_t first_column = (call.first_column % call.query_nlon + call.query_nlon) % call.query_nlon;
    query_first.assign(call.query_rows, int32_t(first_column));
    query_count.assign(call.query_rows, int32_t(call.query_columns));
    query_start.resize(call.query_rows);
    std::iota(query_start.begin(), query_start.end(), 0);
    for (int64_t h = 0; h < call.key_rows; ++h) {
        const int64_t first = call.key_windows[3 * h], count = call.key_windows[3 * h + 1];
        const int64_t start = call.key_windows[3 * h + 2];
        if (first < 0 || first >= call.key_nlon || count < 0 || count > call.key_nlon || start < 0 ||
            start + count > call.key_points)
            throw std::invalid_argument("key row " + std::to_string(h) + " holds " + std::to_string(count) +
                                        " columns from " + std::to_string(first) + " at point " +
                                        std::to_string(start) + ": not within " + std::to_string(call.key_nlon) +
                                        " columns and " + std::to_string(call.key_points) + " points");
        key_first.push_back(int32_t(first)), key_count.push_back(int32_t(count)), key_start.push_back(start);
    }
    const int64_t ticks = std::lcm(call.query_nlon, call.key_nlon);
    const Side queries = {int32_t(call.query_rows), int32_t(call.query_nlon), int32_t(ticks / call.query_nlon),
                          query_first.data(), query_count.data(), query_start.data()};
    const Side keys = {int32_t(call.key_rows), int32_t(call.key_nlon), int32_t(ticks / call.key_nlon),
                       key_first.data(), key_count.data(), key_start.data()};
    find_reach();
    directions[0] = {queries, keys, call.half_widths, call.key_rows, 1, reach[0].data(), reach[1].data()};
    directions[1] = {keys, queries, call.half_widths, 1, call.key_rows, reach[2].data(), reach[3].data()};
}

void Plan::find_reach() {
    reach[0].assign(call.query_rows, int32_t(call.key_rows));
    reach[1].assign(call.query_rows, 0);
    reach[2].assign(call.key_rows, int32_t(call.query_rows));
    reach[3].assign(call.key_rows, 0);
    for (int32_t r = 0; r < call.query_rows; ++r)
        for (int32_t h = 0; h < call.key_rows; ++h) {
            if (call.half_widths[r * call.key_rows + h] < 0) continue;
            reach[0][r] = std::min(reach[0][r], h), reach[1][r] = h + 1;
            reach[2][h] = std::min(reach[2][h], r), reach[3][h] = r + 1;
        }
}

// Cycles of one tile of this shape at rows row..end: every neighbour within reach of any lane costs the same.
double Plan::tile_cost(const Direction &direction, int row, int end, Shape shape) const {
    const Side &near = direction.neighbour;
    const int columns = lanes * shape.vectors / shape.group_rows;
    const double span = double(columns - 1) * direction.centre.step / near.step;
    int32_t first = near.rows, last = 0;
    for (int r = row; r < end; ++r) {
        first = std::min(first, direction.first_neighbour[r]), last = std::max(last, direction.end_neighbour[r]);
    }
    const double channels = double(call.depth + call.value_depth);
    const double per_neighbour = shape.vectors * (0.5 * channels + 20.0) + 0.2 * channels + 4.0;
    double cost = 300.0 + shape.vectors * lanes * channels;
    for (int n = first; n < last; ++n) {
        int32_t widest = -1;
        for (int r = row; r < end; ++r)
            widest = std::max(widest, direction.half_widths[r * direction.centre_stride +
                                                            n * direction.neighbour_stride]);
        if (widest < 0) continue;
        const double arc = std::min(2.0 * widest / near.step + 1.0, double(near.nlon)) + span;
        cost += 90.0 + arc * per_neighbour;
    }
    return cost;
}

// Cycles per column of the rows with one centre at a time; infinite where narrow.h cannot be used.
double Plan::narrow_cost(const Direction &direction, int row, int end) const {
    const bool stored_as_computed = call.dtype == SFNO_DIST_FLOAT32 || call.dtype == SFNO_DIST_FLOAT64;
    if (!stored_as_computed || call.depth % lanes || call.value_depth % lanes) return HUGE_VAL;
    const Side &near = direction.neighbour;
    const double channels = double(call.depth + call.value_depth);
    double cost = 0.0;
    for (int r = row; r < end; ++r) {
        double most = 0.0;
        cost += kNarrowCentre;
        for (int n = direction.first_neighbour[r]; n < direction.end_neighbour[r]; ++n) {
            const int32_t width =
                direction.half_widths[r * direction.centre_stride + n * direction.neighbour_stride];
            if (width < 0) continue;
            const double arc = std::min(2.0 * width / near.step + 1.0, double(near.nlon));
            most += std::floor(arc) + 1.0;
            cost += kNarrowRow + arc * (kNarrowChannel * channels / lanes + kNarrowNeighbour);
        }
        if (most > kMostNarrow) return HUGE_VAL;
    }
    return cost;
}

// The cheapest way to cut kGroupRows rows into tiles. Tiles of several rows share the neighbours of narrow arcs.
Plan::Shape Plan::best_shape(const Direction &direction, int row, int end, double *cost) const {
    Shape best = {1, 1};
    *cost = HUGE_VAL;
    for (int group_rows = 1; group_rows <= kGroupRows; group_rows *= 2)
        for (int vectors = 1; vectors <= 2; ++vectors) {
            const Shape shape = {group_rows, vectors};
            const int columns = lanes * vectors / group_rows;
            if (columns < 1) continue;
            double per_column = 0.0;
            for (int r = row; r < end; r += group_rows)
                per_column += tile_cost(direction, r, std::min(end, r + group_rows), shape) / columns;
            if (per_column < *cost) *cost = per_column, best = shape;
        }
    const double per_column = narrow_cost(direction, row, end);
    if (per_column < *cost) *cost = per_column, best = {1, 0};
    return best;
}

// Bands of rows with one shape of tile. Where arcs are narrow, a band is several groups of rows over few columns,
// so that the neighbour rows of one group are still in cache for the next.
std::vector<Task> Plan::bands(Pass pass) const {
    const Direction &way = direction(pass);
    const Side &side = way.centre;
    std::vector<Task> bands;
    for (int32_t row = 0; row < side.rows; row += kGroupRows) {
        const int32_t end = std::min(side.rows, row + kGroupRows);
        int32_t from = 0, to = 0;
        for (int32_t r = row; r < end; ++r) {
            const int32_t shift = pass == Pass::delta ? 0 : shifted(side, r, row);
            from = std::min(from, shift), to = std::max(to, shift + side.count[r]);
        }
        double per_column = 4.0 * call.value_depth;
        const Shape shape = pass == Pass::delta ? Shape{1, 1} : best_shape(way, row, end, &per_column);
        if (!bands.empty()) {
            Task &last = bands.back();
            const bool alike = side.first[row] == side.first[last.first_row] && from == last.first_column &&
                               to == last.end_column && shape.group_rows == last.group_rows &&
                               shape.vectors == last.vectors;
            if (alike && end - last.first_row <= kBandRows && (last.cost + per_column) * kBandColumns <= kTaskCycles) {
                last.end_row = end, last.cost += per_column;
                continue;
            }
        }
        bands.push_back({pass, 0, 0, row, end, from, to, shape.group_rows, shape.vectors, per_column});
    }
    return bands;
}

void Plan::add(Pass pass) {
    std::vector<Task> once;
    for (const Task &band : bands(pass)) {
        const int blocks = int(std::clamp(kTaskCycles / band.cost / kColumnBlock, 1.0, 1e6));
        const int32_t width = blocks * kColumnBlock;
        for (int32_t column = band.first_column; column < band.end_column; column += width) {
            Task task = band;
            task.first_column = column, task.end_column = std::min(band.end_column, column + width);
            task.cost = band.cost * (task.end_column - column);
            once.push_back(task);
        }
    }
    for (int32_t batch = 0; batch < call.batches; ++batch)
        for (int32_t head = 0; head < call.heads; ++head)
            for (Task task : once) {
                task.batch = batch, task.head = head;
                tasks.push_back(task);
            }
}

void Plan::order() {
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task &a, const Task &b) { return a.cost > b.cost; });
}

double Plan::cost() const {
    double sum = 0.0;
    for (const Task &task : tasks) sum += task.cost;
    return sum;
}

}  // namespace sfno_dist
