/*
 * Compares the values of two blocks. The loops have no branches, and sums in lanes, so that compilers vectorise them.
 */
#include <float.h>
#include <math.h>
#include <string.h>

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
