/* Declarations that only the files of engine/encode/ use. */
#ifndef ENGINE_ENCODE_INTERNAL_H
#define ENGINE_ENCODE_INTERNAL_H

#include "engine/encode/encode.h"

/* ---- block_plan.c ---- */

void block_plan_init(block_plan *p, const kernels *k, symbols_workspace *work);
void block_plan_free(block_plan *p);

/*
 * Sets `standalone`: estimated if a delta will be tried and the block is large enough to sample; else planned.
 * expected: the caller's guess, such as the size in the parent; 0: none.
 */
ckd_status block_plan_begin(block_plan *p, const plan_input *in, bool try_delta, uint64_t expected,
                            ckd_error *err);
/*
 * Sets `delta`, and plans whichever of the two may win, or both. previous: count elements, needed only during the
 * call. If the delta is planned, the residual and its contexts are valid afterwards.
 */
ckd_status block_plan_delta(block_plan *p, const void *previous, ckd_error *err);
/* Plans the standalone stream, unless it is planned. */
ckd_status block_plan_as_standalone(block_plan *p, ckd_error *err);

/* Writes a planned stream to `to` of `capacity` bytes. Returns its size, or 0 if it does not fit. */
size_t block_plan_encode(block_plan *p, bool delta, void *to, size_t capacity);

/* ---- block_coder.c ---- */
static inline unsigned block_width(const tensor_context *tensor) {
    return (unsigned)ckd_dtype_size(tensor->tensor->dtype);
}
void block_keep_smaller(candidate *best, coding c, uint64_t size);
/* Tries zstd or LZ4, plain and on byte planes. */
ckd_status block_try_byte_codecs(block_job *job, candidate *best, const coding_context *ctx,
                                 const coder_source *in, ckd_error *err);

/* ---- block_delta.c: a block as a delta ---- */
/*
 * If the parent's chain is to end, sets analysis.ends and, if a delta on the block that the chain begins with may do,
 * analysis.ancestor. block_measure_parent comes first, and block_step_measure.
 */
void block_plan_chain_end(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                          const load_budget *budget);
/*
 * Plans analysis.predicted, on the parent or the ancestor. plain: the difference to these values may be used, not only
 * an optimizer's step. Damage of the values is noted, and is no error.
 */
ckd_status block_delta_plan(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                            bool plain, ckd_error *err);

/* ---- block_step.c: a block as one optimizer step from the parent's ---- */
/*
 * Sets job->analysis.step: the cost of loading the block as a step, without its own payload. Not available if the
 * moments were not saved in the same blocks, here and in the parent.
 */
void block_step_measure(block_job *job, const tensor_context *tensor);
/*
 * Tries the step's rules. On entry, job->scratch.previous holds the parent's values. If a rule fits better than they
 * do, sets job->analysis.step.predicts, replaces job->scratch.previous by the prediction, and sets the job's
 * dependencies.
 */
ckd_status block_step_predict(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                              ckd_error *err);
/* Sets the job's predictor, its dependencies and its group. */
void block_step_name_inputs(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                            const step_rule *rule);

/* ---- block_gradient.c: a first moment by its gradient ---- */
/*
 * Finds out whether the gradient was bf16. On entry, job->scratch.previous holds the parent's values. If it was, sets
 * job->analysis.step.predicts and the rule, and makes the payload of job->analysis.predicted.
 */
ckd_status block_gradient_plan(step_rule *rule, block_job *job, const coding_context *ctx,
                               const tensor_context *tensor, ckd_error *err);

#endif
