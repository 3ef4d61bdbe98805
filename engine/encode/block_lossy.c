/* A block of a lossy save: decides whether it is stored exactly, and encodes its lattice integers. */
#include "engine/encode/encode.h"

#include <math.h>
#include <string.h>

#include "engine/lossy/lossy.h"

/* The size of an exact base of weights or moments, as a share of raw bytes, as bench_exact measures it. */
#define EXACT_SHARE 0.85
/* With more than 1/KEPT_MAX of its values as exceptions, a block is stored exactly. */
#define KEPT_MAX 16

load_cost lossy_base_cost(ckd_dtype dtype, uint64_t raw) {
    return base_cost(ckd_dtype_size(dtype), raw, (uint64_t)(EXACT_SHARE * (double)raw));
}

static void offer(candidate *c, uint64_t size, bool encoded) {
    c->available = true;
    c->encoded = encoded;
    c->coding = CODING_LATTICE;
    c->size = size;
}

#define SLICE 512 /* elements at a time */

/* Error of a master's decoded values, rounded, against its input values, rounded. */
static lossy_error error_of_rounded(const block_job *job, const void *original, ckd_dtype dtype) {
    const kernels *k = job->decoder.kernels;
    uint16_t input[SLICE], decoded[SLICE];
    float from[SLICE], to[SLICE];
    lossy_error e = {0};
    for (uint64_t at = 0; at < job->input.count; at += SLICE) {
        uint64_t n = job->input.count - at < SLICE ? job->input.count - at : SLICE;
        k->cast(dtype, input, CKD_F32, (const uint8_t *)original + 4 * at, n);
        k->cast(dtype, decoded, CKD_F32, (const uint8_t *)job->input.values + 4 * at, n);
        k->widen(from, dtype, input, n);
        k->widen(to, dtype, decoded, n);
        lossy_error_add(&e, from, to, n, k);
        for (uint64_t i = 0; i < n; i++) { /* infinities and NaNs must be bit-identical in a copy */
            e.largest = !isfinite(from[i]) && input[i] != decoded[i] ? INFINITY : e.largest;
        }
    }
    return e;
}

/* Sets the hashes by which a copy in a narrower dtype is found. */
static ckd_status hash_rounded(block_job *job, const lossy_tile *tile, const tensor_context *tensor,
                               ckd_error *err) {
    ckd_status status = CKD_OK;
    if (block_is_master(tensor) && tile->input.device) {
        const lossy_device_block *b =
            lossy_device_block_of(tile->input.device, job->input.first - tile->shape.first);
        job->analysis.rounded_bf16 = b->bf16.original;
        job->analysis.rounded_f16 = b->f16.original;
    } else if (block_is_master(tensor)) {
        status = block_hash_rounded(job, err);
    }
    job->output.result_bf16 =
        job->analysis.rounded_bf16; /* for exact values; a lossy block sets these later */
    job->output.result_f16 = job->analysis.rounded_f16;
    return status;
}

/* Sets the hashes of such a copy's decoded values. */
static ckd_status hash_rounded_result(block_job *job, const lossy_tile *tile, const tensor_context *tensor,
                                      const void *original, ckd_error *err) {
    if (!block_is_master(tensor)) {
        return CKD_OK;
    }
    if (tile->input.device) {
        const lossy_device_block *b =
            lossy_device_block_of(tile->input.device, job->input.first - tile->shape.first);
        job->output.result_bf16 = b->bf16.content;
        job->output.result_f16 = b->f16.content;
        job->output.error_bf16 = b->bf16.error;
        job->output.error_f16 = b->f16.error;
        return CKD_OK;
    }
    hash128 bf16 = job->analysis.rounded_bf16, f16 = job->analysis.rounded_f16;
    ckd_status status = block_hash_rounded(job, err);
    job->output.result_bf16 = job->analysis.rounded_bf16;
    job->output.result_f16 = job->analysis.rounded_f16;
    job->analysis.rounded_bf16 = bf16;
    job->analysis.rounded_f16 = f16;
    job->output.error_bf16 = error_of_rounded(job, original, CKD_BF16);
    job->output.error_f16 = error_of_rounded(job, original, CKD_F16);
    return status;
}

static dependency on_side(const coding_context *ctx, const region_span *span, const hash128 *content) {
    return (dependency){.kind = DEPENDS_SIDE,
                        .checkpoint = ctx->checkpoint,
                        .tensor = "",
                        .region = span->region,
                        .first = span->first,
                        .count = span->count,
                        .content = *content};
}

/* Adds the dependency on shared rows, if any, followed by the one on shared columns. */
static void depend_on_shared(block_job *job, uint32_t *count, const lossy_tile *tile,
                             const coding_context *ctx, const tensor_context *tensor) {
    region_span columns = {tensor->region, tile->shape.first, tile->shape.count};
    if (tile->plan.lattice.shared_rows) {
        job->decision.dependencies[(*count)++] =
            on_side(ctx, &job->output.rows.span, &job->output.rows.content);
    }
    if (tile->plan.lattice.shared) {
        job->decision.dependencies[(*count)++] = on_side(ctx, &columns, &tile->plan.shared_content);
    }
}

/* Returns the hash of the parent's values, which the tile has only as floats. */
static ckd_status parent_content(hash128 *out, block_job *job, const lossy_tile *tile,
                                 const coding_context *ctx, const tensor_context *tensor, ckd_error *err) {
    uint64_t raw = block_raw_size(job, tensor);
    if (job->analysis.parent_block) {
        *out = job->analysis.parent_block->content;
        return CKD_OK;
    }
    if (tile->dtype == CKD_F32) {
        uint64_t at = job->input.first - tile->shape.first;
        *out = tile->input.device ? lossy_device_block_of(tile->input.device, at)->parent_content
                                  : content_hash(tile->input.parent_values + at, raw);
        return CKD_OK;
    }
    void *values = bytes_scratch(&job->scratch.previous, raw, "coding scratch", err);
    const view_source from = {
        ctx->parent, tensor->parent, {tensor->region, job->input.first, job->input.count}, NULL};
    ckd_status status = values ? span_values(&job->decoder, &from, values, err) : CKD_E_NOMEM;
    *out = status == CKD_OK ? content_hash(values, raw) : (hash128){0};
    return status;
}

/* Fetches the decoded values of a tile on a device; other tiles have them on the host. */
static ckd_status fetch_decoded(block_job *job, const lossy_tile *tile, uint64_t raw, ckd_error *err) {
    bytes *buffer = &job->scratch.lossy.values;
    if (!tile->input.device || job->input.values) {
        return CKD_OK;
    }
    void *values = bytes_scratch(buffer, raw, "coding scratch", err);
    ckd_status status =
        values ? lossy_device_fetch(values, tile->input.device, job->input.first - tile->shape.first,
                                    job->input.count, true, err)
               : CKD_E_NOMEM;
    job->input.values = status == CKD_OK ? values : NULL;
    return status;
}

static ckd_status fetch_input(block_job *job, const lossy_tile *tile, uint64_t raw, ckd_error *err) {
    if (!tile->input.device) {
        return CKD_OK;
    }
    void *values = bytes_scratch(&job->input.own, raw, "a tensor's elements", err);
    job->input.values = values;
    return values ? lossy_device_fetch(values, tile->input.device, job->input.first - tile->shape.first,
                                       job->input.count, false, err)
                  : CKD_E_NOMEM;
}

/* Makes integers, payload, and values (on a device, only their hashes and errors). */
static ckd_status code_block(block_job *job, bytes *payload, const lossy_tile *tile, uint64_t at,
                             ckd_error *err) {
    symbols_workspace *work = coder_symbols(job->decoder.coder);
    lossy_elements e = {tile, at, job->input.count, job->input.values, job->decoder.kernels};
    return tile->input.device ? lossy_device_block_encode(&job->scratch.lossy, payload, &e, work, err)
                              : lossy_block(&job->scratch.lossy, payload, &e, work, err);
}

static ckd_status offer_delta(block_job *job, const lossy_tile *tile, const coding_context *ctx,
                              const tensor_context *tensor, const load_budget *budget, ckd_error *err) {
    hash128 parent;
    ckd_status status = parent_content(&parent, job, tile, ctx, tensor, err);
    if (status != CKD_OK) {
        return status;
    }
    block_measure_parent(job, tensor);
    block_depend_on(job, PREDICT_PARENT, &ctx->parent->manifest.checkpoint.id, "", &parent);
    depend_on_shared(job, &job->decision.dependency_count, tile, ctx, tensor);
    offer(&job->analysis.predicted, job->analysis.predicted.payload.size, true);
    job->analysis.predicted.available =
        job->analysis.previous_depth < MAX_SAVE_DEPTH &&
        budget_allows_chain(budget, &job->analysis.previous_chain, &job->decision.base, PART_LOSSY);
    if (!tile->plan.on_lattice) {
        status = fetch_decoded(job, tile, block_raw_size(job, tensor), err);
        return status == CKD_OK ? block_propose_standalone(job, ctx, tensor, false, err) : status;
    }
    offer(&job->analysis.standalone, lossy_standalone_size(tile, job->input.count), false);
    return CKD_OK;
}

double lossy_copy_bound(const lossy_tile *tile) {
    return tile->part == LOSSY_WEIGHT ? tile->limits.bound : -1;
}

/*
 * Measures the updates of a block of moments that is coded exactly or is a duplicate. Its input is on the host. If the
 * tile is on a device, the input becomes floats, as lossy_job.decoded.
 */
static ckd_status measure_input(block_job *job, const lossy_tile *tile, uint64_t at, ckd_error *err) {
    const float *input = tile->input.device ? NULL : tile->input.now + at;
    if (tile->input.device && tile->part != LOSSY_WEIGHT) {
        float *to = bytes_scratch(&job->scratch.lossy.rebuilt, job->input.count * sizeof(float),
                                  "coding scratch", err);
        if (!to) {
            return CKD_E_NOMEM;
        }
        job->decoder.kernels->widen(to, tile->dtype, job->input.values, job->input.count);
        job->scratch.lossy.decoded = input = to;
    }
    return pair_known(&tile->context.pair)
               ? pair_measure(&job->scratch.lossy, tile, at, input, job->input.count, err)
               : CKD_OK;
}

ckd_status block_lossy_analyse(block_job *job, const lossy_tile *tile, const coding_context *ctx,
                               const tensor_context *tensor, const load_budget *budget, ckd_error *err) {
    uint64_t raw = block_raw_size(job, tensor), at = job->input.first - tile->shape.first;
    const void *original = job->input.values;
    block_begin(job, tensor);
    job->analysis.original = tile->input.device ? lossy_device_block_of(tile->input.device, at)->original
                                                : content_hash(original, raw);
    ckd_status status = hash_rounded(job, tile, tensor, err);
    job->output.content = job->analysis.original;
    job->scratch.lossy.update = NAN;
    if (status != CKD_OK || block_find_in_save(job, ctx, tensor, lossy_copy_bound(tile))) {
        if (status == CKD_OK && tile->part != LOSSY_WEIGHT) {
            status = fetch_input(job, tile, raw, err);
            THEN(status, measure_input(job, tile, at, err));
        }
        return status;
    }
    bytes *payload =
        tile->input.parent_values ? &job->analysis.predicted.payload : &job->analysis.standalone.payload;
    status = code_block(job, payload, tile, at, err);
    if (status != CKD_OK) {
        return status;
    }
    const lossy_job *made = &job->scratch.lossy;
    /* A lossy base of 16-bit weights is hardly smaller, and the first delta on it corrects its error. */
    bool exact_base = tile->part == LOSSY_WEIGHT && tile->dtype != CKD_F32 && !tile->input.parent_values;
    if (exact_base || !made->within || made->block.exceptions > job->input.count / KEPT_MAX ||
        payload->size >= raw) {
        status = fetch_input(job, tile, raw, err);
        THEN(status, measure_input(job, tile, at, err));
        THEN(status, block_analyse(job, ctx, tensor, budget, err));
        /* the block is exact */
        job->output.error = (lossy_error){.energy = made->error.energy, .exceptions = made->error.exceptions};
        return status;
    }
    job->state = BLOCK_PLANNED;
    job->output.lossy = true;
    job->output.tile = tile;
    job->input.values = tile->input.device ? NULL : made->values.data;
    job->output.content = tile->input.device ? lossy_device_block_of(tile->input.device, at)->content
                                             : content_hash(job->input.values, raw);
    job->output.error = made->error;
    status = hash_rounded_result(job, tile, tensor, original, err);
    if (status != CKD_OK || block_find_in_parent(job, ctx, tensor)) {
        return status;
    }
    job->decision.base = lossy_base_cost(tensor->tensor->dtype, raw);
    job->decision.base_stored = (uint64_t)job->decision.base.stored;
    if (tile->input.parent_values) {
        return offer_delta(job, tile, ctx, tensor, budget, err);
    }
    offer(&job->analysis.standalone, payload->size, true);
    depend_on_shared(job, &job->decision.standalone_dependencies, tile, ctx, tensor);
    return CKD_OK;
}

ckd_status block_lossy_standalone(block_job *job, candidate *c, ckd_error *err) {
    ckd_status status =
        fetch_decoded(job, job->output.tile, job->input.count * ckd_dtype_size(job->output.tile->dtype), err);
    if (status != CKD_OK) {
        return status;
    }
    status = lossy_block_standalone(&job->scratch.lossy, &c->payload, job->output.tile, job->decoder.kernels,
                                    coder_symbols(job->decoder.coder), err);
    c->size = c->payload.size;
    c->encoded = status == CKD_OK;
    return status;
}
