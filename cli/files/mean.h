/* Means of floats: summed in double in the given order, divided, rounded once to the dtype, to nearest even. */
#ifndef CLI_MEAN_H
#define CLI_MEAN_H

#include "cli/output/errors.h"

/* Adds `count` values of f64, f32, f16 or bf16 to the sums. */
void cli_mean_add(double *sums, const void *values, ckd_dtype dtype, size_t count);
/* Computes the means over `copies` values each. */
void cli_mean_end(void *values, const double *sums, ckd_dtype dtype, size_t count, size_t copies);

#endif
