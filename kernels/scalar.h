/*
 * The arithmetic of one element, in C that gcc, clang and nvcc compile alike: every backend builds its loops from these
 * functions, so that they cannot differ. Integers only: no rounding mode, no flush to zero, no libm. codec/FORMAT.md,
 * "Transformations of values", is normative.
 *
 * Names end in the width of the element in bits. Values are passed as their bits.
 */
#ifndef KERNELS_SCALAR_H
#define KERNELS_SCALAR_H

#include <stdint.h>

#if defined(__CUDACC__)
#define KERNELS_FN static __host__ __device__ __forceinline__
#else
#define KERNELS_FN static inline __attribute__((always_inline, unused))
#endif

/* Bits rotated left by one, and back. */
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
/* The exponent in f32's bias, clamped: what f32 cannot tell from 0 or infinity is 0 or 255. */
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
    /* Denormal results count units of 2^-24. From shift 25 on all is less than half a unit. */
    uint32_t shift = 126 - exponent;
    shift = exponent > 112 ? 1 : (shift > 25 ? 25 : shift);
    uint32_t denormal = scalar_round_32((magnitude & UINT32_C(0x7fffff)) | UINT32_C(0x800000), shift);
    uint32_t rounded = exponent > 112 ? normal : denormal;
    rounded = magnitude >= UINT32_C(0x477ff000) ? 0x7c00u : rounded; /* 65520: half way beyond the largest */
    rounded |= bits >> 16 & 0x8000u;
    return (uint16_t)(magnitude > UINT32_C(0x7f800000) ? 0x7e00u : rounded);
}

KERNELS_FN uint32_t scalar_f32_from_f64(uint64_t bits) {
    uint64_t magnitude = bits & UINT64_C(0x7fffffffffffffff);
    uint32_t exponent = (uint32_t)(magnitude >> 52);
    uint64_t normal = scalar_round_64(magnitude - ((uint64_t)(1023 - 127) << 52), 29);
    /* Units of 2^-149. From shift 54 on all is less than half a unit. */
    uint32_t shift = 926 - exponent;
    shift = exponent > 896 ? 1 : (shift > 54 ? 54 : shift);
    uint64_t denormal = scalar_round_64((magnitude & UINT64_C(0xfffffffffffff)) | UINT64_C(1) << 52, shift);
    uint64_t rounded = exponent > 896 ? normal : denormal;
    rounded = magnitude >= UINT64_C(0x47effffff0000000) ? UINT64_C(0x7f800000) : rounded;
    rounded |= bits >> 32 & UINT64_C(0x80000000);
    return (uint32_t)(magnitude > UINT64_C(0x7ff0000000000000) ? UINT64_C(0x7fc00000) : rounded);
}

#endif
