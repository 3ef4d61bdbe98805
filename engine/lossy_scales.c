/* What the rows and columns of a matrix weigh, by their second moments. */
#include <math.h>
#include <stdlib.h>

#include "engine/lossy.h"

void lossy_scales_free(lossy_scales *s) {
    free(s->row);
    free(s->column);
    *s = (lossy_scales){0};
}

static double logarithm_of(double sum, double count, double otherwise) {
    double mean = count > 0 ? sum / count : 0;
    return mean > 0 ? log2(mean) : otherwise;
}

ckd_status lossy_scales_of(lossy_scales *out, const float *second, uint64_t count, uint64_t columns,
                           uint64_t phase, bool magnitudes, float most, const kernels *k, ckd_error *err) {
    uint64_t rows = (phase + count + columns - 1) / columns;
    *out = (lossy_scales){.rows = rows, .columns = columns};
    out->row = calloc(2 * rows, sizeof(double));
    out->column = calloc(2 * columns, sizeof(double));
    if (!out->row || !out->column) {
        lossy_scales_free(out);
        return err_nomem(err, (rows + columns) * sizeof(double), "second moments' means");
    }
    double *row_count = out->row + rows, *column_count = out->column + columns, all[2] = {0, 0};
    for (uint64_t row = 0, i = 0; i < count; row++) {
        uint64_t column = row ? 0 : phase, n = columns - column < count - i ? columns - column : count - i;
        double sums[2] = {0, 0};
        k->moment_row(sums, second + i, NULL, magnitudes, most, n);
        k->moment_columns(out->column + column, column_count + column, second + i, NULL, 1, magnitudes, most,
                          n);
        out->row[row] = sums[0];
        row_count[row] = sums[1];
        all[0] += sums[0];
        all[1] += sums[1];
        i += n;
    }
    /* Of nothing, or of zeros, the mean of all. */
    out->all = logarithm_of(all[0], all[1], 0);
    for (uint64_t i = 0; i < rows; i++) {
        out->row[i] = logarithm_of(out->row[i], row_count[i], out->all);
    }
    for (uint64_t j = 0; j < columns; j++) {
        out->column[j] = logarithm_of(out->column[j], column_count[j], out->all);
    }
    return CKD_OK;
}
