/* Hashes and errors of a tile's blocks, computed on the device; values are not copied to the host. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "engine/lossy/internal.h"

/* ---- blocks ---- */

/* All integers are 0 if the first one is 0 and each equals the one before it. */
static bool any_nonzero(const int8_t *integers, uint64_t count) {
    return count && (integers[0] || memcmp(integers, integers + 1, count - 1) != 0);
}

ckd_status lossy_device_add_block(struct lossy_device *d, uint64_t at, uint64_t count, ckd_error *err) {
    d->block_count = at ? d->block_count : 0;
    if (ARRAY_GROW(d->blocks, d->block_scratch, d->block_count + 1, "coding scratch", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    lossy_device_block *b = &d->blocks[d->block_count++];
    *b = (lossy_device_block){.at = at, .count = count};
    b->nonzero = d->at.integers && any_nonzero(d->at.integers + at, count);
    return CKD_OK;
}

/* Returns the place of the error of a block, or of its rounded copy. */
static lossy_error *error_place(lossy_device_block *b, ckd_dtype rounded) {
    return rounded == CKD_BF16 ? &b->bf16.error : rounded == CKD_F16 ? &b->f16.error : &b->error;
}

static ckd_status measure_blocks(const struct lossy_device *d, ckd_dtype rounded, ckd_error *err) {
    uint64_t used = 0;
    device_failure why = {DEVICE_DONE, "", ""};
    device_sums *all = lossy_device_take(d, &used, d->block_count * sizeof(*all)),
                *host = malloc(d->block_count * sizeof(*host));
    device_errors e = {
        .blocks = lossy_device_take(d, &used, device_error_blocks(CKD_BLOCK_ELEMENTS) * sizeof(*all)),
        .rounded = rounded};
    if (!host) {
        return err_nomem(err, d->block_count * sizeof(*host), "coding scratch");
    }
    ckd_status status = lossy_device_check_scratch(d, used, err);
    for (size_t i = 0; i < d->block_count && why.result == DEVICE_DONE && status == CKD_OK; i++) {
        const lossy_device_block *b = &d->blocks[i];
        e.given = d->at.now + b->at;
        e.decoded = d->at.values + b->at;
        e.count = b->count;
        e.all = all + i;
        d->lease->backend->errors(&d->lease->queue, &e, &why);
    }
    THEN(status, lossy_device_status(d, &why, err));
    THEN(status, device_get(d->lease, host, all, d->block_count * sizeof(*host), err));
    for (size_t i = 0; i < d->block_count && status == CKD_OK; i++) {
        *error_place(&d->blocks[i], rounded) =
            (lossy_error){.energy = host[i].now,
                          .error = host[i].moved,
                          .largest = host[i].compared ? INFINITY : (double)host[i].farthest,
                          .finite = host[i].finite,
                          .exceptions = d->blocks[i].count - host[i].finite};
    }
    free(host);
    return status;
}

/* The scratch has room for all pages of the tile, and one more per stretch. */
static ckd_status hash_stretches(hash128 *out, const struct lossy_device *d, device_hash_span *stretches,
                                 size_t count, ckd_error *err) {
    uint64_t used = 0, pages = 0;
    for (size_t i = 0; i < count; i++) {
        pages += device_hash_pages_of(stretches[i].bytes);
    }
    uint64_t *to = lossy_device_take(d, &used, pages * sizeof(*to));
    ckd_status status = lossy_device_check_scratch(d, used, err);
    return status == CKD_OK ? device_hash(out, d->lease, stretches, count, to, err) : status;
}

static hash128 *hash_place(lossy_device_block *b, size_t offset) {
    return (hash128 *)(void *)((uint8_t *)b + offset);
}

/* Computes the content hashes of all blocks of one array. offset: of the hash in lossy_device_block. */
static ckd_status hash_blocks(const struct lossy_device *d, size_t offset, const void *values, size_t size,
                              ckd_error *err) {
    device_hash_span *stretches = malloc(d->block_count * (sizeof(*stretches) + sizeof(hash128)) + 1);
    if (!stretches) {
        return err_nomem(err, d->block_count * sizeof(*stretches), "coding scratch");
    }
    hash128 *out = (hash128 *)(void *)(stretches + d->block_count);
    for (size_t i = 0; i < d->block_count; i++) {
        const lossy_device_block *b = &d->blocks[i];
        stretches[i] = (device_hash_span){(const uint8_t *)values + b->at * size, b->count * size, NULL};
    }
    ckd_status status = hash_stretches(out, d, stretches, d->block_count, err);
    for (size_t i = 0; i < d->block_count && status == CKD_OK; i++) {
        *hash_place(&d->blocks[i], offset) = out[i];
    }
    free(stretches);
    return status;
}

/* ---- masters ---- */

/* Hashes the values that a rounded copy will have. Uses the matrix's memory, which is free by then. */
static ckd_status hash_rounded(const struct lossy_device *d, size_t offset, const float *values, ckd_dtype to,
                               ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    device_elements conversion = {DEVICE_CAST, CKD_F32, to, NULL};
    device_span all = {.to = d->matrix, .from = values, .n = d->at.count};
    bool supported;
    d->lease->backend->elements(&d->lease->queue, &supported, &conversion, &all, 1, &why);
    ckd_status status = lossy_device_status(d, &why, err);
    return status == CKD_OK ? hash_blocks(d, offset, d->matrix, ckd_dtype_size(to), err) : status;
}

static ckd_status measure_rounded(const struct lossy_device *d, ckd_dtype to, size_t offset, ckd_error *err) {
    size_t original = offset + offsetof(lossy_device_rounded, original),
           content = offset + offsetof(lossy_device_rounded, content);
    ckd_status status = measure_blocks(d, to, err);
    THEN(status, hash_rounded(d, original, d->at.now, to, err));
    return status == CKD_OK ? hash_rounded(d, content, d->at.values, to, err) : status;
}

/* ---- all blocks ---- */

static ckd_status measure_coded(const struct lossy_device *d, ckd_error *err) {
    const lossy_device_arrays *a = &d->at;
    const void *decoded = a->cast ? a->cast : (const void *)a->values;
    ckd_status status = measure_blocks(d, CKD_DTYPE_NONE, err);
    if (status == CKD_OK) {
        status =
            hash_blocks(d, offsetof(lossy_device_block, content), decoded, ckd_dtype_size(d->dtype), err);
    }
    if (status == CKD_OK && a->parent_values && !a->cast) {
        status = hash_blocks(d, offsetof(lossy_device_block, parent_content), a->parent_values, sizeof(float),
                             err);
    }
    if (status == CKD_OK && d->master) {
        status = measure_rounded(d, CKD_BF16, offsetof(lossy_device_block, bf16), err);
    }
    return status == CKD_OK && d->master ? measure_rounded(d, CKD_F16, offsetof(lossy_device_block, f16), err)
                                         : status;
}

ckd_status lossy_device_measure(const struct lossy_device *d, ckd_error *err) {
    ckd_status status =
        hash_blocks(d, offsetof(lossy_device_block, original), d->at.input, ckd_dtype_size(d->dtype), err);
    return status == CKD_OK && d->whole.values ? measure_coded(d, err) : status;
}

/* ---- values kept for the next save ---- */

/*
 * Returns the part's values, contiguous: in the reference, or gathered in the matrix's memory, which is not used yet.
 */
static const void *gather_part(const struct lossy_device *d, const lossy_device_part *p, uint64_t *used,
                               device_failure *why) {
    size_t size = ckd_dtype_size(d->dtype);
    const uint8_t *from = (const uint8_t *)d->reference->memory + p->at * size;
    if (p->width == p->count) {
        return from;
    }
    uint8_t *to = (uint8_t *)(void *)d->matrix + *used;
    *used += p->count * size;
    if (why->result == DEVICE_DONE) {
        d->lease->backend->copy_rows(&d->lease->queue,
                                     &(device_rows){to, from, p->width * size, d->columns * size,
                                                    p->count / p->width, DEVICE_ON_DEVICE, 0},
                                     why);
    }
    return to;
}

ckd_status lossy_device_compare(bool *same, const struct lossy_device *d, const lossy_device_part *parts,
                                size_t count, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    uint64_t used = 0;
    *same = false;
    device_hash_span *stretches = malloc(count * (sizeof(*stretches) + sizeof(hash128)) + 1);
    if (!stretches) {
        return err_nomem(err, count * sizeof(*stretches), "coding scratch");
    }
    hash128 *found = (hash128 *)(void *)(stretches + count);
    for (size_t i = 0; i < count; i++) {
        const void *values = gather_part(d, &parts[i], &used, &why);
        stretches[i] = (device_hash_span){values, parts[i].count * ckd_dtype_size(d->dtype), NULL};
    }
    ckd_status status = lossy_device_status(d, &why, err);
    THEN(status, hash_stretches(found, d, stretches, count, err));
    bool equal = status == CKD_OK;
    for (size_t i = 0; i < count && equal; i++) {
        equal = hash128_equal(&found[i], &parts[i].content);
    }
    *same = equal;
    free(stretches);
    return status;
}

ckd_status lossy_device_keep_reference(struct lossy_device *d, const device_reference_key *key,
                                       ckd_error *err) {
    const void *values = d->whole.cast ? d->whole.cast : (const void *)d->whole.values;
    return values ? device_reference_keep(&d->reference, d->store, d->lease, key, values, err) : CKD_OK;
}

const lossy_device_block *lossy_device_block_of(const struct lossy_device *d, uint64_t at) {
    size_t low = 0, high = d->block_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (d->blocks[middle].at <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return &d->blocks[low];
}
