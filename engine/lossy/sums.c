/*
 * Sums over the rows and columns of a tile, in parallel panels. Panels and the order of sums depend on the tile's shape
 * only, so that any number of threads gives the same bytes.
 */
#include "engine/lossy/internal.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/scalar_lattice.h"

#define PANEL_ROWS         32u /* smallest panel; columns' sums then take little beside the elements */
#define PANEL_ELEMENTS     65536u
#define LINE               65536u /* elements per row of a vector */
#define GROUP              8u     /* rows at a time */
#define LEVELS_OF_MEANS    4      /* unit of row and column corrections of second moments: half an octave */
#define MEANS_UP           0.7    /* fraction of that unit from which means are corrected */
#define LEVELS_IN_OCTAVE   8
#define ONE_OUTLIER_IN     4096u
#define NARROWEST_FACTORED 16u /* smallest number of rows and of columns */

/* ---- rows and panels ---- */

static uint64_t width_of(const tile_shape *shape) {
    return shape->vector ? LINE : shape->columns;
}

static uint64_t phase_of(const tile_shape *shape) {
    return shape->vector ? 0 : shape->phase;
}

uint64_t tile_rows(const tile_shape *shape) {
    uint64_t width = width_of(shape);
    return (phase_of(shape) + shape->count + width - 1) / width;
}

uint64_t tile_row_span(const tile_shape *shape, uint64_t row, uint64_t *first, uint64_t *column) {
    uint64_t width = width_of(shape), phase = phase_of(shape), start = row * width, end = start + width;
    *first = start > phase ? start - phase : 0;
    *column = *first + phase - start;
    return (end - phase < shape->count ? end - phase : shape->count) - *first;
}

uint64_t tile_panels(const tile_shape *shape) {
    uint64_t by_rows = tile_rows(shape) / (shape->vector ? 1 : PANEL_ROWS),
             by_elements = shape->count / PANEL_ELEMENTS;
    uint64_t panels = by_rows < by_elements ? by_rows : by_elements;
    return panels < 1 ? 1 : (panels > TILE_PANELS ? TILE_PANELS : panels);
}

uint64_t tile_panel(uint64_t rows, uint64_t p, uint64_t panels) {
    return rows * p / panels;
}

bool lossy_may_factor(const lossy_tile *t) {
    return t->params->effort > 1 && !t->shape.vector && t->shape.columns >= NARROWEST_FACTORED &&
           tile_rows(&t->shape) >= NARROWEST_FACTORED && t->shape.columns <= LATTICE_MAX_COLUMNS;
}

ckd_status tile_run_panels(const lossy_tile *t, size_t count, pool_fn fn, void *context, ckd_error *err) {
    ckd_status status = cancel_poll(t->resources.stop, err);
    if (status != CKD_OK) {
        return status;
    }
    if (t->resources.pool) {
        return pool_run(t->resources.pool, count, fn, context, err);
    }
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = fn(context, i, 0, err);
    }
    return status;
}

/* ---- a panel ---- */

typedef struct panel {
    lattice_sums all;
    moment_sums columns;
    bytes *outliers;
} panel;

typedef struct panels {
    tile_pass *pass;
    const lossy_tile *tile;
    const kernels *k;
    panel *panel;
    uint64_t count;
} panels;

int32_t level_distance(double now, double from) {
    double octaves = now > 0 && from > 0 ? log2(now / from) : 0;
    octaves = fabs(octaves) <= 256 ? octaves : 0; /* an infinite quotient says nothing */
    double steps = octaves * LEVELS_IN_OCTAVE / LEVELS_OF_MEANS;
    int32_t rounded = (int32_t)(fabs(steps) + 1 - MEANS_UP); /* fluctuations are ignored */
    return LEVELS_OF_MEANS * (steps < 0 ? -rounded : rounded);
}

uint64_t max_outliers(uint64_t n) {
    return n / ONE_OUTLIER_IN + 4;
}

/* Records outliers until there are more than max_outliers; the limit does not hold then. */
static void record_outliers(panel *to, const panels *all, uint64_t row) {
    const tile_pass *p = all->pass;
    uint64_t first, column, n = tile_row_span(&all->tile->shape, row, &first, &column),
                            max = max_outliers(all->tile->shape.count);
    const float *now = all->tile->input.now + first;
    for (uint64_t i = 0; i < n; i++) {
        if (to->outliers->size <= max * sizeof(outlier) && now[i] > p->max[0] && isfinite(now[i])) {
            outlier o = {row, column + i, (double)now[i]};
            bytes_put(to->outliers, &o, sizeof(o));
        }
    }
}

/* Sums one row. Returns the scale of births moved by the row's level. */
static double add_row(panel *to, const panels *all, uint64_t row) {
    tile_pass *p = all->pass;
    const lossy_tile *t = all->tile;
    uint64_t first, column, n = tile_row_span(&t->shape, row, &first, &column), finite = to->all.finite;
    const float *now = t->input.now + first;
    const int32_t *steps = p->weight ? t->plan.lattice.row : NULL;
    all->k->sums_of(&to->all,
                    &(sums_run){now, t->input.parent_values ? t->input.parent_values + first : NULL,
                                p->weight ? p->weight + column : NULL,
                                steps ? scalar_quarter_octaves(-steps[row]) : 1, p->max, p->lattice},
                    n);
    if (!p->means) {
        return 0;
    }
    double sums[2] = {0, 0}, birth = p->birth;
    all->k->moment_row(sums, now, p->magnitudes, p->max[0], n);
    p->row[row] = sums[0];
    p->row_count[row] = sums[1];
    if (p->outliers && to->all.finite - finite < n) {
        record_outliers(to, all, row);
    }
    if (p->birth > 0) {
        p->row_level[row] = level_distance(sums[0], sums[1] * birth);
        birth *= exp2((double)p->row_level[row] / LEVELS_IN_OCTAVE);
    }
    return birth;
}

/* Sums `rows` rows of the same columns. */
static void add_rows(panel *to, const panels *all, uint64_t row, uint64_t rows) {
    const tile_pass *p = all->pass;
    double scale[GROUP];
    uint64_t first, column, n = tile_row_span(&all->tile->shape, row, &first, &column);
    for (uint64_t i = 0; i < rows; i++) {
        scale[i] = add_row(to, all, row + i);
    }
    if (p->means) {
        moment_sums columns = {to->columns.sum + column,
                               to->columns.scales ? to->columns.scales + column : NULL,
                               to->columns.count + column};
        all->k->moment_columns(&columns,
                               &(moment_rows){all->tile->input.now + first, width_of(&all->tile->shape), rows,
                                              scale, p->magnitudes, p->max[0]},
                               n);
    }
}

static ckd_status add_panel(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    const panels *all = context;
    panel *to = &all->panel[index];
    uint64_t rows = tile_rows(&all->tile->shape), row = tile_panel(rows, index, all->count),
             end = tile_panel(rows, index + 1, all->count);
    while (row < end) {
        /* The first row and the last one may have fewer elements. */
        bool whole_row = row > 0 && row + 1 < rows;
        uint64_t last = end < rows ? end : rows - 1, at_once = whole_row && last > row ? last - row : 1;
        at_once = at_once < GROUP ? at_once : GROUP;
        add_rows(to, all, row, at_once);
        row += at_once;
    }
    return to->outliers->failed ? err_nomem(err, to->outliers->size, "coding scratch") : CKD_OK;
}

/* ---- all panels ---- */

static void add_sums(lattice_sums *to, const lattice_sums *s) {
    to->now += s->now;
    to->moved += s->moved;
    to->weighted += s->weighted;
    to->largest = s->largest > to->largest ? s->largest : to->largest;
    to->smallest = s->smallest < to->smallest ? s->smallest : to->smallest;
    to->farthest = s->farthest > to->farthest ? s->farthest : to->farthest;
    to->finite += s->finite;
    to->compared += s->compared;
    to->parent_bits |= s->parent_bits;
    to->lowest_bit = s->lowest_bit < to->lowest_bit ? s->lowest_bit : to->lowest_bit;
}

/* Allocates the rows' arrays, and columns' arrays for each panel. The first panel's become the totals. */
static ckd_status allocate_sums(panels *all, ckd_error *err) {
    tile_pass *p = all->pass;
    uint64_t rows = tile_rows(&all->tile->shape), columns = p->means ? width_of(&all->tile->shape) : 0,
             sum_count = all->count * columns;
    uint64_t doubles = p->means ? 2 * rows + sum_count * (p->birth > 0 ? 2 : 1) : 0;
    uint64_t size = doubles * sizeof(double) + (sum_count + (p->means ? rows : 0)) * sizeof(int32_t);
    double *at = bytes_scratch(&p->scratches->sums, size, "sums over a tile", err);
    size_t of_panels = all->count * sizeof(panel);
    all->panel = at ? bytes_scratch(&p->scratches->panels, of_panels, "sums over a tile", err) : NULL;
    if (!all->panel) {
        return CKD_E_NOMEM;
    }
    memset(at, 0, size);
    memset(all->panel, 0, of_panels);
    p->row = at;
    p->row_count = at + rows;
    p->column = p->row_count + rows;
    p->column_scales = p->birth > 0 ? p->column + sum_count : NULL;
    p->row_level = (int32_t *)(void *)(at + doubles);
    p->column_count = (uint32_t *)p->row_level + rows;
    for (uint64_t i = 0; i < all->count; i++) {
        all->panel[i].all = (lattice_sums)LATTICE_SUMS_INIT;
        all->panel[i].outliers = bytes_reset(&p->scratches->outliers_of[i]);
        if (p->means) {
            all->panel[i].columns = (moment_sums){p->column + i * columns,
                                                  p->column_scales ? p->column_scales + i * columns : NULL,
                                                  p->column_count + i * columns};
        }
    }
    return CKD_OK;
}

static void join_columns(const panels *all) {
    tile_pass *p = all->pass;
    uint64_t columns = width_of(&all->tile->shape);
    for (uint64_t i = 1; i < all->count; i++) {
        const moment_sums *from = &all->panel[i].columns;
        for (uint64_t j = 0; j < columns; j++) {
            p->column[j] += from->sum[j];
            p->column_count[j] += from->count[j];
        }
        for (uint64_t j = 0; from->scales && j < columns; j++) {
            p->column_scales[j] += from->scales[j];
        }
    }
}

static ckd_status join_outliers(const panels *all, ckd_error *err) {
    tile_pass *p = all->pass;
    size_t size = 0;
    for (uint64_t i = 0; i < all->count; i++) {
        size += all->panel[i].outliers->size;
    }
    p->outlier = bytes_scratch(&p->scratches->outliers, size, "sums over a tile", err);
    if (!p->outlier) {
        return CKD_E_NOMEM;
    }
    for (uint64_t i = 0; i < all->count; i++) {
        const bytes *from = all->panel[i].outliers;
        if (from->size) {
            memcpy(p->outlier + p->outlier_count, from->data, from->size);
            p->outlier_count += from->size / sizeof(outlier);
        }
    }
    return CKD_OK;
}

ckd_status tile_pass_run(tile_pass *p, const lossy_tile *t, const kernels *k, ckd_error *err) {
    p->scratches = t->resources.scratches ? t->resources.scratches : &p->own;
    p->outlier_count = 0;
    if (t->input.device) {
        return lossy_device_pass(p, t, err);
    }
    panels all = {p, t, k, NULL, tile_panels(&t->shape)};
    p->all = (lattice_sums)LATTICE_SUMS_INIT;
    ckd_status status = allocate_sums(&all, err);
    THEN(status, tile_run_panels(t, all.count, add_panel, &all, err));
    for (uint64_t i = 0; i < all.count && status == CKD_OK; i++) {
        add_sums(&p->all, &all.panel[i].all);
    }
    if (status == CKD_OK && p->means) {
        join_columns(&all);
        status = join_outliers(&all, err);
    }
    return status;
}

void tile_scratches_free(tile_scratches *r) {
    for (uint32_t i = 0; i < r->count; i++) {
        lattice_work_free(&r->workers[i].work);
        bytes_free(&r->workers[i].rows);
    }
    free(r->workers);
    bytes_free(&r->now);
    bytes_free(&r->moved);
    bytes_free(&r->parts);
    bytes_free(&r->sums);
    bytes_free(&r->panels);
    bytes_free(&r->outliers);
    for (uint32_t i = 0; i < TILE_PANELS; i++) {
        bytes_free(&r->outliers_of[i]);
    }
    lossy_scales_free(&r->scales);
    bytes_free(&r->counts);
    bytes_free(&r->histogram);
    lattice_work_free(&r->work);
    low_rank_scratch_free(&r->search);
    *r = (tile_scratches){.workers = NULL};
}

void tile_pass_free(tile_pass *p) {
    tile_scratches_free(&p->own);
}

/* ---- weights of rows and columns by their second moments ---- */

void lossy_scales_free(lossy_scales *s) {
    bytes_free(&s->memory);
    *s = (lossy_scales){0};
}

static double logarithm_of(double sum, double count, double otherwise) {
    double mean = count > 0 ? sum / count : 0;
    return mean > 0 ? log2(mean) : otherwise;
}

ckd_status lossy_scales_of(lossy_scales *out, const tile_pass *p, const tile_shape *shape, ckd_error *err) {
    uint64_t rows = tile_rows(shape), columns = shape->columns;
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
