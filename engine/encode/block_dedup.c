/* Finds values that are stored already: by the parent, by a checkpoint that the parent names, or by this save. */
#include <math.h>

#include "engine/encode/encode.h"

#define MIN_COPY_BYTES 64u /* smaller blocks: naming the values costs about as much */

void block_depend_on(block_job *job, predictor p, const ckd_id *checkpoint, const char *tensor,
                     const hash128 *content) {
    if (p == PREDICT_COPY || p == PREDICT_CAST) {
        job->state = BLOCK_DUPLICATE;
    }
    job->decision.predictor = p;
    job->decision.dependency_count = 1;
    job->decision.dependencies[0] = (dependency){.kind = DEPENDS_VALUES,
                                                 .checkpoint = *checkpoint,
                                                 .tensor = tensor,
                                                 .same_span = true,
                                                 .content = *content};
}

static const record *matching(const tensor_context *tensor, const view_tensor *other, uint64_t at,
                              uint64_t count) {
    region_span block = {tensor->region, at, count};
    size_t s, last;
    for (view_shards_for(&s, &last, other, &block); s < last; s++) {
        const view_shard *shard = &other->shards[s];
        if (!region_equal(shard->region, tensor->region, tensor->shape.ndim)) {
            continue;
        }
        size_t first, end;
        view_shard_range(&first, &end, shard, &tensor->shape, &block);
        const record *r = first < end ? shard->blocks[first].record : NULL;
        return r && r->first == at && r->count == count ? r : NULL;
    }
    return NULL;
}

const record *block_matching(const block_job *job, const tensor_context *tensor, const view_tensor *other) {
    return matching(tensor, other, job->input.first, job->input.count);
}

const record *block_in_parent(const tensor_context *tensor, uint64_t first, uint64_t count) {
    return tensor->parent ? matching(tensor, tensor->parent, first, count) : NULL;
}

static void lock_registry(const coding_context *ctx) {
    if (ctx->registry_lock) {
        pthread_rwlock_rdlock(ctx->registry_lock);
    }
}

static void unlock_registry(const coding_context *ctx) {
    if (ctx->registry_lock) {
        pthread_rwlock_unlock(ctx->registry_lock);
    }
}

/* Returns true if the checkpoint may be named even if `additional` others are named first. */
static bool may_reference_with(const coding_context *ctx, const ckd_id *checkpoint, uint32_t additional) {
    const referenced_checkpoints *h = ctx->referenced;
    lock_registry(ctx);
    bool may = !h || h->count + additional < REFERENCED_CHECKPOINTS_MAX;
    for (uint32_t i = 0; !may && i < h->count; i++) {
        may = id_equal(&h->ids[i], checkpoint);
    }
    unlock_registry(ctx);
    return may;
}

static bool may_reference(const coding_context *ctx, const ckd_id *checkpoint) {
    return may_reference_with(ctx, checkpoint, 0);
}

/* The other checkpoint that a copy names; NULL: none, or this one. */
static const ckd_id *holder_of(const block_job *job, const coding_context *ctx) {
    const ckd_id *holder = &job->decision.dependencies[0].checkpoint;
    return block_is_duplicate(job) && !id_equal(holder, &ctx->checkpoint) ? holder : NULL;
}

bool block_copies_from_save(const block_job *job, const coding_context *ctx) {
    return block_is_duplicate(job) && id_equal(&job->decision.dependencies[0].checkpoint, &ctx->checkpoint);
}

bool block_exceeds_references(const block_job *job, const coding_context *ctx) {
    const ckd_id *holder = holder_of(job, ctx);
    return holder && !may_reference(ctx, holder);
}

void block_add_referenced(const block_job *job, const coding_context *ctx) {
    const ckd_id *holder = holder_of(job, ctx);
    referenced_checkpoints *h = ctx->referenced;
    uint32_t i = 0;
    if (ctx->registry_lock) {
        pthread_rwlock_wrlock(ctx->registry_lock);
    }
    while (holder && i < h->count && !id_equal(&h->ids[i], holder)) {
        i++;
    }
    if (holder && i == h->count && i < REFERENCED_CHECKPOINTS_MAX) {
        h->ids[h->count++] = *holder;
    }
    unlock_registry(ctx);
}

/*
 * Checks that the block is still where the parent says, and can be read. A block that names it does not store the
 * values again.
 */
static bool is_referenced(const coding_context *ctx, const ckd_id *holder, block_job *job,
                          const tensor_context *tensor) {
    const view *v;
    const view_tensor *t = NULL;
    if (views_within(&v, ctx->views, ctx->parent, holder, NULL) == CKD_OK) {
        t = view_find(v, tensor->tensor->name);
    }
    const record *r = t ? block_matching(job, tensor, t) : NULL;
    const view_source from = {v, t, {tensor->region, job->input.first, job->input.count}, NULL};
    return r && hash128_equal(&r->content, &job->output.content) &&
           chain_is_intact(ctx->views, &from, &job->decoder.stored);
}

/*
 * Unchanged since the parent. If the parent's block is itself a copy from an older checkpoint, that one is named, so
 * that frozen tensors do not grow chains.
 */
bool block_find_in_parent(block_job *job, const coding_context *ctx, const tensor_context *tensor) {
    const record *r = job->analysis.parent_block;
    if (!r || !hash128_equal(&r->content, &job->output.content)) {
        return false;
    }
    const ckd_id *holder = &ctx->parent->manifest.checkpoint.id;
    if (r->predictor == PREDICT_COPY && r->dependency_count && r->dependencies[0].same_span &&
        !*r->dependencies[0].tensor && !id_equal(&r->dependencies[0].checkpoint, holder)) {
        holder = &r->dependencies[0].checkpoint;
    }
    if (!may_reference(ctx, holder)) {
        return false;
    }
    if (!is_referenced(ctx, holder, job, tensor)) {
        job->analysis.parent_damaged = true;
        return false;
    }
    block_depend_on(job, PREDICT_COPY, holder, "", &job->output.content);
    job->decision.depth = r->depth;
    job->decision.chain = record_chain(r);
    job->decision.base_stored = r->base_stored;
    job->decision.base = record_base(r);
    return true;
}

bool block_find_unchanged(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                          const hash128 *content, uint32_t jobs) {
    block_begin(job, tensor);
    job->output.content = job->analysis.original = *content;
    bool found = job->analysis.parent_block && block_may_be_copied(job, ctx, tensor) &&
                 block_find_in_parent(job, ctx, tensor);
    /* otherwise the limit might be reached before the decision, which would then need the values */
    found = found && may_reference_with(ctx, &job->decision.dependencies[0].checkpoint, jobs);
    job->state = found ? BLOCK_UNCHANGED : BLOCK_NEW;
    return found;
}

bool block_may_be_copied(const block_job *job, const coding_context *ctx, const tensor_context *tensor) {
    return block_raw_size(job, tensor) >= MIN_COPY_BYTES && ctx->codec != CKD_CODEC_RAW;
}

/* Finds an entry of this save with these values: within `bound`, or bit-identical if `bound` is negative. */
static const content_entry *entry_with(const region_span *block, const hash128 *content,
                                       const coding_context *ctx, const tensor_context *tensor,
                                       double bound) {
    const content_entry *e =
        content_index_find(ctx->dedup_index, content, tensor->tensor->dtype, &tensor->shape, block);
    bool near = e && e->error.largest <= bound && isfinite(e->error.largest);
    return e && (near || hash128_equal(&e->values, content)) ? e : NULL;
}

bool block_is_registered(const region_span *block, const hash128 *original, const coding_context *ctx,
                         const tensor_context *tensor, double bound) {
    lock_registry(ctx);
    bool found = entry_with(block, original, ctx, tensor, bound);
    unlock_registry(ctx);
    return found;
}

bool block_is_in_save(const block_job *job, const coding_context *ctx, const tensor_context *tensor,
                      double bound) {
    region_span block = {tensor->region, job->input.first, job->input.count};
    return (bound >= 0 || block_may_be_copied(job, ctx, tensor)) &&
           block_is_registered(&block, &job->analysis.original, ctx, tensor, bound);
}

bool block_is_in_flight(const block_job *job, const coding_context *ctx, const tensor_context *tensor,
                        double bound) {
    bool found = false;
    if (!ctx->in_flight || (bound < 0 && !block_may_be_copied(job, ctx, tensor))) {
        return false;
    }
    lock_registry(ctx);
    for (size_t i = 0; i < ctx->in_flight->count && !found; i++) {
        const block_job *c = ctx->in_flight->jobs[i];
        found = c != job && c->input.count == job->input.count &&
                (hash128_equal(&c->analysis.original, &job->analysis.original) ||
                 hash128_equal(&c->analysis.rounded_bf16, &job->analysis.original) ||
                 hash128_equal(&c->analysis.rounded_f16, &job->analysis.original));
    }
    unlock_registry(ctx);
    return found;
}

bool block_find_in_save(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                        double bound) {
    region_span block = {tensor->region, job->input.first, job->input.count};
    lock_registry(ctx);
    const content_entry *found = entry_with(&block, &job->output.content, ctx, tensor, bound);
    content_entry e = found ? *found : (content_entry){0};
    unlock_registry(ctx);
    if (!found) {
        return false;
    }
    block_depend_on(job, e.rounded ? PREDICT_CAST : PREDICT_COPY, &ctx->checkpoint, e.tensor, &e.stored);
    job->output.content = e.values;
    job->output.error = e.error;
    job->decision.depth = e.depth;
    /*
     * A load of the whole checkpoint loads what the block depends on anyway. Loaded alone, the block costs as much as
     * that.
     */
    job->decision.chain = (load_cost){e.chain_stored, e.chain_work};
    job->decision.base_stored = (uint64_t)e.chain_stored;
    job->decision.base = job->decision.chain;
    return true;
}
