/*
 * Plans the prediction of a block: an optimizer step if one predicts its values, else a delta. Also plans the coding of
 * the difference. block_coder.c: block_analyse calls the functions of this file in this order:
 *
 *   block_measure_parent  what it costs to load the parent's values
 *   block_plan_chain_end  whether this save ends the parent's chain; a delta then builds on the chain's first block
 *   block_delta_plan      reads the values to build on, and makes the candidate
 *
 * block_coder.c: choose_candidate decides later whether the prediction is used.
 */
#include "engine/encode/internal.h"

/* Sets depth and chain cost of the parent's values over this span. A block that is used in part counts in full. */
void block_measure_parent(block_job *job, const tensor_context *tensor) {
    block_analysis *a = &job->analysis;
    a->previous_depth = 0;
    a->previous_chain = (load_cost){0, 0};
    if (a->parent_block) {
        a->previous_depth = a->parent_block->depth;
        a->previous_chain = record_chain(a->parent_block);
        return;
    }
    region_span block = {tensor->region, job->input.first, job->input.count};
    size_t s, last;
    for (view_shards_for(&s, &last, tensor->parent, &block); s < last; s++) {
        size_t first, end;
        view_shard_range(&first, &end, &tensor->parent->shards[s], &tensor->shape, &block);
        for (size_t i = first; i < end; i++) {
            const record *r = tensor->parent->shards[s].blocks[i].record;
            load_cost chain = record_chain(r);
            a->previous_chain.stored += chain.stored;
            a->previous_chain.work += chain.work;
            a->previous_depth = r->depth > a->previous_depth ? r->depth : a->previous_depth;
        }
    }
}

/* Plans the delta as symbols. Afterwards the standalone size is known more accurately, too. */
static ckd_status plan_delta_symbols(block_job *job, const coding_context *ctx, unsigned width, uint64_t raw,
                                     ckd_error *err) {
    block_analysis *a = &job->analysis;
    ckd_status status = block_plan_delta(&job->plan, job->scratch.previous.data, err);
    if (status != CKD_OK) {
        return status;
    }
    candidate *standalone = &a->standalone;
    if (standalone->coding == CODING_SYMBOLS) { /* its expected size may have been too small */
        standalone->available = standalone->encoded = false;
        block_keep_smaller(standalone, CODING_RAW, raw);
    }
    block_keep_smaller(standalone, CODING_SYMBOLS, job->plan.standalone);
    a->delta_rejected = !job->plan.delta_planned;
    if (a->delta_rejected) {
        return CKD_OK;
    }
    block_keep_smaller(&a->predicted, CODING_SYMBOLS, job->plan.delta);
    /* Byte codecs see few and clustered changes (rows of an embedding) that symbols do not. */
    coder_source in = {job->plan.residual.data, raw, width};
    return 4 * job->plan.delta < raw ? block_try_byte_codecs(job, &job->analysis.predicted, ctx, &in, err)
                                     : CKD_OK;
}

/*
 * Copies the parent's values from the caller's memory, if they are there, and compares them with the store's hash. They
 * are not used if the store can no longer decode them. Without a parent block of the same span there is no hash to
 * compare with.
 */
static bool values_in_memory(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                             const view_source *from, void *to) {
    if (!tensor->parent_values || !job->analysis.parent_block || job->analysis.ancestor.view) {
        return false;
    }
    uint64_t copied = span_copy(&tensor->shape, ckd_dtype_size(tensor->tensor->dtype), to, &from->span,
                                tensor->parent_values, &tensor->values_span);
    hash128 content = content_hash(to, block_raw_size(job, tensor));
    return copied == job->input.count && hash128_equal(&content, &job->analysis.parent_block->content) &&
           chain_is_intact(ctx->views, from, &job->decoder.stored);
}

static void delta_precoded(block_job *job, const coding_context *ctx) {
    job->analysis.delta_rejected = job->input.precoded.rejected;
    if (job->input.precoded.delta) {
        block_depend_on(job, PREDICT_PARENT, &ctx->parent->manifest.checkpoint.id, "",
                        &job->analysis.parent_block->content);
        block_keep_smaller(&job->analysis.predicted, CODING_SYMBOLS, job->input.precoded.planned);
        job->plan.delta_symbols = job->input.count;
    }
}

static ckd_status plan_gradient(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                                ckd_error *err) {
    step_rule rule;
    ckd_status status = block_gradient_plan(&rule, job, ctx, tensor, err);
    if (status == CKD_OK && job->analysis.step.predicts) {
        block_step_name_inputs(job, ctx, tensor, &rule);
    }
    return status;
}

ckd_status block_delta_plan(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                            bool plain, ckd_error *err) {
    uint64_t raw = block_raw_size(job, tensor);
    unsigned width = block_width(tensor);
    if (job->input.precoded.coded) {
        delta_precoded(job, ctx);
        return CKD_OK;
    }
    void *previous = bytes_scratch(&job->scratch.previous, raw, "coding scratch", err);
    if (!previous) {
        return CKD_E_NOMEM;
    }
    const chain_start *ancestor = &job->analysis.ancestor;
    const view_source from = {ancestor->view ? ancestor->view : ctx->parent,
                              ancestor->view ? ancestor->tensor : tensor->parent,
                              {tensor->region, job->input.first, job->input.count},
                              NULL};
    ckd_status status = values_in_memory(job, ctx, tensor, &from, previous)
                            ? CKD_OK
                            : span_values(&job->decoder, &from, previous, err);
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_IO) {
        job->analysis.parent_damaged = true; /* old damage must not fail the new save */
        return CKD_OK;
    }
    if (status != CKD_OK) {
        return status;
    }
    const record *known = ancestor->view ? ancestor->block : job->analysis.parent_block;
    hash128 content = known ? known->content : content_hash(previous, raw);
    block_depend_on(job, PREDICT_PARENT, &from.view->manifest.checkpoint.id, "", &content);
    if (job->analysis.step.available) {
        status = job->analysis.step.by_gradient ? plan_gradient(job, ctx, tensor, err)
                                                : block_step_predict(job, ctx, tensor, err);
    }
    if (status != CKD_OK || job->analysis.predicted.available || (!job->analysis.step.predicts && !plain)) {
        return status;
    }
    if (ctx->codec == CKD_CODEC_AUTO) {
        return plan_delta_symbols(job, ctx, width, raw, err);
    }
    void *residual = bytes_scratch(&job->plan.residual, raw, "coding scratch", err);
    if (!residual) {
        return CKD_E_NOMEM;
    }
    job->decoder.kernels->ordered_residual(tensor->tensor->dtype, residual, job->input.values, previous,
                                           job->input.count);
    coder_source in = {residual, raw, width};
    return block_try_byte_codecs(job, &job->analysis.predicted, ctx, &in, err);
}

/* ---- where the parent's chain ends ---- */

/*
 * Goes down the parent's chain to the block that depends on nothing. Returns false if a block on the way is cut
 * differently, is a step, or cannot be read.
 */
static bool find_start(chain_start *out, block_job *job, const coding_context *ctx,
                       const tensor_context *tensor) {
    const view *in = ctx->parent;
    const view_source top = {in,
                             tensor->parent,
                             {tensor->region, job->input.first, job->input.count},
                             &job->analysis.parent_block->content};
    const view_block *b = view_source_block(&top);
    for (uint32_t n = 0; b && b->record->predictor != PREDICT_NONE; n++) {
        const view *owner;
        uint32_t by = b->record->predictor;
        if (n == MAX_DEPTH || (by != PREDICT_PARENT && by != PREDICT_COPY)) {
            return false;
        }
        ckd_status status = view_parent_block(&b, &owner, ctx->views, in, b, NULL);
        if (status != CKD_OK) {
            job->analysis.parent_damaged |= status != CKD_E_NOMEM;
            return false;
        }
        in = owner;
    }
    *out = (chain_start){in, b ? view_find(in, tensor->tensor->name) : NULL, b ? b->record : NULL};
    return out->tensor && b->record->coding != CODING_LATTICE && b->record->first == job->input.first &&
           region_equal(b->record->region, tensor->region, tensor->shape.ndim);
}

void block_plan_chain_end(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                          const load_budget *budget) {
    block_analysis *a = &job->analysis;
    chain_start start;
    /* It is not known yet whether a gradient fits. */
    bool begins = a->step.available && !a->step.by_gradient && a->parent_block->predictor != PREDICT_STEP;
    a->ends = a->parent_block && !begins && budget_ends_chain(budget, a->parent_block);
    a->step.available = a->step.available && !a->ends;
    if (a->ends && !job->input.precoded.coded && budget_may_merge(a->parent_block) &&
        find_start(&start, job, ctx, tensor)) {
        a->ancestor = start;
        a->previous_chain = record_chain(start.block);
        a->previous_depth = start.block->depth;
    }
}
