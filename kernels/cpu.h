/*
 * The CPU backend's tables, one for each instruction set that the loops are compiled for. Internal to kernels/ and the
 * tests, which compare them; everybody else calls kernels_cpu().
 */
#ifndef KERNELS_CPU_H
#define KERNELS_CPU_H

#include "kernels/kernels.h"

extern const kernels kernels_cpu_portable;
#if defined(__x86_64__)
#define KERNELS_HAVE_AVX2 1
/* Only to be called where the processor has AVX2 and BMI. */
extern const kernels kernels_cpu_avx2;
#endif

#endif
