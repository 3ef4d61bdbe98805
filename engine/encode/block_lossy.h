/*
 * Codes one block of a lossy tile, as block_coder.h does for exact blocks. The decoded values take the place of the
 * original ones. Internal to engine/.
 */
#ifndef ENGINE_BLOCK_LOSSY_H
#define ENGINE_BLOCK_LOSSY_H

#include "engine/encode/block_coder.h"

/*
 * Analyses a block. job: first and count in the region, and the original values. Afterwards the job is lossy, with
 * the decoded values and their content; or a duplicate; or analysed as an exact block, because too many values are
 * not finite or the tile's error bound would not hold.
 */
ckd_status block_lossy_analyse(block_job *job, const lossy_tile *tile, const coding_context *save,
                               const tensor_context *tensor, const load_budget *budget, ckd_error *err);
/*
 * Largest error of values of this save that a block of the tile may copy. Negative: none is allowed, as for moments,
 * which are coded with regard to each other.
 */
double lossy_copy_bound(const lossy_tile *tile);
/* The cost of loading an exact base of `raw` bytes: the unit of all load costs. */
load_cost lossy_base_cost(ckd_dtype dtype, uint64_t raw);
/* Makes the payload of the block on its own, for a candidate that is only estimated so far. */
ckd_status block_lossy_standalone(block_job *job, candidate *c, ckd_error *err);

#endif
