/*
 * Computes values from the integers of a lossy block. Decoders use it, and encoders, to know what decoders will get.
 * codec/FORMAT.md, "Lattice blocks". Internal to engine/. Runs under base/float_mode.h.
 */
#ifndef ENGINE_LATTICE_VALUES_H
#define ENGINE_LATTICE_VALUES_H

#include "codec/lattice/lattice.h"
#include "kernels/kernels.h"

/* Buffers of one worker. Zero-initialise. */
typedef struct lattice_work {
    bytes values, products, left, columns, right, step, row_step;
    lattice_scratch scratch;
} lattice_work;
void lattice_work_free(lattice_work *w);

/*
 * Whether all sums of products are exact in single precision. left, right: largest magnitude of each component, the
 * right one's with its shift.
 */
bool lattice_sums_exact(const float *left, const float *right, uint32_t rank);

/*
 * Converts a factor (n x rank) to int8, n x `padded`, with zeros after the last component. shift: left shift per
 * component, applied to the values; NULL: none. Returns false if a value does not fit; `to` is undefined then.
 */
bool lattice_factor_bytes(int8_t *to, const int32_t *factor, uint64_t n, uint32_t rank, uint32_t padded,
                          const int32_t *shift);

/*
 * Computes the block's low-rank part, rows x columns in row-major order, in units of 2^low_rank_exponent steps. NULL
 * and CKD_OK if it has none. The result lives in w->products. Errors: CORRUPT (sums could be inexact), NOMEM.
 */
ckd_status lattice_products(const float **out, const lattice_block *b, lattice_work *w, const kernels *k,
                            ckd_error *err);

/*
 * Prepares and gives the parameters of one row's run. lattice_steps puts the columns' steps, from column 0 on, into
 * w->step.
 */
ckd_status lattice_steps(const lattice_block *b, lattice_work *w, ckd_error *err);
lattice_run lattice_row_run(const lattice_block *b, const lattice_work *w, uint64_t row);
level_run level_row_run(const lattice_block *b, const lattice_work *w, uint64_t row, bool has_parent);
/* Counts the block's elements in row `row`, and gives the first: its index *first in the block, and its *column. */
uint64_t lattice_row_span(const lattice_block *b, uint64_t row, uint64_t *first, uint64_t *column);

/*
 * Rebuilds b->count values as floats. values holds the parent's values on entry, if has_parent. Exceptions are not
 * applied yet. Errors: CORRUPT, NOMEM.
 */
ckd_status lattice_rebuild(float *values, const lattice_block *b, bool has_parent, lattice_work *w,
                           const kernels *k, ckd_error *err);
/* A block's values in the tensor's dtype, at any alignment. */
typedef struct lattice_target {
    void *values;
    ckd_dtype dtype;
    bool has_parent; /* on entry, they are the parent's values */
} lattice_target;
/* The same as lattice_rebuild, with exceptions applied. */
ckd_status lattice_rebuild_values(const lattice_target *to, const lattice_block *b, lattice_work *w,
                                  const kernels *k, ckd_error *err);

#endif
