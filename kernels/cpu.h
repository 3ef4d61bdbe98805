/*
 * The CPU backend's tables, one for each instruction set that the loops are compiled for. Internal to kernels/ and the
 * tests, which compare them; everybody else calls kernels_cpu().
 */
#ifndef KERNELS_CPU_H
#define KERNELS_CPU_H

#include "kernels/kernels.h"

extern const kernels kernels_cpu_portable;
#if defined(__x86_64__)
/* Only to be called where kernels_cpu_all has them. */
extern const kernels kernels_cpu_avx2;
extern const kernels kernels_cpu_avx512; /* F, BW, DQ and VL */
#endif

/* Those that this processor and system can run, from the portable one to the fastest; how many. */
#define KERNELS_CPU_BEST 3
size_t kernels_cpu_all(const kernels *out[KERNELS_CPU_BEST]);

#endif
