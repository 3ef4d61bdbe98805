/* What the rows and columns of a matrix weigh, by their second moments. */
#include <math.h>
#include <stdlib.h>

#include "engine/lossy_sums.h"

void lossy_scales_free(lossy_scales *s) {
    free(s->row);
    free(s->column);
    *s = (lossy_scales){0};
}

static double logarithm_of(double sum, double count, double otherwise) {
    double mean = count > 0 ? sum / count : 0;
    return mean > 0 ? log2(mean) : otherwise;
}

ckd_status lossy_scales_of(lossy_scales *out, const tile_pass *p, const lossy_tile *t, ckd_error *err) {
    uint64_t rows = tile_rows(t), columns = t->columns;
    *out = (lossy_scales){.rows = rows, .columns = columns};
    out->row = calloc(rows, 2 * sizeof(double));
    out->column = calloc(columns, 2 * sizeof(double));
    if (!out->row || !out->column) {
        lossy_scales_free(out);
        return err_nomem(err, (rows + columns) * sizeof(double), "second moments' means");
    }
    double *row_count = out->row + rows, *column_count = out->column + columns, all[2] = {0, 0};
    memcpy(out->row, p->row, rows * sizeof(double));
    memcpy(row_count, p->row_count, rows * sizeof(double));
    for (uint64_t j = 0; j < columns; j++) {
        out->column[j] = p->column[j];
        column_count[j] = p->column_count[j];
    }
    for (size_t i = 0; i < p->outlier_count; i++) {
        const outlier *o = &p->outlier[i];
        out->row[o->row] += o->value;
        out->column[o->column] += o->value;
        row_count[o->row]++;
        column_count[o->column]++;
    }
    for (uint64_t i = 0; i < rows; i++) {
        all[0] += out->row[i];
        all[1] += row_count[i];
    }
    /* Of nothing, or of zeros, the mean of all. */
    out->all = logarithm_of(all[0], all[1], 0);
    for (uint64_t i = 0; i < rows; i++) {
        out->row[i] = logarithm_of(out->row[i], row_count[i], out->all);
    }
    for (uint64_t j = 0; j < columns; j++) {
        out->column[j] = logarithm_of(out->column[j], column_count[j], out->all);
    }
    double *rows_only = realloc(out->row, rows * sizeof(double)); /* without the counts */
    double *columns_only = realloc(out->column, columns * sizeof(double));
    out->row = rows_only ? rows_only : out->row;
    out->column = columns_only ? columns_only : out->column;
    return CKD_OK;
}
