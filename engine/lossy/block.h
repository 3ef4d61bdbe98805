/* Parts that the ways to code a lossy block share. Internal to engine/lossy. */
#ifndef ENGINE_LOSSY_BLOCK_H
#define ENGINE_LOSSY_BLOCK_H

#include "engine/lossy/lossy.h"
#include "engine/lossy/rate.h"

/* Returns the tile's plan for one block. */
lattice_block lossy_block_of(const lossy_tile *t, uint64_t at, uint64_t count);

/* ---- residual.c: residuals of a tile's elements in steps, before rounding; not for vectors ---- */
/* Counts the residuals in a histogram. Errors: NOMEM. */
ckd_status lossy_residual(rate_histogram *h, const lossy_tile *t, const kernels *k, ckd_error *err);

/*
 * The residuals as a matrix whose pieces are computed on demand. The tile's steps must not change meanwhile,
 * and the tile has no factors.
 */
typedef struct lossy_matrix {
    const lossy_tile *tile;
    const kernels *kernels;
    const lattice_work *work;
} lossy_matrix;
/* work: borrowed until the last product. Errors: NOMEM. */
ckd_status lossy_matrix_begin(lossy_matrix *m, const lossy_tile *t, const kernels *k, lattice_work *work,
                              ckd_error *err);
/* Implements low_rank_matrix.piece, for at most PIECE_SIDE columns. */
void lossy_matrix_piece(const void *matrix, float *to, size_t row, size_t rows, size_t column,
                        size_t columns);

/* Converts the mean distance below an integer, in steps, to the unit of payloads. */
uint8_t lossy_offset(double below);

/*
 * Quantises and rebuilds a block whose tile determines everything but its integers. It works in chunks that
 * stay in the nearer caches. j->block: the tile's plan for the block. *done = false: the block is not of this kind,
 * or an integer does not fit a byte. Errors: NOMEM (stream.c).
 */
ckd_status lossy_stream(bool *done, lossy_job *j, const lossy_elements *e, ckd_error *err);

/*
 * Recomputes j->values, j->decoded, the error and `within` from the integers and exceptions in j->block.
 * Errors: NOMEM.
 */
ckd_status lossy_block_rebuild(lossy_job *j, const lossy_elements *e, ckd_error *err);
/* Quantises and rebuilds the block again, as if the tile had no factors. Errors: NOMEM. */
ckd_status lossy_block_without_factor(lossy_job *j, const lossy_elements *e, ckd_error *err);

/* ---- exceptions.c ---- */
void lossy_no_exceptions(lossy_job *j);
/*
 * lossy_add_exception appends an element of the block, in ascending order. lossy_exceptions_done makes the
 * list the block's exceptions. Errors: NOMEM.
 */
void lossy_add_exception(lossy_job *j, uint32_t place, uint32_t bits);
ckd_status lossy_exceptions_done(lossy_job *j, ckd_error *err);
/*
 * Finds the exceptions among elements from ... to - 1 of the block, appends them, and sets their integers to
 * 0. Errors: NOMEM.
 */
ckd_status lossy_find_exceptions(lossy_job *j, const lossy_elements *e, uint64_t from, uint64_t to,
                                 ckd_error *err);
/* Sets j->within from j->error. */
void lossy_judge(lossy_job *j, const lossy_tile *t);

#endif
