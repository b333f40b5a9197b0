// What the planner (once) and the kernels (once per instruction set) agree on. Plain data only: a function
// defined here would be compiled for several instruction sets and the linker would keep any one of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../attention.h"

namespace sfno_dist {

enum class Pass { forward, delta, query_gradient, key_gradient };

// The points of one side, queries or keys: rows of columns that may be windows of the circle.
struct Side {
    int32_t rows;
    int32_t nlon;           // columns around the circle
    int32_t step;           // ticks between columns
    const int32_t *first;   // global column of each row's first column, in [0, nlon)
    const int32_t *count;   // columns held of each row
    const int64_t *start;   // multiple of the row stride at which each row begins
};

// One pass over centres (the side results are made for) and neighbours (the side that is summed over).
struct Direction {
    Side centre, neighbour;
    const int32_t *half_widths;  // of rows (c, n): half_widths[c * centre_stride + n * neighbour_stride]
    int64_t centre_stride, neighbour_stride;
    const int32_t *first_neighbour, *end_neighbour;  // per centre row, the neighbour rows within reach
};

// A tile is group_rows x (lanes / group_rows) centres, one per vector lane.
struct Task {
    Pass pass;
    int32_t batch, head;
    int32_t first_row, end_row;        // rows of the centre side
    int32_t first_column, end_column;  // counted from the first row's first column, may be negative
    int32_t group_rows, vectors;       // shape of its tiles; vectors per tile is 1 or 2, or 0: no tiles, narrow.h
    double cost;
};

struct Kernels {
    const char *name;
    int32_t float_lanes;  // float32 values in a vector
    size_t (*scratch_bytes)(const sfno_dist_attention &, const Direction *, size_t directions);
    void (*run)(const sfno_dist_attention &, const Direction &, const Task &, void *scratch);
};

constexpr int kMostNarrow = 96;  // a centre of narrow.h has at most this many neighbours
constexpr int kGroupRows = 4;  // a tile has at most this many rows

}  // namespace sfno_dist
