/* What the integers of a whole tile have to say, panels of its rows in parallel. */
#include <stdlib.h>
#include <string.h>

#include "engine/lossy_block.h"
#include "engine/lossy_sums.h"

typedef struct left_pass {
    const lossy_tile *tile;
    const kernels *k;
    float *to;
    rate_histogram *part; /* of each panel */
    uint64_t panels;
} left_pass;

typedef struct left_panel {
    lattice_block block; /* the panel, as if it were one */
    lattice_work work;
    const float *products;
    float *row, *none; /* room for residuals, and zeros */
} left_panel;

static void add_rows(left_panel *p, const left_pass *all, uint64_t at, uint64_t row, rate_histogram *h) {
    const lossy_tile *t = all->tile;
    uint64_t columns = t->columns;
    for (uint64_t r = 0; r < lattice_rows(&p->block); r++) {
        uint64_t first, column, n = lattice_row_span(&p->block, r, &first, &column);
        lattice_run run = lattice_row_run(&p->block, &p->work, r);
        run.column_step = run.column_step ? run.column_step + column : NULL;
        float *to = all->to ? all->to + (row + r) * columns : p->row;
        if (all->to) { /* elements that the tile does not have are 0 */
            memset(to, 0, column * sizeof(float));
            memset(to + column + n, 0, (columns - column - n) * sizeof(float));
        }
        all->k->lattice_residual(to + column, t->now + at + first,
                                 t->before ? t->before + at + first : p->none,
                                 p->products ? p->products + r * columns + column : NULL, n, &run);
        rate_add(h, to + column, n, all->k);
    }
}

static ckd_status left_of_panel(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    const left_pass *all = context;
    const lossy_tile *t = all->tile;
    uint64_t rows = tile_rows(t), row = tile_panel(rows, index, all->panels),
             end = tile_panel(rows, index + 1, all->panels);
    uint64_t column, at, last, n;
    tile_span(t, row, &at, &column);
    n = tile_span(t, end - 1, &last, &column);
    left_panel p = {.block = lossy_block_of(t, at, last + n - at)};
    p.row = calloc(2 * t->columns, sizeof(float));
    p.none = p.row ? p.row + t->columns : NULL;
    ckd_status status = p.row ? lattice_products(&p.products, &p.block, &p.work, all->k, err)
                              : err_nomem(err, 2 * t->columns * sizeof(float), "coding scratch");
    if (status == CKD_OK) {
        status = lattice_steps(&p.block, &p.work, err);
    }
    if (status == CKD_OK) {
        add_rows(&p, all, at, row, &all->part[index]);
    }
    free(p.row);
    lattice_work_free(&p.work);
    return status;
}

ckd_status lossy_left(rate_histogram *h, float *to, const lossy_tile *t, const kernels *k, ckd_error *err) {
    left_pass all = {t, k, to, NULL, tile_panels(t)};
    memset(h, 0, sizeof(*h));
    all.part = calloc(all.panels, sizeof(rate_histogram));
    if (!all.part) {
        return err_nomem(err, all.panels * sizeof(rate_histogram), "coding scratch");
    }
    ckd_status status = tile_run(t, all.panels, left_of_panel, &all, err);
    for (uint64_t i = 0; i < all.panels && status == CKD_OK; i++) {
        rate_join(h, &all.part[i]);
    }
    free(all.part);
    return status;
}
