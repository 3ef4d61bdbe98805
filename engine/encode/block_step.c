/* Codes a block as one optimizer step from the parent's. */
#include "engine/encode/internal.h"

#define STEP_SAMPLE_SLICES 16u
#define STEP_SAMPLE_SLICE  256u
#define CLEARLY \
    2.0 /* bits per element by which a step must beat the parent's values: a step needs more inputs */
#define OTHER_RULE \
    4096.0 /* bits by which another rule must beat the usual one, because it needs its own group record */

/* ---- cost ---- */

static void add(load_cost *to, const load_cost *cost) {
    to->stored += cost->stored;
    to->work += cost->work;
}

/*
 * If the parent's block is a step itself, loading it also loads the parent's moments. The moments of this checkpoint
 * then only add their own payloads.
 */
void block_step_measure(block_job *job, const tensor_context *tensor) {
    const step_source *s = tensor->step;
    block_step *out = &job->analysis.step;
    *out = (block_step){.available = false};
    if (!s || !s->available || !job->analysis.parent_block) {
        return;
    }
    if (s->inputs == INPUTS_GRADIENT) { /* a first moment needs its parent, and nothing else */
        *out = (block_step){.available = job->analysis.previous_depth < MAX_SAVE_DEPTH,
                            .by_gradient = true,
                            .chain = job->analysis.previous_chain,
                            .depth = job->analysis.previous_depth};
        return;
    }
    bool weight = s->inputs == INPUTS_MOMENT_SQUARE;
    const pinned_block *first = &s->first->blocks[job->input.first / CKD_BLOCK_ELEMENTS];
    const pinned_block *square = weight ? &s->square->blocks[job->input.first / CKD_BLOCK_ELEMENTS] : NULL;
    const record *parent_first = s->parent_first ? block_matching(job, tensor, s->parent_first) : NULL;
    if (s->parent_first && !parent_first) {
        return;
    }
    const load_cost nothing = {0, 0};
    load_cost chain_first = parent_first && !first->on_parent ? record_chain(parent_first) : nothing;
    out->chain = job->analysis.previous_chain;
    out->shared = weight ? square->chain : first->chain;
    out->base = first->base;
    out->depth = first->depth > job->analysis.previous_depth ? first->depth : job->analysis.previous_depth;
    if (job->analysis.parent_block->predictor == PREDICT_STEP) {
        add(&out->chain, &first->own);
        add(&out->chain, weight ? &square->own : &nothing);
    } else {
        add(&out->chain, weight ? &square->chain : &first->chain);
        add(&out->chain, weight && !square->on_step ? &first->chain : &chain_first);
    }
    out->two_inputs = weight;
    if (weight) {
        add(&out->base, &square->base);
        out->depth = square->depth > out->depth ? square->depth : out->depth;
    }
    if (parent_first) {
        out->depth = parent_first->depth > out->depth ? parent_first->depth : out->depth;
    }
    out->available = out->depth < MAX_SAVE_DEPTH;
}

/* ---- which rule ---- */

typedef struct inputs {
    const float *now, *previous; /* of the tensor: its values, and those of the parent */
    const float *first, *other;  /* the first moment; the second one or the parent's first one, by the rule */
} inputs;

/* Total length of the differences, in bits. */
static double difference_bits(const float *a, const float *b, size_t n) {
    double total = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t x, y;
        memcpy(&x, a + i, sizeof(x));
        memcpy(&y, b + i, sizeof(y));
        int32_t d = (int32_t)(x - y);
        uint32_t magnitude = d < 0 ? 0u - (uint32_t)d : (uint32_t)d;
        total += magnitude ? 33 - __builtin_clz(magnitude) : 0;
    }
    return total;
}

static double sampled_bits(const block_job *job, const inputs *in, const step_rule *rule) {
    size_t slices = job->input.count > STEP_SAMPLE_SLICES * STEP_SAMPLE_SLICE ? STEP_SAMPLE_SLICES : 1;
    size_t length = slices > 1 ? STEP_SAMPLE_SLICE : (size_t)job->input.count;
    size_t step = (size_t)job->input.count / slices;
    double total = 0;
    float guess[STEP_SAMPLE_SLICES * STEP_SAMPLE_SLICE], now[STEP_SAMPLE_SLICES * STEP_SAMPLE_SLICE];
    for (size_t i = 0; i < slices; i++) {
        size_t at = i * step;
        memcpy(guess, in->previous + at, length * sizeof(float));
        memcpy(now, (const uint8_t *)in->now + at * sizeof(float), length * sizeof(float));
        if (rule) {
            job->decoder.kernels->optimizer_step(rule, guess, guess, in->first + at,
                                                 in->other ? in->other + at : NULL, length);
        }
        total += difference_bits(now, guess, length);
    }
    return total / (double)(slices * length) * (double)job->input.count;
}

static double best_rule(step_rule *rule, const block_job *job, const step_source *s, const inputs *in) {
    memcpy(rule->coefficients, s->group.coefficients, sizeof(rule->coefficients));
    uint32_t best = s->usual ? s->usual : s->first_rule;
    rule->rule = best;
    double min = sampled_bits(job, in, rule);
    double margin = s->usual ? OTHER_RULE : 0;
    for (rule->rule = s->first_rule; rule->rule <= s->last_rule; rule->rule++) {
        double bits = sampled_bits(job, in, rule);
        if (bits < min - margin) {
            min = bits;
            margin = 0;
            best = rule->rule;
        }
    }
    rule->rule = best;
    return min;
}

/* ---- the prediction ---- */

void block_step_name_inputs(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                            const step_rule *rule) {
    const step_source *s = tensor->step;
    const ckd_id *parent = &ctx->parent->manifest.checkpoint.id;
    const dependency values = {.kind = DEPENDS_VALUES, .same_span = true};
    dependency *deps = job->decision.dependencies;
    deps[0] = deps[1] = deps[2] = values;
    deps[0].checkpoint = *parent;
    deps[0].tensor = "";
    deps[0].content = job->analysis.parent_block->content;
    uint32_t count = 1;
    if (s->inputs != INPUTS_GRADIENT) {
        deps[1].checkpoint = ctx->checkpoint;
        deps[1].tensor = s->first->name;
        deps[1].content = s->first->blocks[job->input.first / CKD_BLOCK_ELEMENTS].content;
        count++;
    }
    if (s->inputs == INPUTS_MOMENT_SQUARE) {
        deps[2].checkpoint = ctx->checkpoint;
        deps[2].tensor = s->square->name;
        deps[2].content = s->square->blocks[job->input.first / CKD_BLOCK_ELEMENTS].content;
        count++;
    } else if (s->parent_first) {
        deps[2].checkpoint = *parent;
        deps[2].tensor = s->first->name;
        deps[2].content = block_matching(job, tensor, s->parent_first)->content;
        count++;
    }
    optimizer_group g = s->group;
    g.rule = rule->rule;
    memcpy(g.coefficients, rule->coefficients, sizeof(g.coefficients));
    group_encode(job->analysis.step.group, &g);
    job->analysis.step.rule = rule->rule;
    job->analysis.step.content = content_hash(job->analysis.step.group, GROUP_BYTES);
    deps[count++] = (dependency){.kind = DEPENDS_GROUP,
                                 .checkpoint = ctx->checkpoint,
                                 .tensor = GROUP_NAME,
                                 .same_span = true,
                                 .content = job->analysis.step.content};
    job->decision.dependency_count = count;
    job->decision.predictor = PREDICT_STEP;
}

/* Reads the parent's first moment. */
static ckd_status read_before(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                              const float **parent_first, ckd_error *err) {
    void *to =
        bytes_scratch(&job->scratch.step_before, job->input.count * sizeof(float), "coding scratch", err);
    *parent_first = to;
    if (!to) {
        return CKD_E_NOMEM;
    }
    const view_source from = {
        ctx->parent, tensor->step->parent_first, {tensor->region, job->input.first, job->input.count}, NULL};
    return span_values(&job->decoder, &from, to, err);
}

ckd_status block_step_predict(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                              ckd_error *err) {
    const step_source *s = tensor->step;
    float *previous = (float *)(void *)job->scratch.previous.data;
    inputs in = {
        .now = job->input.values,
        .previous = previous,
        .first = step_pinned_values(s->first, &job->scratch.step_first, job->input.first, job->input.count)};
    if (s->inputs == INPUTS_MOMENT_SQUARE) {
        in.other =
            step_pinned_values(s->square, &job->scratch.step_before, job->input.first, job->input.count);
    }
    if (!in.first || (s->inputs == INPUTS_MOMENT_SQUARE && !in.other)) {
        return CKD_OK; /* no prediction, but a delta */
    }
    if (s->inputs != INPUTS_MOMENT_SQUARE && s->parent_first) {
        ckd_status status = read_before(job, ctx, tensor, &in.other, err);
        if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_IO) {
            job->analysis.parent_damaged = true; /* no prediction, but a delta */
            return CKD_OK;
        }
        if (status != CKD_OK) {
            return status;
        }
    }
    step_rule rule;
    double bits = best_rule(&rule, job, s, &in), plain = sampled_bits(job, &in, NULL);
    if (bits + CLEARLY * (double)job->input.count >= plain) {
        return CKD_OK;
    }
    job->analysis.step.predicts =
        job->decoder.kernels->optimizer_step(&rule, previous, previous, in.first, in.other, job->input.count);
    block_step_name_inputs(job, ctx, tensor, &rule);
    return CKD_OK;
}
