/*
 * The arithmetic of one element, in C that gcc, clang and nvcc compile alike. Every backend builds its loops
 * from these functions, so that they cannot differ. codec/FORMAT.md, "Transformations of values", is
 * normative.
 *
 * Values are passed as their bits, and a function's name ends in the element's width in bits. The functions
 * use integers only: no rounding mode, no flush to zero. The last section, optimizer steps, computes with
 * floats: IEEE + - * / and sqrt in the order written, to nearest, with denormals, never contracted
 * (-ffp-contract=off, --fmad=false). No libm.
 */
#ifndef KERNELS_SCALAR_H
#define KERNELS_SCALAR_H

#ifdef __FAST_MATH__
#error "stored values depend on exact arithmetic: build without -ffast-math and -Ofast"
#endif

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define KERNELS_FN static __host__ __device__ __forceinline__
#else
#define KERNELS_FN static inline __attribute__((always_inline, unused))
#endif

/* Rotate the bits left by one, and back. */
KERNELS_FN uint8_t scalar_rotate_8(uint8_t bits) {
    return (uint8_t)((uint32_t)bits << 1 | bits >> 7);
}
KERNELS_FN uint16_t scalar_rotate_16(uint16_t bits) {
    return (uint16_t)((uint32_t)bits << 1 | bits >> 15);
}
KERNELS_FN uint32_t scalar_rotate_32(uint32_t bits) {
    return bits << 1 | bits >> 31;
}
KERNELS_FN uint64_t scalar_rotate_64(uint64_t bits) {
    return bits << 1 | bits >> 63;
}
KERNELS_FN uint8_t scalar_unrotate_8(uint8_t bits) {
    return (uint8_t)(bits >> 1 | (uint32_t)bits << 7);
}
KERNELS_FN uint16_t scalar_unrotate_16(uint16_t bits) {
    return (uint16_t)(bits >> 1 | (uint32_t)bits << 15);
}
KERNELS_FN uint32_t scalar_unrotate_32(uint32_t bits) {
    return bits >> 1 | bits << 31;
}
KERNELS_FN uint64_t scalar_unrotate_64(uint64_t bits) {
    return bits >> 1 | bits << 63;
}

/* Contexts: the biased exponent of a float, the bit length of an integer's magnitude. */
KERNELS_FN uint8_t scalar_context_f8_e4m3(uint8_t bits) {
    return (uint8_t)(bits >> 3 & 0x0fu);
}
KERNELS_FN uint8_t scalar_context_f8_e5m2(uint8_t bits) {
    return (uint8_t)(bits >> 2 & 0x1fu);
}
KERNELS_FN uint8_t scalar_context_f16(uint16_t bits) {
    return (uint8_t)(bits >> 10 & 0x1fu);
}
KERNELS_FN uint8_t scalar_context_bf16(uint16_t bits) {
    return (uint8_t)(bits >> 7 & 0xffu);
}
KERNELS_FN uint8_t scalar_context_f32(uint32_t bits) {
    return (uint8_t)(bits >> 23 & 0xffu);
}
/* The exponent in f32's bias, clamped: 0 or 255 where f32 would give 0 or infinity. */
KERNELS_FN uint8_t scalar_context_f64(uint64_t bits) {
    int32_t exponent = (int32_t)(bits >> 52 & 0x7ffu) - (1023 - 127);
    exponent = exponent < 0 ? 0 : exponent;
    return (uint8_t)(exponent > 255 ? 255 : exponent);
}
KERNELS_FN uint8_t scalar_bit_length(uint64_t magnitude) {
#if defined(__CUDA_ARCH__)
    return (uint8_t)(64 - __clzll((long long)magnitude));
#else
    return (uint8_t)(64 - __builtin_clzll(magnitude | 1) - (magnitude == 0));
#endif
}
KERNELS_FN uint8_t scalar_context_unsigned(uint64_t value) {
    return scalar_bit_length(value);
}
KERNELS_FN uint8_t scalar_context_signed(int64_t value) {
    uint64_t sign = UINT64_C(0) - ((uint64_t)value >> 63);
    return scalar_bit_length(((uint64_t)value ^ sign) - sign);
}

/* Right shift with rounding to nearest, ties to even; 1 <= shift <= 54. No overflow for value < 2^63. */
KERNELS_FN uint32_t scalar_round_32(uint32_t value, uint32_t shift) {
    return (value + ((UINT32_C(1) << (shift - 1)) - 1) + (value >> shift & 1)) >> shift;
}
KERNELS_FN uint64_t scalar_round_64(uint64_t value, uint32_t shift) {
    return (value + ((UINT64_C(1) << (shift - 1)) - 1) + (value >> shift & 1)) >> shift;
}

/* Casts: nearest even, NaN to one quiet NaN, overflow to infinity, denormals kept. */
KERNELS_FN uint16_t scalar_bf16_from_f32(uint32_t bits) {
    uint32_t magnitude = bits & UINT32_C(0x7fffffff);
    uint32_t rounded = scalar_round_32(magnitude, 16) | (bits >> 16 & 0x8000u);
    return (uint16_t)(magnitude > UINT32_C(0x7f800000) ? 0x7fc0u : rounded);
}

KERNELS_FN uint16_t scalar_f16_from_f32(uint32_t bits) {
    uint32_t magnitude = bits & UINT32_C(0x7fffffff);
    uint32_t exponent = magnitude >> 23;
    /* Normal results: the exponent moves from bias 127 to 15. A mantissa that rounds up carries into it. */
    uint32_t normal = scalar_round_32(magnitude - UINT32_C(0x38000000), 13);
    /* Denormal results count units of 2^-24. From shift 25 on everything is less than half a unit. */
    uint32_t shift = 126 - exponent;
    shift = exponent > 112 ? 1 : (shift > 25 ? 25 : shift);
    uint32_t denormal = scalar_round_32((magnitude & UINT32_C(0x7fffff)) | UINT32_C(0x800000), shift);
    uint32_t rounded = exponent > 112 ? normal : denormal;
    rounded = magnitude >= UINT32_C(0x477ff000) ? 0x7c00u : rounded; /* 65520: halfway beyond the largest */
    rounded |= bits >> 16 & 0x8000u;
    return (uint16_t)(magnitude > UINT32_C(0x7f800000) ? 0x7e00u : rounded);
}

KERNELS_FN uint32_t scalar_f32_from_f64(uint64_t bits) {
    uint64_t magnitude = bits & UINT64_C(0x7fffffffffffffff);
    uint32_t exponent = (uint32_t)(magnitude >> 52);
    uint64_t normal = scalar_round_64(magnitude - ((uint64_t)(1023 - 127) << 52), 29);
    /* Units of 2^-149. From shift 54 on everything is less than half a unit. */
    uint32_t shift = 926 - exponent;
    shift = exponent > 896 ? 1 : (shift > 54 ? 54 : shift);
    uint64_t denormal = scalar_round_64((magnitude & UINT64_C(0xfffffffffffff)) | UINT64_C(1) << 52, shift);
    uint64_t rounded = exponent > 896 ? normal : denormal;
    rounded = magnitude >= UINT64_C(0x47effffff0000000) ? UINT64_C(0x7f800000) : rounded;
    rounded |= bits >> 32 & UINT64_C(0x80000000);
    return (uint32_t)(magnitude > UINT64_C(0x7ff0000000000000) ? UINT64_C(0x7fc00000) : rounded);
}

/* ---- optimizer steps: FORMAT.md, "Optimizer steps", has the rules by number ---- */

/* A group record's coefficients, also rounded to f32. In rules with a gradient scale, `rate` is this scale. */
typedef struct scalar_step {
    double beta1, rest1, beta2, rest2, keep, decay, rate, root, eps, bias1, bias2, lr, weight_decay, momentum,
        undamped;
    float beta1_f, rest1_f, beta2_f, rest2_f, keep_f, rate_f, root_f, eps_f, bias1_f, bias2_f, lr_f,
        weight_decay_f, momentum_f, undamped_f;
} scalar_step;

/* Converts a group record's coefficients, in its order. */
KERNELS_FN scalar_step scalar_step_of(const double c[15]) {
    scalar_step s = {c[0],         c[1],         c[2],         c[3],         c[4],        c[5],
                     c[6],         c[7],         c[8],         c[9],         c[10],       c[11],
                     c[12],        c[13],        c[14],        (float)c[0],  (float)c[1], (float)c[2],
                     (float)c[3],  (float)c[4],  (float)c[6],  (float)c[7],  (float)c[8], (float)c[9],
                     (float)c[10], (float)c[11], (float)c[12], (float)c[13], (float)c[14]};
    return s;
}

#if defined(__CUDA_ARCH__)
#define KERNELS_SQRT(x) __fsqrt_rn(x)
#else
#define KERNELS_SQRT(x) __builtin_sqrtf(x)
#endif

/* The gradient that changed the first moment from m0 to m1: m1 = m0 + rest1 (g - m0), or m1 = beta1 m0 + rest1 g. */
KERNELS_FN float scalar_gradient_lerp(const scalar_step *s, float m1, float m0) {
    return (m1 - m0) / s->rest1_f + m0;
}
KERNELS_FN float scalar_gradient_mul(const scalar_step *s, float m1, float m0) {
    return (m1 - s->beta1_f * m0) / s->rest1_f;
}

/*
 * The same for a gradient that was a bf16 number times a scale. Rounding restores its exact bits, unless the gradient
 * was so small that it hardly changed the moment.
 */
KERNELS_FN float scalar_gradient_bf16(const scalar_step *s, float m1, float m0) {
    float unscaled = (float)(((double)m1 - s->beta1 * (double)m0) / s->rest1 / s->rate);
    uint32_t bits;
    memcpy(&bits, &unscaled, sizeof(bits));
    bits = (uint32_t)scalar_bf16_from_f32(bits) << 16;
    memcpy(&unscaled, &bits, sizeof(bits));
    return unscaled * s->rate_f;
}

/* A first moment from its earlier value and the unscaled gradient, rounded as different programs do. */
KERNELS_FN float scalar_moment_0(const scalar_step *s, float m, float g) {
    return m + s->rest1_f * (g * s->rate_f - m);
}
KERNELS_FN float scalar_moment_1(const scalar_step *s, float m, float g) {
    float way = g * s->rate_f - m;
    return (float)((double)m + (double)s->rest1_f * (double)way);
}
KERNELS_FN float scalar_moment_2(const scalar_step *s, float m, float g) {
    return s->beta1_f * m + s->rest1_f * (g * s->rate_f);
}
KERNELS_FN float scalar_moment_3(const scalar_step *s, float m, float g) {
    float kept = s->beta1_f * m, scaled = g * s->rate_f;
    return (float)((double)kept + (double)s->rest1_f * (double)scaled);
}
KERNELS_FN float scalar_moment_4(const scalar_step *s, float m, float g) {
    float added = s->rest1_f * (g * s->rate_f);
    return (float)((double)s->beta1_f * (double)m + (double)added);
}
KERNELS_FN float scalar_moment_5(const scalar_step *s, float m, float g) {
    float scaled = g * s->rate_f;
    return (float)(s->beta1 * (double)m + s->rest1 * (double)scaled);
}
KERNELS_FN float scalar_momentum_0(const scalar_step *s, float m, float g) {
    return s->momentum_f * m + s->undamped_f * (g * s->rate_f);
}
KERNELS_FN float scalar_momentum_1(const scalar_step *s, float m, float g) {
    float kept = s->momentum_f * m, scaled = g * s->rate_f;
    return (float)((double)kept + (double)s->undamped_f * (double)scaled);
}

/* exp_avg_sq from its earlier value and the gradient, rounded as different programs do. */
KERNELS_FN float scalar_square_0(const scalar_step *s, float v, float g) {
    return v * s->beta2_f + (s->rest2_f * g) * g;
}
KERNELS_FN float scalar_square_1(const scalar_step *s, float v, float g) {
    return v * s->beta2_f + s->rest2_f * (g * g);
}
KERNELS_FN float scalar_square_2(const scalar_step *s, float v, float g) {
    float scaled = s->rest2_f * g, kept = v * s->beta2_f;
    return (float)((double)kept + (double)scaled * (double)g);
}
KERNELS_FN float scalar_square_3(const scalar_step *s, float v, float g) {
    float square = g * g, kept = v * s->beta2_f;
    return (float)((double)kept + (double)s->rest2_f * (double)square);
}
KERNELS_FN float scalar_square_4(const scalar_step *s, float v, float g) {
    return (float)(s->beta2 * (double)v + (s->rest2 * (double)g) * (double)g);
}

/* Weights of Adam and AdamW from their earlier values and both moments. */
KERNELS_FN float scalar_adam_0(const scalar_step *s, float w, float m, float v) {
    return w * s->keep_f - (s->rate_f * m) / (KERNELS_SQRT(v) / s->root_f + s->eps_f);
}
KERNELS_FN float scalar_adam_1(const scalar_step *s, float w, float m, float v) {
    return w * s->keep_f - s->rate_f * (m / (KERNELS_SQRT(v) / s->root_f + s->eps_f));
}
KERNELS_FN float scalar_adam_2(const scalar_step *s, float w, float m, float v) {
    float kept = w * s->keep_f, direction = m / (KERNELS_SQRT(v) / s->root_f + s->eps_f);
    return (float)((double)kept - (double)s->rate_f * (double)direction);
}
KERNELS_FN float scalar_adam_3(const scalar_step *s, float w, float m, float v) {
    float kept = (float)((double)w - s->decay * (double)w);
    float root = KERNELS_SQRT(v) / s->root_f, below = (float)((double)root + s->eps);
    return kept - (s->rate_f * m) / below;
}
KERNELS_FN float scalar_adam_4(const scalar_step *s, float w, float m, float v) {
    float direction = (m / s->bias1_f) / (KERNELS_SQRT(v / s->bias2_f) + s->eps_f);
    return w - s->lr_f * (direction + s->weight_decay_f * w);
}
KERNELS_FN float scalar_adam_5(const scalar_step *s, float w, float m, float v) {
    double below = (double)KERNELS_SQRT(v) / s->root + s->eps;
    return (float)(s->keep * (double)w - (s->rate * (double)m) / below);
}

/* Weights of SGD from their earlier values and the momentum, which already includes the gradient. */
KERNELS_FN float scalar_sgd_0(const scalar_step *s, float w, float m) {
    return w - s->lr_f * m;
}
KERNELS_FN float scalar_sgd_1(const scalar_step *s, float w, float m) {
    return (float)((double)w - (double)s->lr_f * (double)m);
}
KERNELS_FN float scalar_nesterov(const scalar_step *s, float m1, float m0) {
    return (m1 - s->momentum_f * m0) / s->undamped_f + s->momentum_f * m1;
}

/* The bits of a prediction. All NaNs become one NaN, because processors produce different ones. */
KERNELS_FN uint32_t scalar_prediction(uint32_t bits) {
    return (bits & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000) ? UINT32_C(0x7fc00000) : bits;
}

#endif
