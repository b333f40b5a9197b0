#include "launch.h"

namespace sfno_dist::cuda {
extern const Passes tf32_passes;
const Passes tf32_passes = passes<Number::tf32>();
}  // namespace sfno_dist::cuda
