/* Casts between f64, f32, f16 and bf16, and means of them; rounded once, to nearest even. */
#ifndef CLI_CAST_H
#define CLI_CAST_H

#include "cli/output/errors.h"

/* Is it one of these four? */
bool cli_is_float(ckd_dtype dtype);
/* Reads one value at any alignment. A NaN stays a NaN. */
double cli_float_read(const void *from, ckd_dtype dtype);
void cli_float_write(void *to, double value, ckd_dtype dtype);
void cli_cast(void *to, ckd_dtype to_dtype, const void *from, ckd_dtype from_dtype, size_t count);

/*
 * Means are summed in double in the given order, divided, and rounded once to the dtype. The first function adds
 * `count` values to the sums; the second computes the means over `copies` values each.
 */
void cli_mean_add(double *sums, const void *values, ckd_dtype dtype, size_t count);
void cli_mean_end(void *values, const double *sums, ckd_dtype dtype, size_t count, size_t copies);

#endif
