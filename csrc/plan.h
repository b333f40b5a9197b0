// From a call to tasks: what depends on the geometry only, decided once per call and for every thread count alike.
#pragma once

#include <vector>

#include "kernels/problem.h"

namespace sfno_dist {

class Plan {
   public:
    Plan(const sfno_dist_attention &call, int float_lanes);
    Plan(const Plan &) = delete;

    void add(Pass pass);                // tasks of one pass, all batches and heads
    void order();                       // the most expensive first, so that no thread ends up with one at the end
    double cost() const;                // of all tasks, in cycles

    const Direction &direction(Pass pass) const { return directions[pass == Pass::key_gradient]; }
    const Direction *all_directions() const { return directions; }

    std::vector<Task> tasks;

   private:
    struct Shape {
        int group_rows, vectors;
    };
    Shape best_shape(const Direction &, int row, int end, double *cost) const;
    double narrow_cost(const Direction &, int row, int end) const;
    double tile_cost(const Direction &, int row, int end, Shape shape) const;
    std::vector<Task> bands(Pass) const;  // cost: cycles per column
    void find_reach();

    const sfno_dist_attention &call;
    const int lanes;
    std::vector<int32_t> query_first, query_count, key_first, key_count;
    std::vector<int64_t> query_start, key_start;
    std::vector<int32_t> reach[4];  // first and end key row of each query row, first and end query row of each key row
    Direction directions[2];        // centres are queries; centres are keys
};

}  // namespace sfno_dist
