/* Floats of one dtype as another: f64, f32, f16 and bf16, rounded once, to nearest even. */
#ifndef CLI_CAST_H
#define CLI_CAST_H

#include "cli/output/errors.h"

/* One of these four? */
bool cli_is_float(ckd_dtype dtype);
/* One value, at any alignment. A NaN stays one. */
double cli_float_read(const void *from, ckd_dtype dtype);
void cli_float_write(void *to, double value, ckd_dtype dtype);
void cli_cast(void *to, ckd_dtype to_dtype, const void *from, ckd_dtype from_dtype, size_t count);

#endif
