/*
 * Chooses how a block is stored, and encodes it. A save calls, in this order:
 *
 *   block_analyse  finds a duplicate, or plans two candidates: the block on its own, and a prediction
 *   block_decide   takes one of them, within the budget of load cost
 *   block_encode   makes the payload
 *
 * block_dedup.c finds duplicates, block_delta.c plans predictions, and block_plan.c has the sizes of symbol streams.
 * Lossy blocks are analysed in block_lossy.c, and decided and encoded here.
 */
#include <stdlib.h>

#include "engine/encode/internal.h"

#define PROBE_BYTES 16384u /* sample of a block, which shows if zstd or LZ4 can win */
#define PROBE_WHOLE 65536u /* smaller blocks are tried whole */
/*
 * Panels of large matrices have smaller blocks: the sample is 1/PROBE_SHARE of one, and below PROBE_PANEL it is tried
 * whole.
 */
#define PROBE_SHARE 16u
#define PROBE_PANEL 8192u
#define STEP_HEADER 320u /* additional bytes of a record that names the inputs of an optimizer step */

ckd_status block_job_init(block_job *job, columns_cache *columns, ckd_error *err) {
    memset(job, 0, sizeof(*job));
    ckd_status status = decoder_init(&job->decoder, NULL, columns, err);
    job->decoder.block_limit = MAX_SAVE_STEPS;
    if (status == CKD_OK) {
        block_plan_init(&job->plan, job->decoder.kernels, coder_symbols(job->decoder.coder));
    }
    return status;
}

void block_job_free(block_job *job) {
    decoder_free(&job->decoder);
    block_plan_free(&job->plan);
    lossy_job_free(&job->scratch.lossy);
    bytes *const buffers[] = {&job->input.own,
                              &job->scratch.previous,
                              &job->analysis.standalone.payload,
                              &job->analysis.predicted.payload,
                              &job->scratch.step_first,
                              &job->scratch.step_before};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        bytes_free(buffers[i]);
    }
    memset(job, 0, sizeof(*job));
}

/* ---- on its own ---- */

void block_keep_smaller(candidate *best, coding c, uint64_t size) {
    if (!best->available || size < best->size) {
        best->available = true;
        best->encoded = false;
        best->coding = c;
        best->size = size;
    }
}

/* Encodes with a byte codec, and keeps the result if it beats the candidate's. */
static ckd_status try_codec(block_job *job, candidate *best, coding c, int level, const coder_source *in,
                            ckd_error *err) {
    uint64_t limit = best->available ? best->size : in->size;
    bytes payload = {0};
    void *to = bytes_scratch(&payload, limit + 64, "coding scratch", err);
    coder_result result = {.to = to, .limit = limit};
    ckd_status status = to ? coder_encode(job->decoder.coder, c, level, in, &result, err) : CKD_E_NOMEM;
    if (status == CKD_OK && result.stored && result.stored < limit) {
        bytes old = best->payload;
        payload.size = result.stored;
        best->payload = payload;
        payload = old;
        block_keep_smaller(best, c, result.stored);
        best->encoded = true;
    }
    bytes_free(&payload);
    return status;
}

block_probe block_probe_of(bool in_panel, unsigned width, uint64_t size) {
    uint64_t length = in_panel ? size / PROBE_SHARE / width * width : PROBE_BYTES;
    if (size <= (in_panel ? PROBE_PANEL : PROBE_WHOLE)) {
        return (block_probe){0, size};
    }
    length = length < PROBE_BYTES ? length : PROBE_BYTES;
    return (block_probe){(size - length) / 2 / width * width, length};
}

/* Estimates from a sample if a codec can get below the limit. */
static ckd_status try_sample(bool *promising, coder *scratch, coding c, int level, const block_sample *s,
                             ckd_error *err) {
    uint8_t to[PROBE_BYTES];
    coder_result result = {.to = to, .limit = s->size};
    ckd_status status =
        coder_encode(scratch, c, level, &(coder_source){s->data, s->size, s->width}, &result, err);
    *promising =
        result.stored && (double)result.stored / (double)s->size < (double)s->limit / (double)s->block_size;
    return status;
}

static ckd_status try_if_promising(block_job *job, candidate *best, coding c, int level,
                                   const coder_source *in, ckd_error *err) {
    block_probe probe = block_probe_of(job->input.in_panel, in->width, in->size);
    block_sample sample = {.data = (const uint8_t *)in->data + probe.at,
                           .size = probe.size,
                           .width = in->width,
                           .block_size = in->size,
                           .limit = best->available ? best->size : in->size};
    bool promising = true;
    ckd_status status =
        probe.size == in->size ? CKD_OK : try_sample(&promising, job->decoder.coder, c, level, &sample, err);
    return status == CKD_OK && promising ? try_codec(job, best, c, level, in, err) : status;
}

ckd_status block_codec_may_win(bool *may_win, coder *scratch, const coding_context *ctx,
                               const block_sample *s, ckd_error *err) {
    bool lz4 = ctx->codec == CKD_CODEC_LZ4;
    *may_win = true;
    if (s->size == s->block_size) {
        return CKD_OK;
    }
    ckd_status status = try_sample(may_win, scratch, lz4 ? CODING_LZ4 : CODING_ZSTD, ctx->level, s, err);
    if (status == CKD_OK && !*may_win && s->width > 1) {
        status =
            try_sample(may_win, scratch, lz4 ? CODING_LZ4_PLANES : CODING_ZSTD_PLANES, ctx->level, s, err);
    }
    return status;
}

/* Tries zstd or LZ4, plain and on byte planes. */
ckd_status block_try_byte_codecs(block_job *job, candidate *best, const coding_context *ctx,
                                 const coder_source *in, ckd_error *err) {
    bool lz4 = ctx->codec == CKD_CODEC_LZ4;
    ckd_status status = try_if_promising(job, best, lz4 ? CODING_LZ4 : CODING_ZSTD, ctx->level, in, err);
    if (status == CKD_OK && in->width > 1) {
        status =
            try_if_promising(job, best, lz4 ? CODING_LZ4_PLANES : CODING_ZSTD_PLANES, ctx->level, in, err);
    }
    return status;
}

/*
 * Standalone size of the parent's block, used as an estimate for this one; 0 if unknown. Sizes of constant or
 * incompressible blocks are not used.
 */
uint64_t block_expected_standalone(const record *parent_block, uint64_t raw) {
    const record *r = parent_block;
    bool usable =
        r && (r->predictor == PREDICT_NONE || r->predictor == PREDICT_PARENT || r->predictor == PREDICT_STEP);
    if (!usable) {
        return 0;
    }
    return r->base_stored > raw / 8 && r->base_stored < raw - raw / 32 ? r->base_stored : 0;
}

/* may_estimate: a delta is tried next, and its size decides whether this size must be known exactly. */
ckd_status block_propose_standalone(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                                    bool may_estimate, ckd_error *err) {
    candidate *standalone = &job->analysis.standalone;
    uint64_t raw = block_raw_size(job, tensor);
    standalone->available = standalone->encoded = false;
    block_keep_smaller(standalone, CODING_RAW, raw);
    if (ctx->codec == CKD_CODEC_AUTO) {
        plan_input in = {.dtype = tensor->tensor->dtype,
                         .values = job->input.values,
                         .count = job->input.count,
                         .grid = block_grid(&tensor->shape, tensor->region, job->input.first)};
        ckd_status status = block_plan_begin(&job->plan, &in, may_estimate,
                                             block_expected_standalone(job->analysis.parent_block, raw), err);
        if (status != CKD_OK) {
            return status;
        }
        block_keep_smaller(standalone, CODING_SYMBOLS, job->plan.standalone);
    }
    if (ctx->codec != CKD_CODEC_RAW) {
        coder_source in = {job->input.values, raw, block_width(tensor)};
        return block_try_byte_codecs(job, standalone, ctx, &in, err);
    }
    return CKD_OK;
}

static bool values_missing(const block_job *job) {
    return job->input.precoded.coded && !job->input.values;
}

/*
 * Sets the standalone size of a precoded block without its values. The device coder has checked that byte codecs do
 * not promise more.
 */
static void expect_standalone(block_job *job, uint64_t raw, uint64_t size) {
    candidate *standalone = &job->analysis.standalone;
    standalone->available = standalone->encoded = false;
    job->plan.standalone = (size_t)size;
    block_keep_smaller(standalone, CODING_RAW, raw);
    block_keep_smaller(standalone, CODING_SYMBOLS, size);
}

bool block_is_master(const tensor_context *tensor) {
    return tensor->tensor->role == CKD_ROLE_MASTER && tensor->tensor->dtype == CKD_F32;
}

ckd_status block_hash_rounded(block_job *job, ckd_error *err) {
    void *rounded = bytes_scratch(&job->scratch.previous, 2 * job->input.count, "coding scratch", err);
    if (!rounded) {
        return CKD_E_NOMEM;
    }
    const kernels *k = job->decoder.kernels;
    k->cast(CKD_BF16, rounded, CKD_F32, job->input.values, job->input.count);
    job->analysis.rounded_bf16 = content_hash(rounded, 2 * job->input.count);
    k->cast(CKD_F16, rounded, CKD_F32, job->input.values, job->input.count);
    job->analysis.rounded_f16 = content_hash(rounded, 2 * job->input.count);
    return CKD_OK;
}

/*
 * The base load against which a step is measured when it is loaded without its checkpoint: the bases of all three
 * tensors of its parameter. A weight has two inputs in this checkpoint, so its own base is added once. A second moment
 * has one input, so its own base is added twice, once for the weight. A first moment that is coded by its gradient has
 * no input, so only its own base counts.
 */
static load_cost block_step_base(const block_job *job) {
    double times = job->analysis.step.by_gradient || job->analysis.step.two_inputs ? 1 : 2;
    return (load_cost){job->analysis.step.base.stored + times * job->decision.base.stored,
                       job->analysis.step.base.work + times * job->decision.base.work};
}

void block_begin(block_job *job, const tensor_context *tensor) {
    block_analysis *a = &job->analysis;
    block_decision *d = &job->decision;
    block_output *out = &job->output;
    const block_precoded *made = &job->input.precoded;
    job->state = BLOCK_NEW;
    job->input.in_panel = tensor->rows != NULL;
    d->chosen = NULL;
    d->predictor = PREDICT_NONE;
    d->depth = 0;
    d->standalone_dependencies = 0;
    job->decoder.blocks_decoded = 0;
    a->previous_depth = 0;
    a->ends = false;
    a->ancestor = (chain_start){.view = NULL};
    a->parent_damaged = a->delta_rejected = false;
    a->step.available = a->step.predicts = a->step.tried = a->step.fits = false;
    a->standalone.available = a->predicted.available = a->predicted.encoded = false;
    out->lossy = false;
    out->nonfinite = 0;
    a->rounded_bf16 = out->result_bf16 = made->rounded ? made->bf16 : (hash128){0};
    a->rounded_f16 = out->result_f16 = made->rounded ? made->f16 : (hash128){0};
    out->error = out->error_bf16 = out->error_f16 = (lossy_error){0};
    a->parent_block = tensor->parent ? block_matching(job, tensor, tensor->parent) : NULL;
}

/* Plans a duplicate on its own if it has a chain, because it may need a materialized copy. */
static ckd_status plan_duplicate(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                                 ckd_error *err) {
    uint64_t raw = block_raw_size(job, tensor);
    if (job->decision.depth > 0 && values_missing(job)) { /* if it needs a copy, its values are read then */
        expect_standalone(job, raw,
                          job->input.precoded.standalone ? job->input.precoded.planned_standalone : raw);
        return CKD_OK;
    }
    return job->decision.depth > 0 ? block_propose_standalone(job, ctx, tensor, false, err) : CKD_OK;
}

/* Also counts the values that are not finite, while hashing has them in the cache. */
static void hash_values(block_job *job, const tensor_context *tensor, uint64_t raw) {
    if (job->input.precoded.coded) {
        job->output.content = job->input.precoded.content;
        return;
    }
    job->output.content = content_hash(job->input.values, raw);
    job->output.nonfinite = job->plan.kernels->count_nonfinite(tensor->tensor->dtype, job->input.values,
                                                               (size_t)job->input.count);
}

ckd_status block_analyse(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                         const load_budget *budget, ckd_error *err) {
    uint64_t raw = block_raw_size(job, tensor);
    if (job->state == BLOCK_UNCHANGED) {
        return CKD_OK;
    }
    block_begin(job, tensor);
    hash_values(job, tensor, raw);
    bool rounds = block_is_master(tensor) && !job->input.precoded.rounded;
    ckd_status status = rounds ? block_hash_rounded(job, err) : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    job->analysis.original = job->output.content;
    job->output.result_bf16 = job->analysis.rounded_bf16;
    job->output.result_f16 = job->analysis.rounded_f16;
    if (block_may_be_copied(job, ctx, tensor) &&
        (block_find_in_parent(job, ctx, tensor) || block_find_in_save(job, ctx, tensor, -1))) {
        return plan_duplicate(job, ctx, tensor, err);
    }
    if (block_is_in_flight(job, ctx, tensor, -1)) {
        job->state = BLOCK_BLOCKED;
        return CKD_OK;
    }
    bool delta = tensor->parent && job->input.try_delta && block_may_be_copied(job, ctx, tensor);
    if (delta) {
        block_measure_parent(job, tensor);
        delta = job->analysis.previous_depth < MAX_SAVE_DEPTH;
        block_step_measure(job, tensor);
        block_plan_chain_end(job, ctx, tensor, budget);
        delta = delta && (!job->analysis.ends || job->analysis.ancestor.view);
    }
    if (values_missing(job)) {
        uint64_t expected = block_expected_standalone(job->analysis.parent_block, raw);
        expect_standalone(job, raw,
                          job->input.precoded.delta ? expected : job->input.precoded.planned_standalone);
    } else {
        status = block_propose_standalone(job, ctx, tensor, delta, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    job->decision.base = base_cost(block_width(tensor), raw, job->analysis.standalone.size);
    bool plain =
        delta && budget_allows_chain(budget, &job->analysis.previous_chain, &job->decision.base, PART_EXACT);
    load_cost step_base = job->analysis.step.available ? block_step_base(job) : job->decision.base;
    job->analysis.step.available = job->analysis.step.available &&
                                   budget_allows_step_chain(budget, &job->analysis.step.chain, &step_base);
    if (plain || job->analysis.step.available) {
        status = block_delta_plan(job, ctx, tensor, plain, err);
    }
    job->decision.base_stored = job->analysis.standalone.size;
    bool wants_values =
        values_missing(job) && !job->analysis.predicted.available && !job->input.precoded.standalone;
    job->state = wants_values ? BLOCK_WANTS_VALUES : BLOCK_PLANNED;
    return status;
}

static load_cost chain_with(const load_cost *parent, predictor p, const candidate *c,
                            const tensor_context *tensor, uint64_t raw, uint64_t symbols) {
    return (load_cost){parent->stored + (double)c->size,
                       parent->work + decode_work(p, c->coding, block_width(tensor), raw, c->size, symbols)};
}

static uint64_t lossy_rank(const block_job *job) {
    return job->output.tile->plan.lattice.factor ? job->output.tile->plan.lattice.own.rank : 0;
}

/* The load cost of the block on its own. For a duplicate it is known only if the duplicate was planned on its own. */
static load_cost standalone_cost(const block_job *job, const tensor_context *tensor) {
    const load_cost nothing = {0, 0};
    uint64_t symbols =
        job->output.lossy ? (job->output.tile->input.parent_values ? 0 : lossy_rank(job)) : job->input.count;
    return chain_with(&nothing, PREDICT_NONE, &job->analysis.standalone, tensor, block_raw_size(job, tensor),
                      symbols);
}

/*
 * A step that is loaded with its checkpoint counts only its own share of the cost. A step that is loaded by itself may
 * cost as much as its inputs are allowed to.
 */
static void choose_step(block_job *job, const tensor_context *tensor, const load_budget *budget) {
    job->analysis.predicted.chain =
        chain_with(&job->analysis.step.chain, PREDICT_STEP, &job->analysis.predicted, tensor,
                   block_raw_size(job, tensor), job->plan.delta_symbols);
    load_cost share = {job->analysis.predicted.chain.stored - job->analysis.step.shared.stored,
                       job->analysis.predicted.chain.work - job->analysis.step.shared.work};
    const step_cost cost = {job->analysis.predicted.chain, block_step_base(job), share, job->decision.base};
    bool pays = job->analysis.predicted.size + STEP_HEADER < job->analysis.standalone.size;
    if (pays &&
        budget_allows_step(budget, &cost, job->analysis.predicted.size, job->analysis.standalone.size)) {
        job->decision.chosen = &job->analysis.predicted;
        job->decision.predictor = PREDICT_STEP;
        job->decision.depth = job->analysis.step.depth + 1;
        job->decision.own_cost = share;
    }
}

/* Does a delta on the ancestor save more load cost per stored byte than the standalone block? */
static bool merging_pays(const block_analysis *a, const load_cost *base) {
    double ended = (double)a->parent_block->chain_work;
    double freed_merged = ended - a->predicted.chain.work, freed_standalone = ended - base->work;
    return freed_merged * (double)a->standalone.size > freed_standalone * (double)a->predicted.size;
}

static void choose_candidate(block_job *job, const tensor_context *tensor, const load_budget *budget) {
    block_analysis *a = &job->analysis;
    block_decision *d = &job->decision;
    a->standalone.chain = standalone_cost(job, tensor);
    d->chosen = &a->standalone;
    d->base = job->output.lossy ? d->base : a->standalone.chain;
    d->predictor = PREDICT_NONE;
    d->depth = 0;
    d->own_cost = a->standalone.chain;
    if (a->predicted.available && a->step.predicts) {
        choose_step(job, tensor, budget);
    } else if (a->predicted.available) {
        a->predicted.chain =
            chain_with(&a->previous_chain, PREDICT_PARENT, &a->predicted, tensor, block_raw_size(job, tensor),
                       job->output.lossy ? lossy_rank(job) : job->plan.delta_symbols);
        bool fits = !a->ends || (a->ancestor.view && merging_pays(a, &d->base));
        if (fits && budget_allows_delta(budget, &a->predicted.chain, &d->base,
                                        job->output.lossy ? PART_LOSSY : PART_EXACT, a->predicted.size,
                                        a->standalone.size)) {
            d->chosen = &a->predicted;
            d->predictor = PREDICT_PARENT;
            d->depth = a->previous_depth + 1;
            d->own_cost = a->predicted.chain;
        }
    }
    d->chain = d->chosen->chain;
}

void block_decide(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                  load_budget *budget) {
    block_decision *d = &job->decision;
    block_add_referenced(job, ctx);
    if (!block_is_duplicate(job)) {
        choose_candidate(job, tensor, budget);
    }
    d->materialize = d->depth > 0 && job->analysis.standalone.available &&
                     budget_wants_materialized(budget, &d->chain, &d->base);
    if (job->analysis.ends && !block_is_duplicate(job)) {
        budget_chain_ended(budget, job->analysis.parent_block);
    }
    load_cost share = block_is_duplicate(job) ? d->chain : d->own_cost;
    load_cost materialized = d->materialize ? standalone_cost(job, tensor) : share;
    budget_add(budget, &share, &materialized, &d->base);
}

bool block_wants_values(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                        const load_budget *budget) {
    load_budget trial = *budget;
    if (!values_missing(job) || job->state == BLOCK_WANTS_VALUES) {
        return job->state == BLOCK_WANTS_VALUES;
    }
    block_decide(job, ctx, tensor, &trial);
    bool standalone = job->decision.materialize ||
                      (!block_is_duplicate(job) && job->decision.chosen != &job->analysis.predicted);
    return standalone && !job->input.precoded.standalone;
}

/*
 * Makes the payload of a planned candidate. The planned size is an estimate. A payload no smaller than the values is
 * replaced by raw values; such a delta is given up (available = false).
 */
static ckd_status encode_candidate(block_job *job, candidate *c, uint64_t raw, ckd_error *err) {
    if (c->encoded || c->coding == CODING_RAW) {
        return CKD_OK; /* raw payloads are written from the values themselves */
    }
    bool is_delta = c == &job->analysis.predicted;
    if (is_delta ? job->input.precoded.delta : job->input.precoded.standalone && values_missing(job)) {
        c->size = c->payload.size;
        c->encoded = true;
        return CKD_OK;
    }
    if (c->coding == CODING_LATTICE) {
        ckd_status made = block_lossy_standalone(job, c, err);
        if (made == CKD_OK && (c->size == 0 || c->size >= raw)) {
            c->coding = CODING_RAW;
            c->size = raw;
        }
        return made;
    }
    void *to = bytes_scratch(&c->payload, raw + 64, "coding scratch", err);
    if (!to) {
        return CKD_E_NOMEM;
    }
    ckd_status status = is_delta ? CKD_OK : block_plan_as_standalone(&job->plan, err);
    if (status != CKD_OK) {
        return status;
    }
    size_t size = block_plan_encode(&job->plan, is_delta, to, raw + 64);
    if (size == 0 || size >= raw) {
        c->available = !is_delta;
        c->coding = CODING_RAW;
        c->size = raw;
        return CKD_OK;
    }
    c->size = c->payload.size = size;
    c->encoded = true;
    return CKD_OK;
}

/* Replaces the estimated standalone size by the real one, because later saves rely on it. */
static void finish_standalone(block_job *job, const tensor_context *tensor) {
    const candidate *standalone = &job->analysis.standalone;
    block_decision *d = &job->decision;
    if (d->chosen == standalone) {
        d->chain = standalone_cost(job, tensor);
    }
    if (!job->output.lossy && d->chosen && (d->chosen == standalone || standalone->coding != CODING_RAW)) {
        d->base_stored = standalone->size;
    }
}

ckd_status block_encode(block_job *job, const tensor_context *tensor, ckd_error *err) {
    block_decision *d = &job->decision;
    uint64_t raw = block_raw_size(job, tensor);
    ckd_status status = d->chosen ? encode_candidate(job, d->chosen, raw, err) : CKD_OK;
    if (status == CKD_OK && d->chosen == &job->analysis.predicted && !job->analysis.predicted.available) {
        d->chosen = &job->analysis.standalone;
        d->predictor = PREDICT_NONE;
        d->depth = 0;
        d->chain = job->analysis.standalone.chain;
        d->materialize = false;
        job->analysis.step.predicts = false;
    }
    if (status == CKD_OK && (d->materialize || d->chosen == &job->analysis.standalone)) {
        status = encode_candidate(job, &job->analysis.standalone, raw, err);
        finish_standalone(job, tensor);
    }
    return status == CKD_OK ? CKD_OK : err_in_tensor(err, status, tensor->tensor->name);
}
