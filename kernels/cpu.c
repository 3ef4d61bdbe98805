/*
 * Chooses the table of the widest instructions that this processor has, or the one that CKD_CPU in the environment
 * names.
 */
#include "kernels/cpu.h"

#include <stdlib.h>
#include <string.h>

size_t kernels_cpu_all(const kernels *out[KERNELS_CPU_BEST]) {
    size_t n = 0;
    out[n++] = &kernels_cpu_portable;
#if defined(__x86_64__)
    /* The compiler's library also checks (XCR0) that the system preserves these registers. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")) {
        out[n++] = &kernels_cpu_avx2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            out[n++] = &kernels_cpu_avx512;
        }
    }
#endif
    return n;
}

const kernels *kernels_cpu(void) {
    const kernels *all[KERNELS_CPU_BEST];
    size_t n = kernels_cpu_all(all);
    const char *requested = getenv("CKD_CPU");
    for (size_t i = 0; requested && i < n; i++) {
        if (strcmp(all[i]->name, requested) == 0) {
            return all[i];
        }
    }
    return all[n - 1];
}
