#include "kernels/cpu.h"

const kernels *kernels_cpu(void) {
#if defined(KERNELS_HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")) {
        return &kernels_cpu_avx2;
    }
#endif
    return &kernels_cpu_portable;
}
