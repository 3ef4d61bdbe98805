/*
 * Approximates a matrix by a product of two integer factors where that is cheaper than coding its elements. The changes
 * that training makes to a weight have few strong directions. Randomised subspace iteration (Halko, Martinsson, Tropp,
 * SIAM Review 53(2), 2011, algorithm 4.4) finds the components, which are kept as long as they pay. Both sides are
 * quantised so that a unit of either factor means the same error (reverse water-filling: strong components get more
 * bits). The sides are quantised in turn, and the other one is refitted by least squares to the rounded one. The
 * arithmetic is free, as the results are integers. Internal to engine/.
 */
#ifndef ENGINE_LOW_RANK_H
#define ENGINE_LOW_RANK_H

#include "codec/lattice/lattice.h"
#include "engine/lossy/low_rank_products.h"
#include "engine/common/common.h"

/*
 * left (rows x rank) times right (columns x rank), transposed; products of component k have the unit 2^(exponent +
 * shift[k]).
 */
typedef struct low_rank {
    uint32_t rank;                       /* 0: nothing pays */
    int32_t exponent;                    /* in units of the matrix */
    const int32_t *left, *right, *shift; /* point into `memory` */
    double bits;                         /* estimated size, in bits */
    bytes memory;
} low_rank;
void low_rank_free(low_rank *f);

/* Memory of a search; the next search reuses it. Zero-initialise. */
typedef struct low_rank_scratch {
    bytes left, right, small, scratch;
} low_rank_scratch;
void low_rank_scratch_free(low_rank_scratch *r);

/* A search for factors. */
typedef struct low_rank_search {
    double lambda;     /* squared steps that a bit is worth */
    uint32_t max;      /* largest rank */
    unsigned rounds;   /* subspace iterations beyond the first */
    thread_pool *pool; /* may be NULL; the result does not depend on it */
    const kernels *kernels;
    low_rank_scratch *scratch; /* takes `max` vectors of rows and of columns, and half a MiB per thread */
    cancel_check *stop;        /* may be NULL */
} low_rank_search;
/*
 * Searches for factors of x, whose elements are in steps. out: zero, or an earlier result, whose memory is
 * reused. Errors: NOMEM, and those of stop.
 */
ckd_status low_rank_of(low_rank *out, const low_rank_matrix *x, const low_rank_search *options,
                       ckd_error *err);

#endif
