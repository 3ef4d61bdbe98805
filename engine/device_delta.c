#include "engine/device_delta.h"

#include <stdlib.h>

#define COUNTERS (DEVICE_SYMBOLS * (uint64_t)DEVICE_SYMBOLS)
#define ENTRIES  \
    (UINT32_C(1) \
     << 14) /* counters that occur, of a block: far more than of any that deltas are worth it for */
/* A stream's tables, states and description, at most: what dense_batch takes but for what depends on the elements. */
#define TABLES (UINT64_C(320) << 10)

static uint64_t aligned(uint64_t size) {
    return (size + 255) / 256 * 256;
}

void device_deltas_free(device_deltas *b) {
    for (uint32_t i = 0; i < b->most; i++) {
        free(b->blocks[i].parts);
    }
    free(b->blocks);
    dense_batch_free(&b->dense);
    bytes_free(&b->counted);
    *b = (device_deltas){.count = 0};
}

ckd_status device_deltas_clear(device_deltas *b, device_reader *r, ckd_dtype dtype, uint32_t most,
                               ckd_error *err) {
    if (b->most < most) {
        device_delta *more = realloc(b->blocks, most * sizeof(*more));
        if (!more) {
            return err_nomem(err, most * sizeof(*more), "blocks for a device");
        }
        memset(more + b->most, 0, (most - b->most) * sizeof(*more));
        b->blocks = more;
        b->most = most;
    }
    b->r = r;
    b->dtype = dtype;
    b->count = 0;
    bytes_clear(&b->counted);
    dense_batch_clear(&b->dense);
    return CKD_OK;
}

/* ---- places ---- */

/* What a block takes: to the end, before the payloads are written, and then. */
typedef struct delta_room {
    uint64_t stays, first, then;
} delta_room;

/* Elements that do not lie together, or not at multiples of their size, are put together first. */
static bool lies_well(const device_reader *r, const uint8_t *data) {
    return r->width == r->stride && (uintptr_t)data % r->element == 0;
}

static delta_room room_of(const device_reader *r, uint64_t count) {
    uint64_t raw = aligned(count * r->element), pieces = aligned(device_pieces_of(raw) * sizeof(uint64_t));
    uint64_t samples = aligned(SYMBOLS_PARTS_SAMPLE * (sizeof(device_piece) + sizeof(float)));
    delta_room room = {.stays = raw + 2 * aligned(count)};
    room.first = (lies_well(r, r->data) ? 1 : 2) * raw + COUNTERS * sizeof(uint32_t) + pieces + samples +
                 ENTRIES * sizeof(uint32_t) + aligned(sizeof(device_classes) + sizeof(uint64_t));
    room.then = raw + aligned(count * sizeof(uint16_t)) + TABLES;
    return room;
}

static delta_room room_of_all(const device_deltas *b) {
    delta_room all = {0, 0, 0};
    for (uint32_t i = 0; i < b->count; i++) {
        delta_room one = room_of(b->r, b->blocks[i].count);
        all.stays += one.stays;
        all.first += one.first;
        all.then += one.then;
    }
    return all;
}

static uint64_t memory_of(const delta_room *room) {
    return room->stays + (room->first > room->then ? room->first : room->then) + 4096;
}

device_delta *device_deltas_add(device_deltas *b, uint64_t first, uint64_t count, uint64_t most) {
    if (b->count == b->most) {
        return NULL;
    }
    device_delta *d = &b->blocks[b->count++];
    *d = (device_delta){.first = first, .count = count, .parts = d->parts};
    delta_room all = room_of_all(b);
    if (b->count > 1 && memory_of(&all) > most) {
        b->count--;
        return NULL;
    }
    return d;
}

static uint8_t *take(uint8_t **at, uint64_t size) {
    uint8_t *mine = *at;
    *at += aligned(size);
    return mine;
}

/* Where everything is. */
static ckd_status place_all(device_deltas *b, ckd_error *err) {
    device_reader *r = b->r;
    ckd_status status = CKD_OK;
    uint8_t *stays = b->memory;
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        device_delta *d = &b->blocks[i];
        uint64_t raw = d->count * r->element;
        d->residual = take(&stays, raw);
        d->contexts = take(&stays, d->count);
        d->symbols = take(&stays, d->count);
        d->room = take(&b->next, raw);
        d->counts = (uint32_t *)(void *)take(&b->next, COUNTERS * sizeof(uint32_t));
        d->now = r->data + d->first * r->element;
        if (!lies_well(r, r->data)) {
            d->now = b->next;
            status = device_gather(r, take(&b->next, raw), d->first, d->count, err);
        }
    }
    return status;
}

/* What lies there of the parent, if its hash says so. */
static ckd_status look_at_before(device_deltas *b, ckd_error *err) {
    device_reader *r = b->r;
    device_pieces *of = r->before ? calloc(b->count, sizeof(*of)) : NULL;
    hash128 *got = r->before ? calloc(b->count, sizeof(*got)) : NULL;
    ckd_status status = r->before && (!of || !got) ? err_nomem(err, sizeof(*of), "hashes") : CKD_OK;
    uint64_t pieces = 0;
    for (uint32_t i = 0; of && i < b->count && status == CKD_OK; i++) {
        device_delta *d = &b->blocks[i];
        d->previous = r->before + d->first * r->element;
        if (!lies_well(r, r->before)) {
            d->previous = d->room;
            status = device_gather_before(r, d->room, d->first, d->count, err);
        }
        of[i] = (device_pieces){d->previous, d->count * r->element, NULL};
        pieces += device_pieces_of(of[i].bytes);
    }
    if (of && status == CKD_OK) {
        uint64_t *to = (uint64_t *)(void *)take(&b->next, pieces * sizeof(uint64_t));
        status = device_hash(got, r->line, of, b->count, to, err);
    }
    for (uint32_t i = 0; of && i < b->count && status == CKD_OK; i++) {
        b->blocks[i].there = hash128_equal(&got[i], &b->blocks[i].before);
    }
    free(of);
    free(got);
    return status;
}

ckd_status device_deltas_begin(device_deltas *b, ckd_error *err) {
    device_line *line = b->r->line;
    device_failure why = {DEVICE_DONE, "", ""};
    delta_room all = room_of_all(b);
    void *memory;
    ckd_status status = device_memory(&memory, line, memory_of(&all), err);
    if (status != CKD_OK) {
        return status;
    }
    b->memory = memory;
    b->next = b->memory + all.stays;
    b->room = memory_of(&all) - all.stays;
    status = place_all(b, err);
    status = status == CKD_OK ? look_at_before(b, err) : status;
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        line->backend->zero(&line->queue, b->blocks[i].counts, COUNTERS * sizeof(uint32_t), &why);
        status = device_status(&why, line->queue.device, err);
    }
    return status;
}

ckd_status device_deltas_put(device_deltas *b, device_delta *d, const void *previous, ckd_error *err) {
    d->previous = d->room;
    d->there = true;
    return device_put(b->r->line, d->room, previous, d->count * b->r->element, err);
}

/* ---- differences ---- */

static ckd_status some_elements(device_deltas *b, device_operation operation, const device_span *spans,
                                uint32_t count, ckd_error *err) {
    device_line *line = b->r->line;
    device_elements what = {operation, b->dtype, CKD_DTYPE_NONE, NULL};
    device_failure why = {DEVICE_DONE, "", ""};
    bool known = true;
    line->backend->elements(&line->queue, &known, &what, spans, count, &why);
    return known ? device_status(&why, line->queue.device, err)
                 : err_set(err, CKD_E_DEVICE, "the device knows no differences of such values");
}

static ckd_status subtract(device_deltas *b, ckd_error *err) {
    device_span residual[DEVICE_SPANS], context[DEVICE_SPANS];
    ckd_status status = CKD_OK;
    for (uint32_t i = 0, n = 0; i < b->count && status == CKD_OK; i++) {
        const device_delta *d = &b->blocks[i];
        if (!d->left) {
            residual[n] = (device_span){d->residual, d->now, d->previous, NULL, d->count};
            context[n++] = (device_span){d->contexts, d->previous, NULL, NULL, d->count};
        }
        if (n == DEVICE_SPANS || (n && i + 1 == b->count)) {
            status = some_elements(b, DEVICE_RESIDUAL, residual, n, err);
            status = status == CKD_OK ? some_elements(b, DEVICE_CONTEXT, context, n, err) : status;
            n = 0;
        }
    }
    return status;
}

/* Byte that sample k of a block begins at, from the batch's memory on. */
static uint64_t sample_at(const device_deltas *b, const device_delta *d, size_t k) {
    uint64_t i = k * d->count / symbols_sample_count(d->count);
    return (uint64_t)(d->residual - b->memory) + i * b->r->element;
}

/* Words of memory with the samples of all blocks, as they come. */
static ckd_status gather_samples(device_deltas *b, uint32_t *words, device_piece *pieces, ckd_error *err) {
    device_line *line = b->r->line;
    device_failure why = {DEVICE_DONE, "", ""};
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        const device_delta *d = &b->blocks[i];
        for (size_t k = 0; !d->left && k < symbols_sample_count(d->count); k++, n++) {
            pieces[n] = (device_piece){sample_at(b, d, k) / sizeof(float), n, 1};
        }
    }
    device_piece *there = (device_piece *)(void *)take(&b->next, n * sizeof(*pieces));
    float *to = (float *)(void *)take(&b->next, n * sizeof(*to));
    device_gathering g = {to, (const float *)(const void *)b->memory, there, n};
    ckd_status status = device_put(line, there, pieces, n * sizeof(*pieces), err);
    if (status == CKD_OK) {
        line->backend->gather(&line->queue, &g, &why);
        status = device_status(&why, line->queue.device, err);
    }
    return status == CKD_OK ? device_get(line, words, to, n * sizeof(*words), err) : status;
}

static int64_t signed_sample(uint32_t word, uint64_t at, size_t size) {
    return size == 4 ? (int32_t)word : (int16_t)(word >> 8 * (at % 4));
}

static ckd_status choose_centres(device_deltas *b, ckd_error *err) {
    uint32_t *words = malloc((uint64_t)b->count * SYMBOLS_PARTS_SAMPLE * sizeof(*words));
    device_piece *pieces = malloc((uint64_t)b->count * SYMBOLS_PARTS_SAMPLE * sizeof(*pieces));
    ckd_status status = words && pieces ? gather_samples(b, words, pieces, err)
                                        : err_nomem(err, sizeof(*pieces), "samples of blocks");
    for (uint32_t i = 0, n = 0; i < b->count && status == CKD_OK; i++) {
        device_delta *d = &b->blocks[i];
        int64_t samples[SYMBOLS_PARTS_SAMPLE];
        size_t count = symbols_sample_count(d->count);
        for (size_t k = 0; !d->left && k < count; k++, n++) {
            samples[k] = signed_sample(words[n], sample_at(b, d, k), b->r->element);
        }
        d->centre = d->left ? 0 : symbols_centre(samples, count, (unsigned)b->r->element);
    }
    free(words);
    free(pieces);
    return status;
}

/* ---- classes ---- */

static device_classes classes_of(const device_delta *d, unsigned width, uint32_t *entries,
                                 uint64_t *entered) {
    return (device_classes){.integers = d->residual,
                            .contexts = d->contexts,
                            .symbols = d->symbols,
                            .counts = d->counts,
                            .centre = d->centre,
                            .n = (uint32_t)d->count,
                            .width = width,
                            .fine = symbols_finest(width),
                            .room = ENTRIES,
                            .entries = entries,
                            .entered = entered};
}

/* all, entered: room for as many as there are blocks. */
static ckd_status classify(device_deltas *b, device_classes *all, uint64_t *entered, ckd_error *err) {
    device_line *line = b->r->line;
    device_failure why = {DEVICE_DONE, "", ""};
    uint32_t n = 0, most = 0;
    uint64_t *there = (uint64_t *)(void *)take(&b->next, b->count * sizeof(*there));
    for (uint32_t i = 0; i < b->count; i++) {
        const device_delta *d = &b->blocks[i];
        if (!d->left) {
            uint32_t *entries = (uint32_t *)(void *)take(&b->next, ENTRIES * sizeof(*entries));
            all[n++] = classes_of(d, (unsigned)b->r->element, entries, there + i);
            most = d->count > most ? (uint32_t)d->count : most;
        }
    }
    device_classes *described = (device_classes *)(void *)take(&b->next, n * sizeof(*all));
    line->backend->zero(&line->queue, there, b->count * sizeof(*there), &why);
    ckd_status status = device_status(&why, line->queue.device, err);
    status = status == CKD_OK ? device_put(line, described, all, n * sizeof(*all), err) : status;
    if (status == CKD_OK) {
        line->backend->classify(&line->queue, described, n, most, &why);
        status = device_status(&why, line->queue.device, err);
    }
    return status == CKD_OK ? device_get(line, entered, there, b->count * sizeof(*there), err) : status;
}

static ckd_status count_classes(device_deltas *b, ckd_error *err) {
    device_classes *all = calloc(b->count, sizeof(*all));
    uint64_t *entered = calloc(b->count, sizeof(*entered));
    ckd_status status = all && entered ? classify(b, all, entered, err)
                                       : err_nomem(err, b->count * sizeof(*all), "blocks for a device");
    for (uint32_t i = 0, n = 0; i < b->count && status == CKD_OK; i++) {
        device_delta *d = &b->blocks[i];
        const uint32_t *entries = d->left ? NULL : all[n++].entries;
        d->left |= entered[i] > ENTRIES;
        d->counted = b->counted.size;
        d->entries = (uint32_t)entered[i];
        void *to = d->left ? NULL : bytes_extend(&b->counted, d->entries * sizeof(*entries));
        if (to) {
            status = device_get(b->r->line, to, entries, d->entries * sizeof(*entries), err);
        }
    }
    free(all);
    free(entered);
    return status == CKD_OK && b->counted.failed ? err_nomem(err, b->counted.size, "counts of symbols")
                                                 : status;
}

ckd_status device_deltas_count(device_deltas *b, ckd_error *err) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        b->blocks[i].left |= !b->blocks[i].there;
        n += !b->blocks[i].left;
    }
    if (n == 0) {
        return CKD_OK;
    }
    ckd_status status = subtract(b, err);
    status = status == CKD_OK ? choose_centres(b, err) : status;
    return status == CKD_OK ? count_classes(b, err) : status;
}

/* ---- plans, payloads ---- */

/* The counters in a table, from the first context that occurs to the last one; NULL: no memory. */
static uint32_t *spread_entries(symbols_counts *c, const device_deltas *b, const device_delta *d) {
    const uint32_t *entries = (const uint32_t *)(const void *)(b->counted.data + d->counted);
    c->first_context = DEVICE_SYMBOLS - 1;
    c->last_context = 0;
    for (uint32_t i = 0; i < d->entries; i++) {
        unsigned context = entries[i] >> DEVICE_ENTRY_BITS >> 8;
        c->first_context = context < c->first_context ? context : c->first_context;
        c->last_context = context > c->last_context ? context : c->last_context;
    }
    uint32_t *counts =
        calloc((c->last_context - c->first_context + 1) * (size_t)DEVICE_SYMBOLS, sizeof(*counts));
    for (uint32_t i = 0; counts && i < d->entries; i++) {
        counts[(entries[i] >> DEVICE_ENTRY_BITS) - c->first_context * DEVICE_SYMBOLS] +=
            entries[i] & ((1u << DEVICE_ENTRY_BITS) - 1);
    }
    return counts;
}

void device_deltas_plan(const device_deltas *b, device_delta *d, symbols_workspace *w) {
    symbols_counts c = {.width = (unsigned)b->r->element, .n = d->count, .centre = d->centre};
    uint32_t *counts = spread_entries(&c, b, d);
    c.counts = counts;
    if (!d->parts) {
        d->parts = malloc(sizeof(*d->parts));
    }
    d->left |= !counts || !d->parts || !symbols_plan_counts(w, 1, &c, &d->planned);
    free(counts);
    if (!d->left) {
        symbols_parts_planned(d->parts, w, 1);
        symbols_parts_header(w, 1, d->header);
        d->bound = symbols_bound(w, 1) - d->parts->header;
    }
}

ckd_status device_deltas_write(device_deltas *b, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        device_delta *d = &b->blocks[i];
        uint64_t raw = d->count * b->r->element;
        dense_integers of = {
            .integers = d->residual, .symbols = d->symbols, .contexts = d->contexts, .n = (uint32_t)d->count};
        d->stream = b->dense.count;
        if (!d->left) {
            status = dense_add_writing(&b->dense, d->parts, &of, d->bound < raw ? d->bound : raw, err);
        }
    }
    uint8_t *to = b->memory + room_of_all(b).stays;
    if (status == CKD_OK && dense_batch_memory(&b->dense) > b->room) {
        return err_set(err, CKD_E_DEVICE, "symbol streams take more memory than was foreseen");
    }
    return status == CKD_OK && b->dense.count ? dense_write(&b->dense, b->r->line, to, err) : status;
}

ckd_status device_deltas_stream(device_deltas *b, const device_delta *d, bytes *to, ckd_error *err) {
    uint64_t size, header = d->parts->header;
    const void *payload = dense_payload(&b->dense, d->stream, &size);
    bool fits = size > 0 && header + size < d->count * b->r->element;
    uint8_t *at = bytes_scratch(to, header + size + 1, "a block's payload", err);
    to->size = fits ? header + size : 0;
    if (!at || !fits) {
        return at ? CKD_OK : CKD_E_NOMEM;
    }
    memcpy(at, d->header, header);
    return device_get(b->r->line, at + header, payload, size, err);
}

ckd_status device_deltas_residual(const device_deltas *b, const device_delta *d, void *to, uint64_t at,
                                  uint64_t size, ckd_error *err) {
    return device_get(b->r->line, to, d->residual + at, size, err);
}
