/*
 * Decodes a span of a tensor in device memory, in batches of chains. Values are made in their final place if they lie
 * together there, else in scratch memory, and then scattered.
 */
#include "engine/device/internal.h"

#include <stdlib.h>

#include "base/float_mode.h"

/*
 * Fewest dense streams per host thread for which the device reads them. It reads up to thousands in the time that a
 * thread takes for about this many (DECISIONS.md).
 */
#define STREAMS_WORTH 16u
#define PLACES        UINT64_C(256)

/* ---- places ---- */

static size_t runs_of(span_decode *f, const view_block *b) {
    region_span have = {b->record->region, b->record->first, b->record->count};
    return span_runs(f->runs, SPAN_RUNS_MAX, f->tensor->shape, f->span, &have);
}

/* A block of some columns has equal stretches in all rows, and one copy moves them. */
static span_place place_of(span_decode *f, const view_block *b) {
    size_t runs = runs_of(f, b);
    const span_run *r = f->runs;
    span_place p = {.rows = 0};
    if (runs == 0 || runs > SPAN_RUNS_MAX) {
        return p;
    }
    p = (span_place){r[0].from, r[0].to, r[0].count, runs, r[0].count, r[0].count};
    if (runs > 1) {
        p.from_step = r[1].from - r[0].from;
        p.to_step = r[1].to - r[0].to;
    }
    for (size_t i = 1; i < runs && p.rows; i++) {
        bool alike =
            r[i].count == p.count && r[i].from == p.from + i * p.from_step && r[i].to == p.to + i * p.to_step;
        p.rows = alike ? p.rows : 0;
    }
    return p;
}

/* Tells whether the whole block is wanted, as one stretch. */
static bool lies_as_it_is(const span_place *p, const view_block *b) {
    return p->rows == 1 && p->count == b->record->count;
}

/* ---- on the host ---- */

ckd_status span_decode_begin(span_decode *f, const view_block **blocks, size_t count, ckd_error *err) {
    uint64_t large = 0;
    f->blocks = blocks;
    f->count = count;
    f->chains = calloc(count + 1, sizeof(*f->chains));
    f->places = malloc((count + 1) * sizeof(*f->places));
    if (!f->chains || !f->places) {
        free(f->chains);
        free(f->places);
        f->chains = NULL;
        f->places = NULL;
        return err_nomem(err, count * sizeof(*f->chains), "blocks for a device");
    }
    for (size_t i = 0; i < count; i++) {
        f->chains[i].block = blocks[i];
        f->places[i] = place_of(f, blocks[i]);
        large += blocks[i]->record->count >= DEVICE_MIN_ELEMENTS;
    }
    chain_sides_init(&f->sides);
    f->sides.streams = large >= STREAMS_WORTH * pool_threads(f->pool);
    return CKD_OK;
}

ckd_status span_decode_make(span_decode *f, size_t index, uint32_t worker, ckd_error *err) {
    return f->make(f->context, &f->chains[index], &f->sides, false, worker, err);
}

void span_decode_end(span_decode *f) {
    for (size_t i = 0; f->chains && i < f->count; i++) {
        device_chain_free(&f->chains[i]);
    }
    if (f->chains) {
        chain_sides_free(&f->sides);
    }
    free(f->chains);
    free(f->places);
    f->chains = NULL;
    f->places = NULL;
}

static ckd_status make_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    return span_decode_make(context, index, worker, err);
}

static uint64_t aligned(uint64_t size) {
    return (size + PLACES - 1) / PLACES * PLACES;
}

/* Chains of a batch that run together. */
typedef struct fill_part {
    size_t first, count;
} fill_part;

/*
 * Sets where values are made: in their final place, or, if they would lie scattered there, in memory from offset
 * `apart` on. Returns the end of that memory.
 */
static uint64_t find_offsets(span_decode *f, const fill_part *p, uint64_t apart, uint8_t *memory) {
    size_t element = ckd_dtype_size(f->tensor->tensor->dtype);
    for (size_t i = p->first; i < p->first + p->count; i++) {
        const view_block *b = f->blocks[i];
        bool whole = lies_as_it_is(&f->places[i], b);
        f->chains[i].to = whole ? f->data + f->places[i].to * element : (memory ? memory + apart : NULL);
        apart += whole ? 0 : aligned(b->record->raw_size);
    }
    return apart;
}

static uint64_t chains_size(const span_decode *f, const fill_part *p) {
    return aligned(device_chains_memory(f->chains + p->first, p->count, &f->sides));
}

/* Reduces the part to the chains that memory allows. If not even one fits, sends its values instead. */
static ckd_status fit_memory(fill_part *p, span_decode *f, ckd_error *err) {
    bool values = false;
    ckd_status status = CKD_OK;
    while (status == CKD_OK && f->memory && find_offsets(f, p, chains_size(f, p), NULL) > f->memory_size) {
        if (p->count > 1) {
            p->count /= 2;
            continue;
        }
        if (values) {
            return err_set(err, CKD_E_NOMEM, "a block takes more than %llu bytes of a device's memory",
                           (unsigned long long)f->memory_size);
        }
        values = true;
        status = f->make(f->context, &f->chains[p->first], &f->sides, true, 0, err);
    }
    return status;
}

#define STRIDE_MAX (UINT64_C(1) << 31) /* bytes */

/* Copies stretches that are all alike. false: they differ, or their strides are too large. */
static bool copy_rows(const span_decode *f, const span_place *p, const uint8_t *from, device_failure *why) {
    size_t element = ckd_dtype_size(f->tensor->tensor->dtype);
    const device_rows rows = {.to = f->data + p->to * element,
                              .from = from + p->from * element,
                              .bytes = p->count * element,
                              .stride = p->from_step * element,
                              .rows = p->rows,
                              .direction = DEVICE_ON_DEVICE,
                              .to_stride = p->to_step * element};
    if (p->rows == 0 || rows.stride >= STRIDE_MAX || rows.to_stride >= STRIDE_MAX) {
        return false;
    }
    f->lease->backend->copy_rows(&f->lease->queue, &rows, why);
    return true;
}

static bool copy_stretches(span_decode *f, const view_block *b, const uint8_t *from, device_failure *why) {
    const device_elements copy = {DEVICE_COPY, CKD_U8, CKD_DTYPE_NONE, NULL};
    size_t element = ckd_dtype_size(f->tensor->tensor->dtype), runs = runs_of(f, b);
    device_span spans[DEVICE_SPANS];
    bool supported = true;
    uint32_t n = 0;
    for (size_t j = 0; j < runs && why->result == DEVICE_DONE && supported; j++) {
        const span_run *r = &f->runs[j];
        spans[n++] = (device_span){
            .to = f->data + r->to * element, .from = from + r->from * element, .n = r->count * element};
        if (n == DEVICE_SPANS || j + 1 == runs) {
            f->lease->backend->elements(&f->lease->queue, &supported, &copy, spans, n, why);
            n = 0;
        }
    }
    return supported;
}

static uint64_t copied_of(span_decode *f, size_t i) {
    const span_place *p = &f->places[i];
    uint64_t copied = p->rows * p->count;
    size_t runs = p->rows ? 0 : runs_of(f, f->blocks[i]);
    for (size_t j = 0; j < runs; j++) {
        copied += f->runs[j].count;
    }
    return copied;
}

/* Copies values that were made elsewhere to their final places. */
static ckd_status scatter(span_decode *f, const fill_part *p, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    bool supported = true;
    for (size_t i = p->first; i < p->first + p->count; i++) {
        const view_block *b = f->blocks[i];
        f->copied += copied_of(f, i);
        if (!lies_as_it_is(&f->places[i], b) && why.result == DEVICE_DONE && supported) {
            supported = copy_rows(f, &f->places[i], f->chains[i].to, &why) ||
                        copy_stretches(f, b, f->chains[i].to, &why);
        }
    }
    return supported ? device_status(&why, f->lease->queue.device, err)
                     : err_set(err, CKD_E_UNSUPPORTED, "the device has no operation that copies");
}

/* ---- batches ---- */

static ckd_status run_part(span_decode *f, const fill_part *p, ckd_error *err) {
    uint64_t chains = chains_size(f, p);
    void *memory = f->memory;
    ckd_status status =
        memory ? CKD_OK : device_memory(&memory, f->lease, find_offsets(f, p, chains, NULL), err);
    if (status == CKD_OK) {
        find_offsets(f, p, chains, memory);
        status = device_chains_run(f->lease, memory, f->chains + p->first, p->count, &f->sides, err);
    }
    for (size_t i = p->first; i < p->first + p->count && status == CKD_OK; i++) {
        const device_chain *c = &f->chains[i];
        bool host = c->count == 1 && c->links[0].form == CHAIN_VALUES && !c->links[0].hashed;
        f->decoded += !host;
        f->sent += host;
        f->mismatch |= c->mismatch;
    }
    return status == CKD_OK && !f->mismatch ? scatter(f, p, err) : status;
}

ckd_status span_decode_run(span_decode *f, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (fill_part p = {0, 0}; p.first < f->count && status == CKD_OK && !f->mismatch; p.first += p.count) {
        p.count = f->count - p.first;
        status = fit_memory(&p, f, err);
        THEN(status, run_part(f, &p, err));
    }
    return status == CKD_OK ? device_finish(f->lease, err) : status; /* copies came after the last hash */
}

static ckd_status run_batch(span_decode *f, const view_block **blocks, size_t count, ckd_error *err) {
    ckd_status status = span_decode_begin(f, blocks, count, err);
    float_mode mode = float_mode_enter();
    THEN(status, pool_run(f->pool, count, make_one, f, err));
    float_mode_leave(mode);
    THEN(status, span_decode_run(f, err));
    span_decode_end(f);
    return status;
}

/* The values, a byte per element and link, and the stored chain. */
uint64_t span_decode_size(const view_block *b) {
    const record *r = b->record;
    uint64_t max = 64 * r->raw_size; /* a damaged file may say anything */
    uint64_t links = r->depth < CHAIN_LINKS ? r->depth : CHAIN_LINKS;
    return r->raw_size + links * r->count + (r->chain_stored < max ? r->chain_stored : max);
}

ckd_status device_decode_span(span_decode *f, const view_block **blocks, size_t count, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t first = 0, end; first < count && status == CKD_OK && !f->mismatch; first = end) {
        uint64_t size = 0;
        end = first;
        do {
            size += span_decode_size(blocks[end++]);
        } while (end < count && size + span_decode_size(blocks[end]) <= f->staging);
        status = run_batch(f, blocks + first, end - first, err);
    }
    return status;
}

bool device_can_decode_span(span_decode *f, const view_block **blocks, size_t *count) {
    size_t used = 0;
    bool any = false, fits = true;
    for (size_t i = 0; i < *count; i++) {
        size_t runs = runs_of(f, blocks[i]);
        fits &= runs <= SPAN_RUNS_MAX;
        any |= runs && blocks[i]->record->count >= DEVICE_MIN_ELEMENTS;
        blocks[used] = blocks[i];
        used += runs > 0;
    }
    *count = used;
    return any && fits && (uintptr_t)f->data % ckd_dtype_size(f->tensor->tensor->dtype) == 0;
}
