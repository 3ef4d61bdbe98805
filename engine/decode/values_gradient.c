/*
 * First moments that are one update after another checkpoint's, if the gradient was bf16. The payload has the gradient,
 * which takes half the bytes of the moment's change. codec/FORMAT.md, "Gradients", is normative.
 */
#include "engine/decode/internal.h"

#define SIZE_BYTES 4u /* the size of the gradient's stream */

/* The gradient's n numbers of the stream, as floats. */
static ckd_status read_gradient(float **out, decoder *d, size_t n, const void *stream, size_t stored,
                                ckd_error *err) {
    uint8_t *scratch =
        bytes_scratch(&d->integers, n * (sizeof(float) + sizeof(uint16_t)) + 1, "decoding scratch", err);
    if (!scratch) {
        return CKD_E_NOMEM;
    }
    float *gradient = (float *)(void *)scratch;
    void *rotated = scratch + n * sizeof(float);
    ckd_status status = coder_decode(d->coder, CODING_SYMBOLS,
                                     &(coder_target){rotated, n * sizeof(uint16_t), sizeof(uint16_t), NULL},
                                     stream, stored, err);
    if (status == CKD_OK) {
        d->kernels->unrotate_sign(CKD_BF16, rotated, rotated, n);
        d->kernels->widen(gradient, CKD_BF16, rotated, n);
    }
    *out = gradient;
    return status;
}

static ckd_status apply_gradient(decoder *d, const view_block *b, const optimizer_group *g, void *to,
                                 ckd_error *err) {
    const record *r = b->record;
    const void *payload;
    ckd_status status = values_payload(d, b, &payload, err);
    if (status != CKD_OK) {
        return status;
    }
    const uint8_t *at = payload;
    uint32_t size = r->stored_size >= SIZE_BYTES ? load_le32(at) : 0;
    if (r->stored_size < SIZE_BYTES || size > r->stored_size - SIZE_BYTES) {
        return view_block_corrupt(b, err, "the gradient's stream is longer than the payload");
    }
    float *gradient;
    size_t rest = (size_t)(r->stored_size - SIZE_BYTES - size);
    status = read_gradient(&gradient, d, (size_t)r->count, at + SIZE_BYTES, size, err);
    if (status != CKD_OK) {
        return status;
    }
    step_rule rule = {.rule = g->rule};
    memcpy(rule.coefficients, g->coefficients, sizeof(rule.coefficients));
    if (!d->kernels->optimizer_step(&rule, to, to, gradient, NULL, (size_t)r->count)) {
        return err_unsupported(err, file_path(b->chunk->file), r->offset, "this build cannot compute rule %u",
                               (unsigned)g->rule);
    }
    const coded_residual residual = {CODING_SYMBOLS, at + SIZE_BYTES + size, rest};
    return rest ? values_apply(d, r, &residual, to, err) : CKD_OK;
}

ckd_status values_by_gradient(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err) {
    const record *r = b->record;
    optimizer_group g;
    if (r->tensor->dtype != CKD_F32 || r->dependency_count != 2) {
        return view_block_corrupt(
            b, err, "the block cannot have a gradient: its dtype or its dependencies do not fit");
    }
    ckd_status status = values_group(d, v, b, &g, err);
    if (status == CKD_OK && group_rule_inputs(g.rule) != INPUTS_GRADIENT) {
        status = view_block_corrupt(b, err, "the optimizer's rule does not take the block's gradient");
    }
    if (status != CKD_OK) {
        return status;
    }
    uint32_t waiting = d->waiting;
    /* The earlier moment may be cached for other blocks, so it is checked against its own hash. */
    d->waiting = 0;
    status = values_dependency(d, v, b, to, err);
    d->waiting = waiting;
    return status == CKD_OK ? apply_gradient(d, b, &g, to, err) : status;
}
