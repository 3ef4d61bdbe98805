/*
 * Compares the values of two blocks. The loops have no branches, and sums in lanes, so that compilers vectorise them.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/vocabulary.h"
#include "engine/common/common.h"
#include "engine/load/diff.h"
#include "kernels/kernels.h"

#define LANES 8u
#define RUN   512u /* elements converted at a time */

void diff_sums_add(diff_sums *to, const diff_sums *from) {
    to->changed += from->changed;
    to->squares_a += from->squares_a;
    to->squares_b += from->squares_b;
    to->squares_diff += from->squares_diff;
    to->max_diff = from->max_diff > to->max_diff ? from->max_diff : to->max_diff;
}

/* ---- bits ---- */

#define COUNT_CHANGED(type)                                                    \
    static uint64_t changed_##type(const type *a, const type *b, uint64_t n) { \
        uint64_t changed = 0;                                                  \
        for (uint64_t i = 0; i < n; i++) {                                     \
            changed += a[i] != b[i];                                           \
        }                                                                      \
        return changed;                                                        \
    }
COUNT_CHANGED(uint8_t)
COUNT_CHANGED(uint16_t)
COUNT_CHANGED(uint32_t)
COUNT_CHANGED(uint64_t)

static uint64_t count_changed(size_t size, const void *a, const void *b, uint64_t n) {
    switch (size) {
    case 1:
        return changed_uint8_t(a, b, n);
    case 2:
        return changed_uint16_t(a, b, n);
    case 4:
        return changed_uint32_t(a, b, n);
    default:
        return changed_uint64_t(a, b, n);
    }
}

/* ---- one element ---- */

/* A float of 1 + exponent_bits + mantissa_bits bits, IEEE style. */
static double decode_small(uint32_t bits, int exponent_bits, int mantissa_bits) {
    uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    int exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
    double value;
    if (exponent == top) {
        value = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
        value = ldexp(mantissa, 1 - bias - mantissa_bits);
    } else {
        value = ldexp(mantissa | 1u << mantissa_bits, exponent - bias - mantissa_bits);
    }
    return bits >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

/* e4m3 (OCP "fn"): no infinities, only the all-ones pattern is NaN, so the top exponent holds numbers. */
static double decode_e4m3(uint8_t bits) {
    uint32_t mantissa = bits & 7u;
    int exponent = bits >> 3 & 15;
    double value = exponent == 15 && mantissa == 7 ? NAN
                   : exponent == 0                 ? ldexp(mantissa, -9)
                                                   : ldexp(mantissa | 8u, exponent - 10);
    return bits & 0x80 ? -value : value;
}

double element_to_double(ckd_dtype dtype, const void *values, uint64_t i) {
    const uint8_t *p = (const uint8_t *)values + i * ckd_dtype_size(dtype);
    switch (dtype) {
    case CKD_F64: {
        uint64_t bits = load_le64(p);
        double value;
        memcpy(&value, &bits, sizeof(value));
        return value;
    }
    case CKD_F32: {
        uint32_t bits = load_le32(p);
        float value;
        memcpy(&value, &bits, sizeof(value));
        return value;
    }
    case CKD_F16:
        return decode_small(load_le16(p), 5, 10);
    case CKD_BF16:
        return decode_small(load_le16(p), 8, 7);
    case CKD_F8_E4M3:
        return decode_e4m3(*p);
    case CKD_F8_E5M2:
        return decode_small(*p, 5, 2);
    default:
        return 0;
    }
}

/* ---- values ---- */

typedef struct lane_sums {
    double a[LANES], b[LANES], diff[LANES], max[LANES];
} lane_sums;

/* n is a multiple of LANES. */
static void add_lanes(lane_sums *s, const double *a, const double *b, size_t n) {
    for (size_t i = 0; i < n; i += LANES) {
        for (size_t k = 0; k < LANES; k++) {
            double x = a[i + k], y = b[i + k];
            double difference = fabs(x - y);
            bool known_x = fabs(x) <= DBL_MAX, known_y = fabs(y) <= DBL_MAX; /* false for NaN */
            x = known_x ? x : 0;
            y = known_y ? y : 0;
            difference = known_x & known_y ? difference : 0;
            s->a[k] += x * x;
            s->b[k] += y * y;
            s->diff[k] += difference * difference;
            s->max[k] = difference > s->max[k] ? difference : s->max[k];
        }
    }
}

static void to_doubles(double *to, ckd_dtype dtype, const void *values, uint64_t first, size_t n) {
    if (dtype == CKD_F32) {
        const float *from = (const float *)values + first;
        for (size_t i = 0; i < n; i++) {
            to[i] = (double)from[i];
        }
    } else if (dtype == CKD_F64) {
        memcpy(to, (const double *)values + first, n * sizeof(*to));
    } else if (dtype == CKD_BF16 || dtype == CKD_F16) {
        float wide[RUN];
        kernels_cpu()->widen(wide, dtype, (const uint16_t *)values + first, n);
        for (size_t i = 0; i < n; i++) {
            to[i] = (double)wide[i];
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            to[i] = element_to_double(dtype, values, first + i);
        }
    }
    for (; n % LANES; n++) {
        to[n] = 0;
    }
}

void diff_values(diff_sums *out, ckd_dtype dtype, const void *a, const void *b, uint64_t count) {
    double x[RUN], y[RUN];
    lane_sums s = {.a = {0}};
    *out = (diff_sums){.changed = count_changed(ckd_dtype_size(dtype), a, b, count)};
    for (uint64_t at = 0; at < count && dtype_is_float(dtype); at += RUN) {
        size_t n = count - at < RUN ? (size_t)(count - at) : RUN;
        to_doubles(x, dtype, a, at, n);
        to_doubles(y, dtype, b, at, n);
        add_lanes(&s, x, y, (n + LANES - 1) / LANES * LANES);
    }
    for (size_t k = 0; k < LANES; k++) {
        out->squares_a += s.a[k];
        out->squares_b += s.b[k];
        out->squares_diff += s.diff[k];
        out->max_diff = s.max[k] > out->max_diff ? s.max[k] : out->max_diff;
    }
}
