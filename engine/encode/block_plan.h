/*
 * The size of a block of values as symbols: on its own, and as a delta on previous values. Planning both is the
 * slowest part of a save, so a sample shows first which of them can win. Internal to engine/.
 */
#ifndef ENGINE_BLOCK_PLAN_H
#define ENGINE_BLOCK_PLAN_H

#include "base/bytes.h"
#include "codec/entropy/symbols.h"
#include "engine/common/region.h"
#include "kernels/kernels.h"

/*
 * A delta below this fraction of the expected standalone size wins, and the exact standalone size need not be known.
 */
#define BLOCK_DELTA_WON 0.95

/* The values of a block. They stay unchanged until it is encoded. */
typedef struct plan_input {
    ckd_dtype dtype;
    const void *values;
    size_t count;
    symbols_grid grid;
} plan_input;

/* A worker's scratch. Slot 0 of the symbols workspace holds the standalone plan, slot 1 the delta's. */
typedef struct block_plan {
    const kernels *kernels;
    symbols_workspace *work; /* the caller's, like the values */
    plan_input input;
    unsigned width;
    symbols_mode mode;                 /* of the standalone stream */
    const void *previous;              /* NULL: no delta */
    bytes integers, residual, context; /* `residual` also holds a sample */
    /* Sizes in bytes; estimated from a sample unless planned. */
    size_t standalone, delta;
    size_t delta_symbols; /* integers in the delta's stream */
    bool standalone_planned, delta_planned, standalone_sampled;
} block_plan;

void block_plan_init(block_plan *p, const kernels *k, symbols_workspace *work);
void block_plan_free(block_plan *p);

/* Where the rows and columns of the elements from `first` on lie. */
symbols_grid block_grid(const geometry *g, const ckd_region *region, uint64_t first);

/*
 * Sets `standalone`: estimated if a delta will be tried and the block is large enough to sample; else planned.
 * expected: the caller's guess, such as the size in the parent; 0: none.
 */
ckd_status block_plan_begin(block_plan *p, const plan_input *in, bool try_delta, uint64_t expected,
                            ckd_error *err);
/*
 * Sets `delta`, and plans whichever of the two may win, or both. previous: count elements, needed only during the
 * call. If the delta is planned, the residual and its contexts are valid afterwards.
 */
ckd_status block_plan_delta(block_plan *p, const void *previous, ckd_error *err);
/* Plans the standalone stream, unless it is planned. */
ckd_status block_plan_as_standalone(block_plan *p, ckd_error *err);

/* Writes a planned stream to `to` of `capacity` bytes. Returns its size, or 0 if it does not fit. */
size_t block_plan_encode(block_plan *p, bool delta, void *to, size_t capacity);

#endif
