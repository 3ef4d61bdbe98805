/*
 * Estimates the range and the steps of a tile on slices of its rows, which saves passes over the tile. The sums of all
 * elements show later whether the range holds; if not, it is found on all of them.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "engine/lossy/internal.h"
#include "kernels/scalar_lattice.h"

#define SAMPLE_ELEMENTS (1u << 16) /* approximate sample of a large tile */
#define OUTLIER         32.0       /* in RMS */
#define OUTLIER_OF_ALL  40.0       /* in RMS, for limits that come from a sample */

/* Picks one of `stride` slices. The choice shifts from round to round, so that it covers all columns. */
static bool next_slice(tile_slice *out, tile_sample *s) {
    uint64_t rows = tile_rows(&s->tile->shape);
    while (s->row < rows) {
        uint64_t first, column, n = tile_row_span(&s->tile->shape, s->row, &first, &column);
        while (s->at < n) {
            uint64_t at = s->at;
            bool chosen = s->in_round == s->round;
            s->at += SAMPLE_SLICE;
            if (++s->in_round == s->stride) {
                s->in_round = 0;
                s->round = s->round + 1 < s->stride ? s->round + 1 : 0;
            }
            if (chosen) {
                *out = (tile_slice){.first = first + at,
                                    .row = s->row,
                                    .column = column + at,
                                    .n = n - at < SAMPLE_SLICE ? n - at : SAMPLE_SLICE};
                return true;
            }
        }
        s->at = 0;
        s->row++;
    }
    return false;
}

bool sample_next(tile_slice *out, tile_sample *s) {
    if (!next_slice(out, s)) {
        return false;
    }
    const lossy_tile *t = s->tile;
    out->now = s->now ? s->now + s->next : t->input.now + out->first;
    out->parent_values = !t->input.parent_values ? NULL
                         : s->parent_values      ? s->parent_values + s->next
                                                 : t->input.parent_values + out->first;
    s->next += out->n;
    return true;
}

/* Copies all slices from the device at once. */
static ckd_status gather(tile_sample *s, ckd_error *err) {
    const lossy_tile *t = s->tile;
    tile_sample walk = *s;
    bytes list = {0};
    uint64_t elements = 0;
    for (tile_slice p; next_slice(&p, &walk);) {
        device_slice slice = {p.first, (uint32_t)elements, (uint32_t)p.n};
        bytes_put(&list, &slice, sizeof(slice));
        elements += p.n;
    }
    s->now = malloc((elements + 1) * sizeof(float));
    s->parent_values = t->input.parent_values ? malloc((elements + 1) * sizeof(float)) : NULL;
    if (list.failed || !s->now || (t->input.parent_values && !s->parent_values)) {
        bytes_free(&list);
        return err_nomem(err, elements * sizeof(float), "coding scratch");
    }
    const device_slice *slices = (const device_slice *)(const void *)list.data;
    uint64_t count = list.size / sizeof(*slices);
    ckd_status status = lossy_device_gather(s->now, t->input.device, t->input.now, slices, count, err);
    if (status == CKD_OK && t->input.parent_values) {
        status = lossy_device_gather(s->parent_values, t->input.device, t->input.parent_values, slices, count,
                                     err);
    }
    bytes_free(&list);
    return status;
}

ckd_status sample_begin(tile_sample *s, const lossy_tile *t, uint64_t elements, ckd_error *err) {
    *s = (tile_sample){.tile = t, .stride = t->shape.count / elements + 1};
    return t->input.device ? gather(s, err) : CKD_OK;
}

void sample_end(tile_sample *s) {
    free(s->now);
    free(s->parent_values);
    s->now = s->parent_values = NULL;
}

/* ---- typical ranges ---- */

/*
 * Takes one step of the search for a limit. Returns false if the search is over. energy, n: of the values within the
 * current limit.
 */
static bool next_limit(float *limit, float largest, double energy, uint64_t n) {
    double next = n > 0 ? OUTLIER * sqrt(energy / (double)n) : 0;
    *limit = next < FLT_MAX ? (float)next : FLT_MAX;
    return next > 0 && next < FLT_MAX && (double)largest > next;
}

static float typical_limit(const float *values, uint64_t n, const kernels *k) {
    float limit = FLT_MAX, next;
    uint64_t trimmed = 0;
    lattice_sums all = LATTICE_SUMS_INIT, s;
    k->sums_of(&all, &(sums_run){values, NULL, NULL, 1, (float[2]){FLT_MAX, FLT_MAX}, false}, n);
    s = all;
    while (next_limit(&next, all.largest, s.now, s.finite)) {
        s = (lattice_sums)LATTICE_SUMS_INIT;
        k->sums_of(&s, &(sums_run){values, NULL, NULL, 1, (float[2]){next, FLT_MAX}, false}, n);
        uint64_t far = all.finite - s.finite;
        if (far <= trimmed || far > max_outliers(n)) {
            break;
        }
        limit = next;
        trimmed = far;
    }
    return limit;
}

ckd_status sample_typical_range(lossy_tile *t, double *mean, const kernels *k, ckd_error *err) {
    bool moves = t->input.parent_values && t->part == LOSSY_WEIGHT;
    tile_scratches own = {.workers = NULL},
                   *scratches = t->resources.scratches ? t->resources.scratches : &own;
    bytes *now = &scratches->now, *moved = &scratches->moved;
    tile_sample s;
    bytes_clear(now);
    bytes_clear(moved);
    ckd_status status = sample_begin(&s, t, SAMPLE_ELEMENTS, err);
    for (tile_slice p; status == CKD_OK && sample_next(&p, &s);) {
        bytes_put(now, p.now, p.n * sizeof(float));
        float *to = moves ? (float *)(void *)bytes_extend(moved, p.n * sizeof(float)) : NULL;
        for (uint64_t i = 0; to && i < p.n; i++) {
            to[i] = p.now[i] - p.parent_values[i];
        }
    }
    sample_end(&s);
    if (status == CKD_OK && (now->failed || moved->failed)) {
        status = err_nomem(err, now->size, "coding scratch");
        bytes_free(now); /* clears the sticky failure */
        bytes_free(moved);
    }
    if (status == CKD_OK) {
        const float *values = (const float *)(const void *)now->data;
        uint64_t n = now->size / sizeof(float);
        double sums[2] = {0, 0};
        t->limits.exception_above = typical_limit(values, n, k);
        t->limits.exception_moved =
            moves ? typical_limit((const float *)(const void *)moved->data, n, k) : FLT_MAX;
        k->moment_row(sums, values, false, t->limits.exception_above, n);
        *mean = sums[1] > 0 ? sums[0] / sums[1] : 0;
    }
    tile_scratches_free(&own);
    return status;
}

static bool limit_holds(float limit, float largest, double energy, uint64_t n, uint64_t count) {
    bool few_outliers = limit >= FLT_MAX || count - n <= max_outliers(count);
    return few_outliers && !((double)largest > OUTLIER_OF_ALL * sqrt(n ? energy / (double)n : 0));
}

bool typical_range_holds(const lossy_tile *t, const lattice_sums *s) {
    bool moves = t->input.parent_values && t->part == LOSSY_WEIGHT;
    return limit_holds(t->limits.exception_above, s->largest, s->now, s->finite, t->shape.count) &&
           (!moves ||
            limit_holds(t->limits.exception_moved, s->farthest, s->moved, s->compared, t->shape.count));
}

static ckd_status typical_limit_of_tile(float *limit, const lossy_tile *t, const lattice_sums *all,
                                        bool difference, const kernels *k, ckd_error *err) {
    uint64_t trimmed = 0;
    lattice_sums s = *all;
    float next, largest = difference ? all->farthest : all->largest;
    *limit = FLT_MAX;
    while (next_limit(&next, largest, difference ? s.moved : s.now, difference ? s.compared : s.finite)) {
        tile_pass p = {.max = {difference ? FLT_MAX : next, difference ? next : FLT_MAX}};
        ckd_status status = tile_pass_run(&p, t, k, err);
        s = p.all;
        tile_pass_free(&p);
        uint64_t far = difference ? all->compared - s.compared : all->finite - s.finite;
        if (status != CKD_OK || far <= trimmed || far > max_outliers(t->shape.count)) {
            return status;
        }
        *limit = next;
        trimmed = far;
    }
    return CKD_OK;
}

ckd_status find_typical_range(lossy_tile *t, const kernels *k, ckd_error *err) {
    tile_pass all = {.max = {FLT_MAX, FLT_MAX}};
    ckd_status status = tile_pass_run(&all, t, k, err);
    THEN(status, typical_limit_of_tile(&t->limits.exception_above, t, &all.all, false, k, err));
    if (status == CKD_OK && t->input.parent_values && t->part == LOSSY_WEIGHT) {
        status = typical_limit_of_tile(&t->limits.exception_moved, t, &all.all, true, k, err);
    }
    tile_pass_free(&all);
    return status;
}

/* ---- steps ---- */

ckd_status sample_weighted(double *out, const lossy_tile *t, const float *weight, const kernels *k,
                           ckd_error *err) {
    const float max[2] = {t->limits.exception_above, t->limits.exception_moved};
    lattice_sums sums = LATTICE_SUMS_INIT;
    tile_sample s;
    ckd_status status = sample_begin(&s, t, 2 * SAMPLE_ELEMENTS, err);
    for (tile_slice p; status == CKD_OK && sample_next(&p, &s);) {
        k->sums_of(&sums,
                   &(sums_run){p.now, NULL, weight + p.column,
                               scalar_quarter_octaves(-t->plan.lattice.row[p.row]), max, false},
                   p.n);
    }
    sample_end(&s);
    *out = sums.compared ? sqrt(sums.weighted / (double)sums.compared) : 0;
    return status;
}
