/* Codes a block as one optimizer step from the parent's. Internal to engine/, as block_coder.h. */
#ifndef ENGINE_BLOCK_STEP_H
#define ENGINE_BLOCK_STEP_H

#include "engine/encode/block_coder.h"

/*
 * Sets job->step: the cost of loading the block as a step, without its own payload. Not available if the moments were
 * not saved in the same blocks, here and in the parent.
 */
void block_step_measure(block_job *job, const tensor_context *tensor);
/*
 * Tries the step's rules. On entry, job->previous holds the parent's values. If a rule fits better than they do, sets
 * job->step.chosen, replaces job->previous by the prediction, and sets the job's dependencies.
 */
ckd_status block_step_predict(block_job *job, const coding_context *save, const tensor_context *tensor,
                              ckd_error *err);

#endif
