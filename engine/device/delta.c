/*
 * Makes the deltas of exact blocks on a device, in batches, and counts their symbols. The host plans the streams, and
 * stream.c writes them.
 */
#include "engine/device/device.h"

#include <stdlib.h>

void device_deltas_free(device_deltas *b) {
    free(b->blocks);
    *b = (device_deltas){.count = 0};
}

ckd_status device_deltas_clear(device_deltas *b, stream_batch *streams, device_reader *r, ckd_dtype dtype,
                               uint32_t max, ckd_error *err) {
    if (b->max < max) {
        device_delta *blocks = realloc(b->blocks, max * sizeof(*blocks));
        if (!blocks) {
            return err_nomem(err, max * sizeof(*blocks), "blocks for a device");
        }
        b->blocks = blocks;
        b->max = max;
    }
    b->streams = streams;
    b->r = r;
    b->dtype = dtype;
    b->count = 0;
    return stream_batch_clear(streams, r->lease, (unsigned)r->element, max, err);
}

/* ---- memory ---- */

device_delta *device_deltas_add(device_deltas *b, uint64_t first, uint64_t count, uint64_t max) {
    device_reader *r = b->r;
    uint64_t raw = stream_aligned(count * r->element);
    uint64_t pages = stream_aligned(device_hash_pages_of(raw) * sizeof(uint64_t));
    uint64_t samples = SYMBOLS_PARTS_SAMPLE * (sizeof(device_slice) + sizeof(float));
    uint64_t once = (device_is_contiguous(r, r->data) ? 1 : 2) * raw + pages + samples;
    device_stream *s = stream_batch_add(b->streams, count, raw + stream_aligned(count), once, max);
    device_delta *d = s ? &b->blocks[b->count++] : NULL;
    if (d) {
        *d = (device_delta){.first = first, .count = count, .stream = s};
    }
    return d;
}

static ckd_status scatter_all(device_deltas *b, ckd_error *err) {
    device_reader *r = b->r;
    uint8_t **next = &b->streams->next;
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < b->count; i++) {
        device_delta *d = &b->blocks[i];
        d->residual = stream_take(next, d->count * r->element);
        d->contexts = stream_take(next, d->count);
        d->stream->integers = d->residual;
        d->stream->contexts = d->contexts;
    }
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        device_delta *d = &b->blocks[i];
        d->memory = stream_take(next, d->count * r->element);
        status = device_contiguous(&d->now, r, next, d->first, d->count, err);
    }
    return status;
}

/* Uses the parent's values on the device if their hashes match. */
static ckd_status look_at_before(device_deltas *b, ckd_error *err) {
    device_reader *r = b->r;
    device_hash_span *pages_of = r->parent_values ? calloc(b->count, sizeof(*pages_of)) : NULL;
    hash128 *hashes = r->parent_values ? calloc(b->count, sizeof(*hashes)) : NULL;
    ckd_status status =
        r->parent_values && (!pages_of || !hashes) ? err_nomem(err, sizeof(*pages_of), "hashes") : CKD_OK;
    uint64_t pages = 0;
    for (uint32_t i = 0; pages_of && i < b->count && status == CKD_OK; i++) {
        device_delta *d = &b->blocks[i];
        d->previous = r->parent_values + d->first * r->element;
        if (!device_is_contiguous(r, r->parent_values)) {
            d->previous = d->memory;
            status = device_gather_before(r, d->memory, d->first, d->count, err);
        }
        pages_of[i] = (device_hash_span){d->previous, d->count * r->element, NULL};
        pages += device_hash_pages_of(pages_of[i].bytes);
    }
    if (pages_of && status == CKD_OK) {
        uint64_t *to = (uint64_t *)(void *)stream_take(&b->streams->next, pages * sizeof(uint64_t));
        status = device_hash(hashes, r->lease, pages_of, b->count, to, err);
    }
    for (uint32_t i = 0; pages_of && i < b->count && status == CKD_OK; i++) {
        b->blocks[i].parent_on_device = hash128_equal(&hashes[i], &b->blocks[i].parent_content);
    }
    free(pages_of);
    free(hashes);
    return status;
}

ckd_status device_deltas_begin(device_deltas *b, ckd_error *err) {
    ckd_status status = stream_batch_begin(b->streams, err);
    THEN(status, scatter_all(b, err));
    return status == CKD_OK ? look_at_before(b, err) : status;
}

ckd_status device_deltas_put(device_deltas *b, device_delta *d, const void *previous, ckd_error *err) {
    d->previous = d->memory;
    d->parent_on_device = true;
    return device_put(b->r->lease, d->memory, previous, d->count * b->r->element, err);
}

/* ---- differences ---- */

static ckd_status some_elements(device_deltas *b, device_operation operation, const device_span *spans,
                                uint32_t count, ckd_error *err) {
    device_lease *lease = b->r->lease;
    device_elements elements = {operation, b->dtype, CKD_DTYPE_NONE, NULL};
    device_failure why = {DEVICE_DONE, "", ""};
    bool supported = true;
    lease->backend->elements(&lease->queue, &supported, &elements, spans, count, &why);
    return supported ? device_status(&why, lease->queue.device, err)
                     : err_set(err, CKD_E_DEVICE, "the device cannot subtract values of this dtype");
}

static ckd_status subtract(device_deltas *b, ckd_error *err) {
    device_span residual[DEVICE_SPANS], context[DEVICE_SPANS];
    ckd_status status = CKD_OK;
    for (uint32_t i = 0, n = 0; i < b->count && status == CKD_OK; i++) {
        const device_delta *d = &b->blocks[i];
        if (!d->stream->dropped) {
            residual[n] = (device_span){d->residual, d->now, d->previous, NULL, d->count};
            context[n++] = (device_span){d->contexts, d->previous, NULL, NULL, d->count};
        }
        if (n == DEVICE_SPANS || (n && i + 1 == b->count)) {
            status = some_elements(b, DEVICE_RESIDUAL, residual, n, err);
            THEN(status, some_elements(b, DEVICE_CONTEXT, context, n, err));
            n = 0;
        }
    }
    return status;
}

/* Returns the offset of sample k of a block, in bytes, in the batch's memory. */
static uint64_t sample_at(const device_deltas *b, const device_delta *d, size_t k) {
    uint64_t i = k * d->count / symbols_sample_count(d->count);
    return (uint64_t)(d->residual - b->streams->memory) + i * b->r->element;
}

/* Gathers the words that contain the samples of all blocks, in order. */
static ckd_status gather_samples(device_deltas *b, uint32_t *words, device_slice *slices, ckd_error *err) {
    device_lease *lease = b->r->lease;
    device_failure why = {DEVICE_DONE, "", ""};
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        const device_delta *d = &b->blocks[i];
        for (size_t k = 0; !d->stream->dropped && k < symbols_sample_count(d->count); k++, n++) {
            slices[n] = (device_slice){sample_at(b, d, k) / sizeof(float), n, 1};
        }
    }
    device_slice *sent = (device_slice *)(void *)stream_take(&b->streams->next, n * sizeof(*slices));
    float *to = (float *)(void *)stream_take(&b->streams->next, n * sizeof(*to));
    device_gathering g = {to, (const float *)(const void *)b->streams->memory, sent, n};
    ckd_status status = device_put(lease, sent, slices, n * sizeof(*slices), err);
    if (status == CKD_OK) {
        lease->backend->gather(&lease->queue, &g, &why);
        status = device_status(&why, lease->queue.device, err);
    }
    return status == CKD_OK ? device_get(lease, words, to, n * sizeof(*words), err) : status;
}

static int64_t signed_sample(uint32_t word, uint64_t at, size_t size) {
    return size == 4 ? (int32_t)word : (int16_t)(word >> 8 * (at % 4));
}

static ckd_status choose_centres(device_deltas *b, ckd_error *err) {
    uint32_t *words = malloc((uint64_t)b->count * SYMBOLS_PARTS_SAMPLE * sizeof(*words));
    device_slice *slices = malloc((uint64_t)b->count * SYMBOLS_PARTS_SAMPLE * sizeof(*slices));
    ckd_status status = words && slices ? gather_samples(b, words, slices, err)
                                        : err_nomem(err, sizeof(*slices), "samples of blocks");
    for (uint32_t i = 0, n = 0; i < b->count && status == CKD_OK; i++) {
        device_delta *d = &b->blocks[i];
        int64_t samples[SYMBOLS_PARTS_SAMPLE];
        size_t count = symbols_sample_count(d->count);
        for (size_t k = 0; !d->stream->dropped && k < count; k++, n++) {
            samples[k] = signed_sample(words[n], sample_at(b, d, k), b->r->element);
        }
        d->stream->centre = d->stream->dropped ? 0 : symbols_centre(samples, count, (unsigned)b->r->element);
    }
    free(words);
    free(slices);
    return status;
}

ckd_status device_deltas_count(device_deltas *b, ckd_error *err) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        b->blocks[i].stream->dropped |= !b->blocks[i].parent_on_device;
        n += !b->blocks[i].stream->dropped;
    }
    if (n == 0) {
        return CKD_OK;
    }
    ckd_status status = subtract(b, err);
    THEN(status, choose_centres(b, err));
    return status == CKD_OK ? stream_batch_count(b->streams, err) : status;
}

void device_deltas_plan(const device_deltas *b, device_delta *d, symbols_workspace *w) {
    device_stream *s = d->stream;
    symbols_counts c;
    uint32_t *counts = stream_counts(&c, b->streams, s);
    s->dropped |= !counts || !symbols_plan_counts(w, 1, &c, &s->planned);
    free(counts);
    if (!s->dropped) {
        stream_keep_plan(s, w, 1);
    }
}

ckd_status device_deltas_residual(const device_deltas *b, const device_delta *d, void *to, uint64_t at,
                                  uint64_t size, ckd_error *err) {
    return device_get(b->r->lease, to, d->residual + at, size, err);
}
