/* What the ways to code a lossy block have in common. Internal to engine/lossy_*.c. */
#ifndef ENGINE_LOSSY_BLOCK_H
#define ENGINE_LOSSY_BLOCK_H

#include "engine/lossy.h"
#include "engine/lossy_rate.h"

/* The tile's plan, for a block of it. */
lattice_block lossy_block_of(const lossy_tile *t, uint64_t at, uint64_t count);

/*
 * What integers have to say of each element, in steps, by the tile's plan, as a histogram; and in row-major order in `to`, unless that is
 * NULL, where elements that the tile does not have are 0. Not of vectors. Errors: NOMEM (lossy_left.c).
 */
ckd_status lossy_left(rate_histogram *h, float *to, const lossy_tile *t, const kernels *k, ckd_error *err);

/* Mean distance below an integer, in steps, as payloads have it. */
uint8_t lossy_offset(double below);

/*
 * Integers, and what a decoder makes of them, of a block for which the tile says all else: little by little, so that all of it stays in the
 * nearer caches. j->block is the tile's plan for the block, `at` its first element in the tile. false in *done: it is no such
 * block, or an integer does not fit a byte. Errors: NOMEM (lossy_stream.c).
 */
ckd_status lossy_stream(bool *done, lossy_job *j, const lossy_tile *t, uint64_t at, const void *original,
                        const kernels *k, ckd_error *err);

/* ---- lossy_kept.c ---- */
void lossy_keep_none(lossy_job *j);
/*
 * Appends those of the block's elements from ... to - 1 that are kept as they are to its exceptions, and makes their integers 0. The
 * block lies at element `at` of the tile. Errors: NOMEM.
 */
ckd_status lossy_keep(lossy_job *j, const lossy_tile *t, uint64_t at, uint64_t from, uint64_t to,
                      const void *original, const kernels *k, ckd_error *err);
/* From j->error: is the bound kept? */
void lossy_judge(lossy_job *j, const lossy_tile *t);

#endif
