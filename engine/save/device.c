/*
 * Blocks that a device codes: chooses delta or standalone by the rules of encode/block_coder.c, and hands them to the
 * pipeline.
 */
#include "engine/save/device.h"

#include <stdlib.h>

#include "engine/device/device.h"

#define MEMORY       (UINT64_C(64) << 20) /* bytes of device memory for the blocks of a batch */
#define BATCH_BLOCKS 256u
#define FIRST_BLOCKS 4u  /* first batch of a tensor, which shows if deltas win */
#define SKIP_BLOCKS  28u /* blocks for which no delta is tried after none has won */
#define TIMES        4u  /* most memory of a standalone block there, as a multiple of its bytes */

/* The two payloads of a block: as a delta, and on its own (also for a materialized copy). */
typedef enum payload_kind { PAYLOAD_DELTA, PAYLOAD_STANDALONE, PAYLOAD_KINDS } payload_kind;

/* A block of a batch. */
typedef struct coded_block {
    uint32_t number; /* in the span */
    uint64_t first, count;
    const record *parent;
    bool duplicate; /* this save has its values already */
    bool wants[PAYLOAD_KINDS], has[PAYLOAD_KINDS];
    bool may_lose;    /* a delta was planned, but may not be the smallest */
    bool with_values; /* the pipeline needs its values nevertheless */
    uint64_t planned[PAYLOAD_KINDS];
    bytes payload[PAYLOAD_KINDS];
    bytes part[2]; /* samples of values and differences, for the byte codecs */
} coded_block;

struct save_device {
    stream_batch streams;
    device_deltas deltas;
    device_standalones standalones;
    coded_block blocks[BATCH_BLOCKS];
    coded_block *standalone[BATCH_BLOCKS]; /* the blocks that are now in `standalones` */
    uint32_t count;
    const char *tensor; /* the tensor to which the fields below refer */
    bool won;           /* a delta of the last batch won, or was left to the host */
    bool failed;
    uint32_t skip; /* number of next blocks for which no delta is tried */
};

static bool used, unprepared;

void save_device_use(bool yes) {
    used = yes;
}

bool save_device_is_used(void) {
    return used;
}

void save_device_unprepared(bool yes) {
    unprepared = yes;
}

void save_device_free(ckd_save *save) {
    save_device *s = save->device.coder;
    for (uint32_t i = 0; s && i < BATCH_BLOCKS; i++) {
        bytes_free(&s->blocks[i].payload[PAYLOAD_DELTA]);
        bytes_free(&s->blocks[i].payload[PAYLOAD_STANDALONE]);
        bytes_free(&s->blocks[i].part[0]);
        bytes_free(&s->blocks[i].part[1]);
    }
    if (s) {
        device_deltas_free(&s->deltas);
        device_standalones_free(&s->standalones);
        stream_batch_free(&s->streams);
    }
    free(s);
    save->device.coder = NULL;
}

/* ---- choosing blocks ---- */

/*
 * Returns the parent's block if a delta is worth trying. For that, the block must be large enough to sample, and its
 * standalone size must be known roughly. Else NULL.
 */
static const record *parent_of(const tensor_context *t, uint64_t first, uint64_t count) {
    unsigned width = (unsigned)ckd_dtype_size(t->tensor->dtype);
    uint64_t raw = count * width;
    const record *r = block_in_parent(t, first, count);
    bool too_small = block_probe_of(t->rows != NULL, width, raw).size == raw;
    return !too_small && block_expected_standalone(r, raw) ? r : NULL;
}

static bool may_be_delta(const ckd_save *save, const record *parent, size_t width) {
    load_cost chain = record_chain(parent),
              base = base_cost(width, parent->raw_size, block_expected_standalone(parent, parent->raw_size));
    return parent->depth < MAX_SAVE_DEPTH &&
           budget_allows_chain(&save->coding.budget, &chain, &base, PART_EXACT);
}

static bool may_code(const ckd_save *save, const tensor_context *t, const unchanged_blocks *u) {
    ckd_dtype dtype = t->tensor->dtype;
    return used && u->hashed && u->next >= u->looked && save->coding.context.codec == CKD_CODEC_AUTO &&
           !t->decoded_values && (dtype == CKD_F32 || dtype == CKD_BF16 || dtype == CKD_F16);
}

static coded_block *add_block(save_device *s, uint32_t number, uint64_t first, uint64_t count,
                              const record *parent) {
    coded_block *c = &s->blocks[s->count++];
    c->number = number;
    c->first = first;
    c->count = count;
    c->parent = parent;
    c->duplicate = c->may_lose = c->with_values = false;
    c->wants[PAYLOAD_DELTA] = c->wants[PAYLOAD_STANDALONE] = c->has[PAYLOAD_DELTA] =
        c->has[PAYLOAD_STANDALONE] = false;
    return c;
}

/*
 * Chooses as many of the next blocks as can be handled together. A delta is tried for all of them or for none. Sets
 * u->looked to their end.
 */
static ckd_status choose_batch(save_device *s, const ckd_save *save, unchanged_blocks *u, uint64_t first,
                               ckd_error *err) {
    const tensor_context *t = u->span->context;
    uint64_t end = u->span->end;
    bool tries = s->skip == 0;
    uint32_t max = !tries ? s->skip : s->won ? BATCH_BLOCKS : FIRST_BLOCKS, i = u->next;
    device_reader *r = u->span->tensor->read_context;
    uint64_t count, memory = 0;
    ckd_status status = device_deltas_clear(&s->deltas, &s->streams, r, t->tensor->dtype, BATCH_BLOCKS, err);
    s->count = 0;
    for (; first < end && status == CKD_OK && s->count < max; first += count, i++) {
        count = save_block_length(t, first, end);
        const record *parent = u->same[i] || u->named[i] ? NULL : parent_of(t, first, count);
        parent = parent && budget_ends_chain(&save->coding.budget, parent) ? NULL : parent; /* the host's */
        device_delta *d = parent && tries ? device_deltas_add(&s->deltas, first, count, MEMORY) : NULL;
        memory += count * r->element * TIMES;
        if (parent && (tries ? !d : s->count > 0 && memory > MEMORY)) {
            break;
        }
        if (parent) {
            coded_block *c = add_block(s, i, first, count, parent);
            c->wants[PAYLOAD_DELTA] = tries && may_be_delta(save, parent, r->element);
            c->wants[PAYLOAD_STANDALONE] = !c->wants[PAYLOAD_DELTA];
        }
        if (d) {
            d->parent_content = parent->content;
            d->stream->dropped = !s->blocks[s->count - 1].wants[PAYLOAD_DELTA];
        }
    }
    s->skip -= tries ? 0 : s->count;
    u->looked = i;
    return status;
}

/* ---- coding deltas ---- */

typedef struct batch {
    save_device *s;
    ckd_save *save;
    const tensor_context *t;
    const unchanged_blocks *u;
    uint32_t absent[BATCH_BLOCKS], absent_count; /* blocks whose parent is not on the device */
    uint32_t decoded;                            /* number of them decoded so far */
} batch;

/* Blocks that this save has already need no delta. All jobs are free. */
static void leave_duplicates(batch *b) {
    for (uint32_t i = 0; i < b->s->count; i++) {
        coded_block *c = &b->s->blocks[i];
        block_job *job = &b->save->pipeline.jobs[0];
        job->input.first = c->first;
        job->input.count = c->count;
        job->analysis.original = b->u->content[c->number];
        c->duplicate = block_is_in_save(job, &b->save->coding.context, b->t, -1);
        c->wants[PAYLOAD_STANDALONE] &= !c->duplicate;
        if (i < b->s->deltas.count) {
            b->s->deltas.blocks[i].stream->dropped |= c->duplicate;
        }
    }
}

/* Decodes the parent's values of an absent block into job i. b->decoded blocks were decoded before. */
static ckd_status decode_one(void *context, size_t i, uint32_t worker, ckd_error *err) {
    batch *b = context;
    device_delta *d = &b->s->deltas.blocks[b->absent[b->decoded + i]];
    block_job *job = &b->save->pipeline.jobs[i];
    void *previous =
        bytes_scratch(&job->scratch.previous, d->count * b->s->deltas.r->element, "coding scratch", err);
    if (!previous) {
        return CKD_E_NOMEM;
    }
    (void)worker;
    const view_source from = {
        b->save->sources.parent, b->t->parent, {b->t->region, d->first, d->count}, NULL};
    ckd_error why = {0};
    ckd_status status = span_values(&job->decoder, &from, previous, &why);
    d->stream->dropped = status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_IO;
    return d->stream->dropped ? CKD_OK /* the host meets the damage, too, and reports it */
                              : err_from(err, status, &why);
}

static ckd_status fetch_parent(batch *b, ckd_error *err) {
    save_device *s = b->s;
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < s->count; i++) {
        const device_delta *d = &s->deltas.blocks[i];
        if (!d->parent_on_device && !d->stream->dropped) {
            b->absent[b->absent_count++] = i;
        }
    }
    for (uint32_t n; b->decoded < b->absent_count && status == CKD_OK; b->decoded += n) {
        n = b->absent_count - b->decoded;
        n = n < b->save->pipeline.slot_count ? n : b->save->pipeline.slot_count;
        status = pool_run(b->save->store->pool, n, decode_one, b, err);
        for (uint32_t i = 0; i < n && status == CKD_OK; i++) {
            device_delta *d = &s->deltas.blocks[b->absent[b->decoded + i]];
            status =
                d->stream->dropped
                    ? CKD_OK
                    : device_deltas_put(&s->deltas, d, b->save->pipeline.jobs[i].scratch.previous.data, err);
        }
    }
    return status;
}

static ckd_status plan_one(void *context, size_t i, uint32_t worker, ckd_error *err) {
    batch *b = context;
    device_delta *d = &b->s->deltas.blocks[i];
    (void)err;
    if (!d->stream->dropped) {
        device_deltas_plan(&b->s->deltas, d, coder_symbols(b->save->pipeline.jobs[worker].decoder.coder));
    }
    return CKD_OK;
}

/*
 * Finds the deltas that clearly win. Also finds what else the pipeline will need, as far as that is known before it
 * decides.
 */
static void judge(batch *b) {
    load_budget trial = b->save->coding.budget;
    size_t width = ckd_dtype_size(b->t->tensor->dtype);
    for (uint32_t i = 0; i < b->s->deltas.count; i++) {
        coded_block *c = &b->s->blocks[i];
        device_stream *s = b->s->deltas.blocks[i].stream;
        uint64_t raw = c->count * width, standalone = block_expected_standalone(c->parent, raw);
        if (s->dropped) {
            continue;
        }
        load_cost chain = record_chain(c->parent), base = base_cost(width, raw, standalone);
        c->planned[PAYLOAD_DELTA] = s->planned;
        c->may_lose = s->dropped = (double)s->planned > BLOCK_DELTA_WON * (double)standalone;
        if (!c->may_lose) {
            chain.stored += (double)s->planned;
            chain.work += decode_work(PREDICT_PARENT, CODING_SYMBOLS, width, raw, s->planned, c->count);
        }
        bool use_delta =
            !c->may_lose && budget_allows_delta(&trial, &chain, &base, PART_EXACT, s->planned, standalone);
        c->wants[PAYLOAD_STANDALONE] =
            !unprepared && (!use_delta || budget_wants_materialized(&trial, &chain, &base));
        budget_add(&trial, use_delta ? &chain : &base, c->wants[PAYLOAD_STANDALONE] ? &base : &chain, &base);
    }
}

/* For a small delta, reads a sample of the differences for the byte codecs. */
static ckd_status take_differences(coded_block *c, const device_deltas *all, const device_delta *d,
                                   bool in_panel, ckd_error *err) {
    uint64_t raw = c->count * all->r->element;
    block_probe probe = block_probe_of(in_panel, (unsigned)all->r->element, raw);
    bytes_clear(&c->part[1]);
    if (4 * c->planned[PAYLOAD_DELTA] >= raw) {
        return CKD_OK;
    }
    void *to = bytes_scratch(&c->part[1], probe.size, "a part of a block", err);
    return to ? device_deltas_residual(all, d, to, probe.at, probe.size, err) : CKD_E_NOMEM;
}

static ckd_status take_deltas(batch *b, ckd_error *err) {
    save_device *s = b->s;
    ckd_status status = stream_batch_write(&s->streams, err);
    for (uint32_t i = 0; i < s->deltas.count && status == CKD_OK; i++) {
        const device_delta *d = &s->deltas.blocks[i];
        coded_block *c = &s->blocks[i];
        if (!d->stream->dropped) {
            status = stream_batch_read(&s->streams, d->stream, &c->payload[PAYLOAD_DELTA], err);
            THEN(status, take_differences(c, &s->deltas, d, b->t->rows != NULL, err));
            c->has[PAYLOAD_DELTA] = status == CKD_OK && c->payload[PAYLOAD_DELTA].size > 0;
        }
    }
    return status;
}

static ckd_status code_deltas(batch *b, ckd_error *err) {
    save_device *s = b->s;
    ckd_status status = device_deltas_begin(&s->deltas, err);
    THEN(status, fetch_parent(b, err));
    THEN(status, device_deltas_count(&s->deltas, err));
    THEN(status, pool_run(b->save->store->pool, s->deltas.count, plan_one, b, err));
    if (status != CKD_OK) {
        return status;
    }
    judge(b);
    return take_deltas(b, err);
}

/* ---- coding blocks on their own ---- */

static ckd_status plan_standalone(void *context, size_t i, uint32_t worker, ckd_error *err) {
    batch *b = context;
    device_standalone *d = &b->s->standalones.blocks[i];
    (void)err;
    if (!d->stream->dropped) {
        device_standalones_plan(&b->s->standalones, d,
                                coder_symbols(b->save->pipeline.jobs[worker].decoder.coder));
    }
    return CKD_OK;
}

/* Codes the blocks in s->standalones. */
static ckd_status code_standalones(batch *b, ckd_error *err) {
    save_device *s = b->s;
    symbols_workspace *w = coder_symbols(b->save->pipeline.jobs[0].decoder.coder);
    ckd_status status = device_standalones_count(&s->standalones, w, err);
    THEN(status, pool_run(b->save->store->pool, s->standalones.count, plan_standalone, b, err));
    THEN(status, stream_batch_write(&s->streams, err));
    for (uint32_t i = 0; i < s->standalones.count && status == CKD_OK; i++) {
        const device_stream *stream = s->standalones.blocks[i].stream;
        coded_block *c = s->standalone[i];
        if (!stream->dropped) {
            status = stream_batch_read(&s->streams, stream, &c->payload[PAYLOAD_STANDALONE], err);
            c->planned[PAYLOAD_STANDALONE] = stream->planned;
            c->has[PAYLOAD_STANDALONE] = status == CKD_OK && c->payload[PAYLOAD_STANDALONE].size > 0;
        }
    }
    return status;
}

/* Codes all such blocks, as many at a time as memory allows. */
static ckd_status code_all_standalones(batch *b, device_reader *r, ckd_error *err) {
    save_device *s = b->s;
    ckd_dtype dtype = b->t->tensor->dtype;
    ckd_status status = device_standalones_clear(&s->standalones, &s->streams, r, dtype, BATCH_BLOCKS, err);
    for (uint32_t i = 0; i < s->count && status == CKD_OK;) {
        coded_block *c = &s->blocks[i];
        device_standalone *d = c->wants[PAYLOAD_STANDALONE]
                                   ? device_standalones_add(&s->standalones, c->first, c->count, MEMORY)
                                   : NULL;
        if (c->wants[PAYLOAD_STANDALONE] && !d) { /* it comes first in the next batch */
            status = code_standalones(b, err);
            status = status == CKD_OK
                         ? device_standalones_clear(&s->standalones, &s->streams, r, dtype, BATCH_BLOCKS, err)
                         : status;
            continue;
        }
        if (d) {
            d->grid = block_grid(&b->t->shape, b->t->region, c->first);
            s->standalone[s->standalones.count - 1] = c;
        }
        i++;
    }
    return status == CKD_OK && s->standalones.count ? code_standalones(b, err) : status;
}

/* ---- byte codecs ---- */

/* Reads a sample of each block that may do without its values, for the byte codecs. */
static ckd_status take_values(batch *b, device_reader *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < b->s->count && status == CKD_OK; i++) {
        coded_block *c = &b->s->blocks[i];
        block_probe probe = block_probe_of(b->t->rows != NULL, (unsigned)r->element, c->count * r->element);
        bool unsure = c->may_lose && delta_may_pay(c->planned[PAYLOAD_DELTA], c->planned[PAYLOAD_STANDALONE]);
        c->has[PAYLOAD_STANDALONE] &= !unsure; /* the host decides */
        c->with_values = c->has[PAYLOAD_DELTA] && c->wants[PAYLOAD_STANDALONE] && !c->has[PAYLOAD_STANDALONE];
        bytes_clear(&c->part[0]);
        if (!c->with_values && (c->has[PAYLOAD_DELTA] || c->has[PAYLOAD_STANDALONE])) {
            void *to = bytes_scratch(&c->part[0], probe.size, "a part of a block", err);
            uint64_t first = c->first + probe.at / r->element, count = probe.size / r->element;
            r->end = first + count; /* do not read ahead */
            status = to ? device_read(r, first, count, to, err) : CKD_E_NOMEM;
        }
    }
    return status;
}

/* Byte codecs see patterns that symbols do not. If they promise more, the host gets the whole block. */
static ckd_status probe_one(void *context, size_t i, uint32_t worker, ckd_error *err) {
    batch *b = context;
    coded_block *c = &b->s->blocks[i];
    unsigned width = (unsigned)ckd_dtype_size(b->t->tensor->dtype);
    uint64_t raw = c->count * width, standalone = block_expected_standalone(c->parent, raw);
    standalone = c->has[PAYLOAD_STANDALONE] && c->planned[PAYLOAD_STANDALONE] > standalone
                     ? c->planned[PAYLOAD_STANDALONE]
                     : standalone;
    uint64_t limits[2] = {standalone, c->planned[PAYLOAD_DELTA]};
    ckd_status status = CKD_OK;
    for (int k = 0; k < 2 && (c->has[PAYLOAD_DELTA] || c->has[PAYLOAD_STANDALONE]) && status == CKD_OK; k++) {
        bool may_win = false;
        if (c->part[k].size && (k == 0 || c->has[PAYLOAD_DELTA])) {
            block_sample s = {c->part[k].data, c->part[k].size, width, raw, limits[k]};
            status = block_codec_may_win(&may_win, b->save->pipeline.jobs[worker].decoder.coder,
                                         &b->save->coding.context, &s, err);
        }
        c->has[PAYLOAD_DELTA] &= !may_win;
        c->has[PAYLOAD_STANDALONE] &= !may_win;
    }
    return status;
}

static ckd_status run(batch *b, device_reader *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    leave_duplicates(b);
    if (b->s->deltas.count > 0) {
        status = code_deltas(b, err);
    }
    THEN(status, code_all_standalones(b, r, err));
    THEN(status, take_values(b, r, err));
    return status == CKD_OK ? pool_run(b->save->store->pool, b->s->count, probe_one, b, err) : status;
}

/* ---- for the pipeline ---- */

/* Returns the state for the tensor; NULL: the device no longer codes it, or memory is short. */
static save_device *device_state_for(ckd_save *save, const tensor_context *t) {
    save_device *s = save->device.coder = save->device.coder ? save->device.coder : calloc(1, sizeof(*s));
    if (s && s->tensor != t->tensor->name) {
        s->tensor = t->tensor->name;
        s->won = s->failed = false;
        s->skip = 0;
    }
    return s && !s->failed ? s : NULL;
}

/*
 * No delta is tried for the next blocks if all of these have lost. A delta left to the host does not count as lost:
 * only the host writes sparse streams, which are far smaller if few values have changed.
 */
static void record_results(ckd_save *save, const save_device *s, unchanged_blocks *u) {
    bool won = false;
    for (uint32_t i = 0; i < s->count; i++) {
        const coded_block *c = &s->blocks[i];
        bool coded = c->has[PAYLOAD_DELTA] || c->has[PAYLOAD_STANDALONE];
        won |= c->has[PAYLOAD_DELTA] || (c->wants[PAYLOAD_DELTA] && !c->may_lose);
        save->device.has_pending_values |= coded && !c->with_values;
        u->unread[c->number] = coded && !c->with_values;
    }
    if (s->deltas.count > 0) {
        save->device.coder->skip = won ? 0 : SKIP_BLOCKS;
        save->device.coder->won = won;
    }
}

ckd_status save_device_code(ckd_save *save, unchanged_blocks *u, uint64_t first, ckd_error *err) {
    const tensor_context *t = u->span->context;
    save_device *s = may_code(save, t, u) ? device_state_for(save, t) : NULL;
    ckd_error why;
    if (!s) {
        return CKD_OK;
    }
    batch b = {.s = s, .save = save, .t = t, .u = u};
    ckd_status status = choose_batch(s, save, u, first, &why);
    if (status == CKD_OK && s->count > 0) {
        /* the batch uses the pipeline's jobs */
        ckd_status awaited = save_await(save, save->pipeline.pushed, err);
        if (awaited != CKD_OK) {
            return awaited;
        }
        status = run(&b, u->span->tensor->read_context, &why);
    }
    if (status != CKD_OK) {
        s->failed = true;
        s->count = 0;
        u->looked = u->count;
        store_message(save->store, "%s is copied to the host and coded there, as the device failed: %s",
                      t->tensor->name, why.message);
    }
    record_results(save, s, u);
    return CKD_OK;
}

static void exchange(bytes *a, bytes *b) {
    bytes old = *a;
    *a = *b;
    *b = old;
}

static void set_precoded(block_job *job, coded_block *c, const hash128 *content) {
    exchange(&job->analysis.predicted.payload, &c->payload[PAYLOAD_DELTA]);
    exchange(&job->analysis.standalone.payload, &c->payload[PAYLOAD_STANDALONE]);
    job->input.precoded = (block_precoded){.coded = true,
                                           .delta = c->has[PAYLOAD_DELTA],
                                           .standalone = c->has[PAYLOAD_STANDALONE],
                                           .rejected = c->may_lose,
                                           .rounded = job->input.precoded.rounded,
                                           .bf16 = job->input.precoded.bf16,
                                           .f16 = job->input.precoded.f16,
                                           .content = *content,
                                           .planned = c->planned[PAYLOAD_DELTA],
                                           .planned_standalone = c->planned[PAYLOAD_STANDALONE]};
    c->has[PAYLOAD_DELTA] = c->has[PAYLOAD_STANDALONE] = false;
}

bool save_device_take_result(ckd_save *save, block_job *job, const unchanged_blocks *u) {
    save_device *s = save->device.coder;
    uint32_t number = u->next - 1;
    for (uint32_t i = 0; s && number < u->looked && i < s->count; i++) {
        coded_block *c = &s->blocks[i];
        if (c->number == number && (c->has[PAYLOAD_DELTA] || c->has[PAYLOAD_STANDALONE])) {
            set_precoded(job, c, &u->content[number]);
            return !c->with_values;
        }
    }
    return false;
}
