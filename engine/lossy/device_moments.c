/*
 * The two moments of a parameter, while one of them is on a device (lossy.h). Halves of a tile's values lie
 * in the matrix's memory, which is free once the tile is coded: those of the input, then those of the decoded values.
 */
#include "engine/lossy/internal.h"

static uint16_t *halves_of(const struct lossy_device *d) {
    return (uint16_t *)(void *)d->matrix;
}

ckd_status lossy_device_halves(const lossy_tile *t, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    device_failure why = {DEVICE_DONE, "", ""};
    device_halves input = {.to = halves_of(d),
                           .from = d->whole.now,
                           .count = d->count,
                           .second = t->part == LOSSY_SECOND},
                  decoded = input;
    decoded.to += d->count;
    decoded.from = d->whole.values;
    decoded.decoded = true;
    if (d->lease->backend->halves(&d->lease->queue, &input, &why) == DEVICE_DONE) {
        d->lease->backend->halves(&d->lease->queue, &decoded, &why);
    }
    return lossy_device_status(d, &why, err);
}

ckd_status lossy_device_get_halves(uint16_t *to, struct lossy_device *d, uint64_t at, uint64_t n,
                                   ckd_error *err) {
    return device_get(d->lease, to, halves_of(d) + at, n * sizeof(*to), err);
}

ckd_status lossy_device_put_halves(struct lossy_device *d, const uint16_t *from, uint64_t at, uint64_t n,
                                   ckd_error *err) {
    return device_put(d->lease, halves_of(d) + at, from, n * sizeof(*from), err);
}

_Static_assert(PAIR_BOUNDS == DEVICE_UPDATE_BOUNDS, "a kernel fills found_updates.largest");

typedef struct found_updates {
    double largest[PAIR_BOUNDS];
    uint64_t above;
} found_updates;

/* Finds the updates of both moments' decoded values, or of their input. */
static ckd_status find_updates(found_updates *out, const lossy_tile *t, bool decoded, ckd_error *err) {
    const struct lossy_device *d = t->input.device;
    const pair_bound *bounds = t->context.pair.bounds;
    uint64_t used = 0;
    device_failure why = {DEVICE_DONE, "", ""};
    found_updates *found = lossy_device_take(d, &used, sizeof(*found));
    device_updates u = {.values = decoded ? d->whole.values : d->whole.now,
                        .other = halves_of(d) + (decoded ? d->count : 0),
                        .count = d->count,
                        .second = t->part == LOSSY_SECOND,
                        .largest = found->largest,
                        .above = &found->above};
    for (size_t b = 0; b < PAIR_BOUNDS; b++) {
        u.eps[b] = bounds[b].eps;
        u.per[b] = decoded && bounds[PAIR_EPS].max > 0 ? 1 / bounds[b].max : 0;
    }
    if (d->lease->backend->zero(&d->lease->queue, found, sizeof(*found), &why) == DEVICE_DONE) {
        d->lease->backend->updates(&d->lease->queue, &u, &why);
    }
    ckd_status status = lossy_device_status(d, &why, err);
    return status == CKD_OK ? device_get(d->lease, out, found, sizeof(*out), err) : status;
}

ckd_status lossy_device_updates(bool *within, lossy_tile *t, ckd_error *err) {
    lossy_pair *p = &t->context.pair;
    found_updates input, decoded = {.above = 0};
    ckd_status status = find_updates(&input, t, false, err);
    for (size_t b = 0; b < PAIR_BOUNDS && status == CKD_OK; b++) {
        pair_set_bound(&p->bounds[b], input.largest[b]);
    }
    THEN(status, find_updates(&decoded, t, true, err));
    p->decoded = decoded.largest[PAIR_EPS];
    *within = status == CKD_OK && decoded.above == 0;
    return status;
}
