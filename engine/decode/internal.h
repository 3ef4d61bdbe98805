/* Declarations that only the files of engine/decode/ use. */
#ifndef ENGINE_DECODE_INTERNAL_H
#define ENGINE_DECODE_INTERNAL_H

#include <pthread.h>

#include "codec/entropy/entropy.h"
#include "codec/metadata/metadata.h"
#include "engine/decode/decode.h"

/* ---- cost.c, chain_plan.c ---- */

/*
 * Estimates of size and time are inexact and the bounds are promises, so stay a little inside them. The plan that ends
 * chains aims at a lower bound. Otherwise costs that it did not foresee would turn the last blocks into bases.
 */
#define BUDGET_MARGIN 0.95
#define PLAN_MARGIN   0.92

static inline void load_cost_add(load_cost *to, const load_cost *cost) {
    to->stored += cost->stored;
    to->work += cost->work;
}

/* ---- columns_cache.c ---- */

/*
 * Pins the entry with this content, until columns_release. *must_fill: the entry is new, and the caller must decode
 * into `columns`, put the memory behind it into step, shift and factor, and call columns_filled before anything else.
 * Waits while another worker decodes it, or while all entries are in use. So a caller that holds an entry may wait only
 * for the disk, and for one second entry.
 */
cached_columns *columns_claim(columns_cache *c, bool *must_fill, const hash128 *content);
/* good: false if decoding failed; the entry is then released and removed. */
void columns_filled(columns_cache *c, cached_columns *k, bool good);
void columns_release(columns_cache *c, cached_columns *k);

/*
 * values_lattice.c: Decodes a lossy block; `to` holds the parent's values, if it has one. v NULL: a materialized
 * copy, which depends on nothing.
 */
ckd_status values_decode_lattice(decoder *d, const view *v, const view_block *b, bool has_parent, void *to,
                                 ckd_error *err);
/*
 * lattice_moves.c: Moves the values that the block's masks name; without masks, none. Gives all others the bits that
 * lattice_rebuild and a conversion to floats and back would give them. Exceptions are not applied. Errors: NOMEM.
 */
ckd_status lattice_move_values(const lattice_target *to, const lattice_block *b, lattice_work *w,
                               const kernels *k, ckd_error *err);

/*
 * values.c: The values of a block that the planned load uses more than once; the caller releases them
 * (values_store_release). *out NULL with CKD_OK: the load has no plan or no space, or uses them once.
 */
ckd_status values_shared(stored_values **out, decoder *d, const view *v, const view_block *b, ckd_error *err);

/* values_step.c: Predicts an optimizer step into `to`; the caller then applies the residual. */
ckd_status values_predict(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err);
/* The optimizer that a block with predictor 4 names as its last dependency. */
ckd_status values_group(decoder *d, const view *v, const view_block *b, optimizer_group *out, ckd_error *err);
/* values_gradient.c: Decodes a first moment whose payload has the gradient. */
ckd_status values_by_gradient(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err);
/* Integers of a block, as they are stored. */
typedef struct coded_residual {
    coding coding;
    const void *data;
    size_t size;
} coded_residual;
/* Applies a residual to the predicted values in `to`. */
ckd_status values_apply(decoder *d, const record *r, const coded_residual *by, void *to, ckd_error *err);

/* Between these calls, blocks that optimizer steps are predicted from stay cached, a few of them. Calls nest. */
void values_cache_begin(decoder *d);
void values_cache_end(decoder *d);
/* Copies a cached block's values. Returns false if the block is not cached. */
bool values_cached(decoder *d, const view_block *b, void *to);

#endif
