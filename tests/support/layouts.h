/* Which rank holds which regions of a tensor, and checkpoints of many tensors in such layouts. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_LAYOUTS_H
#define TESTS_SUPPORT_LAYOUTS_H

#include <stdbool.h>
#include <stddef.h>

#include "include/ckptdelta.h"

typedef struct layout {
    size_t count, capacity;
    struct layout_piece {
        uint32_t rank;
        ckd_region region;
    } * pieces;
} layout;
void layout_add(layout *l, uint32_t rank, const ckd_region *region);
void layout_free(layout *l);

/* A tensor, how it is saved, and all the ways it is to be loaded. */
typedef struct reshard_case {
    char name[96];
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
    uint64_t elements;
    layout from;
    layout *to;
    size_t to_count;
    bool deep; /* large enough that each of its checkpoints is a delta on the one before */
    uint8_t *values;
} reshard_case;

typedef struct reshard_cases {
    size_t count, capacity;
    reshard_case *items;
} reshard_cases;
/* With random values. The pointer is valid until the next one is added. */
reshard_case *reshard_add(reshard_cases *all, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape,
                          const char *name);
layout *reshard_target(reshard_case *c); /* a new, empty one */
void reshard_free(reshard_cases *all);

/* Pieces for ranks 0, 1, ...: */
void layout_whole(layout *l, uint32_t ranks); /* all of it for each */
/* Lengths in dimension `dim`, as many as `ranks`; they add up to the tensor's. */
void layout_split(layout *l, const reshard_case *c, uint32_t dim, const uint64_t *lengths, uint32_t ranks);
/* As torch.chunk has it: ceil(L / ranks) each as far as it goes. */
void layout_chunk(layout *l, const reshard_case *c, uint32_t dim, uint32_t ranks);
void layout_grid(layout *l, const reshard_case *c, uint32_t rows, uint32_t columns);
/* Flat ranges of these counts; they add up to all of it. */
void layout_flat(layout *l, const reshard_case *c, const uint64_t *counts, uint32_t ranks);
/* Boxes or ranges, some of them empty, in a random order, for up to 9 ranks; they tile the tensor. */
void layout_random(layout *l, const reshard_case *c, uint64_t *random);

#define RESHARD_LAST_STEP 16
/*
 * Saves a chain of RESHARD_LAST_STEP deltas in a new run, every case in its layout `from`, each rank its own part; and loads every
 * case in its layouts `to` from the chain's checkpoints 0, 1, 4 and 16: all regions must hold what the whole tensor does, and that what
 * was saved, if exact. change: called for every step, may give cases another layout. seed: of the steps, and named by failures.
 */
void reshard_check(ckd_store *store, const char *run, reshard_cases *all, ckd_fidelity fidelity,
                   void (*change)(reshard_cases *all, uint64_t *random), uint64_t seed);

#endif
