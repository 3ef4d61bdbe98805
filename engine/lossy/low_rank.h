/*
 * A matrix as a product of two integer factors, where that is cheaper than its elements: what training changes in a weight has few
 * strong directions. Randomised subspace iteration (Halko, Martinsson, Tropp, SIAM Review 53(2), 2011, algorithm 4.4), then components
 * kept as long as they pay, each side quantised so that a unit of either factor means the same error (reverse water-filling:
 * strong components get more bits by themselves), in turn, the other one refitted by least squares to what became of it. Free arithmetic: what comes
 * out are integers. Internal to engine/.
 */
#ifndef ENGINE_LOW_RANK_H
#define ENGINE_LOW_RANK_H

#include "codec/lattice/lattice.h"
#include "engine/lossy/low_rank_products.h"
#include "engine/common/cancel.h"

/* left (rows x rank) times right (columns x rank), a product of component k counting 2^(exponent + shift[k]). */
typedef struct low_rank {
    uint32_t rank;                       /* 0: nothing pays */
    int32_t exponent;                    /* in the unit of the matrix */
    const int32_t *left, *right, *shift; /* in: */
    double bits;                         /* about what they take */
    bytes memory;
} low_rank;
void low_rank_free(low_rank *f);

/* What a search works in, and the next one can have. Zero-initialise. */
typedef struct low_rank_scratch {
    bytes left, right, small, scratch;
} low_rank_scratch;
void low_rank_scratch_free(low_rank_scratch *r);

/*
 * out: zero, or what another call gave, whose memory is used again. x: in steps. lambda: squared steps that a bit is worth. max: components at most. rounds: of subspace iteration beyond the first. pool: or
 * NULL; what comes out does not depend on it. Memory, in the room: what `max` vectors of rows and of columns take, and half a MiB for each thread. stop: may be
 * NULL. Errors: NOMEM, and what stop says.
 */
ckd_status low_rank_of(low_rank *out, const low_rank_matrix *x, double lambda, uint32_t max, unsigned rounds,
                       thread_pool *pool, const kernels *k, low_rank_scratch *scratch, cancel_check *stop,
                       ckd_error *err);

#endif
