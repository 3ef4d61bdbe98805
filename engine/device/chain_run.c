/*
 * Runs chains on a device, one round per link, from the roots on. All streams of a round are read at once, as
 * a device reads many in the time of one. Lossy links run one after the other and share memory.
 */
#include <stdlib.h>

#include "base/vocabulary.h"
#include "engine/device/internal.h"

#define PLACES 256u

static uint64_t aligned(uint64_t size) {
    return (size + PLACES - 1) / PLACES * PLACES;
}

typedef struct run {
    device_lease *lease;
    device_chain *chains;
    size_t count;
    chain_sides *sides;
    uint8_t *memory;
    uint64_t sent, wide; /* sent arrays; then factors of sides as floats, and values to be rounded */
    uint64_t round;      /* differences and contexts of a round, and scratch for reading its streams */
    uint64_t link;       /* one lossy link */
    uint64_t pages;      /* hashes */
    uint32_t rounds;
    symbols_parts *parts;
    dense_batch streams;
    size_t *read; /* index of the chain of each stream */
    device_hash_span *hashed;
    hash128 *found;
    size_t *chain_of_hash; /* index of the chain of each hash */
    device_failure why;
    bool unsupported; /* the backend lacks an operation */
} run;

/* ---- memory ---- */

static uint64_t stream_size(const chain_link *l) {
    uint64_t n = l->record->count;
    return l->memory + (l->delta ? aligned(l->record->raw_size) + aligned(n) : 0);
}

/* Returns a link's factor as sent: a side's, or the chain's own. */
static const chain_factor *factor_of(const chain_side *side, const chain_factor *own) {
    return side ? &side->at : own;
}

static uint64_t link_size(const chain_link *l) {
    uint64_t size = l->record->tensor->dtype == CKD_F32 ? 0 : aligned(l->record->count * sizeof(float));
    if (l->rank) {
        const chain_factor *left = factor_of(l->left_side, &l->left),
                           *right = factor_of(l->right_side, &l->right);
        size += aligned(l->rows * l->columns * sizeof(float)) + aligned(left->count * sizeof(float)) +
                aligned(right->count * sizeof(float));
    }
    return size;
}

/* Returns the size of the values to be rounded. */
static uint64_t wide_size(const device_chain *c) {
    return c->cast ? aligned(c->links[c->cast - 1].record->raw_size) : 0;
}

static uint64_t max_size(const device_chain *c) {
    uint64_t own = c->block->record->raw_size, wide = c->cast ? c->links[c->cast - 1].record->raw_size : 0;
    return wide > own ? wide : own;
}

static void measure(run *r) {
    for (const chain_side *s = r->sides->first; s; s = s->next) {
        r->sent += aligned(s->sent.size);
        r->wide += s->at.dtype == CKD_F16 ? aligned(s->at.count * sizeof(float)) : 0;
    }
    for (size_t i = 0; i < r->count; i++) {
        const device_chain *c = &r->chains[i];
        r->sent += aligned(c->sent.size);
        r->pages += device_hash_pages_of(max_size(c));
        r->wide += wide_size(c);
        r->rounds = c->count > r->rounds ? c->count : r->rounds;
    }
    for (uint32_t at = 0; at < r->rounds; at++) {
        uint64_t round = 0;
        for (size_t i = 0; i < r->count; i++) {
            const device_chain *c = &r->chains[i];
            const chain_link *l = &c->links[at];
            uint64_t link = at < c->count && l->form == CHAIN_LINEAR ? link_size(l) : 0;
            link =
                at < c->count && l->form == CHAIN_LEVELS ? aligned(l->record->count * sizeof(float)) : link;
            round += at < c->count && l->form == CHAIN_STREAM ? stream_size(l) : 0;
            r->link = link > r->link ? link : r->link;
        }
        r->round = round > r->round ? round : r->round;
    }
}

uint64_t device_chains_memory(const device_chain *chains, size_t count, const chain_sides *sides) {
    run r = {.chains = (device_chain *)chains, .count = count, .sides = (chain_sides *)sides};
    measure(&r);
    return r.sent + r.wide + r.round + r.link + aligned(r.pages * sizeof(uint64_t)) + PLACES;
}

static uint8_t *round_memory(const run *r) {
    return r->memory + r->sent + r->wide;
}
static uint8_t *link_memory(const run *r) {
    return round_memory(r) + r->round;
}
static uint64_t *pages_memory(const run *r) {
    return (uint64_t *)(void *)(link_memory(r) + r->link);
}

static void *take(uint8_t **at, uint64_t size) {
    void *place = *at;
    *at += aligned(size);
    return place;
}

/* ---- elements, many spans at a time ---- */

typedef struct span_list {
    run *r;
    device_elements elements;
    device_span spans[DEVICE_SPANS];
    uint32_t count;
} span_list;

static void flush(span_list *s) {
    run *r = s->r;
    bool supported = true;
    if (s->count && r->why.result == DEVICE_DONE) {
        r->lease->backend->elements(&r->lease->queue, &supported, &s->elements, s->spans, s->count, &r->why);
    }
    r->unsupported |= !supported;
    s->count = 0;
}

/* Adds a span. A new dtype flushes the spans before it. */
static void add_span(span_list *s, ckd_dtype dtype, device_span item) {
    if (s->elements.dtype != dtype) {
        flush(s);
        s->elements.dtype = dtype;
    }
    s->spans[s->count++] = item;
    if (s->count == DEVICE_SPANS) {
        flush(s);
    }
}

static span_list list_of(run *r, device_operation operation, ckd_dtype to) {
    return (span_list){.r = r, .elements = {operation, CKD_DTYPE_NONE, to, NULL}};
}

static void one_span(run *r, device_operation operation, ckd_dtype dtype, ckd_dtype to, device_span item) {
    span_list s = list_of(r, operation, to);
    add_span(&s, dtype, item);
    flush(&s);
}

/* ---- sending ---- */

/* Sends one array behind the others, and returns where the next one begins. */
static uint64_t send_array(device_putting *p, const bytes *array, uint64_t at) {
    device_put_add(p, array->data, array->size);
    device_put_add(p, NULL, aligned(array->size) - array->size);
    return at + aligned(array->size);
}

static ckd_status send_all(run *r, ckd_error *err) {
    device_putting p = device_put_begin(r->lease, r->memory);
    uint64_t at = 0, wide = r->sent;
    for (chain_side *s = r->sides->first; s; s = s->next) {
        s->base = at;
        s->wide = wide;
        at = send_array(&p, &s->sent, at);
        wide += s->at.dtype == CKD_F16 ? aligned(s->at.count * sizeof(float)) : 0;
    }
    for (size_t i = 0; i < r->count; i++) {
        device_chain *c = &r->chains[i];
        c->base = at;
        c->wide = r->memory + wide;
        wide += wide_size(c);
        at = send_array(&p, &c->sent, at);
    }
    return device_put_end(&p, err);
}

static void widen_sides(run *r) {
    span_list s = list_of(r, DEVICE_WIDEN, CKD_DTYPE_NONE);
    for (const chain_side *side = r->sides->first; side; side = side->next) {
        if (side->at.dtype == CKD_F16) {
            add_span(&s, CKD_F16,
                     (device_span){.to = r->memory + side->wide,
                                   .from = r->memory + side->base + side->at.factor,
                                   .n = side->at.count});
        }
    }
    flush(&s);
}

/* ---- a round ---- */

static const chain_link *link_at(const device_chain *c, uint32_t round, chain_form form) {
    return round < c->count && c->links[round].form == form ? &c->links[round] : NULL;
}

static ckd_dtype dtype_of(const chain_link *l) {
    return l->record->tensor->dtype;
}

/* Returns where the link's values are made. */
static void *place_of(const device_chain *c, const chain_link *l) {
    return l - c->links < c->cast ? c->wide : c->to;
}

static void put_exceptions(run *r, const device_chain *c, const chain_link *l) {
    const uint8_t *sent = r->memory + c->base;
    device_scattering s = {place_of(c, l), (const uint32_t *)(const void *)(sent + l->exception_at),
                           sent + l->exception_bits, l->exceptions, (uint32_t)ckd_dtype_size(dtype_of(l))};
    if (r->why.result == DEVICE_DONE) {
        r->lease->backend->scatter(&r->lease->queue, &s, &r->why);
    }
}

static void place_values(run *r, uint32_t round) {
    span_list copied = list_of(r, DEVICE_COPY, CKD_DTYPE_NONE),
              widened = list_of(r, DEVICE_WIDEN, CKD_DTYPE_NONE);
    for (size_t i = 0; i < r->count; i++) {
        const device_chain *c = &r->chains[i];
        const chain_link *l = link_at(c, round, CHAIN_VALUES);
        if (l) {
            device_span all = {.to = place_of(c, l),
                               .from = r->memory + c->base + l->at,
                               .n = l->half ? l->record->count : l->record->raw_size};
            add_span(l->half ? &widened : &copied, l->half ? CKD_BF16 : CKD_U8, all);
        }
    }
    flush(&copied);
    flush(&widened);
    for (size_t i = 0; i < r->count; i++) {
        const chain_link *l = link_at(&r->chains[i], round, CHAIN_VALUES);
        if (l && l->exceptions) {
            put_exceptions(r, &r->chains[i], l);
        }
    }
}

/* Returns the places of a stream's differences and contexts. A stream of values is read in place, without contexts. */
static dense_integers integers_of(const device_chain *c, const chain_link *l, uint8_t **at) {
    dense_integers integers = {.integers = place_of(c, l), .n = (uint32_t)l->record->count};
    if (l->delta) {
        integers.integers = take(at, l->record->raw_size);
        integers.contexts = take(at, l->record->count);
    }
    return integers;
}

/* Adds all streams of the round to the batch, and queues the computation of their contexts. */
static ckd_status gather_streams(run *r, uint32_t round, uint8_t **at, ckd_error *err) {
    span_list contexts = list_of(r, DEVICE_CONTEXT, CKD_DTYPE_NONE);
    ckd_status status = CKD_OK;
    dense_batch_clear(&r->streams);
    for (size_t i = 0; i < r->count && status == CKD_OK; i++) {
        const device_chain *c = &r->chains[i];
        const chain_link *l = link_at(c, round, CHAIN_STREAM);
        bool dense;
        if (!l) {
            continue;
        }
        const uint8_t *stream = c->streams.data + l->at;
        dense_integers integers = integers_of(c, l, at);
        status = symbols_parts_read(r->parts, &dense, (unsigned)(l->record->raw_size / l->record->count),
                                    stream, l->size, err); /* as chain.c has read it */
        if (status == CKD_OK) {
            r->read[r->streams.count] = i;
            status = dense_add_reading(&r->streams, r->parts, &integers, stream + r->parts->header,
                                       r->parts->bits, err);
        }
        if (l->delta && r->parts->contexts) {
            add_span(&contexts, dtype_of(l),
                     (device_span){.to = (void *)(uintptr_t)integers.contexts,
                                   .from = place_of(c, l),
                                   .n = integers.n});
        }
    }
    flush(&contexts);
    return status;
}

static ckd_status read_streams(run *r, uint32_t round, ckd_error *err) {
    uint8_t *at = round_memory(r);
    ckd_status status = gather_streams(r, round, &at, err);
    if (status == CKD_OK && r->streams.count) {
        status = dense_read(&r->streams, r->lease, at, err);
    }
    if (status != CKD_OK || r->streams.count == 0) {
        return status;
    }
    span_list turned = list_of(r, DEVICE_UNROTATE, CKD_DTYPE_NONE),
              moved = list_of(r, DEVICE_APPLY, CKD_DTYPE_NONE);
    at = round_memory(r);
    for (uint32_t i = 0; i < r->streams.count; i++) {
        device_chain *c = &r->chains[r->read[i]];
        const chain_link *l = &c->links[round];
        dense_integers integers = integers_of(c, l, &at);
        void *values = place_of(c, l);
        c->mismatch |= !dense_read_ok(&r->streams, i);
        if (l->delta) {
            add_span(
                &moved, dtype_of(l),
                (device_span){.to = values, .from = values, .first = integers.integers, .n = integers.n});
        } else if (dtype_is_float(dtype_of(l))) {
            add_span(&turned, dtype_of(l), (device_span){.to = values, .from = values, .n = integers.n});
        }
    }
    flush(&turned);
    flush(&moved);
    return CKD_OK;
}

/* ---- lossy links ---- */

static const uint8_t *sent_factor(const run *r, const device_chain *c, const chain_side *side,
                                  const chain_factor *own) {
    return r->memory + (side ? side->base : c->base) + factor_of(side, own)->factor;
}

static const float *wide_factor(run *r, const device_chain *c, const chain_side *side,
                                const chain_factor *own, uint8_t **at) {
    const chain_factor *f = factor_of(side, own);
    const uint8_t *sent = sent_factor(r, c, side, own);
    if (f->dtype == CKD_F32) {
        return (const float *)(const void *)sent;
    }
    if (side && f->dtype == CKD_F16) {
        return (const float *)(const void *)(r->memory + side->wide);
    }
    float *to = take(at, f->count * sizeof(float));
    one_span(r, DEVICE_WIDEN, f->dtype, CKD_DTYPE_NONE, (device_span){.to = to, .from = sent, .n = f->count});
    return to;
}

static const void *columns_of(const run *r, const device_chain *c, const chain_link *l) {
    const chain_factor *f = l->right_side ? &l->right_side->at : &l->right;
    uint64_t base = l->right_side ? l->right_side->base : c->base;
    return f->has_step ? r->memory + base + f->step : NULL;
}

/* Returns false if the factors do not suit a product of bytes. */
static bool multiply_bytes(run *r, const device_chain *c, const chain_link *l, int32_t *sums) {
    device_byte_product p = {.sums = sums, .rows = l->rows, .columns = l->columns, .rank = l->rank};
    bool fit = factor_of(l->left_side, &l->left)->dtype == CKD_I8 &&
               factor_of(l->right_side, &l->right)->dtype == CKD_I8 && device_multiplies_bytes(l->columns);
    p.left = (const int8_t *)sent_factor(r, c, l->left_side, &l->left);
    p.right = (const int8_t *)sent_factor(r, c, l->right_side, &l->right);
    bool supported = fit;
    if (fit && r->why.result == DEVICE_DONE) {
        r->lease->backend->byte_product(&r->lease->queue, &supported, &p, &r->why);
    }
    return supported;
}

static void multiply_floats(run *r, const device_chain *c, const chain_link *l, float *sums, uint8_t **at) {
    device_product p = {
        .sums = sums, .rows = l->rows, .columns = l->columns, .rank = l->rank, .right_transposed = true};
    p.left = wide_factor(r, c, l->left_side, &l->left, at);
    p.right = wide_factor(r, c, l->right_side, &l->right, at);
    if (r->why.result == DEVICE_DONE) {
        r->lease->backend->product(&r->lease->queue, &p, &r->why);
    }
}

/* Multiplies the link's factors, if it has any. */
static void put_products(device_tile *t, run *r, const device_chain *c, const chain_link *l, uint8_t **at) {
    void *sums = l->rank ? take(at, l->rows * l->columns * sizeof(float)) : NULL;
    if (sums && multiply_bytes(r, c, l, sums)) {
        t->low_whole = (const int32_t *)sums + l->phase;
    } else if (sums) {
        multiply_floats(r, c, l, sums, at);
        t->low_rank = (const float *)sums + l->phase;
    }
}

static const uint32_t *packed_of(const run *r, const device_chain *c, const chain_link *l) {
    return l->packed ? (const uint32_t *)(const void *)(r->memory + c->base + l->at) : NULL;
}

static void move_linear(run *r, const device_chain *c, const chain_link *l, float *values, uint8_t *at) {
    device_tile t = {.parent_values = l->delta ? values : NULL,
                     .values = values,
                     .packed = packed_of(r, c, l),
                     .row_step = (const float *)(const void *)(r->memory + c->base + l->row),
                     .column_step = columns_of(r, c, l),
                     .count = l->record->count,
                     .columns = l->columns,
                     .phase = l->phase,
                     .unit = l->run.unit,
                     .per_unit = l->run.per_unit,
                     .low_rank_unit = l->run.low_rank_unit,
                     .offset = {l->run.offset[0], l->run.offset[1], l->run.offset[2]}};
    put_products(&t, r, c, l, &at);
    if (r->why.result == DEVICE_DONE) {
        r->lease->backend->move(&r->lease->queue, &t, &r->why);
    }
}

static void move_levels(run *r, const device_chain *c, const chain_link *l, float *values) {
    const uint8_t *rows = r->memory + c->base + l->row;
    device_levels t = {.values = values,
                       .packed = packed_of(r, c, l),
                       .row = l->has_rows ? (const int32_t *)(const void *)rows : NULL,
                       .column = columns_of(r, c, l),
                       .count = l->record->count,
                       .columns = l->columns,
                       .phase = l->phase,
                       .birth = l->birth,
                       .step = l->step};
    if (r->why.result == DEVICE_DONE) {
        r->lease->backend->move_levels(&r->lease->queue, &t, &r->why);
    }
}

/* Works in floats for every dtype. */
static void move_lossy(run *r, const device_chain *c, const chain_link *l) {
    ckd_dtype dtype = dtype_of(l);
    void *to = place_of(c, l);
    uint8_t *at = link_memory(r);
    uint64_t n = l->record->count;
    float *values = dtype == CKD_F32 ? to : take(&at, n * sizeof(float));
    if (dtype != CKD_F32 && l->delta) {
        one_span(r, DEVICE_WIDEN, dtype, CKD_DTYPE_NONE, (device_span){.to = values, .from = to, .n = n});
    }
    if (l->form == CHAIN_LEVELS) {
        move_levels(r, c, l, values);
    } else {
        move_linear(r, c, l, values, at);
    }
    if (dtype != CKD_F32) {
        one_span(r, DEVICE_CAST, CKD_F32, dtype, (device_span){.to = to, .from = values, .n = n});
    }
    put_exceptions(r, c, l);
}

static void move_all(run *r, uint32_t round) {
    for (size_t i = 0; i < r->count; i++) {
        const chain_link *linear = link_at(&r->chains[i], round, CHAIN_LINEAR),
                         *levels = link_at(&r->chains[i], round, CHAIN_LEVELS);
        const chain_link *cast = link_at(&r->chains[i], round, CHAIN_CAST);
        if (cast) {
            const device_chain *c = &r->chains[i];
            one_span(r, DEVICE_CAST, dtype_of(cast - 1), dtype_of(cast),
                     (device_span){.to = c->to, .from = c->wide, .n = cast->record->count});
        }
        if (linear || levels) {
            move_lossy(r, &r->chains[i], linear ? linear : levels);
        }
    }
}

/* ---- hashes ---- */

static ckd_status compare(run *r, uint32_t round, ckd_error *err) {
    size_t count = 0;
    for (size_t i = 0; i < r->count; i++) {
        const device_chain *c = &r->chains[i];
        if (round < c->count && c->links[round].hashed) {
            const chain_link *l = &c->links[round];
            r->hashed[count] = (device_hash_span){place_of(c, l), l->record->raw_size, NULL};
            r->chain_of_hash[count++] = i;
        }
    }
    ckd_status status =
        count ? device_hash(r->found, r->lease, r->hashed, count, pages_memory(r), err) : CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        device_chain *c = &r->chains[r->chain_of_hash[i]];
        c->mismatch |= !hash128_equal(&r->found[i], &c->links[round].record->content);
    }
    return status;
}

/* ---- rounds ---- */

static ckd_status run_rounds(run *r, ckd_error *err) {
    ckd_status status = send_all(r, err);
    if (status == CKD_OK) {
        widen_sides(r);
    }
    for (uint32_t round = 0; round < r->rounds && status == CKD_OK; round++) {
        place_values(r, round);
        status = read_streams(r, round, err);
        move_all(r, round);
        if (status == CKD_OK && r->unsupported) {
            status = err_set(err, CKD_E_UNSUPPORTED, "the device has no operation for %s",
                             ckd_dtype_name(r->chains[0].block->record->tensor->dtype));
        }
        THEN(status, device_status(&r->why, r->lease->queue.device, err));
        THEN(status, compare(r, round, err));
    }
    return status == CKD_OK ? device_finish(r->lease, err) : status;
}

ckd_status device_chains_run(device_lease *lease, void *memory, device_chain *chains, size_t count,
                             chain_sides *sides, ckd_error *err) {
    run r = {.lease = lease, .chains = chains, .count = count, .sides = sides, .memory = memory};
    measure(&r);
    r.why = (device_failure){DEVICE_DONE, "", ""};
    r.parts = malloc(sizeof(*r.parts));
    r.read = malloc((count + 1) * sizeof(*r.read));
    r.chain_of_hash = malloc((count + 1) * sizeof(*r.chain_of_hash));
    r.hashed = malloc((count + 1) * sizeof(*r.hashed));
    r.found = malloc((count + 1) * sizeof(*r.found));
    bool allocated = r.parts && r.read && r.chain_of_hash && r.hashed && r.found;
    ckd_status status = allocated ? CKD_OK : err_nomem(err, count * sizeof(*r.hashed), "blocks for a device");
    if (status == CKD_OK && count) {
        status = run_rounds(&r, err);
    }
    dense_batch_free(&r.streams);
    free(r.parts);
    free(r.read);
    free(r.chain_of_hash);
    free(r.hashed);
    free(r.found);
    return status;
}
