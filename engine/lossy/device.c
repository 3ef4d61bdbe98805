/*
 * A lossy tile on a device: its memory there, and the device's versions of passes and residuals. The host plans as for
 * any tile, from the sums that come back.
 */
#include "engine/lossy/internal.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "kernels/scalar_lattice.h"

#define MAX_EXCEPTIONS(n) \
    ((n) / 256 + 64) /* most exceptions among n elements; each takes memory and a write of its own */

/* ---- begin and end ---- */

/* Rows of panels are copied with a pitch in bytes, which must stay below 2^31. */
#define COLUMNS_MAX (INT32_MAX / sizeof(float))

bool lossy_device_can_code(const lossy_tile *t, const void *input) {
    size_t size = ckd_dtype_size(t->dtype);
    bool whole = !t->shape.vector && t->shape.phase == 0 && t->shape.count % t->shape.columns == 0 &&
                 t->shape.columns < COLUMNS_MAX;
    bool plain = t->params->effort < 7 && !(t->params->max_error > 0);
    return whole && (uintptr_t)input % size == 0 && plain && t->shape.count >= DEVICE_MIN_ELEMENTS;
}

#define PANELS     64u /* largest number of panels of rows whose columns are summed separately */
#define PANEL_ROWS 32u /* smallest number of rows of a panel */

static uint64_t panels_of(uint64_t rows) {
    uint64_t panels = rows / PANEL_ROWS;
    return panels < 1 ? 1 : (panels > PANELS ? PANELS : panels);
}

/* Largest rank of factors, and largest number of vectors in the search for them. */
static uint64_t max_rank(const lossy_tile *t, uint64_t rows) {
    uint64_t shorter = rows < t->shape.columns ? rows : t->shape.columns;
    bool factors = t->part != LOSSY_SECOND && lossy_may_factor(t);
    return !factors ? 0 : (shorter < t->params->max_rank ? shorter : t->params->max_rank);
}

/*
 * Returns the scratch that the largest operation takes: sums of rows, sums of columns, factors, gathering or packing,
 * hashes.
 */
static uint64_t scratch_of(const lossy_tile *t, uint64_t rows) {
    uint64_t columns = t->shape.columns, sides = 4 * (rows + columns);
    uint64_t max = 4 * sides + 16 * rows + device_pass_blocks(rows) * sizeof(device_sums);
    uint64_t of_columns = 8 * rows + 20 * panels_of(rows) * columns;
    uint64_t rank = max_rank(t, rows), floats = rank * sides,
             integers = device_bytes_rank((uint32_t)rank) * (rows + columns),
             factors = sides + (floats > integers ? floats : integers);
    uint64_t search = lossy_device_search_size(rows, t->shape.columns, rank);
    uint64_t packing = t->shape.count / 4 + t->shape.count / 16 * sizeof(device_element_at) +
                       t->shape.count / 64 + (4u << 20);
    max = of_columns > max ? of_columns : max;
    max = factors > max ? factors : max;
    max = search > max ? search : max;
    return lossy_device_aligned((packing > max ? packing : max) +
                                4096); /* alignment of arrays to 256 bytes */
}

/* Errors: NOMEM if the operation needs more than the scratch. */
ckd_status lossy_device_check_scratch(const struct lossy_device *d, uint64_t used, ckd_error *err) {
    return used <= d->scratch_size
               ? CKD_OK
               : err_set(err, CKD_E_NOMEM,
                         "an operation needs %llu bytes of a device's scratch memory, which has %llu",
                         (unsigned long long)used, (unsigned long long)d->scratch_size);
}

static ckd_status as_floats(const struct lossy_device *d, float *to, const void *from, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    device_elements conversion = {DEVICE_WIDEN, d->dtype, CKD_DTYPE_NONE, NULL};
    device_span all = {.to = to, .from = from, .n = d->count};
    bool supported;
    d->lease->backend->elements(&d->lease->queue, &supported, &conversion, &all, 1, &why);
    return lossy_device_status(d, &why, err);
}

/* Returns the bytes of a panel's arrays. widest == UINT64_MAX: there are no panels. */
static uint64_t panel_size(const lossy_tile *t, uint64_t rows, bool parent_values,
                           const lossy_device_values *v) {
    if (v->widest == UINT64_MAX) {
        return 0;
    }
    uint64_t n = rows * (v->widest < t->shape.columns ? v->widest : t->shape.columns),
             size = ckd_dtype_size(t->dtype);
    bool floats = t->dtype == CKD_F32;
    if (v->only_input) {
        return lossy_device_aligned(n * size);
    }
    return lossy_device_aligned(n * size) * (floats ? 1 : 2) +
           lossy_device_aligned(n * 4) * (1 + parent_values + !floats);
}

/* Puts the parent's values as floats into `to`, unless the caller makes them later (makes_parent_values). */
static ckd_status set_before(struct lossy_device *d, const lossy_device_values *v, float *to,
                             ckd_error *err) {
    d->whole.parent_values = to;
    if (v->makes_parent_values) {
        return CKD_OK;
    }
    return v->parent_values ? device_put(d->lease, to, v->parent_values, d->count * sizeof(float), err)
                            : as_floats(d, to, v->reference->memory, err);
}

/* Allocates memory for hashes and a panel only. */
static ckd_status begin_input(struct lossy_device *d, lossy_tile *t, uint64_t panel, ckd_error *err) {
    void *memory;
    ckd_status status = device_memory(&memory, d->lease, d->scratch_size + panel, err);
    d->scratch = memory;
    d->panel = status == CKD_OK ? d->scratch + d->scratch_size : NULL;
    d->at = d->whole;
    t->input.device = d;
    t->input.now = t->input.parent_values = NULL;
    return status;
}

ckd_status lossy_device_begin(struct lossy_device *d, lossy_tile *t, const lossy_device_values *v,
                              ckd_error *err) {
    bool floats = t->dtype == CKD_F32, borrowed = v->reference && floats,
         parent_values = v->parent_values || v->reference || v->makes_parent_values;
    uint64_t n = t->shape.count, all = lossy_device_aligned(n * sizeof(float)), rows = n / t->shape.columns;
    *d = (struct lossy_device){.lease = v->lease,
                               .store = v->store,
                               .reference = v->reference,
                               .rows = rows,
                               .columns = t->shape.columns,
                               .count = n,
                               .dtype = t->dtype,
                               .master = v->master,
                               .whole = {.input = v->input, .count = n}};
    pthread_mutex_init(&d->mutex, NULL);
    d->scratch_size = scratch_of(t, rows);
    uint64_t panel = panel_size(t, rows, parent_values, v);
    if (v->only_input) {
        return begin_input(d, t, panel, err);
    }
    uint64_t list =
        lossy_device_aligned(MAX_EXCEPTIONS(n) * sizeof(device_element_at)) + lossy_device_aligned(8);
    uint64_t size = (2 + (parent_values && !borrowed) + !floats) * all + (floats ? 0 : all / 2) +
                    lossy_device_aligned(n) + list + d->scratch_size + panel;
    void *memory;
    ckd_status status = device_memory(&memory, d->lease, size, err);
    if (status != CKD_OK) {
        return status;
    }
    uint8_t *at = memory;
    d->matrix = (float *)(void *)at;
    d->whole.values = (float *)(void *)(at += all);
    d->q8 = (int8_t *)(at += all);
    at += lossy_device_aligned(n);
    d->exceptions = (device_exceptions){.count = (uint64_t *)(void *)at,
                                        .list = (device_element_at *)(void *)(at + lossy_device_aligned(8)),
                                        .capacity = (uint32_t)MAX_EXCEPTIONS(n)};
    d->scratch = at += list;
    d->panel = at += d->scratch_size;
    at += panel;
    d->whole.now = v->input;
    if (borrowed) {
        d->whole.parent_values = v->reference->memory;
    } else if (parent_values) {
        status = set_before(d, v, (float *)(void *)at, err);
        at += all;
    }
    if (status == CKD_OK && !floats) {
        d->whole.cast = at + all;
        d->whole.now = (float *)(void *)at;
        status = as_floats(d, (float *)(void *)at, v->input, err);
    }
    t->input.device = d;
    t->input.now = d->whole.now;
    t->input.parent_values = d->whole.parent_values;
    return status;
}

lossy_device_scratch lossy_device_scratch_of(const struct lossy_device *d) {
    uint8_t *begin = (uint8_t *)(void *)d->matrix;
    void *parent_values = d->whole.cast ? d->whole.cast : (void *)d->whole.parent_values;
    return (lossy_device_scratch){parent_values, begin, (uint64_t)(d->panel - begin)};
}

ckd_status lossy_device_before_made(struct lossy_device *d, ckd_error *err) {
    return d->whole.cast ? as_floats(d, d->whole.parent_values, d->whole.cast, err) : CKD_OK;
}

void lossy_device_end(struct lossy_device *d) {
    if (d->lease) {
        pthread_mutex_destroy(&d->mutex);
        device_reference_release(d->store, d->reference);
    }
    bytes_free(&d->integers);
    bytes_free(&d->panel_integers);
    bytes_free(&d->exception_list);
    bytes_free(&d->panel_exceptions);
    free(d->blocks);
    *d = (struct lossy_device){.lease = NULL};
}

/* ---- a pass ---- */

static ckd_status put_row_weights(const struct lossy_device *d, float *to, const int32_t *steps,
                                  ckd_error *err) {
    float *weights = malloc(d->rows * sizeof(float));
    if (!weights) {
        return err_nomem(err, d->rows * sizeof(float), "coding scratch");
    }
    for (uint64_t i = 0; i < d->rows; i++) {
        weights[i] = scalar_quarter_octaves(-steps[i]);
    }
    ckd_status status = device_put(d->lease, to, weights, d->rows * sizeof(float), err);
    free(weights);
    return status;
}

static void take_sums(lattice_sums *to, const device_sums *s) {
    *to = (lattice_sums){.now = s->now,
                         .moved = s->moved,
                         .weighted = s->weighted,
                         .largest = s->largest,
                         .smallest = s->smallest,
                         .farthest = s->farthest,
                         .finite = s->finite,
                         .compared = s->compared,
                         .parent_bits = s->parent_bits,
                         .lowest_bit = s->lowest < INFINITY ? ilogbf(s->lowest) : INT32_MAX};
}

static ckd_status sum_rows(tile_pass *p, const lossy_tile *t, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    uint64_t used = 0;
    device_failure why = {DEVICE_DONE, "", ""};
    device_pass pass = {.now = d->whole.now,
                        .parent_values = d->whole.parent_values,
                        .count = d->count,
                        .columns = d->columns,
                        .max = {p->max[0], p->max[1]},
                        .lattice = p->lattice,
                        .magnitudes = p->magnitudes};
    float *weight = lossy_device_take(d, &used, d->columns * sizeof(float)),
          *row_weight = lossy_device_take(d, &used, d->rows * sizeof(float));
    double *rows = lossy_device_take(d, &used, 2 * d->rows * sizeof(double));
    pass.all = lossy_device_take(d, &used, sizeof(device_sums));
    pass.blocks = lossy_device_take(d, &used, device_pass_blocks(d->rows) * sizeof(device_sums));
    ckd_status status = lossy_device_check_scratch(d, used, err);
    if (status == CKD_OK && p->weight) {
        pass.weight = weight;
        pass.row_weight = t->plan.lattice.row ? row_weight : NULL;
        status = device_put(d->lease, weight, p->weight, d->columns * sizeof(float), err);
        status = status == CKD_OK && t->plan.lattice.row
                     ? put_row_weights(d, row_weight, t->plan.lattice.row, err)
                     : status;
    }
    pass.row = p->means ? rows : NULL;
    pass.row_count = p->means ? rows + d->rows : NULL;
    if (status == CKD_OK) {
        d->lease->backend->sums(&d->lease->queue, &pass, &why);
        status = lossy_device_status(d, &why, err);
    }
    device_sums all;
    THEN(status, device_get(d->lease, &all, pass.all, sizeof(all), err));
    if (status == CKD_OK) {
        take_sums(&p->all, &all);
    }
    return status == CKD_OK && p->means
               ? device_get(d->lease, p->row, rows, 2 * d->rows * sizeof(double), err)
               : status;
}

/* Computes each row's level, and the scale of births moved by it. */
static void find_scales(double *scale, tile_pass *p, uint64_t rows) {
    for (uint64_t i = 0; i < rows; i++) {
        scale[i] = p->birth;
        if (p->birth > 0) {
            p->row_level[i] = level_distance(p->row[i], p->row_count[i] * p->birth);
            scale[i] *= exp2((double)p->row_level[i] / 8);
        }
    }
}

static ckd_status sum_columns(tile_pass *p, struct lossy_device *d, ckd_error *err) {
    uint64_t used = 0, panels = panels_of(d->rows), sum_count = panels * d->columns;
    device_failure why = {DEVICE_DONE, "", ""};
    double *scales = lossy_device_take(d, &used, d->rows * sizeof(double));
    device_columns c = {.now = d->whole.now,
                        .row_scale = p->birth > 0 ? scales : NULL,
                        .count = d->count,
                        .columns = d->columns,
                        .panels = panels,
                        .max = p->max[0],
                        .magnitudes = p->magnitudes};
    c.sum = lossy_device_take(d, &used, sum_count * sizeof(double));
    double *scale_sums = lossy_device_take(d, &used, sum_count * sizeof(double));
    c.scales = p->birth > 0 ? scale_sums : NULL;
    c.count_of = lossy_device_take(d, &used, sum_count * sizeof(uint32_t));
    double *host =
        malloc(d->rows * sizeof(double) + 2 * sum_count * sizeof(double) + sum_count * sizeof(uint32_t));
    if (!host) {
        return err_nomem(err, 3 * sum_count * sizeof(double), "sums over a tile");
    }
    double *sum = host + d->rows, *scale = sum + sum_count;
    uint32_t *count = (uint32_t *)(void *)(scale + sum_count);
    find_scales(host, p, d->rows);
    ckd_status status = lossy_device_check_scratch(d, used, err);
    THEN(status, device_put(d->lease, scales, host, d->rows * sizeof(double), err));
    if (status == CKD_OK) {
        d->lease->backend->columns(&d->lease->queue, &c, &why);
        status = lossy_device_status(d, &why, err);
    }
    THEN(status, device_get(d->lease, sum, c.sum, sum_count * sizeof(double), err));
    status = status == CKD_OK ? device_get(d->lease, count, c.count_of, sum_count * sizeof(uint32_t), err)
                              : status;
    status = status == CKD_OK && c.scales
                 ? device_get(d->lease, scale, c.scales, sum_count * sizeof(double), err)
                 : status;
    for (uint64_t i = 0; i < sum_count && status == CKD_OK; i++) {
        p->column[i % d->columns] += sum[i];
        p->column_count[i % d->columns] += count[i];
        if (c.scales) {
            p->column_scales[i % d->columns] += scale[i];
        }
    }
    free(host);
    return status;
}

ckd_status lossy_device_pass(tile_pass *p, const lossy_tile *t, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    ckd_status status = cancel_poll(t->resources.stop, err);
    if (status != CKD_OK) {
        return status;
    }
    uint64_t doubles = p->means ? 2 * d->rows + 2 * d->columns : 0;
    uint64_t size = doubles * sizeof(double) + (p->means ? d->rows + d->columns : 0) * sizeof(int32_t);
    double *at = bytes_scratch(&p->scratches->sums, size + 1, "sums over a tile", err);
    if (!at) {
        return CKD_E_NOMEM;
    }
    memset(at, 0, size);
    p->row = at;
    p->row_count = at + d->rows;
    p->column = p->row_count + d->rows;
    p->column_scales = p->birth > 0 ? p->column + d->columns : NULL;
    p->row_level = (int32_t *)(void *)(at + doubles);
    p->column_count = (uint32_t *)p->row_level + d->rows;
    status = sum_rows(p, t, err);
    return status == CKD_OK && p->means ? sum_columns(p, t->input.device, err) : status;
}

/* ---- residuals ---- */

/* Puts the tile's steps into the scratch from *used on. */
static ckd_status put_steps(device_tile *out, const lossy_tile *t, uint64_t *used, const lattice_work *w,
                            ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    lattice_run run = lattice_row_run(&t->plan.lattice, w, 0);
    float *rows = malloc(d->rows * sizeof(float)),
          *row_step = lossy_device_take(d, used, d->rows * sizeof(float)),
          *column_step = lossy_device_take(d, used, d->columns * sizeof(float));
    if (!rows) {
        return err_nomem(err, d->rows * sizeof(float), "coding scratch");
    }
    for (uint64_t i = 0; i < d->rows; i++) {
        rows[i] = lattice_row_run(&t->plan.lattice, w, i).row_step;
    }
    ckd_status status = device_put(d->lease, row_step, rows, d->rows * sizeof(float), err);
    free(rows);
    if (status == CKD_OK && run.column_step) {
        status = device_put(d->lease, column_step, run.column_step, d->columns * sizeof(float), err);
    }
    *out = (device_tile){.now = d->whole.now,
                         .parent_values = d->whole.parent_values,
                         .values = d->whole.values,
                         .q8 = d->q8,
                         .row_step = row_step,
                         .column_step = run.column_step ? column_step : NULL,
                         .count = d->count,
                         .columns = d->columns,
                         .unit = run.unit,
                         .per_unit = run.per_unit,
                         .low_rank_unit = run.low_rank_unit,
                         .offset = {run.offset[0], run.offset[1], run.offset[2]},
                         .up = {t->plan.up[0], t->plan.up[1], t->plan.up[2]}};
    return status;
}

ckd_status lossy_device_steps(device_tile *out, const lossy_tile *t, uint64_t *used, ckd_error *err) {
    lattice_work w = {.step = {0}};
    ckd_status status = lattice_steps(&t->plan.lattice, &w, err);
    THEN(status, put_steps(out, t, used, &w, err));
    lattice_work_free(&w);
    return status;
}

/*
 * Puts both factors of the plan on the device as integers of one byte. *fit = false: they do not fit, or the
 * device's products need another shape.
 */
static ckd_status put_bytes(bool *fit, device_byte_product *p, const lossy_tile *t, uint64_t used,
                            ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    const lattice_columns *own = &t->plan.lattice.own;
    uint32_t padded = device_bytes_rank(own->rank);
    uint64_t left = d->rows * padded, right = d->columns * padded;
    int8_t *to_left = lossy_device_take(d, &used, left), *to_right = lossy_device_take(d, &used, right);
    *p = (device_byte_product){(int32_t *)(void *)d->matrix, to_left, to_right, d->rows, d->columns, padded};
    *fit = false;
    if (!device_multiplies_bytes(d->columns)) {
        return CKD_OK;
    }
    int8_t *host = malloc(left + right);
    if (!host) {
        return err_nomem(err, left + right, "coding scratch");
    }
    *fit = lattice_factor_bytes(host, t->plan.lattice.factor, d->rows, own->rank, padded, NULL) &&
           lattice_factor_bytes(host + left, own->factor, d->columns, own->rank, padded, own->shift);
    ckd_status status = *fit ? lossy_device_check_scratch(d, used, err) : CKD_OK;
    if (status == CKD_OK && *fit) {
        status = device_put(d->lease, to_left, host, left, err);
        THEN(status, device_put(d->lease, to_right, host + left, right, err));
    }
    free(host);
    return status;
}

/* *done = false: the plan's factors do not suit this product. */
static ckd_status multiply_bytes(bool *done, const lossy_tile *t, uint64_t used, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    device_failure why = {DEVICE_DONE, "", ""};
    device_byte_product p;
    ckd_status status = put_bytes(done, &p, t, used, err);
    if (status != CKD_OK || !*done) {
        return status;
    }
    d->lease->backend->byte_product(&d->lease->queue, done, &p, &why);
    return lossy_device_status(d, &why, err);
}

/* Multiplies integers of any size, as floats. */
static ckd_status multiply_floats(const lossy_tile *t, uint64_t used, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    uint32_t rank = t->plan.lattice.own.rank;
    uint64_t left = d->rows * rank, right = d->columns * rank;
    float *host = malloc((left > right ? left : right) * sizeof(float));
    float *to_left = lossy_device_take(d, &used, left * sizeof(float)),
          *to_right = lossy_device_take(d, &used, right * sizeof(float));
    if (!host) {
        return err_nomem(err, (left + right) * sizeof(float), "coding scratch");
    }
    for (uint64_t i = 0; i < left; i++) {
        host[i] = (float)t->plan.lattice.factor[i];
    }
    ckd_status status = lossy_device_check_scratch(d, used, err);
    THEN(status, device_put(d->lease, to_left, host, left * sizeof(float), err));
    for (uint64_t i = 0; i < right; i++) {
        host[i] = (float)t->plan.lattice.own.factor[i] * (float)(1u << t->plan.lattice.own.shift[i % rank]);
    }
    THEN(status, device_put(d->lease, to_right, host, right * sizeof(float), err));
    free(host);
    if (status != CKD_OK) {
        return status;
    }
    device_failure why = {DEVICE_DONE, "", ""};
    device_product p = {.sums = d->matrix,
                        .left = to_left,
                        .right = to_right,
                        .rows = d->rows,
                        .columns = d->columns,
                        .rank = rank,
                        .right_transposed = true};
    d->lease->backend->product(&d->lease->queue, &p, &why);
    return lossy_device_status(d, &why, err);
}

ckd_status lossy_device_factors(device_tile *tile, const lossy_tile *t, uint64_t used, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    if (!t->plan.lattice.factor) {
        return CKD_OK;
    }
    bool as_integers;
    ckd_status status = multiply_bytes(&as_integers, t, used, err);
    if (status == CKD_OK && !as_integers) {
        status = multiply_floats(t, used, err);
    }
    tile->low_rank = as_integers ? NULL : d->matrix;
    tile->low_whole = as_integers ? (const int32_t *)(const void *)d->matrix : NULL;
    return status;
}

ckd_status lossy_device_residual(rate_histogram *h, const lossy_tile *t, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    uint64_t used = 0;
    device_failure why = {DEVICE_DONE, "", ""};
    device_residuals r = {.per_unit = RATE_IN_ONE, .max = RATE_BINS - 1};
    memset(h, 0, sizeof(*h));
    ckd_status status = cancel_poll(t->resources.stop, err);
    THEN(status, lossy_device_steps(&r.tile, t, &used, err));
    THEN(status, lossy_device_factors(&r.tile, t, used, err));
    r.bin = lossy_device_take(
        d, &used, DEVICE_BINS * sizeof(uint32_t)); /* overwrites the factors, which have been used */
    if (status != CKD_OK) {
        return status;
    }
    if (d->lease->backend->zero(&d->lease->queue, r.bin, DEVICE_BINS * sizeof(uint32_t), &why) ==
        DEVICE_DONE) {
        d->lease->backend->residuals(&d->lease->queue, &r, &why);
    }
    status = lossy_device_status(d, &why, err);
    h->n = d->count;
    return status == CKD_OK ? device_get(d->lease, h->apart[0], r.bin, RATE_BINS * sizeof(uint32_t), err)
                            : status;
}

ckd_status lossy_device_gather(float *to, struct lossy_device *d, const float *from,
                               const device_slice *slices, uint64_t count, ckd_error *err) {
    uint64_t used = 0, elements = count ? (uint64_t)slices[count - 1].to + slices[count - 1].n : 0;
    device_failure why = {DEVICE_DONE, "", ""};
    device_slice *list = lossy_device_take(d, &used, count * sizeof(*list));
    device_gathering g = {.from = from, .slice = list, .slices = count};
    g.to = lossy_device_take(d, &used, elements * sizeof(float));
    ckd_status status = lossy_device_check_scratch(d, used, err);
    THEN(status, device_put(d->lease, list, slices, count * sizeof(*list), err));
    if (status == CKD_OK) {
        d->lease->backend->gather(&d->lease->queue, &g, &why);
        status = lossy_device_status(d, &why, err);
    }
    return status == CKD_OK ? device_get(d->lease, to, g.to, elements * sizeof(float), err) : status;
}

/* ---- a matrix ---- */

ckd_status lossy_device_matrix(const lossy_tile *t, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    uint64_t used = 0;
    device_failure why = {DEVICE_DONE, "", ""};
    device_residuals r = {.to = d->matrix};
    ckd_status status = lossy_device_steps(&r.tile, t, &used, err);
    if (status == CKD_OK) {
        d->lease->backend->residuals(&d->lease->queue, &r, &why);
        status = lossy_device_status(d, &why, err);
    }
    return status;
}
