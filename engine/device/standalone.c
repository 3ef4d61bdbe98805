/*
 * Codes exact blocks on their own on a device, as delta.c codes differences: makes integers, splits them by levels of
 * rows and columns, and counts their symbols.
 */
#include "engine/device/device.h"

#include <stdlib.h>

void device_standalones_free(device_standalones *b) {
    free(b->blocks);
    bytes_free(&b->sums);
    bytes_free(&b->levels);
    *b = (device_standalones){.count = 0};
}

ckd_status device_standalones_clear(device_standalones *b, stream_batch *streams, device_reader *r,
                                    ckd_dtype dtype, uint32_t max, ckd_error *err) {
    if (b->max < max) {
        device_standalone *blocks = realloc(b->blocks, max * sizeof(*blocks));
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
    bytes_clear(&b->sums);
    bytes_clear(&b->levels);
    return stream_batch_clear(streams, r->lease, (unsigned)r->element, max, err);
}

device_standalone *device_standalones_add(device_standalones *b, uint64_t first, uint64_t count,
                                          uint64_t max) {
    device_reader *r = b->r;
    uint64_t raw = stream_aligned(count * r->element), lines = count / 16; /* at most */
    uint64_t once = device_is_contiguous(r, r->data) ? 0 : raw;
    once += DEVICE_EXTENTS(count) * sizeof(device_extent) + lines * (sizeof(uint64_t) + 1);
    once += sizeof(uint64_t) + 3 * sizeof(device_split);
    device_stream *s = stream_batch_add(b->streams, count, raw + stream_aligned(count), once, max);
    device_standalone *d = s ? &b->blocks[b->count++] : NULL;
    if (d) {
        *d = (device_standalone){.first = first, .count = count, .stream = s};
    }
    return d;
}

/* ---- integers ---- */

static ckd_status rotate(device_standalones *b, ckd_error *err) {
    device_lease *lease = b->r->lease;
    device_elements elements = {DEVICE_ROTATE, b->dtype, CKD_DTYPE_NONE, NULL};
    device_failure why = {DEVICE_DONE, "", ""};
    ckd_status status = CKD_OK;
    for (uint32_t at = 0; at < b->count && status == CKD_OK; at += DEVICE_SPANS) {
        device_span spans[DEVICE_SPANS];
        uint32_t n = 0;
        for (; n < DEVICE_SPANS && at + n < b->count; n++) {
            const device_standalone *d = &b->blocks[at + n];
            spans[n] = (device_span){d->integers, d->now, NULL, NULL, d->count};
        }
        bool supported = true;
        lease->backend->elements(&lease->queue, &supported, &elements, spans, n, &why);
        status = supported ? device_status(&why, lease->queue.device, err)
                           : err_set(err, CKD_E_DEVICE, "the device does not support this dtype");
    }
    return status;
}

static ckd_status begin(device_standalones *b, ckd_error *err) {
    uint8_t **next = &b->streams->next;
    ckd_status status = stream_batch_begin(b->streams, err);
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        device_standalone *d = &b->blocks[i];
        d->integers = stream_take(next, d->count * b->r->element);
        d->contexts = stream_take(next, d->count);
    }
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        device_standalone *d = &b->blocks[i];
        status = device_contiguous(&d->now, b->r, next, d->first, d->count, err);
    }
    return status == CKD_OK ? rotate(b, err) : status;
}

/* ---- from integers to contexts: three steps; each uses what the host makes of the step before ---- */

static ckd_status take_step(device_standalones *b, device_split_step step, const device_split *all,
                            ckd_error *err) {
    device_lease *lease = b->r->lease;
    device_failure why = {DEVICE_DONE, "", ""};
    uint32_t max = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        max = all[i].n > max ? all[i].n : max;
    }
    device_split *device_splits =
        (device_split *)(void *)stream_take(&b->streams->next, b->count * sizeof(*all));
    ckd_status status = device_put(lease, device_splits, all, b->count * sizeof(*all), err);
    if (status == CKD_OK) {
        lease->backend->split(&lease->queue, step, device_splits, b->count, max, &why);
        status = device_status(&why, lease->queue.device, err);
    }
    return status;
}

static void split_finest(device_standalone *d, const device_extent *e, unsigned width) {
    symbols_extent all = {
        .width = width, .n = d->count, .low = UINT64_MAX, .any = e[0].any, .differing = 0, .high = 0};
    for (uint64_t i = 0; i < DEVICE_EXTENTS(d->count); i++) {
        all.low = e[i].low < all.low ? e[i].low : all.low;
        all.high = e[i].high > all.high ? e[i].high : all.high;
        all.differing |= e[i].differing;
    }
    d->split = symbols_split_finest(&all);
}

static ckd_status find_splits(device_standalones *b, device_split *all, ckd_error *err) {
    uint64_t extents = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        const device_standalone *d = &b->blocks[i];
        all[i] = (device_split){
            .integers = d->integers, .n = (uint32_t)d->count, .width = (uint32_t)b->r->element};
        extents += DEVICE_EXTENTS(d->count);
    }
    device_extent *device_extents =
        (device_extent *)(void *)stream_take(&b->streams->next, extents * sizeof(*device_extents));
    device_extent *extents_found = malloc(extents * sizeof(*extents_found));
    for (uint64_t i = 0, at = 0; i < b->count; at += DEVICE_EXTENTS(b->blocks[i++].count)) {
        all[i].extents = device_extents + at;
    }
    ckd_status status = extents_found ? take_step(b, DEVICE_SPLIT_EXTENT, all, err)
                                      : err_nomem(err, extents * sizeof(*extents_found), "extents");
    THEN(status,
         device_get(b->r->lease, extents_found, device_extents, extents * sizeof(*extents_found), err));
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        split_finest(&b->blocks[i], extents_found + (all[i].extents - device_extents),
                     (unsigned)b->r->element);
    }
    free(extents_found);
    return status;
}

/* Computes sums over rows and columns, followed by the squares of all blocks. */
static ckd_status sum_lines(device_standalones *b, device_split *all, ckd_error *err) {
    device_lease *lease = b->r->lease;
    device_failure why = {DEVICE_DONE, "", ""};
    size_t lines = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        device_standalone *d = &b->blocks[i];
        d->lines = symbols_lines_of(&d->grid, d->count);
        d->sums = lines;
        lines += d->lines.rows + d->lines.columns;
    }
    uint64_t size = (lines + b->count) * sizeof(uint64_t);
    uint64_t *device_sums_at = (uint64_t *)(void *)stream_take(&b->streams->next, size);
    if (!bytes_scratch(&b->sums, size, "sums of rows and columns", err)) {
        return CKD_E_NOMEM;
    }
    for (uint32_t i = 0; i < b->count; i++) {
        const device_standalone *d = &b->blocks[i];
        all[i].bits = d->split.bits;
        all[i].bias = d->split.bias;
        all[i].columns = d->lines.columns;
        all[i].phase = d->lines.phase;
        all[i].rows = d->lines.rows;
        all[i].sums = d->lines.columns ? device_sums_at + d->sums : NULL;
        all[i].squares = device_sums_at + lines + i;
    }
    lease->backend->zero(&lease->queue, device_sums_at, size, &why);
    ckd_status status = device_status(&why, lease->queue.device, err);
    THEN(status, take_step(b, DEVICE_SPLIT_LINES, all, err));
    return status == CKD_OK ? device_get(lease, b->sums.data, device_sums_at, size, err) : status;
}

static ckd_status choose_levels(device_standalones *b, device_split *all, symbols_workspace *w,
                                ckd_error *err) {
    const uint64_t *sums = (const uint64_t *)(const void *)b->sums.data;
    size_t lines = b->sums.size / sizeof(*sums) - b->count;
    uint8_t *levels = bytes_scratch(&b->levels, lines + 1, "levels of rows and columns", err);
    if (!levels) {
        return CKD_E_NOMEM;
    }
    const uint8_t *device_levels_at = stream_take(&b->streams->next, lines);
    for (uint32_t i = 0; i < b->count; i++) {
        device_standalone *d = &b->blocks[i];
        device_stream *s = d->stream;
        d->levels = d->sums;
        d->chosen = d->lines.columns && symbols_levels_of(levels + d->levels, w, &d->lines, sums + d->sums,
                                                          sums[lines + i], d->count);
        all[i].levels = d->chosen ? device_levels_at + d->levels : NULL;
        all[i].contexts = d->contexts;
        s->integers = d->integers;
        s->contexts = d->chosen ? d->contexts : NULL;
        s->split = true;
        s->bits = d->split.bits;
        s->centre = d->split.bias;
    }
    ckd_status status = device_put(b->r->lease, (void *)(uintptr_t)device_levels_at, levels, lines, err);
    return status == CKD_OK ? take_step(b, DEVICE_SPLIT_CONTEXTS, all, err) : status;
}

ckd_status device_standalones_count(device_standalones *b, symbols_workspace *w, ckd_error *err) {
    device_split *all = calloc(b->count + 1, sizeof(*all));
    ckd_status status = all ? begin(b, err) : err_nomem(err, b->count * sizeof(*all), "blocks for a device");
    THEN(status, find_splits(b, all, err));
    THEN(status, sum_lines(b, all, err));
    THEN(status, choose_levels(b, all, w, err));
    free(all);
    return status == CKD_OK ? stream_batch_count(b->streams, err) : status;
}

void device_standalones_plan(const device_standalones *b, device_standalone *d, symbols_workspace *w) {
    device_stream *s = d->stream;
    symbols_counts c;
    uint32_t *counts = stream_counts(&c, b->streams, s);
    s->dropped |= !counts;
    if (!s->dropped) {
        s->planned =
            symbols_plan_split(w, 0, &c, &d->split, &d->lines, d->chosen ? b->levels.data + d->levels : NULL);
        stream_keep_plan(s, w, 0);
    }
    free(counts);
}
