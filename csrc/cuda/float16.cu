#include "launch.h"

namespace sfno_dist::cuda {
extern const Passes float16_passes;
const Passes float16_passes = passes<Number::float16>();
}  // namespace sfno_dist::cuda
