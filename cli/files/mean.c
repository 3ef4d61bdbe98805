#include "cli/files/mean.h"

#include "cli/files/cast.h"

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
