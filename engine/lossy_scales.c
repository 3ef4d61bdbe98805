/* What the rows and columns of a matrix weigh, by their second moments. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "engine/lossy.h"

void lossy_scales_free(lossy_scales *s) {
    free(s->row);
    free(s->column);
    *s = (lossy_scales){0};
}

/* Sums become logarithms of means; those of nothing, or of zeros, are the mean of all. */
static void to_logarithms(double *sums, const double *counts, uint64_t n, double all) {
    for (uint64_t i = 0; i < n; i++) {
        double mean = counts[i] > 0 ? sums[i] / counts[i] : 0;
        sums[i] = mean > 0 ? log2(mean) : all;
    }
}

ckd_status lossy_scales_of(lossy_scales *out, const float *second, uint64_t count, uint64_t columns,
                           uint64_t phase, ckd_error *err) {
    uint64_t rows = (phase + count + columns - 1) / columns;
    *out = (lossy_scales){.rows = rows, .columns = columns};
    out->row = calloc(2 * rows, sizeof(double));
    out->column = calloc(2 * columns, sizeof(double));
    if (!out->row || !out->column) {
        lossy_scales_free(out);
        return err_nomem(err, (rows + columns) * sizeof(double), "second moments' means");
    }
    double *row_count = out->row + rows, *column_count = out->column + columns, sum = 0, n = 0;
    uint64_t row = 0, column = phase;
    for (uint64_t i = 0; i < count; i++) {
        double v = second[i];
        if (v > 0 && v <= FLT_MAX) {
            out->row[row] += v;
            out->column[column] += v;
            row_count[row]++;
            column_count[column]++;
            sum += v;
            n++;
        }
        if (++column == columns) {
            column = 0;
            row++;
        }
    }
    out->all = n > 0 ? log2(sum / n) : 0;
    to_logarithms(out->row, row_count, rows, out->all);
    to_logarithms(out->column, column_count, columns, out->all);
    return CKD_OK;
}
