/*
 * What a block of values takes as symbols: on its own, and as a delta on previous values. Planning both takes longer than
 * anything else in a save, so a sample tells first which of them can win. Internal to engine/.
 */
#ifndef ENGINE_BLOCK_PLAN_H
#define ENGINE_BLOCK_PLAN_H

#include "base/bytes.h"
#include "codec/entropy/symbols.h"
#include "engine/common/region.h"
#include "kernels/kernels.h"

/* What a delta takes of what a block is expected to take on its own, at most, so that this need not be known exactly. */
#define BLOCK_DELTA_WON 0.95

/* A worker's scratch; the workspace's slot 0 holds the standalone plan, slot 1 the delta's. */
typedef struct block_plan {
    const kernels *kernels;
    symbols_workspace *work; /* the caller's, like the values */
    ckd_dtype dtype;
    unsigned width;
    symbols_mode mode;             /* of the standalone stream */
    const void *values, *previous; /* previous NULL: no delta */
    size_t count;
    symbols_grid grid;
    bytes integers, residual, context; /* `residual` also holds a sample */
    /* Bytes. Estimated from a sample where not planned. */
    size_t standalone, delta;
    size_t delta_symbols; /* integers in the delta's stream */
    bool standalone_planned, delta_planned, standalone_sampled;
} block_plan;

void block_plan_init(block_plan *p, const kernels *k, symbols_workspace *work);
void block_plan_free(block_plan *p);

/* Where the rows and columns of element `first` and the following of a region lie. */
symbols_grid block_grid(const geometry *g, const ckd_region *region, uint64_t first);

/*
 * Sets `standalone`: planned, or, if a delta will be tried and the block is large enough to have a sample, estimated. `expected` is what the
 * caller knows of it, such as what the block took in the parent; 0: nothing. values: count elements, which must stay as
 * they are until the block is encoded.
 */
ckd_status block_plan_begin(block_plan *p, ckd_dtype dtype, const void *values, size_t count,
                            const symbols_grid *grid, bool try_delta, uint64_t expected, ckd_error *err);
/*
 * Sets `delta`, and plans whichever of the two may win, or both. previous: count elements, only needed during the call. The
 * residual and its contexts are there afterwards if the delta is planned.
 */
ckd_status block_plan_delta(block_plan *p, const void *previous, ckd_error *err);
/* Plans the standalone stream, if it is not planned. */
ckd_status block_plan_as_standalone(block_plan *p, ckd_error *err);

/* Writes a planned stream to at least `capacity` bytes; returns its size, 0 if that is not enough. */
size_t block_plan_encode(block_plan *p, bool delta, void *to, size_t capacity);

#endif
