/*
 * The search for factors of a tile on a device. The vectors stay there. Only the starting vectors, matrices of vector
 * products, and the factors cross the bus.
 */
#include <stdlib.h>

#include "engine/lossy/internal.h"

/* Returns the size of a side, and of the spare one. All have the longer side's size, as they swap places. */
static uint64_t side_size(uint64_t rows, uint64_t columns, uint64_t count) {
    return lossy_device_aligned(count * (rows > columns ? rows : columns) * sizeof(float));
}

uint64_t lossy_device_search_size(uint64_t rows, uint64_t columns, uint64_t count) {
    return 3 * side_size(rows, columns, count) + lossy_device_aligned(count * count * sizeof(float)) +
           lossy_device_aligned(count * sizeof(double)) + lossy_device_aligned(count * sizeof(uint32_t));
}

static struct lossy_device *device_of(const void *tile) {
    return ((const lossy_tile *)tile)->input.device;
}

static ckd_status begin(const void *tile, vectors *left, vectors *right, ckd_error *err) {
    struct lossy_device *d = device_of(tile);
    uint64_t used = 0, count = left->count, size = side_size(left->n, right->n, count);
    left->device_copy = lossy_device_take(d, &used, size);
    right->device_copy = lossy_device_take(d, &used, size);
    d->search.spare = lossy_device_take(d, &used, size);
    d->search.mix = lossy_device_take(d, &used, count * count * sizeof(float));
    d->search.scale = lossy_device_take(d, &used, count * sizeof(double));
    d->search.largest = lossy_device_take(d, &used, count * sizeof(uint32_t));
    return lossy_device_check_scratch(d, used, err);
}

/* Converts between whole vectors (`flat`, as on the device) and the host's parts. out: to the parts. */
static void turn_vectors(float *flat, const vectors *v, bool out) {
    for (size_t p = 0; p < vectors_parts(v); p++) {
        size_t n = vectors_width(v, p);
        for (size_t i = 0; i < v->count; i++) {
            float *cut = vectors_part(v, p) + i * n, *whole = flat + i * v->n + p * SUBMATRIX_SIDE;
            memcpy(out ? cut : whole, out ? whole : cut, n * sizeof(float));
        }
    }
}

static ckd_status exchange(const void *tile, const vectors *v, bool out, ckd_error *err) {
    const struct lossy_device *d = device_of(tile);
    uint64_t size = v->count * v->n * sizeof(float);
    float *flat = malloc(size);
    if (!flat) {
        return err_nomem(err, size, "factors of a matrix");
    }
    if (!out) {
        turn_vectors(flat, v, false);
    }
    ckd_status status = out ? device_get(d->lease, flat, v->device_copy, size, err)
                            : device_put(d->lease, v->device_copy, flat, size, err);
    if (out && status == CKD_OK) {
        turn_vectors(flat, v, true);
    }
    free(flat);
    return status;
}

static ckd_status put(const void *tile, const vectors *v, ckd_error *err) {
    return exchange(tile, v, false, err);
}

static ckd_status take(const void *tile, const vectors *v, ckd_error *err) {
    return exchange(tile, v, true, err);
}

static ckd_status multiply(const struct lossy_device *d, const device_product *p, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    d->lease->backend->product(&d->lease->queue, p, &why);
    return lossy_device_status(d, &why, err);
}

static ckd_status times(const void *tile, vectors *to, const vectors *from, bool transposed, ckd_error *err) {
    const struct lossy_device *d = device_of(tile);
    device_product p = {.sums = to->device_copy,
                        .left = from->device_copy,
                        .right = d->matrix,
                        .rows = from->count,
                        .columns = to->n,
                        .rank = from->n,
                        .right_transposed = transposed};
    to->count = from->count;
    return multiply(d, &p, err);
}

static ckd_status pairs(const void *tile, float *mix, const vectors *v, ckd_error *err) {
    const struct lossy_device *d = device_of(tile);
    device_product p = {.sums = d->search.mix,
                        .left = v->device_copy,
                        .right = v->device_copy,
                        .rows = v->count,
                        .columns = v->count,
                        .rank = v->n,
                        .right_transposed = true};
    ckd_status status = multiply(d, &p, err);
    return status == CKD_OK
               ? device_get(d->lease, mix, d->search.mix, v->count * v->count * sizeof(float), err)
               : status;
}

static ckd_status mix_vectors(const void *tile, vectors *v, const float *mix, size_t count, ckd_error *err) {
    struct lossy_device *d = device_of(tile);
    device_product p = {.sums = d->search.spare,
                        .left = d->search.mix,
                        .right = v->device_copy,
                        .rows = count,
                        .columns = v->n,
                        .rank = v->count};
    ckd_status status = device_put(d->lease, d->search.mix, mix, count * v->count * sizeof(float), err);
    THEN(status, multiply(d, &p, err));
    d->search.spare = v->device_copy;
    v->device_copy = p.sums;
    v->count = count;
    return status;
}

static ckd_status round_vectors(const void *tile, const vectors *v, const vectors_rounding *rounding,
                                ckd_error *err) {
    const struct lossy_device *d = device_of(tile);
    device_failure why = {DEVICE_DONE, "", ""};
    uint64_t size = v->count * sizeof(uint32_t);
    device_rounding r = {.at = v->device_copy,
                         .scale = d->search.scale,
                         .largest = d->search.largest,
                         .n = v->n,
                         .count = (uint32_t)v->count,
                         .add = rounding->add,
                         .max = rounding->max};
    uint32_t *largest = malloc(size + 1);
    if (!largest) {
        return err_nomem(err, size, "factors of a matrix");
    }
    ckd_status status =
        device_put(d->lease, d->search.scale, rounding->scale, v->count * sizeof(double), err);
    if (status == CKD_OK && d->lease->backend->zero(&d->lease->queue, r.largest, size, &why) == DEVICE_DONE) {
        d->lease->backend->round(&d->lease->queue, &r, &why);
    }
    THEN(status, lossy_device_status(d, &why, err));
    THEN(status, device_get(d->lease, largest, r.largest, size, err));
    for (size_t i = 0; i < v->count && status == CKD_OK; i++) {
        rounding->largest[i] = largest[i];
    }
    free(largest);
    return status;
}

const vectors_backend lossy_device_vectors = {.begin = begin,
                                              .put = put,
                                              .take = take,
                                              .times = times,
                                              .pairs = pairs,
                                              .mix = mix_vectors,
                                              .round = round_vectors};
