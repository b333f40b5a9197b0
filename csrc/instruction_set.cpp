#include "instruction_set.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace sfno_dist {

namespace plain {
extern const Kernels kernels;
}
#if defined(SFNO_DIST_X86)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

struct Candidate {
    const Kernels &kernels;
    bool (*available)();
};

// From the widest to the one that always works.
const Candidate kCandidates[] = {
#if defined(SFNO_DIST_X86)
    {avx512::kernels,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
     }},
    // Every machine with AVX2 also converts half precision (F16C), which older compilers cannot ask for.
    {avx2::kernels, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {plain::kernels, [] { return true; }},
};

}  // namespace

const char *built_instruction_sets() {
    static const std::string names = [] {
        std::string all;
        for (const Candidate &candidate : kCandidates)
            all += (all.empty() ? "" : " ") + std::string(candidate.kernels.name);
        return all;
    }();
    return names.c_str();
}

const Kernels &chosen_kernels() {
#if defined(SFNO_DIST_X86)
    __builtin_cpu_init();
#endif
    const char *wanted = std::getenv("SFNO_DIST_ISA");
    const bool free_choice = wanted == nullptr || *wanted == '\0';
    for (const Candidate &candidate : kCandidates) {
        if (!free_choice && std::strcmp(wanted, candidate.kernels.name) != 0) continue;
        if (candidate.available()) return candidate.kernels;
        if (!free_choice)
            throw std::runtime_error(std::string("SFNO_DIST_ISA=") + wanted +
                                     ": this processor lacks that instruction set; unset the variable");
    }
    throw std::runtime_error(std::string("SFNO_DIST_ISA=") + wanted + " is not built; choose one of: " +
                             built_instruction_sets());
}

}  // namespace sfno_dist
