/*
 * The arithmetic of one element of a lossy block, for gcc, clang and nvcc alike. codec/FORMAT.md, "Lattice
 * blocks", is normative. IEEE single precision, round to nearest, denormals kept, no contraction; the order
 * of operations is part of it.
 */
#ifndef KERNELS_SCALAR_LATTICE_H
#define KERNELS_SCALAR_LATTICE_H

#include <string.h>

#include "kernels/scalar.h"

#define LATTICE_LIMIT 1073741824.0f /* 2^30: lattice integers are smaller */
#define LEVEL_ZERO    INT32_MIN     /* an integer of the log map: the value is zero */
#define LEVEL_MAX     2039          /* largest level of finite values */
#define LEVEL_SHIFT   20 /* levels count eighths of an octave: a float's bits above three of its mantissa */

KERNELS_FN uint32_t scalar_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}
KERNELS_FN float scalar_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
KERNELS_FN float scalar_magnitude(float value) {
    return scalar_float(scalar_bits(value) & UINT32_C(0x7fffffff));
}

/*
 * Rounds to the nearest integer, ties to even: beyond 2^23 floats are integers, so adding 2^23 rounds.
 * SCALAR_RINT: an instruction that does this.
 */
KERNELS_FN float scalar_rint(float x) {
#ifdef SCALAR_RINT
    return SCALAR_RINT(x);
#else
    float big = scalar_float(UINT32_C(0x4b000000) | (scalar_bits(x) & UINT32_C(0x80000000)));
    float rounded = (x + big) - big;
    return scalar_magnitude(x) < 8388608.0f ? rounded : x;
#endif
}
/* The nearest integer; 0 for NaN and for values that reach the limit. */
KERNELS_FN int32_t scalar_units(float x) {
    return (int32_t)scalar_rint(scalar_magnitude(x) < LATTICE_LIMIT ? x : 0.0f);
}

/* 2^(x / 4), for x from -480 to 480. */
KERNELS_FN float scalar_quarter_octaves(int32_t x) {
    const uint32_t mantissa =
        x & 2 ? (x & 1 ? UINT32_C(0x5744fd) : UINT32_C(0x3504f3)) : (x & 1 ? UINT32_C(0x1837f0) : 0);
    int32_t clamped = x < -480 ? -480 : (x > 480 ? 480 : x);
    return scalar_float(((uint32_t)((clamped >> 2) + 127) << 23) | (clamped == x ? mantissa : 0));
}

/* The position of integer q, in steps: beyond 2 all levels have the third offset. */
KERNELS_FN float scalar_level(int32_t q, float offset1, float offset2, float offset3) {
    float at = scalar_magnitude((float)q);
    at -= at > 2.0f ? offset3 : (at > 1.0f ? offset2 : (at > 0.0f ? offset1 : 0.0f));
    return q < 0 ? -at : at;
}
KERNELS_FN int32_t scalar_add(int32_t a, int32_t b) {
    return (int32_t)((uint32_t)a + (uint32_t)b);
}

/* The magnitude of a residual's integer: 1 from `one` on, 2 from `two`, then n from n - `add`. Encoders only. */
KERNELS_FN int32_t scalar_quantised(float magnitude, float one, float two, float add) {
    float more = magnitude + add;
    more = more < 2.0f ? 2.0f : more;
    int32_t level = (int32_t)(more < LATTICE_LIMIT ? more : 0.0f);
    level = magnitude < two ? 1 : level;
    return magnitude < one ? 0 : level;
}

/* Moves a value by some units on its lattice. A value that does not move keeps its bits, on the lattice or off it. */
KERNELS_FN float scalar_move(float value, int32_t units, float unit, float per_unit) {
    float moved = (float)scalar_add(scalar_units(value * per_unit), units) * unit;
    return units ? moved : value;
}

/* f16 is exactly representable as f32. Denormals: the mantissa counts units of 2^-24. */
KERNELS_FN uint32_t scalar_f32_from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    uint32_t normal = (magnitude << 13) + UINT32_C(0x38000000);
    uint32_t special = (magnitude << 13) | UINT32_C(0x7f800000);
    uint32_t denormal = scalar_bits((float)magnitude * 5.9604644775390625e-8f);
    return sign | (magnitude < 0x400u ? denormal : (magnitude < 0x7c00u ? normal : special));
}

/* The level of a value: 0 unless it is positive and finite, else at least 1. */
KERNELS_FN int32_t scalar_level_of(float value) {
    uint32_t bits = scalar_bits(value);
    int32_t level = (int32_t)((bits + (UINT32_C(1) << (LEVEL_SHIFT - 1))) >> LEVEL_SHIFT);
    level = level < 1 ? 1 : (level > LEVEL_MAX ? LEVEL_MAX : level);
    return bits == 0 || bits >= UINT32_C(0x7f800000) ? 0 : level;
}
/* The level from the predicted level and integer q. `from` is 0 if the parent's value is zero. */
KERNELS_FN int32_t scalar_level_apply(int32_t from, int32_t q, int32_t offset, int32_t birth, int32_t step) {
    int32_t steps = from ? q : (q > 0 ? q - 1 : q);
    uint32_t at = (uint32_t)(from ? from : birth) + (uint32_t)offset + (uint32_t)steps * (uint32_t)step;
    int32_t level = (int32_t)at;
    level = level < 1 ? 1 : (level > LEVEL_MAX ? LEVEL_MAX : level);
    return q == LEVEL_ZERO || (from == 0 && q == 0) ? 0 : level;
}

#endif
