/*
 * Eight floats at a time with GCC's vector extensions. This is portable C with the same bits on every target, since no
 * operation is fused or reordered. GPT_CLONES compiles a function twice on x86-64, for AVX2 (deliberately without FMA)
 * and for the baseline; the choice is made at load time.
 */
#ifndef CKPTDELTA_EXAMPLES_GPT_VECTOR_H
#define CKPTDELTA_EXAMPLES_GPT_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define GPT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define GPT_CLONES
#endif
#define GPT_INLINE static inline __attribute__((always_inline))

#define GPT_LANES 8
/* Loads and stores through these types need no alignment. */
typedef float gpt_f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t gpt_i8 __attribute__((vector_size(32), aligned(4), may_alias));

/* The helpers take pointers, since passing vectors by value differs between targets. */

GPT_INLINE float gpt_sum8(const gpt_f8 *x) {
    const gpt_f8 v = *x;
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/*
 * x = e^x after clamping to [-87, 87]. With x = n ln 2 + r and |r| <= ln 2 / 2, e^r is a polynomial of degree 6
 * (coefficients of Cephes' expf, Moshier 1989), and n goes into the exponent.
 */
GPT_INLINE void gpt_exp8(gpt_f8 *x) {
    const gpt_f8 zero = {0}, top = zero + 87.0f, bottom = zero - 87.0f;
    gpt_f8 v = *x;
    gpt_i8 above = v > top, below = v < bottom;
    v = (gpt_f8)((above & (gpt_i8)top) | (~above & (gpt_i8)v));
    v = (gpt_f8)((below & (gpt_i8)bottom) | (~below & (gpt_i8)v));
    const gpt_f8 magic = zero + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    gpt_f8 n = (v * 1.44269504088896341f + magic) - magic;
    gpt_f8 r = (v - n * 0.693359375f) - n * -2.12194440e-4f;
    gpt_f8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    gpt_i8 scale = (__builtin_convertvector(n, gpt_i8) + 127) << 23;
    *x = p * (gpt_f8)scale;
}

#endif
