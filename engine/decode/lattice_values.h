/*
 * From the integers of a lossy block to values: what a decoder does, and an encoder in order to know what it will get.
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

/* Are all sums of products exact in single precision? left, right: the largest magnitude of each component, the right one's with its shift. */
bool lattice_sums_exact(const float *left, const float *right, uint32_t rank);

/*
 * A factor (n x rank) as integers of a byte each, n x `padded`, with zeros behind the last component. shift: of each component, counted in; NULL: none. false: one does
 * not fit, and `to` is anything.
 */
bool lattice_factor_bytes(int8_t *to, const int32_t *factor, uint64_t n, uint32_t rank, uint32_t padded,
                          const int32_t *shift);

/*
 * The block's low-rank part, rows x columns in row-major order, in units of 2^low_rank_exponent steps; NULL, and CKD_OK, if it has
 * none. Lives in w->products. CORRUPT if sums could be inexact.
 */
ckd_status lattice_products(const float **out, const lattice_block *b, lattice_work *w, const kernels *k,
                            ckd_error *err);

/* What the run of row `row` needs. Columns' steps, from column 0 on, lie in w->step after lattice_steps. */
ckd_status lattice_steps(const lattice_block *b, lattice_work *w, ckd_error *err);
lattice_run lattice_row_run(const lattice_block *b, const lattice_work *w, uint64_t row);
level_run level_row_run(const lattice_block *b, const lattice_work *w, uint64_t row, bool has_parent);
/* Elements of row `row`: *first (in the block) and *column. */
uint64_t lattice_row_span(const lattice_block *b, uint64_t row, uint64_t *first, uint64_t *column);

/*
 * values: the parent's (has_parent) and then this block's, as floats: b->count of them. Exceptions are not in yet.
 * Errors: CORRUPT, NOMEM.
 */
ckd_status lattice_rebuild(float *values, const lattice_block *b, bool has_parent, lattice_work *w,
                           const kernels *k, ckd_error *err);
/* The same in the tensor's dtype, exceptions included. */
ckd_status lattice_rebuild_values(void *values, ckd_dtype dtype, const lattice_block *b, bool has_parent,
                                  lattice_work *w, const kernels *k, ckd_error *err);

#endif
