/* Recodes one block: the smallest of a copy, a delta and standalone values. Each decodes to the same bits. */
#include <stdlib.h>

#include "engine/encode/encode.h"
#include "engine/compact/internal.h"

#define ARCHIVE_LEVEL 19 /* of zstd */

ckd_status compact_worker_init(compact_worker *w, compaction *c, ckd_error *err) {
    *w = (compact_worker){.values = {0}};
    ckd_status status = block_job_init(&w->job, &c->columns, err);
    w->job.decoder.views = &c->views;
    w->job.decoder.block_limit = MAX_CHAIN_BLOCKS; /* it must load everything that others committed */
    return status;
}

void compact_worker_free(compact_worker *w) {
    bytes *const all[] = {&w->values, &w->base_values, &w->now_floats, &w->base_floats, &w->q,
                          &w->at,     &w->bits,        &w->standalone, &w->delta,       &w->check};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_free(all[i]);
    }
    lattice_work_free(&w->lattice);
    block_job_free(&w->job);
}

/* Is a delta worth its load? Decides as a save does, but bounds only the bytes of the chain. */
static bool pays(const compaction *c, const load_cost *chain, const load_cost *base, uint64_t delta_size,
                 uint64_t standalone_size) {
    return delta_pays(chain, delta_size, standalone_size) &&
           chain->stored <= c->options.max_load_cost * base->stored;
}

/* ---- the result, as a record ---- */

/* Starts with the block's own record, without its method. */
static void begin_record(compact_item *item) {
    item->to = *item->from;
    item->to.bundle = NULL;
    item->to.dependencies = item->dependencies;
    item->to.dependency_count = 0;
    item->to.predictor = PREDICT_NONE;
    item->to.depth = 0;
}

static void build_on(compact_item *item, predictor p, const ckd_id *checkpoint, const hash128 *content) {
    item->to.predictor = (uint32_t)p;
    item->dependencies[0] = (dependency){.kind = DEPENDS_VALUES,
                                         .checkpoint = *checkpoint,
                                         .tensor = "",
                                         .same_span = true,
                                         .content = *content};
    item->to.dependency_count = 1;
}

static ckd_status set_payload(compact_item *item, coding c, const void *payload, uint64_t size,
                              ckd_error *err) {
    item->to.coding = (uint32_t)c;
    item->to.stored_size = size;
    bytes_clear(&item->payload);
    bytes_put(&item->payload, payload, size);
    return item->payload.failed ? err_nomem(err, size, "a payload") : CKD_OK;
}

/* own_ns: nanoseconds to decode the block without what it builds on. */
static void set_load(compact_item *item, const block_load *new_base, double own_ns) {
    item->to.depth = new_base ? new_base->depth + 1 : 0;
    item->to.chain_stored = item->to.stored_size + (uint64_t)(new_base ? new_base->chain.stored : 0);
    item->to.chain_work = (uint64_t)(own_ns + (new_base ? new_base->chain.work : 0));
}

static double work_of(const record *r, uint64_t symbols) {
    return decode_work((predictor)r->predictor, (coding)r->coding, ckd_dtype_size(r->tensor->dtype),
                       r->raw_size, r->stored_size, symbols);
}

/* One block at work. */
typedef struct recoding {
    compact_item *item;
    compaction *c;
    const rewrite_plan *p;
    const block_rewrite *f;
    compact_worker *w;
} recoding;

/* ---- lossy checkpoints: values on a lattice ---- */

/*
 * Reads the values to take differences to; *content is their hash. *out = NULL if there are none or they cannot be
 * read: the block is coded standalone then.
 */
static ckd_status read_base(const void **out, hash128 *content, const recoding *x, ckd_error *err) {
    const block_rewrite *f = x->f;
    compact_worker *w = x->w;
    const record *r = x->item->from;
    *out = NULL;
    if (!f->new_base) {
        return CKD_OK;
    }
    void *to = bytes_scratch(&w->base_values, r->raw_size + 1, "coding scratch", err);
    const view_source from = {f->new_base, f->new_base_tensor, {r->region, r->first, r->count}, NULL};
    if (!to) {
        return CKD_E_NOMEM;
    }
    w->job.decoder.blocks_decoded = 0;
    ckd_status status = span_values(&w->job.decoder, &from, to, NULL);
    if (status == CKD_E_NOMEM) {
        return err_nomem(err, r->raw_size, "a block's values");
    }
    if (status == CKD_OK) {
        *out = to;
        *content = content_hash(to, r->raw_size);
    }
    return CKD_OK;
}

static ckd_status code_on_lattice(bool *done, const recoding *x, const lattice_try *t, const hash128 *content,
                                  ckd_error *err) {
    compact_item *item = x->item;
    const block_rewrite *f = x->f;
    const compact_worker *w = x->w;
    const record *r = item->from;
    load_cost base = base_cost(ckd_dtype_size(r->tensor->dtype), r->raw_size, r->base_stored);
    load_cost chain = f->new_base_load.chain;
    chain.stored += (double)w->delta.size;
    uint64_t standalone_size =
        t->standalone_possible && w->standalone.size < r->raw_size ? w->standalone.size : r->raw_size;
    bool delta = t->delta_possible && pays(x->c, &chain, &base, w->delta.size, standalone_size);
    *done = delta || standalone_size < r->raw_size;
    if (!*done) {
        return CKD_OK;
    }
    const bytes *payload = delta ? &w->delta : &w->standalone;
    if (delta) {
        build_on(item, PREDICT_PARENT, &f->new_base->manifest.checkpoint.id, content);
    }
    ckd_status status = set_payload(item, CODING_LATTICE, payload->data, payload->size, err);
    set_load(item, delta ? &f->new_base_load : NULL, work_of(&item->to, 0));
    return status;
}

/* ---- exact values ---- */

static tensor_context context_of(const rewrite_plan *p, const view_block *b, const block_rewrite *f) {
    const record *r = b->record;
    const view_tensor *t = view_find(p->view, r->tensor->name);
    return (tensor_context){.tensor = r->tensor,
                            .shape = *t->shape,
                            .region = r->region,
                            .parent = f->new_base_tensor,
                            .block_elements = CKD_BLOCK_ELEMENTS};
}

/*
 * Makes a copy of a block with the values of its base. It names the checkpoint that holds them or, if that is a victim,
 * the base.
 */
static ckd_status code_copy(const recoding *x, ckd_error *err) {
    compact_item *item = x->item;
    const block_rewrite *f = x->f;
    const ckd_id *holder = &x->w->job.decision.dependencies[0].checkpoint;
    if (compact_is_victim(x->c, holder)) {
        holder = &f->new_base->manifest.checkpoint.id;
    }
    build_on(item, PREDICT_COPY, holder, &item->from->content);
    ckd_status status = set_payload(item, CODING_RAW, "", 0, err);
    set_load(item, &f->new_base_load, 0);
    item->to.depth = f->new_base_load.depth;
    return status;
}

/* Chooses whether the block is stored as a delta or on its own. */
static void choose_method(block_job *job, compaction *c, const block_rewrite *f) {
    load_cost chain = f->new_base_load.chain;
    chain.stored += (double)job->analysis.predicted.size;
    bool delta =
        job->analysis.predicted.available &&
        pays(c, &chain, &job->decision.base, job->analysis.predicted.size, job->analysis.standalone.size);
    job->decision.chosen = delta ? &job->analysis.predicted : &job->analysis.standalone;
    job->decision.predictor = delta ? PREDICT_PARENT : PREDICT_NONE;
    job->decision.depth = delta ? f->new_base_load.depth + 1 : 0;
    job->decision.materialize = false;
}

static ckd_status code_exactly(const recoding *x, ckd_error *err) {
    compact_item *item = x->item;
    compaction *c = x->c;
    const block_rewrite *f = x->f;
    const record *r = item->from;
    block_job *job = &x->w->job;
    tensor_context t = context_of(x->p, &x->p->view->blocks[item->block], f);
    coding_context ctx = {.level = f->why & CKD_COMPACT_COLD ? ARCHIVE_LEVEL : 0,
                          .views = &c->views,
                          .parent = f->new_base,
                          .dedup_index = &c->nothing,
                          .checkpoint = x->p->view->manifest.checkpoint.id};
    load_budget budget = {.limit = c->options.max_load_cost, .newest_limit = c->options.max_load_cost};
    job->input.values = x->w->values.data;
    job->input.first = r->first;
    job->input.count = r->count;
    job->input.try_delta = true;
    ckd_status status = block_analyse(job, &ctx, &t, &budget, err);
    if (status == CKD_OK && block_is_duplicate(job)) {
        return code_copy(x, err);
    }
    if (status == CKD_OK) {
        choose_method(job, c, f);
        status = block_encode(job, &t, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    const candidate *chosen = job->decision.chosen;
    bool raw = chosen->coding == CODING_RAW, delta = job->decision.predictor == PREDICT_PARENT;
    if (delta) {
        build_on(item, PREDICT_PARENT, &f->new_base->manifest.checkpoint.id,
                 &job->decision.dependencies[0].content);
    }
    status = set_payload(item, chosen->coding, raw ? job->input.values : chosen->payload.data,
                         raw ? r->raw_size : chosen->size, err);
    item->to.base_stored = job->analysis.standalone.size;
    set_load(item, delta ? &f->new_base_load : NULL,
             work_of(&item->to, delta ? job->plan.delta_symbols : r->count));
    return status;
}

/* ---- any block ---- */

/*
 * Does the block keep its present coding? A cold block is recoded only if it gets smaller. A block that builds on
 * victims is recoded only if that saves an eighth of its bytes and its share of the victims' bytes together.
 */
static bool keep_as_it_is(const compact_item *item, const block_rewrite *f) {
    return (f->why == CKD_COMPACT_COLD && item->to.stored_size >= item->from->stored_size) ||
           (f->why == CKD_COMPACT_FOLD && f->retained_bytes != UINT64_MAX &&
            item->to.stored_size >= (item->from->stored_size + f->retained_bytes) / 8 * 7);
}

static ckd_status code_values(const recoding *x, ckd_error *err) {
    const view *v = x->p->view;
    const record *r = x->item->from;
    lattice_try t = {.dtype = r->tensor->dtype,
                     .count = r->count,
                     .small = x->f->why & CKD_COMPACT_COLD,
                     .values = x->w->values.data};
    hash128 content = {0};
    bool done = false;
    ckd_status status = CKD_OK;
    if (v->manifest.checkpoint.fidelity != CKD_EXACT && lattice_dtype(r->tensor->dtype)) {
        t.grid = block_grid(view_find(v, r->tensor->name)->shape, r->region, r->first);
        status = read_base(&t.base_values, &content, x, err);
        if (status == CKD_OK && !(t.base_values && hash128_equal(&content, &r->content))) {
            status = compact_lattice(&t, x->w, err);
        }
        if (status == CKD_OK && (t.standalone_possible || t.delta_possible)) {
            status = code_on_lattice(&done, x, &t, &content, err);
        }
    }
    return status == CKD_OK && !done ? code_exactly(x, err) : status;
}

ckd_status compact_recode_block(compact_item *item, compaction *c, const rewrite_plan *p, compact_worker *w,
                                ckd_error *err) {
    const view_block *b = &p->view->blocks[item->block];
    void *values = bytes_scratch(&w->values, b->record->raw_size + 1, "a block's values", err);
    begin_record(item);
    ckd_status status = values ? block_values(&w->job.decoder, p->view, b, values, err) : CKD_E_NOMEM;
    const recoding x = {item, c, p, &p->rewrites[item->block], w};
    THEN(status, code_values(&x, err));
    item->is_coded = status == CKD_OK && !keep_as_it_is(item, x.f);
    return status;
}
