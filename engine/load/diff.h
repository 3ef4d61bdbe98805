/* The comparison of values. Internal to engine/load/: diff.c, diff_values.c. */
#ifndef ENGINE_LOAD_DIFF_H
#define ENGINE_LOAD_DIFF_H

#include <stdint.h>

#include "include/ckptdelta.h"

/* Sums over elements. Squares and differences are of finite values, 0 for integers. */
typedef struct diff_sums {
    uint64_t changed; /* elements with different bits */
    double squares_a, squares_b, squares_diff, max_diff;
} diff_sums;

/* Compares `count` elements, aligned for the dtype. The result depends on the values only. Thread-safe. */
void diff_values(diff_sums *out, ckd_dtype dtype, const void *a, const void *b, uint64_t count);
void diff_sums_add(diff_sums *to, const diff_sums *from);

/*
 * Converts element i of an array of any alignment. Floats are exact, NaN and infinities included; integers and bool
 * give 0.
 */
double element_to_double(ckd_dtype dtype, const void *values, uint64_t i);

#endif
