/* Weights of a matrix's rows and columns by their second moments. */
#include <math.h>

#include "engine/lossy/sums.h"

void lossy_scales_free(lossy_scales *s) {
    bytes_free(&s->memory);
    *s = (lossy_scales){0};
}

static double logarithm_of(double sum, double count, double otherwise) {
    double mean = count > 0 ? sum / count : 0;
    return mean > 0 ? log2(mean) : otherwise;
}

ckd_status lossy_scales_of(lossy_scales *out, const tile_pass *p, const lossy_tile *t, ckd_error *err) {
    uint64_t rows = tile_rows(t), columns = t->columns;
    size_t size = (rows + columns) * sizeof(double);
    *out = (lossy_scales){.memory = out->memory};
    double *at = bytes_scratch(&out->memory, size, "second moments' means", err);
    double *row_count = at ? bytes_scratch(&p->scratches->counts, size, "second moments' means", err) : NULL;
    if (!row_count) {
        return CKD_E_NOMEM;
    }
    double *column_count = row_count + rows, all[2] = {0, 0};
    out->rows = rows;
    out->columns = columns;
    out->row = at;
    out->column = at + rows;
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
    /* Rows and columns that are empty or zero take the overall mean. */
    out->all = logarithm_of(all[0], all[1], 0);
    for (uint64_t i = 0; i < rows; i++) {
        out->row[i] = logarithm_of(out->row[i], row_count[i], out->all);
    }
    for (uint64_t j = 0; j < columns; j++) {
        out->column[j] = logarithm_of(out->column[j], column_count[j], out->all);
    }
    return CKD_OK;
}
