/*
 * The CPU backend's tables, one per instruction set that the loops are compiled for. Internal to kernels/ and
 * to the tests, which compare the tables; all others call kernels_cpu().
 */
#ifndef KERNELS_CPU_H
#define KERNELS_CPU_H

#include "kernels/kernels.h"

extern const kernels kernels_cpu_portable;
#if defined(__x86_64__)
/* Call these only if kernels_cpu_all lists them. */
extern const kernels kernels_cpu_avx2;
extern const kernels kernels_cpu_avx512; /* F, BW, DQ and VL */
#endif

/*
 * Lists the tables that this processor and system can run, from the portable one to the fastest. Returns
 * their number.
 */
#define KERNELS_CPU_BEST 3
size_t kernels_cpu_all(const kernels *out[KERNELS_CPU_BEST]);

#endif
