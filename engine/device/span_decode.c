#include "engine/device/internal.h"

#include <stdlib.h>

#include "base/float_mode.h"

#define STREAMS_WORTH \
    32u /* dense streams; a device reads many in the time of one, which a host with a few threads also takes */
#define PLACES UINT64_C(256)

/* ---- on the host ---- */

static ckd_status make_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    span_decode *f = context;
    return f->make(f->context, &f->chains[index], &f->sides, false, worker, err);
}

static ckd_status make_chains(span_decode *f, ckd_error *err) {
    uint64_t large = 0;
    f->chains = calloc(f->count, sizeof(*f->chains));
    if (!f->chains) {
        return err_nomem(err, f->count * sizeof(*f->chains), "blocks for a device");
    }
    for (size_t i = 0; i < f->count; i++) {
        f->chains[i].block = f->blocks[i];
        large += f->blocks[i]->record->count >= DEVICE_MIN_ELEMENTS;
    }
    chain_sides_init(&f->sides);
    f->sides.streams = large >= STREAMS_WORTH;
    float_mode mode = float_mode_enter();
    ckd_status status = pool_run(f->pool, f->count, make_one, f, err);
    float_mode_leave(mode);
    return status;
}

/* ---- places ---- */

static size_t runs_of(span_decode *f, const view_block *b) {
    region_span have = {b->record->region, b->record->first, b->record->count};
    return span_runs(f->runs, SPAN_RUNS_MAX, &f->tensor->shape, f->span, &have);
}

/* Is all of the block wanted, as one stretch? */
static bool lies_as_it_is(const span_decode *f, size_t runs, const view_block *b) {
    return runs == 1 && f->runs[0].count == b->record->count;
}

static uint64_t aligned(uint64_t size) {
    return (size + PLACES - 1) / PLACES * PLACES;
}

/* Chains of a batch that run together. */
typedef struct fill_part {
    size_t first, count;
} fill_part;

/*
 * Sets the places of values: their final place, or, if they are scattered there, own memory from `apart` on.
 * Returns where that ends.
 */
static uint64_t find_offsets(span_decode *f, const fill_part *p, uint64_t apart, uint8_t *memory) {
    size_t element = ckd_dtype_size(f->tensor->tensor->dtype);
    for (size_t i = p->first; i < p->first + p->count; i++) {
        const view_block *b = f->blocks[i];
        bool whole = lies_as_it_is(f, runs_of(f, b), b);
        f->chains[i].to = whole ? f->data + f->runs[0].to * element : (memory ? memory + apart : NULL);
        apart += whole ? 0 : aligned(b->record->raw_size);
    }
    return apart;
}

static uint64_t chains_size(const span_decode *f, const fill_part *p) {
    return aligned(device_chains_memory(f->chains + p->first, p->count, &f->sides));
}

/* Reduces the part to the chains that memory allows. If not even one fits, takes its values instead. */
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

static ckd_status scatter(span_decode *f, const fill_part *p, ckd_error *err) {
    const device_backend *backend = f->lease->backend;
    size_t element = ckd_dtype_size(f->tensor->tensor->dtype);
    device_failure why = {DEVICE_DONE, "", ""};
    const device_elements copy = {DEVICE_COPY, CKD_U8, CKD_DTYPE_NONE, NULL};
    bool supported = true;
    for (size_t i = p->first; i < p->first + p->count; i++) {
        size_t runs = runs_of(f, f->blocks[i]);
        bool whole = lies_as_it_is(f, runs, f->blocks[i]);
        device_span spans[DEVICE_SPANS];
        uint32_t n = 0;
        for (size_t j = 0; j < runs; j++) {
            const span_run *r = &f->runs[j];
            f->copied += r->count;
            spans[n++] = (device_span){.to = f->data + r->to * element,
                                       .from = (const uint8_t *)f->chains[i].to + r->from * element,
                                       .n = r->count * element};
            if (!whole && (n == DEVICE_SPANS || j + 1 == runs) && why.result == DEVICE_DONE && supported) {
                backend->elements(&f->lease->queue, &supported, &copy, spans, n, &why);
            }
            n %= DEVICE_SPANS;
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

static ckd_status run_batch(span_decode *f, ckd_error *err) {
    ckd_status status = make_chains(f, err);
    for (fill_part p = {0, 0}; p.first < f->count && status == CKD_OK && !f->mismatch; p.first += p.count) {
        p.count = f->count - p.first;
        status = fit_memory(&p, f, err);
        THEN(status, run_part(f, &p, err));
    }
    for (size_t i = 0; f->chains && i < f->count; i++) {
        device_chain_free(&f->chains[i]);
    }
    if (f->chains) {
        chain_sides_free(&f->sides);
    }
    free(f->chains);
    f->chains = NULL;
    return status;
}

/* Estimates the host memory of a block on its way: its stored chain, a byte per element and link, and its values. */
static uint64_t block_size(const view_block *b) {
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
            size += block_size(blocks[end++]);
        } while (end < count && size + block_size(blocks[end]) <= f->staging);
        f->blocks = blocks + first;
        f->count = end - first;
        status = run_batch(f, err);
    }
    return status == CKD_OK ? device_finish(f->lease, err) : status;
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
