/* What the ways to code a lossy block have in common. Internal to engine/lossy_*.c. */
#ifndef ENGINE_LOSSY_BLOCK_H
#define ENGINE_LOSSY_BLOCK_H

#include "engine/lossy/lossy.h"
#include "engine/lossy/rate.h"

/* The tile's plan, for a block of it. */
lattice_block lossy_block_of(const lossy_tile *t, uint64_t at, uint64_t count);

/* ---- residual.c: what integers have to say of each element, in steps, by the tile's plan; not of vectors ---- */
/* As a histogram. Errors: NOMEM. */
ckd_status lossy_residual(rate_histogram *h, const lossy_tile *t, const kernels *k, ckd_error *err);

/* The same as a matrix, of which pieces are computed when they are wanted. The tile's steps must not change meanwhile, and it has no factors. */
typedef struct lossy_matrix {
    const lossy_tile *tile;
    const kernels *kernels;
    const lattice_work *work;
} lossy_matrix;
/* work: stays the matrix's until the last product. Errors: NOMEM. */
ckd_status lossy_matrix_begin(lossy_matrix *m, const lossy_tile *t, const kernels *k, lattice_work *work,
                              ckd_error *err);
/* low_rank_matrix.piece, at most PIECE_SIDE columns. */
void lossy_matrix_piece(const void *matrix, float *to, size_t row, size_t rows, size_t column,
                        size_t columns);

/* Mean distance below an integer, in steps, as payloads have it. */
uint8_t lossy_offset(double below);

/*
 * Integers, and what a decoder makes of them, of a block for which the tile says all else: little by little, so that all of it stays in the
 * nearer caches. j->block is the tile's plan for the block, `at` its first element in the tile. false in *done: it is no such
 * block, or an integer does not fit a byte. Errors: NOMEM (stream.c).
 */
ckd_status lossy_stream(bool *done, lossy_job *j, const lossy_tile *t, uint64_t at, const void *original,
                        const kernels *k, ckd_error *err);

/* j->values, j->decoded, the error and `within` anew, of the integers and exceptions that j->block has. Errors: NOMEM. */
ckd_status lossy_block_rebuild(lossy_job *j, const lossy_tile *t, uint64_t at, const kernels *k,
                               ckd_error *err);
/* Integers, exceptions and values anew, as if the tile had no factors. Errors: NOMEM. */
ckd_status lossy_block_without_factor(lossy_job *j, const lossy_tile *t, uint64_t at, const void *original,
                                      const kernels *k, ckd_error *err);

/* ---- exceptions.c ---- */
void lossy_no_exceptions(lossy_job *j);
/* An element of the block, behind those before it; and when all are told, they are its exceptions. Errors: NOMEM. */
void lossy_add_exception(lossy_job *j, uint32_t place, uint32_t bits);
ckd_status lossy_exceptions_done(lossy_job *j, ckd_error *err);
/*
 * Appends those of the block's elements from ... to - 1 that are kept as they are to its exceptions, and makes their integers 0. The
 * block lies at element `at` of the tile. Errors: NOMEM.
 */
ckd_status lossy_find_exceptions(lossy_job *j, const lossy_tile *t, uint64_t at, uint64_t from, uint64_t to,
                                 const void *original, const kernels *k, ckd_error *err);
/* From j->error: is the bound kept? */
void lossy_judge(lossy_job *j, const lossy_tile *t);

#endif
