#include "cli/mean.h"

#include <math.h>
#include <string.h>

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

/* To a multiple of what the last bit is worth there: exact in double, so that it is rounded once. */
static double round_to(double value, int mantissa_bits, int least_exponent) {
    int exponent;
    frexp(value, &exponent); /* value < 2^exponent */
    int last = exponent - 1 - mantissa_bits;
    last = last < least_exponent - mantissa_bits ? least_exponent - mantissa_bits : last;
    return ldexp(nearbyint(ldexp(value, -last)), last);
}

static uint16_t to_bf16(double value) {
    if (isnan(value)) {
        return 0x7fc0;
    }
    /* Beyond the largest, rounded as if exponents went on, lies infinity. */
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

/* ---- means ---- */

void cli_mean_add(double *sums, const void *values, ckd_dtype dtype, size_t count) {
    const char *at = values;
    size_t element = ckd_dtype_size(dtype);
    for (size_t i = 0; i < count; i++, at += element) {
        double f64;
        float f32;
        uint16_t bits;
        switch (dtype) {
        case CKD_F64:
            memcpy(&f64, at, sizeof(f64));
            sums[i] += f64;
            break;
        case CKD_F32:
            memcpy(&f32, at, sizeof(f32));
            sums[i] += (double)f32;
            break;
        default:
            memcpy(&bits, at, sizeof(bits));
            sums[i] += dtype == CKD_BF16 ? from_bf16(bits) : from_f16(bits);
        }
    }
}

void cli_mean_end(void *values, const double *sums, ckd_dtype dtype, size_t count, size_t copies) {
    char *at = values;
    size_t element = ckd_dtype_size(dtype);
    for (size_t i = 0; i < count; i++, at += element) {
        double f64 = sums[i] / (double)copies;
        float f32 = (float)f64;
        uint16_t bits;
        switch (dtype) {
        case CKD_F64:
            memcpy(at, &f64, sizeof(f64));
            break;
        case CKD_F32:
            memcpy(at, &f32, sizeof(f32));
            break;
        default:
            bits = dtype == CKD_BF16 ? to_bf16(f64) : to_f16(f64);
            memcpy(at, &bits, sizeof(bits));
        }
    }
}
