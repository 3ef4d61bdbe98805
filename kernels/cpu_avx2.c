/* The loops of kernels/cpu_loops.h, compiled for AVX2. */
#if defined(__x86_64__)
#define CPU_TABLE      kernels_cpu_avx2
#define CPU_NAME       "avx2"
#define CPU_TARGET     __attribute__((target("avx2,bmi")))
#define SCALAR_RINT    __builtin_rintf
#define ROUND_EIGHT(x) __builtin_ia32_cvtps2dq256(x)
#define ANY_EIGHT(x)   __builtin_ia32_movmskps256(AS_FLOATS(x))
#if !defined(__clang__) /* which finds it by itself */
#define WIDE_HALF(x) __builtin_ia32_cvtps2pd256(x)
#endif
#include "kernels/cpu_loops.h"
#endif
