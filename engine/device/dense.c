/*
 * A batch of dense symbol streams that a device writes or reads. All tables travel in one copy, and one launch codes
 * all streams.
 */
#include "engine/device/internal.h"

#define PLACES 256u /* alignment of arrays */

void dense_batch_free(dense_batch *b) {
    bytes_free(&b->sent);
    bytes_free(&b->streams);
    bytes_free(&b->results);
}

void dense_batch_clear(dense_batch *b) {
    bytes_clear(&b->sent);
    bytes_clear(&b->streams);
    bytes_clear(&b->results);
    b->scratch = 0;
    b->count = b->max = 0;
}

/* ---- offsets from the beginning of `sent`, or of scratch; addresses once there is memory ---- */

static uint64_t aligned(uint64_t size) {
    return (size + PLACES - 1) / PLACES * PLACES;
}

static const void *send(dense_batch *b, const void *data, size_t size) {
    size_t at = b->sent.size;
    uint8_t *to = bytes_extend(&b->sent, (size_t)aligned(size));
    if (to) {
        memcpy(to, data, size);
        memset(to + size, 0, (size_t)aligned(size) - size);
    }
    return (const void *)(uintptr_t)at;
}

static void *scratch(dense_batch *b, uint64_t size) {
    uint64_t at = b->scratch;
    b->scratch += aligned(size);
    return (void *)(uintptr_t)at;
}

static void *relocate(const void *place, uint8_t *memory) {
    return memory + (uintptr_t)place;
}

/* ---- filling ---- */

static device_tables send_tables(dense_batch *b, const symbols_parts *p, uint32_t shift) {
    device_tables t = {
        .tables = p->tables, .log = p->log, .lanes = p->lanes, .width = p->width, .shift = shift};
    uint32_t symbols = p->first[p->tables];
    size_t at = b->sent.size, size = symbols * sizeof(device_symbol);
    device_symbol *to = bytes_extend(&b->sent, (size_t)aligned(size));
    for (uint32_t i = 0; to && i < symbols; i++) {
        const symbols_part *s = &p->symbol[i];
        to[i] = (device_symbol){s->base, s->before, s->states, s->symbol, s->low};
    }
    t.symbol = (const device_symbol *)(uintptr_t)at;
    t.table_of = send(b, p->table_of, sizeof(p->table_of));
    memcpy(t.first, p->first, (p->tables + 1) * sizeof(t.first[0]));
    return t;
}

static ckd_status append_stream(dense_batch *b, const void *stream, size_t size, uint32_t n, ckd_error *err) {
    bytes_put(&b->streams, stream, size);
    if (b->streams.failed || b->sent.failed) {
        return err_nomem(err, b->sent.size + size, "symbol streams for a device");
    }
    b->count++;
    b->max = n > b->max ? n : b->max;
    return CKD_OK;
}

ckd_status dense_add_writing(dense_batch *b, const symbols_parts *parts, const dense_integers *integers,
                             uint64_t max, ckd_error *err) {
    device_encoding e = {.tables = send_tables(b, parts, integers->shift),
                         .own = send(b, parts->own, parts->tables * sizeof(parts->own[0])),
                         .integers = integers->integers,
                         .symbols = integers->symbols,
                         .contexts = parts->contexts ? integers->contexts : NULL,
                         .n = integers->n,
                         .capacity = (uint32_t)((max + 3) / 4)};
    e.payload = scratch(b, 4 * (uint64_t)e.capacity);
    e.codes = scratch(b, (uint64_t)parts->tables * DEVICE_SYMBOLS * sizeof(device_code));
    e.next = scratch(b, ((uint64_t)parts->tables << parts->log) * sizeof(uint16_t));
    e.trace = scratch(b, integers->n * sizeof(uint16_t));
    e.group_bits = scratch(b, DEVICE_WRITE_GROUPS(integers->n) * sizeof(uint32_t));
    e.last = scratch(b, DEVICE_STREAM_LANES * sizeof(uint16_t));
    return append_stream(b, &e, sizeof(e), integers->n, err);
}

ckd_status dense_add_reading(dense_batch *b, const symbols_parts *parts, const dense_integers *integers,
                             const void *payload, uint32_t bits, ckd_error *err) {
    if (parts->contexts && !integers->contexts) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET,
                           "a symbol stream needs contexts, and the block has none");
    }
    device_decoding d = {.tables = send_tables(b, parts, integers->shift),
                         .payload = send(b, payload, (bits + 7) / 8),
                         .shared = integers->shared,
                         .contexts = parts->contexts ? integers->contexts : NULL,
                         .integers = integers->integers,
                         .n = integers->n,
                         .bits = bits};
    d.states = scratch(b, ((uint64_t)parts->tables << parts->log) * sizeof(uint32_t));
    return append_stream(b, &d, sizeof(d), integers->n, err);
}

uint64_t dense_reading_memory(const symbols_parts *parts, uint32_t bits) {
    return aligned(parts->first[parts->tables] * sizeof(device_symbol)) + aligned(sizeof(parts->table_of)) +
           aligned(bits / 8 + 1) + aligned(((uint64_t)parts->tables << parts->log) * sizeof(uint32_t)) +
           aligned(sizeof(device_decoding)) + aligned(sizeof(uint32_t));
}

/* ---- running ---- */

static uint64_t results_size(const dense_batch *b) {
    return aligned(b->count * sizeof(uint32_t));
}

uint64_t dense_batch_memory(const dense_batch *b) {
    return b->sent.size + aligned(b->streams.size) + b->scratch + results_size(b);
}

/* Beginnings of the memory's parts. */
typedef struct memory_parts {
    uint8_t *sent, *streams, *scratch;
    uint32_t *results;
} memory_parts;

static memory_parts parts_of(const dense_batch *b, void *memory) {
    memory_parts m = {.sent = memory};
    m.streams = m.sent + b->sent.size;
    m.scratch = m.streams + aligned(b->streams.size);
    m.results = (uint32_t *)(void *)(m.scratch + b->scratch);
    return m;
}

static void finish_tables(device_tables *t, const memory_parts *m) {
    t->symbol = relocate(t->symbol, m->sent);
    t->table_of = relocate(t->table_of, m->sent);
}

static void finish_writing(device_encoding *e, uint32_t i, const memory_parts *m) {
    finish_tables(&e->tables, m);
    e->own = relocate(e->own, m->sent);
    e->payload = relocate(e->payload, m->scratch);
    e->codes = relocate(e->codes, m->scratch);
    e->next = relocate(e->next, m->scratch);
    e->trace = relocate(e->trace, m->scratch);
    e->group_bits = relocate(e->group_bits, m->scratch);
    e->last = relocate(e->last, m->scratch);
    e->bits = m->results + i;
}

static void finish_reading(device_decoding *d, uint32_t i, const memory_parts *m) {
    finish_tables(&d->tables, m);
    d->payload = relocate(d->payload, m->sent);
    d->states = relocate(d->states, m->scratch);
    d->failed = m->results + i;
}

/* Sends the batch, runs it, and fetches the results. */
static ckd_status run(dense_batch *b, device_lease *lease, const memory_parts *m, bool write,
                      ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    uint32_t *results = bytes_scratch(&b->results, results_size(b) + 1, "a device's results", err);
    ckd_status status = results ? device_put(lease, m->sent, b->sent.data, b->sent.size, err) : CKD_E_NOMEM;
    THEN(status, device_put(lease, m->streams, b->streams.data, b->streams.size, err));
    if (status != CKD_OK) {
        return status;
    }
    if (write) {
        lease->backend->encode(&lease->queue, (const device_encoding *)(const void *)m->streams, b->count,
                               b->max, &why);
    } else {
        lease->backend->decode(&lease->queue, (const device_decoding *)(const void *)m->streams, b->count,
                               &why);
    }
    status = device_status(&why, lease->queue.device, err);
    return status == CKD_OK ? device_get(lease, results, m->results, b->count * sizeof(*results), err)
                            : status;
}

ckd_status dense_write(dense_batch *b, device_lease *lease, void *memory, ckd_error *err) {
    memory_parts m = parts_of(b, memory);
    for (uint32_t i = 0; i < b->count; i++) {
        finish_writing((device_encoding *)(void *)b->streams.data + i, i, &m);
    }
    return run(b, lease, &m, true, err);
}

ckd_status dense_read(dense_batch *b, device_lease *lease, void *memory, ckd_error *err) {
    memory_parts m = parts_of(b, memory);
    for (uint32_t i = 0; i < b->count; i++) {
        finish_reading((device_decoding *)(void *)b->streams.data + i, i, &m);
    }
    return run(b, lease, &m, false, err);
}

static uint32_t result(const dense_batch *b, uint32_t i) {
    uint32_t value;
    memcpy(&value, b->results.data + i * sizeof(value), sizeof(value));
    return value;
}

const void *dense_payload(const dense_batch *b, uint32_t i, uint64_t *size) {
    const device_encoding *e = (const device_encoding *)(const void *)b->streams.data + i;
    uint64_t whole = (result(b, i) + UINT64_C(7)) / 8;
    *size = whole <= 4 * (uint64_t)e->capacity ? whole : 0;
    return e->payload;
}

bool dense_read_ok(const dense_batch *b, uint32_t i) {
    return result(b, i) == 0;
}
