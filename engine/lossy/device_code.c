/* Codes all blocks of a tile on a device at once. The host then encodes them block by block. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "engine/lossy/internal.h"
#include "kernels/scalar_lattice.h"

/* ---- integers and values ---- */

/* Returns the smallest magnitude that integers do not reach. */
static float out_of_reach(const lossy_tile *t) {
    return t->part == LOSSY_SECOND ? INFINITY : ldexpf(1, t->plan.lattice.exponent + 29);
}

static bool may_have_exceptions(const lossy_tile *t) {
    return !(t->limits.ordinary && t->limits.largest < out_of_reach(t));
}

/*
 * Tells whether the device can code all blocks by the tile's plan. Outliers among second moments count for their rows
 * and columns, but a device's sums leave them out.
 */
static bool is_planned(const lossy_tile *t) {
    bool complete = t->part == LOSSY_SECOND ? !may_have_exceptions(t)
                                            : t->plan.offsets_known && t->plan.lattice.step <= 400;
    return complete && (t->part != LOSSY_WEIGHT || t->input.parent_values);
}

/* Returns an empty list of exceptions with the tile's limits. */
static device_exceptions exceptions_of(const lossy_tile *t, device_failure *why) {
    const struct lossy_device *d = t->input.device;
    device_exceptions exceptions = d->exceptions;
    exceptions.above = t->limits.exception_above;
    exceptions.moved = t->limits.exception_moved;
    exceptions.max = out_of_reach(t);
    d->lease->backend->zero(&d->lease->queue, exceptions.count, sizeof(uint64_t), why);
    return exceptions;
}

/* Fetches the number of exceptions. *fit = false: the list has no room for them. */
static ckd_status count_exceptions(bool *fit, struct lossy_device *d, ckd_error *err) {
    ckd_status status =
        device_get(d->lease, &d->whole.exception_count, d->exceptions.count, sizeof(uint64_t), err);
    *fit = d->whole.exception_count <= d->exceptions.capacity;
    return status;
}

/* Puts the levels of rows and columns into the scratch. */
static ckd_status put_levels(device_levels *out, const lossy_tile *t, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    uint64_t used = 0;
    int32_t *row = lossy_device_take(d, &used, d->rows * sizeof(int32_t)),
            *column = lossy_device_take(d, &used, d->columns * sizeof(int32_t));
    ckd_status status = lossy_device_check_scratch(d, used, err);
    if (t->plan.lattice.row && status == CKD_OK) {
        status = device_put(d->lease, row, t->plan.lattice.row, d->rows * sizeof(int32_t), err);
    }
    if (t->plan.lattice.own.step && status == CKD_OK) {
        status = device_put(d->lease, column, t->plan.lattice.own.step, d->columns * sizeof(int32_t), err);
    }
    *out = (device_levels){.now = d->whole.now,
                           .values = d->whole.values,
                           .q8 = t->plan.levels_known ? NULL : d->q8,
                           .row = t->plan.lattice.row ? row : NULL,
                           .column = t->plan.lattice.own.step ? column : NULL,
                           .count = d->count,
                           .columns = d->columns,
                           .birth = t->plan.lattice.birth,
                           .step = t->plan.lattice.step,
                           .up = LOSSY_LEVEL_UP};
    return status;
}

static ckd_status fetch_integers(struct lossy_device *d, ckd_error *err) {
    uint64_t used = 0, words = (d->count + 15) / 16, capacity = d->count / 16, wide_count = 0;
    device_failure why = {DEVICE_DONE, "", ""};
    device_packing p = {.q8 = d->q8, .count = d->count, .capacity = (uint32_t)capacity};
    p.words = lossy_device_take(d, &used, words * sizeof(uint32_t));
    p.wide = lossy_device_take(d, &used, capacity * sizeof(*p.wide));
    p.wide_count = lossy_device_take(d, &used, sizeof(uint64_t));
    int8_t *integers = bytes_scratch(&d->integers, d->count, "coding scratch", err);
    uint32_t *packed = integers ? malloc(words * sizeof(uint32_t) + capacity * sizeof(*p.wide)) : NULL;
    if (!packed) {
        return integers ? err_nomem(err, words * sizeof(uint32_t), "coding scratch") : CKD_E_NOMEM;
    }
    device_element_at *wide = (device_element_at *)(void *)(packed + words);
    ckd_status status = lossy_device_check_scratch(d, used, err);
    if (status == CKD_OK &&
        d->lease->backend->zero(&d->lease->queue, p.wide_count, sizeof(uint64_t), &why) == DEVICE_DONE) {
        d->lease->backend->pack(&d->lease->queue, &p, &why);
    }
    THEN(status, lossy_device_status(d, &why, err));
    THEN(status, device_get(d->lease, &wide_count, p.wide_count, sizeof(wide_count), err));
    if (status == CKD_OK && wide_count > capacity) {
        status = device_get(d->lease, integers, d->q8, d->count, err);
    } else if (status == CKD_OK) {
        status = device_get(d->lease, packed, p.words, words * sizeof(uint32_t), err);
        status =
            status == CKD_OK ? device_get(d->lease, wide, p.wide, wide_count * sizeof(*wide), err) : status;
        static const int8_t meaning[4] = {0, 1, -1, 0};
        for (uint64_t i = 0; i < d->count && status == CKD_OK; i++) {
            integers[i] = meaning[packed[i / 16] >> 2 * (i % 16) & 3];
        }
        for (uint64_t i = 0; i < wide_count && status == CKD_OK; i++) {
            integers[wide[i].at] = (int8_t)wide[i].q;
        }
    }
    free(packed);
    return status;
}

static ckd_status zero_integers(struct lossy_device *d, ckd_error *err) {
    int8_t *integers = bytes_scratch(&d->integers, d->count, "coding scratch", err);
    if (integers) {
        memset(integers, 0, d->count);
    }
    return integers ? CKD_OK : CKD_E_NOMEM;
}

/* *fit = false: there are too many exceptions. */
static ckd_status make_integers(bool *fit, const lossy_tile *t, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    uint64_t used = 0;
    device_failure why = {DEVICE_DONE, "", ""};
    device_tile tile;
    bool still = !(t->plan.up[0] < INFINITY);
    ckd_status status = lossy_device_steps(&tile, t, &used, err);
    THEN(status, lossy_device_factors(&tile, t, used, err));
    tile.sums = lossy_device_take(d, &used, sizeof(*tile.sums));
    if (status != CKD_OK) {
        return status;
    }
    tile.exceptions = exceptions_of(t, &why);
    if ((!still || may_have_exceptions(t)) && why.result == DEVICE_DONE &&
        d->lease->backend->zero(&d->lease->queue, tile.sums, sizeof(*tile.sums), &why) == DEVICE_DONE) {
        d->lease->backend->quantise(&d->lease->queue, &tile, &why);
    }
    tile.q8 = still ? NULL : d->q8;
    if (why.result == DEVICE_DONE) {
        d->lease->backend->move(&d->lease->queue, &tile, &why);
    }
    status = lossy_device_status(d, &why, err);
    THEN(status, count_exceptions(fit, t->input.device, err));
    if (status != CKD_OK || !*fit) {
        return status;
    }
    return still ? zero_integers(t->input.device, err) : fetch_integers(t->input.device, err);
}

/* Makes second moments, and their integers unless rows and columns determine all of them. */
static ckd_status make_levels(bool *fit, const lossy_tile *t, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    device_failure why = {DEVICE_DONE, "", ""};
    device_levels levels;
    ckd_status status = put_levels(&levels, t, err);
    if (status != CKD_OK) {
        return status;
    }
    levels.exceptions = exceptions_of(t, &why);
    if (levels.q8 && why.result == DEVICE_DONE) {
        d->lease->backend->quantise_levels(&d->lease->queue, &levels, &why);
    }
    if (why.result == DEVICE_DONE) {
        d->lease->backend->move_levels(&d->lease->queue, &levels, &why);
    }
    status = lossy_device_status(d, &why, err);
    THEN(status, count_exceptions(fit, t->input.device, err));
    return status == CKD_OK && *fit && levels.q8 ? fetch_integers(t->input.device, err) : status;
}

/* Rounds the values to the dtype, as a decoder does, and widens them again. */
static ckd_status finish_values(const struct lossy_device *d, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    device_elements narrow = {DEVICE_CAST, CKD_F32, d->dtype, NULL},
                    wide = {DEVICE_WIDEN, d->dtype, CKD_DTYPE_NONE, NULL};
    device_span to_dtype = {.to = d->whole.cast, .from = d->whole.values, .n = d->count},
                to_floats = {.to = d->whole.values, .from = d->whole.cast, .n = d->count};
    bool supported;
    if (d->whole.cast && d->lease->backend->elements(&d->lease->queue, &supported, &narrow, &to_dtype, 1,
                                                     &why) == DEVICE_DONE) {
        d->lease->backend->elements(&d->lease->queue, &supported, &wide, &to_floats, 1, &why);
    }
    return lossy_device_status(d, &why, err);
}

/* ---- exceptions ---- */

static int by_place(const void *a, const void *b) {
    const device_element_at *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

/* Writes the exceptions into the host's list and into the decoded values, which are then final. */
static ckd_status keep_elements(struct lossy_device *d, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    uint64_t count = d->whole.exception_count;
    device_exception_copy floats = {d->exceptions.list, count, d->whole.values, d->whole.now, sizeof(float)},
                          typed = {d->exceptions.list, count, d->whole.cast, d->whole.input,
                                   (uint32_t)ckd_dtype_size(d->dtype)};
    device_element_at *list =
        bytes_scratch(&d->exception_list, count * sizeof(*list) + 1, "coding scratch", err);
    d->whole.exceptions = list;
    if (!list || count == 0) {
        return list ? CKD_OK : CKD_E_NOMEM;
    }
    if (d->lease->backend->keep(&d->lease->queue, &floats, &why) == DEVICE_DONE && d->whole.cast) {
        d->lease->backend->keep(&d->lease->queue, &typed, &why);
    }
    ckd_status status = lossy_device_status(d, &why, err);
    THEN(status, device_get(d->lease, list, d->exceptions.list, count * sizeof(*list), err));
    if (status == CKD_OK) {
        qsort(list, count, sizeof(*list), by_place);
    }
    return status;
}

/* Selects the exceptions of a panel, with their places in it. */
static ckd_status exceptions_in_panel(struct lossy_device *d, uint64_t first, uint64_t width,
                                      ckd_error *err) {
    const lossy_device_arrays *all = &d->whole;
    device_element_at *list =
        bytes_scratch(&d->panel_exceptions, all->exception_count * sizeof(*list) + 1, "coding scratch", err);
    d->at.exceptions = list;
    for (uint64_t i = 0; i < all->exception_count && list; i++) {
        uint64_t row = all->exceptions[i].at / d->columns, column = all->exceptions[i].at % d->columns;
        if (column >= first && column < first + width) {
            list[d->at.exception_count++] =
                (device_element_at){(uint32_t)(row * width + column - first), all->exceptions[i].q};
        }
    }
    return list ? CKD_OK : CKD_E_NOMEM;
}

/* Sets the block's exceptions to those of the tile that lie in it. Errors: NOMEM. */
static ckd_status exceptions_in_block(lossy_job *j, const lossy_device_arrays *a, uint64_t at, uint64_t count,
                                      ckd_error *err) {
    uint64_t low = 0, high = a->exception_count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (a->exceptions[middle].at < at) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    lossy_no_exceptions(j);
    for (uint64_t i = low; i < a->exception_count && a->exceptions[i].at < at + count; i++) {
        lossy_add_exception(j, (uint32_t)(a->exceptions[i].at - at), (uint32_t)a->exceptions[i].q);
    }
    return lossy_exceptions_done(j, err);
}

/* ---- panels ---- */

typedef struct panel_scratch {
    const struct lossy_device *d;
    uint64_t first, width, used;
    device_failure why;
} panel_scratch;

/* Gathers some columns of an array of the tile; returns NULL for NULL. */
static void *gather_columns(panel_scratch *p, const void *from, size_t size) {
    const struct lossy_device *d = p->d;
    if (!from) {
        return NULL;
    }
    void *to = d->panel + p->used;
    p->used += lossy_device_aligned(d->rows * p->width * size);
    if (p->why.result == DEVICE_DONE) {
        d->lease->backend->copy_rows(&d->lease->queue,
                                     &(device_rows){to, (const uint8_t *)from + p->first * size,
                                                    p->width * size, d->columns * size, d->rows,
                                                    DEVICE_ON_DEVICE, 0},
                                     &p->why);
    }
    return to;
}

ckd_status lossy_device_panel(lossy_tile *t, uint64_t first, ckd_error *err) {
    struct lossy_device *d = t->input.device;
    size_t size = ckd_dtype_size(d->dtype);
    panel_scratch p = {d, first, t->shape.columns, 0, {DEVICE_DONE, "", ""}};
    lossy_device_arrays *to = &d->at;
    *to = (lossy_device_arrays){.count = t->shape.count};
    to->input = gather_columns(&p, d->whole.input, size);
    to->parent_values = gather_columns(&p, d->whole.parent_values, sizeof(float));
    to->values = gather_columns(&p, d->whole.values, sizeof(float));
    to->cast = gather_columns(&p, d->whole.cast, size);
    to->now = d->whole.cast ? gather_columns(&p, d->whole.now, sizeof(float)) : to->input;
    t->input.now = to->now;
    t->input.parent_values = to->parent_values;
    int8_t *integers =
        d->whole.integers ? bytes_scratch(&d->panel_integers, t->shape.count, "coding scratch", err) : NULL;
    if (d->whole.integers && !integers) {
        return CKD_E_NOMEM;
    }
    for (uint64_t row = 0; integers && row < d->rows; row++) {
        memcpy(integers + row * t->shape.columns, d->whole.integers + row * d->columns + first,
               t->shape.columns);
    }
    to->integers = integers;
    ckd_status status =
        d->whole.exception_count ? exceptions_in_panel(d, first, t->shape.columns, err) : CKD_OK;
    return status == CKD_OK ? lossy_device_status(d, &p.why, err) : status;
}

ckd_status lossy_device_code(bool *done, lossy_tile *t, ckd_error *err) {
    struct lossy_device *d = t->input.device;
    *done = is_planned(t);
    ckd_status status = cancel_poll(t->resources.stop, err);
    if (status == CKD_OK && *done) {
        status = t->part == LOSSY_SECOND ? make_levels(done, t, err) : make_integers(done, t, err);
    }
    if (status != CKD_OK || !*done) {
        return status;
    }
    d->whole.integers = t->plan.levels_known ? NULL : (const int8_t *)d->integers.data;
    status = finish_values(d, err);
    THEN(status, keep_elements(d, err));
    d->at = d->whole;
    return status;
}

/* Sets q to the block's integers, for second moments. */
static ckd_status levels_of(lossy_job *j, const int8_t *integers, uint64_t count, ckd_error *err) {
    int32_t *q = bytes_scratch(&j->q, count * sizeof(int32_t), "coding scratch", err);
    for (uint64_t i = 0; q && i < count; i++) {
        q[i] = integers[i] == DEVICE_LEVEL_ZERO ? LEVEL_ZERO : integers[i];
    }
    j->block.q = q;
    return q ? CKD_OK : CKD_E_NOMEM;
}

ckd_status lossy_device_block_encode(lossy_job *j, bytes *payload, const lossy_elements *e,
                                     symbols_workspace *work, ckd_error *err) {
    const lossy_tile *t = e->tile;
    const struct lossy_device *d = t->input.device;
    const lossy_device_block *b = lossy_device_block_of(t->input.device, e->at);
    const int8_t *integers = b->nonzero ? d->at.integers + e->at : NULL;
    ckd_status status = CKD_OK;
    j->block = lossy_block_of(t, e->at, e->count);
    if (t->part == LOSSY_SECOND && integers) {
        status = levels_of(j, integers, e->count, err);
    } else {
        j->block.q8 = integers;
    }
    j->error = b->error;
    j->decoded = NULL;
    j->update = pair_known(&t->context.pair) ? t->context.pair.decoded : (double)NAN;
    lossy_check_bound(j, &t->limits);
    bytes_clear(payload);
    THEN(status, exceptions_in_block(j, &d->at, e->at, e->count, err));
    return status == CKD_OK ? lattice_encode(payload, &j->block, LATTICE_FAST, &j->work.scratch, work, err)
                            : status;
}

ckd_status lossy_device_fetch(void *to, struct lossy_device *d, uint64_t at, uint64_t count, bool decoded,
                              ckd_error *err) {
    size_t size = ckd_dtype_size(d->dtype);
    const lossy_device_arrays *a = &d->at;
    const uint8_t *from = decoded ? (a->cast ? a->cast : (const void *)a->values) : a->input;
    pthread_mutex_lock(&d->mutex);
    ckd_status status = device_get(d->lease, to, from + at * size, count * size, err);
    pthread_mutex_unlock(&d->mutex);
    return status;
}

ckd_status lossy_device_direction(direction_sums *sums, direction_sample *s, const lossy_tile *t, double eps,
                                  ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    uint64_t from = (t->input.sampled + s->stride - 1) / s->stride,
             end = (t->input.sampled + t->shape.count + s->stride - 1) / s->stride, n = end - from;
    device_slice *slices = malloc((n + 1) * (sizeof(*slices) + 2 * sizeof(float)));
    if (!slices) {
        return err_nomem(err, n * sizeof(*slices), "a sample of second moments");
    }
    float *input = (float *)(void *)(slices + n), *decoded = input + n;
    for (uint64_t i = 0; i < n; i++) {
        slices[i] = (device_slice){(from + i) * s->stride - t->input.sampled, (uint32_t)i, 1};
    }
    ckd_status status = lossy_device_gather(input, t->input.device, d->at.now, slices, n, err);
    THEN(status, lossy_device_gather(decoded, t->input.device, d->at.values, slices, n, err));
    if (status == CKD_OK) {
        direction_values v = {input, decoded, from, n};
        direction_take(sums, s, &v, eps);
    }
    free(slices);
    return status;
}
