/*
 * Casts floats from one dtype to another, and averages them. Values are rounded once: a cast by way of f32 could round
 * twice.
 */
#include "cli/files/files.h"

#include <math.h>
#include <string.h>

bool cli_is_float(ckd_dtype dtype) {
    return dtype == CKD_F64 || dtype == CKD_F32 || dtype == CKD_F16 || dtype == CKD_BF16;
}

/* ---- f16 and bf16 ---- */

static double from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

static double from_f16(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                   : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                  : ldexp(mantissa, -24);
    return bits & 0x8000 ? -value : value;
}

/* Rounds to a multiple of the last bit's value. This is exact in double, so the value is rounded only once. */
static double round_to(double value, int mantissa_bits, int min_exponent) {
    int exponent;
    frexp(value, &exponent); /* value < 2^exponent */
    int last = exponent - 1 - mantissa_bits;
    last = last < min_exponent - mantissa_bits ? min_exponent - mantissa_bits : last;
    return ldexp(nearbyint(ldexp(value, -last)), last);
}

static uint16_t to_bf16(double value) {
    if (isnan(value)) {
        return 0x7fc0;
    }
    /* Values beyond the largest one, rounded as if the exponent range continued, become infinity. */
    float narrow = (float)(isinf(value) ? value : round_to(value, 7, -126));
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

static uint16_t to_f16(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value)) {
        return 0x7e00;
    }
    double size = isinf(value) ? INFINITY : fabs(round_to(value, 10, -14));
    if (size > 65504) {
        return sign | 0x7c00;
    }
    if (size < ldexp(1, -14)) {
        return sign | (uint16_t)ldexp(size, 24);
    }
    int exponent;
    frexp(size, &exponent);
    return sign | (uint16_t)(((exponent + 14) << 10) + (int)ldexp(size, 11 - exponent) - 1024);
}

/* ---- values ---- */

double cli_float_read(const void *from, ckd_dtype dtype) {
    double f64;
    float f32;
    uint16_t bits;
    switch (dtype) {
    case CKD_F64:
        memcpy(&f64, from, sizeof(f64));
        return f64;
    case CKD_F32:
        memcpy(&f32, from, sizeof(f32));
        return (double)f32;
    default:
        memcpy(&bits, from, sizeof(bits));
        return dtype == CKD_BF16 ? from_bf16(bits) : from_f16(bits);
    }
}

void cli_float_write(void *to, double value, ckd_dtype dtype) {
    float f32 = (float)value;
    uint16_t bits;
    switch (dtype) {
    case CKD_F64:
        memcpy(to, &value, sizeof(value));
        break;
    case CKD_F32:
        memcpy(to, &f32, sizeof(f32));
        break;
    default:
        bits = dtype == CKD_BF16 ? to_bf16(value) : to_f16(value);
        memcpy(to, &bits, sizeof(bits));
    }
}

/* A shortcut for the most common cast: adds half of the last remaining bit, or slightly less if that bit is even. */
static void f32_to_bf16(char *to, const char *from, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t wide;
        memcpy(&wide, from + 4 * i, sizeof(wide));
        bool nan = (wide & 0x7fffffff) > 0x7f800000;
        uint16_t bits = nan ? 0x7fc0 : (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
        memcpy(to + 2 * i, &bits, sizeof(bits));
    }
}

/* Rounds off the last `drop` bits (1 to 24) of a value's `bits`. */
static uint32_t round_off(uint32_t bits, int drop) {
    uint32_t high = bits >> drop, rest = bits & ((UINT32_C(1) << drop) - 1), half = UINT32_C(1) << (drop - 1);
    return high + (rest > half || (rest == half && (high & 1)));
}

static uint16_t f16_of_f32(uint32_t wide) {
    uint16_t sign = (uint16_t)(wide >> 16 & 0x8000);
    uint32_t size = wide & 0x7fffffff, mantissa = (size & 0x7fffff) | 0x800000;
    int exponent = (int)(size >> 23) - 127;
    if (size > 0x7f800000) {
        return 0x7e00;
    }
    if (exponent > 15) {
        return sign | 0x7c00;
    }
    if (exponent < -25) { /* less than half of the smallest value */
        return sign;
    }
    /* Rounding up may carry into the exponent, up to infinity, as it should. */
    return sign | (uint16_t)(exponent < -14 ? round_off(mantissa, -exponent - 1)
                                            : round_off(size - ((127u - 15u) << 23), 13));
}

static void f32_to_f16(char *to, const char *from, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t wide;
        memcpy(&wide, from + 4 * i, sizeof(wide));
        uint16_t bits = f16_of_f32(wide);
        memcpy(to + 2 * i, &bits, sizeof(bits));
    }
}

void cli_cast(void *to, ckd_dtype to_dtype, const void *from, ckd_dtype from_dtype, size_t count) {
    if (from_dtype == CKD_F32 && to_dtype == CKD_BF16) {
        f32_to_bf16(to, from, count);
        return;
    }
    if (from_dtype == CKD_F32 && to_dtype == CKD_F16) {
        f32_to_f16(to, from, count);
        return;
    }
    size_t to_size = ckd_dtype_size(to_dtype), from_size = ckd_dtype_size(from_dtype);
    for (size_t i = 0; i < count; i++) {
        cli_float_write((char *)to + i * to_size,
                        cli_float_read((const char *)from + i * from_size, from_dtype), to_dtype);
    }
}

/* ---- means ---- */

void cli_mean_add(double *sums, const void *values, ckd_dtype dtype, size_t count) {
    size_t element = ckd_dtype_size(dtype);
    for (size_t i = 0; i < count; i++) {
        sums[i] += cli_float_read((const char *)values + i * element, dtype);
    }
}

void cli_mean_end(void *values, const double *sums, ckd_dtype dtype, size_t count, size_t copies) {
    size_t element = ckd_dtype_size(dtype);
    for (size_t i = 0; i < count; i++) {
        cli_float_write((char *)values + i * element, sums[i] / (double)copies, dtype);
    }
}
