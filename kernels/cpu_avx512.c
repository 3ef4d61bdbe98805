/* The loops of kernels/cpu_loops.h, compiled for AVX-512. */
#if defined(__x86_64__)
#include <immintrin.h>

#define CPU_TABLE      kernels_cpu_avx512
#define CPU_NAME       "avx512"
#define CPU_TARGET     __attribute__((target("avx2,bmi,avx512f,avx512bw,avx512dq,avx512vl")))
#define PANEL_LANES    16
#define SCALAR_RINT    __builtin_rintf
#define ROUND_EIGHT(x) __builtin_ia32_cvtps2dq256(x)
#define ANY_EIGHT(x)   __builtin_ia32_movmskps256(AS_FLOATS(x))
/* Compilers would extract the integers one by one. */
#define STORE_NARROW(to, x)                                                                                 \
    do {                                                                                                    \
        __m256i wide_ = (__m256i)(x);                                                                       \
        __m128i half_ = _mm_packs_epi32(_mm256_castsi256_si128(wide_), _mm256_extracti128_si256(wide_, 1)); \
        _mm_storel_epi64((__m128i *)(void *)(to), _mm_packs_epi16(half_, half_));                           \
    } while (0)
#if !defined(__clang__) /* clang finds this instruction by itself */
#define WIDE_HALF(x) __builtin_ia32_cvtps2pd256(x)
#endif
#include "kernels/cpu_loops.h"
#endif
