#include "launch.h"

namespace sfno_dist::cuda {
extern const Passes float32_passes;
const Passes float32_passes = passes<Number::float32>();
}  // namespace sfno_dist::cuda
