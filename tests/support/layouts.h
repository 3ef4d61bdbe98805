/*
 * Layouts, which say which rank holds which regions of a tensor, and checkpoints of many tensors in such
 * layouts. Failures fail the running cmocka test.
 */
#ifndef TESTS_SUPPORT_LAYOUTS_H
#define TESTS_SUPPORT_LAYOUTS_H

#include <stdbool.h>
#include <stddef.h>

#include "include/ckptdelta.h"

typedef struct layout {
    size_t count, capacity;
    struct layout_region {
        uint32_t rank;
        ckd_region region;
    } * regions;
} layout;
void layout_add(layout *l, uint32_t rank, const ckd_region *region);
void layout_free(layout *l);

/* A tensor, how it is saved, and all layouts in which it is loaded. */
typedef struct reshard_case {
    char name[96];
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
    uint64_t elements;
    layout from;
    layout *to;
    size_t to_count;
    bool deep; /* large enough that each of its checkpoints is a delta on the previous one */
    uint8_t *values;
} reshard_case;

typedef struct reshard_cases {
    size_t count, capacity;
    reshard_case *items;
} reshard_cases;
/* Adds a case with random values. The pointer is valid until the next one is added. */
reshard_case *reshard_add(reshard_cases *all, ckd_dtype dtype, uint32_t ndim, const uint64_t *shape,
                          const char *name);
layout *reshard_target(reshard_case *c); /* adds an empty layout */
void reshard_free(reshard_cases *all);

/* These add regions for ranks 0, 1, ... */
void layout_whole(layout *l, uint32_t ranks); /* the whole tensor for each rank */
/*
 * Splits dimension `dim` into regions of these lengths, one for each rank. They add up to the length of the
 * dimension.
 */
void layout_split(layout *l, const reshard_case *c, uint32_t dim, const uint64_t *lengths, uint32_t ranks);
/* Splits like torch.chunk: each rank gets ceil(L / ranks), the last ones less or nothing. */
void layout_chunk(layout *l, const reshard_case *c, uint32_t dim, uint32_t ranks);
void layout_grid(layout *l, const reshard_case *c, uint32_t rows, uint32_t columns);
/* Splits into flat ranges of these counts, which add up to the number of elements. */
void layout_flat(layout *l, const reshard_case *c, const uint64_t *counts, uint32_t ranks);
/*
 * Splits into boxes or flat ranges for up to 9 ranks, in random order. Some are empty. Together they cover
 * the tensor once.
 */
void layout_random(layout *l, const reshard_case *c, uint64_t *random);

#define RESHARD_LAST_STEP 16
/*
 * Saves a chain of RESHARD_LAST_STEP deltas in a new run. Every case has its layout `from`, and each rank
 * saves its own part. Then loads every case in its layouts `to` from the checkpoints 0, 1, 4 and 16 of the
 * chain. All regions must equal those of the whole tensor. If the fidelity is exact, the whole tensor must
 * equal what was saved. change: called for every step; it may give cases another layout. seed: for the steps;
 * failures name it.
 */
void reshard_check(ckd_store *store, const char *run, reshard_cases *all, ckd_fidelity fidelity,
                   void (*change)(reshard_cases *all, uint64_t *random), uint64_t seed);

#endif
