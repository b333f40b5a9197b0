#pragma once

#include "kernels/problem.h"

namespace sfno_dist {

// Names of the instruction sets in this binary, space separated.
const char *built_instruction_sets();

// The widest one that this machine has, or the one that SFNO_DIST_ISA names. Throws std::runtime_error.
const Kernels &chosen_kernels();

}  // namespace sfno_dist
