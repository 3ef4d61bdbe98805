/*
 * The batch of symbol streams that delta.c and standalone.c share: its memory on the device, the counts, the plans, and
 * the payloads.
 */
#include "engine/device/internal.h"

#include <stdlib.h>

#define COUNTERS (DEVICE_SYMBOLS * (uint64_t)DEVICE_SYMBOLS * sizeof(uint32_t))
/* Largest number of nonzero counters of a block: far more than a worthwhile stream has. */
#define ENTRIES (UINT32_C(1) << 14)
/* Upper bound of a stream's tables, states and description, which dense_batch takes besides the elements. */
#define TABLES (UINT64_C(320) << 10)
#define SPARE  4096u /* bytes for rounding up */

uint64_t stream_aligned(uint64_t size) {
    return (size + 255) / 256 * 256;
}

uint8_t *stream_take(uint8_t **at, uint64_t size) {
    uint8_t *start = *at;
    *at += stream_aligned(size);
    return start;
}

/* ---- filling ---- */

void stream_batch_free(stream_batch *b) {
    for (uint32_t i = 0; i < b->max; i++) {
        free(b->streams[i].parts);
        bytes_free(&b->streams[i].head);
    }
    free(b->streams);
    bytes_free(&b->counted);
    dense_batch_free(&b->dense);
    *b = (stream_batch){.count = 0};
}

ckd_status stream_batch_clear(stream_batch *b, device_lease *lease, unsigned width, uint32_t max,
                              ckd_error *err) {
    if (b->max < max) {
        device_stream *streams = realloc(b->streams, max * sizeof(*streams));
        if (!streams) {
            return err_nomem(err, max * sizeof(*streams), "streams for a device");
        }
        memset(streams + b->max, 0, (max - b->max) * sizeof(*streams));
        b->streams = streams;
        b->max = max;
    }
    b->lease = lease;
    b->width = width;
    b->count = 0;
    b->kept_bytes = b->first = b->payload_bytes = 0;
    bytes_clear(&b->counted);
    dense_batch_clear(&b->dense);
    return CKD_OK;
}

static uint64_t memory_of(const stream_batch *b) {
    return b->kept_bytes + (b->first > b->payload_bytes ? b->first : b->payload_bytes) + SPARE;
}

device_stream *stream_batch_add(stream_batch *b, uint64_t count, uint64_t stays, uint64_t first,
                                uint64_t limit) {
    stream_batch with = *b;
    with.kept_bytes += stays + stream_aligned(count);
    with.first += first + COUNTERS + ENTRIES * sizeof(uint32_t) + sizeof(uint64_t) + sizeof(device_classes);
    with.payload_bytes +=
        stream_aligned(count * b->width) + stream_aligned(count * sizeof(uint16_t)) + TABLES;
    if (b->count == b->max || (b->count > 0 && memory_of(&with) > limit)) {
        return NULL;
    }
    b->kept_bytes = with.kept_bytes;
    b->first = with.first;
    b->payload_bytes = with.payload_bytes;
    device_stream *s = &b->streams[b->count++];
    *s = (device_stream){.count = count, .parts = s->parts, .head = s->head};
    return s;
}

ckd_status stream_batch_begin(stream_batch *b, ckd_error *err) {
    void *memory;
    ckd_status status = device_memory(&memory, b->lease, memory_of(b), err);
    if (status != CKD_OK) {
        return status;
    }
    b->memory = b->next = memory;
    for (uint32_t i = 0; i < b->count; i++) {
        b->streams[i].symbols = stream_take(&b->next, b->streams[i].count);
    }
    return CKD_OK;
}

ckd_status device_contiguous(const uint8_t **out, const device_reader *r, uint8_t **next, uint64_t first,
                             uint64_t count, ckd_error *err) {
    *out = r->data + first * r->element;
    if (device_is_contiguous(r, r->data)) {
        return CKD_OK;
    }
    uint8_t *to = stream_take(next, count * r->element);
    *out = to;
    return device_gather(r, to, first, count, err);
}

/* ---- counting ---- */

static device_classes classes_of(const device_stream *s, unsigned width) {
    return (device_classes){.integers = s->integers,
                            .contexts = s->contexts,
                            .symbols = s->symbols,
                            .centre = s->centre,
                            .n = (uint32_t)s->count,
                            .width = width,
                            .fine = symbols_finest(width),
                            .split = s->split,
                            .bits = s->bits,
                            .capacity = ENTRIES};
}

/* all: one per stream that is not dropped. entered: one per stream. */
static ckd_status classify(stream_batch *b, device_classes *all, uint64_t *entered, ckd_error *err) {
    const device_backend *backend = b->lease->backend;
    device_queue *queue = &b->lease->queue;
    device_failure why = {DEVICE_DONE, "", ""};
    uint32_t n = 0, max = 0;
    uint64_t *device_counts = (uint64_t *)(void *)stream_take(&b->next, b->count * sizeof(*device_counts));
    device_result result = backend->zero(queue, device_counts, b->count * sizeof(*device_counts), &why);
    for (uint32_t i = 0; i < b->count && result == DEVICE_DONE; i++) {
        if (!b->streams[i].dropped) {
            device_classes *c = &all[n++];
            *c = classes_of(&b->streams[i], b->width);
            c->counts = (uint32_t *)(void *)stream_take(&b->next, COUNTERS);
            c->entries = (uint32_t *)(void *)stream_take(&b->next, ENTRIES * sizeof(*c->entries));
            c->entered = device_counts + i;
            max = c->n > max ? c->n : max;
            result = backend->zero(queue, c->counts, COUNTERS, &why);
        }
    }
    device_classes *described = (device_classes *)(void *)stream_take(&b->next, n * sizeof(*all));
    ckd_status status = device_status(&why, queue->device, err);
    THEN(status, device_put(b->lease, described, all, n * sizeof(*all), err));
    if (status == CKD_OK) {
        backend->classify(queue, described, n, max, &why);
        status = device_status(&why, queue->device, err);
    }
    return status == CKD_OK
               ? device_get(b->lease, entered, device_counts, b->count * sizeof(*device_counts), err)
               : status;
}

ckd_status stream_batch_count(stream_batch *b, ckd_error *err) {
    device_classes *all = calloc(b->count + 1, sizeof(*all));
    uint64_t *entered = calloc(b->count + 1, sizeof(*entered));
    ckd_status status = all && entered ? classify(b, all, entered, err)
                                       : err_nomem(err, b->count * sizeof(*all), "blocks for a device");
    for (uint32_t i = 0, n = 0; i < b->count && status == CKD_OK; i++) {
        device_stream *s = &b->streams[i];
        const uint32_t *entries = s->dropped ? NULL : all[n++].entries;
        s->dropped |= entered[i] > ENTRIES;
        s->counted = b->counted.size;
        s->entries = (uint32_t)entered[i];
        void *to = s->dropped ? NULL : bytes_extend(&b->counted, s->entries * sizeof(*entries));
        if (to) {
            status = device_get(b->lease, to, entries, s->entries * sizeof(*entries), err);
        }
    }
    free(all);
    free(entered);
    return status == CKD_OK && b->counted.failed ? err_nomem(err, b->counted.size, "counts of symbols")
                                                 : status;
}

/* ---- plans ---- */

uint32_t *stream_counts(symbols_counts *c, const stream_batch *b, const device_stream *s) {
    const uint32_t *entries = (const uint32_t *)(const void *)(b->counted.data + s->counted);
    *c = (symbols_counts){
        .width = b->width, .n = s->count, .centre = s->centre, .first_context = DEVICE_SYMBOLS - 1};
    for (uint32_t i = 0; i < s->entries; i++) {
        unsigned context = (entries[i] >> DEVICE_ENTRY_BITS) / DEVICE_SYMBOLS;
        c->first_context = context < c->first_context ? context : c->first_context;
        c->last_context = context > c->last_context ? context : c->last_context;
    }
    uint32_t *counts =
        calloc((c->last_context - c->first_context + 1) * (size_t)DEVICE_SYMBOLS, sizeof(*counts));
    for (uint32_t i = 0; counts && i < s->entries; i++) {
        counts[(entries[i] >> DEVICE_ENTRY_BITS) - c->first_context * DEVICE_SYMBOLS] +=
            entries[i] & ((1u << DEVICE_ENTRY_BITS) - 1);
    }
    c->counts = counts;
    return counts;
}

void stream_keep_plan(device_stream *s, symbols_workspace *w, int slot) {
    s->parts = s->parts ? s->parts : malloc(sizeof(*s->parts));
    if (!s->parts) {
        s->dropped = true;
        return;
    }
    symbols_parts_planned(s->parts, w, slot);
    uint64_t max = symbols_parts_frame_bound(w, slot) + s->parts->header;
    uint8_t *to = bytes_scratch(&s->head, max, "a stream's header", NULL);
    s->dropped |= !to;
    if (to) {
        size_t frame = symbols_parts_frame(w, slot, to);
        symbols_parts_header(w, slot, to + frame);
        s->head.size = frame + s->parts->header;
    }
}

/* ---- payloads ---- */

ckd_status stream_batch_write(stream_batch *b, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        device_stream *s = &b->streams[i];
        uint64_t raw = s->count * b->width;
        s->number = b->dense.count;
        if (!s->dropped) {
            dense_integers integers = {.integers = (void *)(uintptr_t)s->integers,
                                       .symbols = s->symbols,
                                       .contexts = s->contexts,
                                       .n = (uint32_t)s->count,
                                       .shift = s->parts->shift};
            uint64_t max = s->parts->bound < raw ? s->parts->bound : raw;
            status = dense_add_writing(&b->dense, s->parts, &integers, max, err);
        }
    }
    if (status == CKD_OK && dense_batch_memory(&b->dense) > memory_of(b) - b->kept_bytes) {
        return err_set(err, CKD_E_DEVICE, "symbol streams take more memory than was planned");
    }
    return status == CKD_OK && b->dense.count
               ? dense_write(&b->dense, b->lease, b->memory + b->kept_bytes, err)
               : status;
}

ckd_status stream_batch_read(stream_batch *b, const device_stream *s, bytes *to, ckd_error *err) {
    uint64_t size;
    const void *payload = dense_payload(&b->dense, s->number, &size);
    uint8_t *at = bytes_scratch(to, s->head.size + size + 1, "a block's payload", err);
    if (!at) {
        return CKD_E_NOMEM;
    }
    bool fits = size > 0 && s->head.size + size < s->count * b->width;
    to->size = fits ? s->head.size + size : 0;
    if (!fits) {
        return CKD_OK;
    }
    memcpy(at, s->head.data, s->head.size);
    return device_get(b->lease, at + s->head.size, payload, size, err);
}
