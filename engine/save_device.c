#include "engine/save_device.h"

#include <stdlib.h>

#include "engine/device_delta.h"

#define MEMORY       (UINT64_C(64) << 20) /* of the device, for the blocks of a batch */
#define BATCH_BLOCKS 256u
#define FIRST_BLOCKS 4u  /* of a tensor, to see whether deltas win */
#define SKIP_BLOCKS  28u /* that are not looked at once none has won */

struct values_there {
    ckd_device device;
    device_reader values;
};

/* A block of a batch. */
typedef struct coded_block {
    uint32_t number; /* of the span's */
    const record *parent;
    bool coded;
    bool with_values; /* the pipeline wants them all the same */
    size_t planned;
    bytes payload;
    bytes part[2]; /* of the values, of the differences: can a byte codec win? */
} coded_block;

struct save_device {
    device_deltas deltas;
    coded_block blocks[BATCH_BLOCKS];
    uint32_t count;
    const char *tensor; /* that what follows is about */
    bool won, failed;
    uint32_t skip; /* blocks */
    bool pending;
};

void save_device_free(ckd_save *save) {
    save_device *s = save->device;
    for (uint32_t i = 0; s && i < BATCH_BLOCKS; i++) {
        bytes_free(&s->blocks[i].payload);
        bytes_free(&s->blocks[i].part[0]);
        bytes_free(&s->blocks[i].part[1]);
    }
    if (s) {
        device_deltas_free(&s->deltas);
    }
    free(s);
    save->device = NULL;
}

/* ---- which blocks ---- */

/* The parent's block, if a delta on it is worth a try here: its values are many enough for samples, and what they take is known. */
static const record *parent_of(const ckd_save *save, const tensor_context *t, uint64_t first,
                               uint64_t count) {
    unsigned width = (unsigned)ckd_dtype_size(t->tensor->dtype);
    uint64_t raw = count * width;
    const record *r = block_in_parent(t, first, count);
    uint64_t alone = block_expected_alone(r, raw);
    if (!alone || r->depth >= MAX_SAVE_DEPTH || block_probe_of(t->rows != NULL, width, raw).size == raw) {
        return NULL;
    }
    load_cost chain = record_chain(r), base = base_cost(width, raw, alone);
    return budget_allows_chain(&save->budget, &chain, &base, PART_EXACT) ? r : NULL;
}

static bool may_code(const ckd_save *save, const tensor_context *t, const staying_blocks *u) {
    ckd_dtype dtype = t->tensor->dtype;
    return u->hashed && u->next >= u->looked && save->coding.codec == CKD_CODEC_AUTO && !t->kept &&
           (dtype == CKD_F32 || dtype == CKD_BF16 || dtype == CKD_F16);
}

/* As many of the next blocks as may be looked at together. Where they end is u->looked. */
static ckd_status choose(save_device *s, const ckd_save *save, const ckd_tensor *tensor,
                         const tensor_context *t, staying_blocks *u, uint64_t first, uint64_t end,
                         ckd_error *err) {
    uint32_t most = s->won ? BATCH_BLOCKS : FIRST_BLOCKS, i = u->next;
    ckd_status status =
        device_deltas_clear(&s->deltas, tensor->read_context, t->tensor->dtype, BATCH_BLOCKS, err);
    s->count = 0;
    for (uint64_t count; first < end && status == CKD_OK && s->count < most; first += count, i++) {
        count = save_block_at(t, first, end);
        const record *r = u->same[i] || s->skip ? NULL : parent_of(save, t, first, count);
        s->skip -= s->skip > 0;
        device_delta *d = r ? device_deltas_add(&s->deltas, first, count, MEMORY) : NULL;
        if (r && !d) {
            break;
        }
        if (d) {
            d->before = r->content;
            coded_block *c = &s->blocks[s->count++];
            c->number = i;
            c->parent = r;
            c->coded = c->with_values = false;
        }
    }
    u->looked = i;
    return status;
}

/* ---- coding them ---- */

typedef struct batch {
    save_device *s;
    ckd_save *save;
    const tensor_context *t;
    const staying_blocks *u;
    uint32_t absent[BATCH_BLOCKS], absent_count; /* blocks whose parent is not on the device */
    uint32_t decoded;                            /* of these */
} batch;

/* What this save has already is no delta. All jobs are free. */
static void leave_known(batch *b) {
    for (uint32_t i = 0; i < b->s->count; i++) {
        device_delta *d = &b->s->deltas.blocks[i];
        block_job *job = &b->save->jobs[0];
        job->first = d->first;
        job->count = d->count;
        job->original = b->u->content[b->s->blocks[i].number];
        d->left = block_is_in_save(job, &b->save->coding, b->t, -1);
    }
}

/* Index i's job has the parent's values of the block that is so far behind the last one decoded. */
static ckd_status decode_one(void *context, size_t i, uint32_t worker, ckd_error *err) {
    batch *b = context;
    device_delta *d = &b->s->deltas.blocks[b->absent[b->decoded + i]];
    block_job *job = &b->save->jobs[i];
    void *previous = bytes_scratch(&job->previous, d->count * b->s->deltas.r->element, "coding scratch", err);
    if (!previous) {
        return CKD_E_NOMEM;
    }
    (void)worker;
    span mine = {b->t->region, d->first, d->count};
    ckd_status status = span_values(&job->decoder, b->save->coding.views, b->save->parent, b->t->parent,
                                    &mine, previous, NULL, err);
    d->left = status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_IO;
    return d->left ? CKD_OK : status; /* the host meets it, too, and tells */
}

static ckd_status bring_parent(batch *b, ckd_error *err) {
    save_device *s = b->s;
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < s->count; i++) {
        const device_delta *d = &s->deltas.blocks[i];
        if (!d->there && !d->left) {
            b->absent[b->absent_count++] = i;
        }
    }
    for (uint32_t n; b->decoded < b->absent_count && status == CKD_OK; b->decoded += n) {
        n = b->absent_count - b->decoded;
        n = n < b->save->pipeline.slot_count ? n : b->save->pipeline.slot_count;
        status = pool_run(b->save->store->pool, n, decode_one, b, err);
        for (uint32_t i = 0; i < n && status == CKD_OK; i++) {
            device_delta *d = &s->deltas.blocks[b->absent[b->decoded + i]];
            status = d->left ? CKD_OK : device_deltas_put(&s->deltas, d, b->save->jobs[i].previous.data, err);
        }
    }
    return status;
}

static ckd_status plan_one(void *context, size_t i, uint32_t worker, ckd_error *err) {
    batch *b = context;
    device_delta *d = &b->s->deltas.blocks[i];
    (void)err;
    if (!d->left) {
        device_deltas_plan(&b->s->deltas, d, coder_symbols(b->save->jobs[worker].decoder.coder));
    }
    return CKD_OK;
}

/* Which deltas win for certain, and what the pipeline will want besides them, as far as can be told before it decides. */
static void judge(batch *b) {
    load_budget trial = b->save->budget;
    size_t width = ckd_dtype_size(b->t->tensor->dtype);
    for (uint32_t i = 0; i < b->s->count; i++) {
        coded_block *c = &b->s->blocks[i];
        device_delta *d = &b->s->deltas.blocks[i];
        uint64_t raw = d->count * width, alone = block_expected_alone(c->parent, raw);
        if (d->left || (double)d->planned > BLOCK_DELTA_WON * (double)alone) {
            d->left = true;
            continue;
        }
        load_cost chain = record_chain(c->parent), base = base_cost(width, raw, alone);
        chain.stored += (double)d->planned;
        chain.work += decode_work(PREDICT_PARENT, CODING_SYMBOLS, width, raw, d->planned, d->count);
        d->left = !budget_allows_delta(&trial, &chain, &base, PART_EXACT, d->planned, alone);
        c->planned = d->planned;
        c->with_values = budget_wants_ready(&trial, &chain, &base);
        budget_add(&trial, &chain, c->with_values ? &base : &chain, &base);
    }
}

/* Some of the values, and of the differences where these are few bits, for byte codecs to look at. */
static ckd_status take_parts(coded_block *c, const device_deltas *all, const device_delta *d, bool in_panel,
                             ckd_error *err) {
    device_reader *r = all->r;
    uint64_t raw = d->count * r->element;
    block_probe of = block_probe_of(in_panel, (unsigned)r->element, raw);
    bool wanted[2] = {!c->with_values, 4 * c->planned < raw};
    ckd_status status = CKD_OK;
    for (int k = 0; k < 2 && status == CKD_OK; k++) {
        void *to = wanted[k] ? bytes_scratch(&c->part[k], of.size, "a part of a block", err) : NULL;
        c->part[k].size = to ? of.size : 0;
        if (wanted[k] && !to) {
            return CKD_E_NOMEM;
        }
        if (wanted[k] && k == 0) {
            uint64_t first = d->first + of.at / r->element, count = of.size / r->element;
            r->end = first + count; /* nothing behind it is wanted */
            status = device_read(r, first, count, to, err);
        } else if (wanted[k]) {
            status = device_deltas_residual(all, d, to, of.at, of.size, err);
        }
    }
    return status;
}

static ckd_status take_results(batch *b, ckd_error *err) {
    save_device *s = b->s;
    ckd_status status = device_deltas_write(&s->deltas, err);
    for (uint32_t i = 0; i < s->count && status == CKD_OK; i++) {
        const device_delta *d = &s->deltas.blocks[i];
        coded_block *c = &s->blocks[i];
        if (!d->left) {
            status = device_deltas_stream(&s->deltas, d, &c->payload, err);
            status = status == CKD_OK ? take_parts(c, &s->deltas, d, b->t->rows != NULL, err) : status;
            c->coded = status == CKD_OK && c->payload.size > 0;
        }
    }
    return status;
}

/* Byte codecs see what symbols do not; where they promise more, all of the block is theirs to look at. */
static ckd_status probe_one(void *context, size_t i, uint32_t worker, ckd_error *err) {
    batch *b = context;
    coded_block *c = &b->s->blocks[i];
    unsigned width = (unsigned)ckd_dtype_size(b->t->tensor->dtype);
    uint64_t raw = b->s->deltas.blocks[i].count * width;
    uint64_t limits[2] = {block_expected_alone(c->parent, raw), c->planned};
    ckd_status status = CKD_OK;
    for (int k = 0; k < 2 && c->coded && status == CKD_OK; k++) {
        bool promise = false;
        if (c->part[k].size) {
            status = block_codecs_promise(&promise, b->save->jobs[worker].decoder.coder, &b->save->coding,
                                          width, c->part[k].data, c->part[k].size, limits[k], raw, err);
        }
        c->coded = !promise;
    }
    return status;
}

static ckd_status run(batch *b, ckd_error *err) {
    thread_pool *pool = b->save->store->pool;
    device_deltas *all = &b->s->deltas;
    leave_known(b);
    ckd_status status = device_deltas_begin(all, err);
    status = status == CKD_OK ? bring_parent(b, err) : status;
    status = status == CKD_OK ? device_deltas_count(all, err) : status;
    status = status == CKD_OK ? pool_run(pool, b->s->count, plan_one, b, err) : status;
    if (status == CKD_OK) {
        judge(b);
        status = take_results(b, err);
    }
    return status == CKD_OK ? pool_run(pool, b->s->count, probe_one, b, err) : status;
}

/* ---- for the pipeline ---- */

/* What is known of the tensor; NULL: it is not to be tried (any more). */
static save_device *about(ckd_save *save, const tensor_context *t) {
    save_device *s = save->device = save->device ? save->device : calloc(1, sizeof(*s));
    if (s && s->tensor != t->tensor->name) {
        s->tensor = t->tensor->name;
        s->won = s->failed = false;
        s->skip = 0;
    }
    return s && !s->failed ? s : NULL;
}

static void note_results(save_device *s, staying_blocks *u) {
    bool won = false;
    for (uint32_t i = 0; i < s->count; i++) {
        const coded_block *c = &s->blocks[i];
        won |= c->coded;
        s->pending |= c->coded && !c->with_values;
        u->unread[c->number] = c->coded && !c->with_values;
    }
    s->skip = won || s->count == 0 ? s->skip : SKIP_BLOCKS;
    s->won = s->count ? won : s->won;
}

ckd_status save_device_code(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t,
                            staying_blocks *u, uint64_t first, uint64_t end, ckd_error *err) {
    save_device *s = may_code(save, t, u) ? about(save, t) : NULL;
    ckd_error why;
    if (!s) {
        return CKD_OK;
    }
    batch b = {.s = s, .save = save, .t = t, .u = u};
    ckd_status status = choose(s, save, tensor, t, u, first, end, &why);
    if (status == CKD_OK && s->count > 0) {
        ckd_status awaited = save_await(save, save->pipeline.pushed, err); /* its jobs are worked with */
        if (awaited != CKD_OK) {
            return awaited;
        }
        status = run(&b, &why);
    }
    if (status != CKD_OK) {
        s->failed = true;
        s->count = 0;
        u->looked = u->count;
        store_message(save->store, "%s is read from its device, which cannot code it: %s", t->tensor->name,
                      why.message);
    }
    note_results(s, u);
    return CKD_OK;
}

bool save_device_give(ckd_save *save, block_job *job, const staying_blocks *u) {
    save_device *s = save->device;
    uint32_t number = u->next - 1;
    for (uint32_t i = 0; s && number < u->looked && i < s->count; i++) {
        coded_block *c = &s->blocks[i];
        if (c->number == number && c->coded) {
            bytes old = job->delta.payload;
            job->delta.payload = c->payload;
            c->payload = old;
            c->coded = false;
            job->ahead = (block_ahead){true, u->content[number], c->planned};
            return !c->with_values;
        }
    }
    return false;
}

ckd_status save_device_remember(ckd_save *save, save_piece *piece, const ckd_tensor *tensor, ckd_error *err) {
    if (tensor->read != device_read) {
        return CKD_OK;
    }
    const device_reader *r = tensor->read_context;
    piece->there = arena_alloc(&save->arena, sizeof(*piece->there));
    if (!piece->there) {
        return err_nomem(err, sizeof(*piece->there), "a tensor's description");
    }
    *piece->there = (struct values_there){CKD_DEVICE_INIT, *r};
    piece->there->device.device = r->line->queue.device;
    piece->there->device.stream = r->line->stream;
    return CKD_OK;
}

ckd_status save_device_fetch(ckd_save *save, block_job *job, const save_piece *piece, ckd_error *err) {
    const struct values_there *there = piece->there;
    device_reader r = there->values;
    uint64_t raw = job->count * r.element;
    void *to = bytes_scratch(&job->own, raw, "a tensor's elements", err);
    ckd_status status = to ? device_take(&r.line, save->store, &there->device, r.data, err) : CKD_E_NOMEM;
    if (status != CKD_OK) {
        return status;
    }
    r.end = job->first + job->count;
    r.piece[0].count = r.piece[1].count = 0;
    status = device_read(&r, job->first, job->count, to, err);
    r.line->reader = NULL;
    device_give_back(save->store, r.line);
    job->values = to;
    return status;
}

bool save_device_pending(ckd_save *save) {
    bool pending = save->device && save->device->pending;
    if (pending) {
        save->device->pending = false;
    }
    return pending;
}
