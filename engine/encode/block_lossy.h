/*
 * Coding one block of a lossy tile: as block_coder.h does it for exact ones, with the values that a decoder will get in place of the
 * original ones. Internal to engine/.
 */
#ifndef ENGINE_BLOCK_LOSSY_H
#define ENGINE_BLOCK_LOSSY_H

#include "engine/encode/block_coder.h"

/*
 * job: first and count in the region, values: the original ones; at: where the block lies in the tile. Afterwards the job is lossy, with
 * values and content those that a decoder will get, or it is known, or it was analysed as an exact one: because so many of its
 * values are not finite, or the tile's bound on errors would not be kept.
 */
ckd_status block_lossy_analyse(block_job *job, const lossy_tile *tile, const coding_context *save,
                               const tensor_context *tensor, const load_budget *budget, ckd_error *err);
/* How far values of this save may be off that a block of the tile names as its own; negative: not at all, as of moments, which are held against each other. */
double lossy_copy_bound(const lossy_tile *tile);
/* What an exact base of so many bytes would take to load: the measure of all loads. */
load_cost lossy_base_cost(ckd_dtype dtype, uint64_t raw);
/* The payload of a candidate that is only estimated so far: the block on its own. */
ckd_status block_lossy_standalone(block_job *job, candidate *c, ckd_error *err);

#endif
