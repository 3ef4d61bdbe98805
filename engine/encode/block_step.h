/* A block as one optimizer step from the parent's. Internal to engine/, as block_coder.h. */
#ifndef ENGINE_BLOCK_STEP_H
#define ENGINE_BLOCK_STEP_H

#include "engine/encode/block_coder.h"

/*
 * What the block would take to load as a step, its own payload not counted: sets job->step. Not available if the moments were not saved in
 * the same blocks, here and in the parent.
 */
void block_step_measure(block_job *job, const tensor_context *tensor);
/*
 * job->previous holds the parent's values. If a rule fits better than they do, job->step.chosen is set, job->previous is
 * the prediction, and the job names what it builds on.
 */
ckd_status block_step_predict(block_job *job, const coding_context *save, const tensor_context *tensor,
                              ckd_error *err);

#endif
