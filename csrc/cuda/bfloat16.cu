#include "launch.h"

namespace sfno_dist::cuda {
extern const Passes bfloat16_passes;
const Passes bfloat16_passes = passes<Number::bfloat16>();
}  // namespace sfno_dist::cuda
