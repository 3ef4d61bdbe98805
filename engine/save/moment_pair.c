/*
 * The two moments of a parameter in a lossy save: keeps the values of the first one until the second is coded
 * (lossy/moment_pair.c).
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "engine/lossy/lossy.h"
#include "engine/save/lossy.h"

#define PAIR_SLICE (1u << 18) /* elements at a time */
#define FILE_SLICE 4096u      /* elements at a time on their way to a file */
#define PAIR_SHARE 8          /* pairs in memory may take 1/PAIR_SHARE of the staging limit */

/* ---- where values are kept ---- */

static uint64_t values_size(const moment_stats *k) {
    return 2 * k->count * sizeof(uint16_t);
}

static bytes *smallest_buffer(save_tiles *all) {
    bytes *smallest = all->pair_buffers;
    for (size_t i = 1; i < PAIR_BUFFERS; i++) {
        smallest = all->pair_buffers[i].capacity < smallest->capacity ? &all->pair_buffers[i] : smallest;
    }
    return smallest;
}

static bytes *largest_buffer(save_tiles *all) {
    bytes *largest = all->pair_buffers;
    for (size_t i = 1; i < PAIR_BUFFERS; i++) {
        largest = all->pair_buffers[i].capacity > largest->capacity ? &all->pair_buffers[i] : largest;
    }
    return largest;
}

/*
 * Provides space for a moment's values: in memory, using the buffer of a finished pair if there is one; beyond the
 * limit, in a file.
 */
static ckd_status values_begin(ckd_save *save, moment_stats *k, ckd_error *err) {
    save_tiles *all = save->lossy.tiles;
    if (all->pairs_held + values_size(k) > save->coding.staging / PAIR_SHARE) {
        return file_scratch_open(&k->file, save->coding.scratch.text, err);
    }
    bytes *buffer = largest_buffer(all);
    k->values = *buffer;
    *buffer = (bytes){0};
    if (!bytes_scratch(&k->values, values_size(k), "moments", err)) {
        return CKD_E_NOMEM;
    }
    all->pairs_held += values_size(k);
    return CKD_OK;
}

void pair_end(save_tiles *all, moment_stats *k) {
    bytes *buffer = smallest_buffer(all);
    if (k->values_part != LOSSY_NONE && !k->file) {
        all->pairs_held -= values_size(k);
    }
    if (k->values.capacity > buffer->capacity) { /* the larger one stays */
        bytes old = *buffer;
        *buffer = k->values;
        k->values = old;
    }
    bytes_free(&k->values);
    file_scratch_close(k->file);
    k->file = NULL;
    k->values_part = LOSSY_NONE;
}

/* Stores n halves from index `to` on. */
static ckd_status halves_put(const moment_stats *k, uint64_t to, const uint16_t *halves, uint64_t n,
                             ckd_error *err) {
    if (k->file) {
        return file_scratch_write(k->file, to * sizeof(*halves), halves, n * sizeof(*halves), err);
    }
    memcpy((uint16_t *)(void *)k->values.data + to, halves, n * sizeof(*halves));
    return CKD_OK;
}

/* Stores n values at index `at` of the input (or decoded) values. */
static ckd_status values_put(const moment_stats *k, bool decoded, uint64_t at, const float *values,
                             uint64_t n, ckd_error *err) {
    uint16_t halves[FILE_SLICE];
    uint64_t to = (decoded ? k->count : 0) + at;
    if (!k->file) {
        pair_record((uint16_t *)(void *)k->values.data + to, k->values_part, decoded, values, n);
        return CKD_OK;
    }
    ckd_status status = CKD_OK;
    for (uint64_t i = 0; i < n && status == CKD_OK; i += FILE_SLICE) {
        uint64_t length = n - i < FILE_SLICE ? n - i : FILE_SLICE;
        pair_record(halves, k->values_part, decoded, values + i, length);
        status = halves_put(k, to + i, halves, length, err);
    }
    return status;
}

/* ---- tiles ---- */

static uint64_t slices_of(const tile_shape *shape) {
    return (shape->count + PAIR_SLICE - 1) / PAIR_SLICE;
}

static uint64_t slice_count(const tile_shape *shape, uint64_t at) {
    return shape->count - at < PAIR_SLICE ? shape->count - at : PAIR_SLICE;
}

static ckd_status record_slice(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    const inflight_tile *inflight = context;
    const lossy_tile *t = &inflight->tile;
    uint64_t at = index * (uint64_t)PAIR_SLICE;
    return values_put(inflight->second, false, at, t->input.now + at, slice_count(&t->shape, at), err);
}

typedef struct largest_search {
    const lossy_tile *tile;
    double (*largest)[PAIR_BOUNDS]; /* of each slice */
} largest_search;

static ckd_status search_slice(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    const largest_search *s = context;
    const lossy_tile *t = s->tile;
    uint16_t other[FILE_SLICE];
    uint64_t at = index * (uint64_t)PAIR_SLICE, end = at + slice_count(&t->shape, at);
    ckd_status status = CKD_OK;
    for (; at < end && status == CKD_OK; at += FILE_SLICE) {
        uint64_t n = end - at < FILE_SLICE ? end - at : FILE_SLICE;
        status = pair_read(other, &t->context.pair, false, at, n, err);
        if (status == CKD_OK) {
            pair_largest(s->largest[index], t->part, t->input.now + at, other, n, t->context.pair.bounds);
        }
    }
    return status;
}

static ckd_status find_largest(lossy_tile *t, ckd_error *err) {
    uint64_t slices = slices_of(&t->shape);
    largest_search s = {t, calloc(slices + 1, sizeof(*s.largest))};
    ckd_status status = s.largest ? tile_run_panels(t, slices, search_slice, &s, err)
                                  : err_nomem(err, slices * sizeof(*s.largest), "coding scratch");
    for (size_t b = 0; b < PAIR_BOUNDS && status == CKD_OK; b++) {
        pair_bound *bound = &t->context.pair.bounds[b];
        double largest = 0;
        for (uint64_t i = 0; i < slices; i++) {
            largest = fmax(largest, s.largest[i][b]);
        }
        pair_set_bound(bound, largest);
    }
    free(s.largest);
    return status;
}

/* ---- tiles on a device ---- */

/* Copies halves of a tile on a device: its own to their place on the host, or the other moment's to the device. */
static ckd_status copy_halves(const lossy_tile *t, const moment_stats *k, bool to_device, ckd_error *err) {
    ckd_status status = CKD_OK;
    uint64_t all = 2 * k->count;
    uint16_t *slice = malloc(PAIR_SLICE * sizeof(*slice));
    if (!slice) {
        return err_nomem(err, PAIR_SLICE * sizeof(*slice), "coding scratch");
    }
    for (uint64_t at = 0; at < all && status == CKD_OK; at += PAIR_SLICE) {
        uint64_t n = all - at < PAIR_SLICE ? all - at : PAIR_SLICE;
        if (to_device) {
            status = pair_read(slice, &t->context.pair, false, at, n, err);
            THEN(status, lossy_device_put_halves(t->input.device, slice, at, n, err));
        } else {
            status = lossy_device_get_halves(slice, t->input.device, at, n, err);
            THEN(status, halves_put(k, at, slice, n, err));
        }
    }
    free(slice);
    return status;
}

static ckd_status record_on_device(const lossy_tile *t, const moment_stats *k, ckd_error *err) {
    ckd_status status = lossy_device_halves(t, err);
    return status == CKD_OK ? copy_halves(t, k, false, err) : status;
}

static ckd_status check_on_device(bool *within, lossy_tile *t, const moment_stats *k, ckd_error *err) {
    ckd_status status = copy_halves(t, k, true, err);
    return status == CKD_OK ? lossy_device_updates(within, t, err) : status;
}

/* ---- both moments ---- */

static ckd_status begin_pair(ckd_save *save, inflight_tile *inflight, ckd_error *err) {
    moment_stats *k = inflight->second;
    const lossy_tile *t = &inflight->tile;
    ckd_status status = values_begin(save, k, err);
    if (status == CKD_OK) {
        k->values_part = t->part;
        status = t->input.device ? record_on_device(t, k, err)
                                 : tile_run_panels(t, slices_of(&t->shape), record_slice, inflight, err);
    }
    if (status != CKD_OK) {
        pair_end(save->lossy.tiles, k);
    }
    return status;
}

static ckd_status end_pair(bool *within, ckd_save *save, inflight_tile *inflight,
                           const double eps[PAIR_BOUNDS], ckd_error *err) {
    const moment_stats *k = inflight->second;
    lossy_tile *t = &inflight->tile;
    ckd_status status = save_await(save, k->end, err);
    t->context.pair = (lossy_pair){.values = k->file ? NULL : (const uint16_t *)(const void *)k->values.data,
                                   .file = k->file,
                                   .count = k->count,
                                   .bounds = {{.eps = eps[PAIR_EPS]}, {.eps = eps[PAIR_LOW_EPS]}}};
    THEN(status, t->input.device ? check_on_device(within, t, k, err) : find_largest(t, err));
    return status;
}

ckd_status pair_tile(bool *within, ckd_save *save, inflight_tile *inflight, const double eps[PAIR_BOUNDS],
                     ckd_error *err) {
    moment_stats *k = inflight->second;
    const lossy_tile *t = &inflight->tile;
    *within = true;
    if (!k || t->part == LOSSY_WEIGHT) {
        return CKD_OK;
    }
    if (k->values_part == t->part) { /* another tensor claims to be the same moment of this weight */
        inflight->second = NULL;
        return CKD_OK;
    }
    return k->values_part == LOSSY_NONE ? begin_pair(save, inflight, err)
                                        : end_pair(within, save, inflight, eps, err);
}

/* ---- blocks ---- */

static bool is_first_of_pair(const inflight_tile *inflight, const lossy_tile *t) {
    return inflight->second && inflight->second->values_part == t->part;
}

static ckd_status record_decoded(const inflight_tile *inflight, const lossy_tile *t, uint64_t at,
                                 uint64_t count, const float *decoded, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint64_t i = 0, length; i < count && status == CKD_OK; i += length) {
        length = pair_in_row(&t->context.pair, at + i, count - i);
        status = values_put(inflight->second, true, pair_index(&t->context.pair, at + i), decoded + i, length,
                            err);
    }
    return status;
}

ckd_status pair_record_block(const inflight_tile *inflight, const lossy_tile *t, const block_job *job,
                             ckd_error *err) {
    uint64_t at = job->input.first - t->shape.first;
    bool recorded = t->input.device && job->output.lossy; /* with all of the tile */
    if (!is_first_of_pair(inflight, t) || recorded) {
        return CKD_OK;
    }
    /* The analysis copies the values of other device blocks to the host. */
    const float *decoded =
        job->output.lossy || t->input.device ? job->scratch.lossy.decoded : t->input.now + at;
    return record_decoded(inflight, t, at, job->input.count, decoded, err);
}

ckd_status pair_exact(double *update, ckd_save *save, inflight_tile *inflight, const double eps[PAIR_BOUNDS],
                      ckd_error *err) {
    lossy_tile *t = &inflight->tile;
    lossy_job job = {.update = NAN};
    bool within;
    ckd_status status = t->input.now ? pair_tile(&within, save, inflight, eps, err) : CKD_OK;
    if (status == CKD_OK && pair_known(&t->context.pair)) {
        status = pair_measure(&job, t, 0, t->input.now, t->shape.count, err);
    } else if (status == CKD_OK && t->input.now && is_first_of_pair(inflight, t)) {
        status = record_decoded(inflight, t, 0, t->shape.count, t->input.now, err);
    }
    *update = job.update;
    lossy_job_free(&job);
    return status;
}
