/* Residuals of a whole tile before rounding, computed in parallel panels of rows. */
#include <string.h>

#include "engine/lossy/internal.h"

typedef struct residual_pass {
    const lossy_tile *tile;
    const kernels *k;
    rate_histogram *part; /* one per panel */
    uint64_t panels;
} residual_pass;

typedef struct residual_panel {
    lattice_block block; /* the panel, as one block */
    lattice_work *work;
    const float *products;
    float *row, *zeros; /* a row's residuals; zeros */
} residual_panel;

static void add_rows(residual_panel *p, const residual_pass *all, uint64_t at, rate_histogram *h) {
    const lossy_tile *t = all->tile;
    uint64_t columns = t->shape.columns;
    for (uint64_t r = 0; r < lattice_rows(&p->block); r++) {
        uint64_t first, column, n = lattice_row_span(&p->block, r, &first, &column);
        lattice_run run = lattice_row_run(&p->block, p->work, r);
        run.column_step = run.column_step ? run.column_step + column : NULL;
        all->k->lattice_residual(p->row, t->input.now + at + first,
                                 t->input.parent_values ? t->input.parent_values + at + first : p->zeros,
                                 p->products ? p->products + r * columns + column : NULL, n, &run);
        rate_add(h, p->row, n, all->k);
    }
}

static ckd_status residual_of_panel(void *context, size_t index, uint32_t worker, ckd_error *err) {
    const residual_pass *all = context;
    const lossy_tile *t = all->tile;
    uint64_t rows = tile_rows(&t->shape), row = tile_panel(rows, index, all->panels),
             end = tile_panel(rows, index + 1, all->panels);
    uint64_t column, at, last, n;
    tile_row_span(&t->shape, row, &at, &column);
    n = tile_row_span(&t->shape, end - 1, &last, &column);
    tile_scratch own = {0},
                 *scratch = t->resources.scratches ? &t->resources.scratches->workers[worker] : &own;
    residual_panel p = {.block = lossy_block_of(t, at, last + n - at), .work = &scratch->work};
    p.row = bytes_scratch(&scratch->rows, 2 * t->shape.columns * sizeof(float), "coding scratch", err);
    ckd_status status = p.row ? lattice_products(&p.products, &p.block, p.work, all->k, err) : CKD_E_NOMEM;
    THEN(status, lattice_steps(&p.block, p.work, err));
    if (status == CKD_OK) {
        p.zeros = memset(p.row + t->shape.columns, 0, t->shape.columns * sizeof(float));
        add_rows(&p, all, at, &all->part[index]);
    }
    bytes_free(&own.rows);
    lattice_work_free(&own.work);
    return status;
}

ckd_status lossy_residual(rate_histogram *h, const lossy_tile *t, const kernels *k, ckd_error *err) {
    if (t->input.device) {
        return lossy_device_residual(h, t, err);
    }
    residual_pass all = {t, k, NULL, tile_panels(&t->shape)};
    memset(h, 0, sizeof(*h));
    bytes own = {0}, *parts = t->resources.scratches ? &t->resources.scratches->parts : &own;
    all.part = bytes_scratch(parts, all.panels * sizeof(rate_histogram), "coding scratch", err);
    if (!all.part) {
        return CKD_E_NOMEM;
    }
    memset(all.part, 0, all.panels * sizeof(rate_histogram));
    ckd_status status = tile_run_panels(t, all.panels, residual_of_panel, &all, err);
    for (uint64_t i = 0; i < all.panels && status == CKD_OK; i++) {
        rate_join(h, &all.part[i]);
    }
    bytes_free(&own);
    return status;
}

/* ---- submatrices of the residual matrix, without factors ---- */

ckd_status lossy_matrix_begin(lossy_matrix *m, const lossy_tile *t, const kernels *k, lattice_work *work,
                              ckd_error *err) {
    *m = (lossy_matrix){.tile = t, .kernels = k, .work = work};
    return t->input.device ? lossy_device_matrix(t, err) : lattice_steps(&t->plan.lattice, work, err);
}

/* Elements outside the tile are 0. */
static void submatrix_of_row(const lossy_matrix *m, float *to, size_t row, size_t column, size_t columns) {
    static const float zeros[SUBMATRIX_SIDE] = {0};
    const lossy_tile *t = m->tile;
    uint64_t first, begin, n = tile_row_span(&t->shape, row, &first, &begin), end = begin + n,
                           to_end = column + columns;
    uint64_t from = begin > column ? begin : column;
    end = end < to_end ? end : to_end;
    if (from >= end) {
        memset(to, 0, columns * sizeof(float));
        return;
    }
    memset(to, 0, (from - column) * sizeof(float));
    memset(to + (end - column), 0, (to_end - end) * sizeof(float));
    lattice_run run = lattice_row_run(&t->plan.lattice, m->work, row);
    run.column_step = run.column_step ? run.column_step + from : NULL;
    first += from - begin;
    m->kernels->lattice_residual(to + (from - column), t->input.now + first,
                                 t->input.parent_values ? t->input.parent_values + first : zeros, NULL,
                                 end - from, &run);
}

void lossy_submatrix(const void *matrix, float *to, size_t row, size_t rows, size_t column, size_t columns) {
    for (size_t i = 0; i < rows; i++) {
        submatrix_of_row(matrix, to + i * columns, row + i, column, columns);
    }
}
