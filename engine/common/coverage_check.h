/*
 * Do regions tile a tensor: is every element in exactly one of them? Internal to engine/.
 *
 * Boxes and flat ranges in any number, order and mixture, in time linear in their number. A region stands for the sum of
 * a weight over its elements, where element (x0, x1, ...) weighs the product of P0(x0 + 1) - P0(x0), P1(x1 + 1) - P1(x1), ...
 * in the integers modulo 2^61 - 1, and every Pd(x) is a hash of d, x and a seed. Such sums telescope: a box costs a few
 * multiplications, a flat range about as many, however large they are. Regions that tile the tensor add up to its own
 * weight, always. Others do so only if a polynomial that is not zero, of a degree of at most 16 in the Pd(x), happens to
 * vanish at them: with a probability of 2^-57 (Schwartz, "Fast probabilistic algorithms for verification of polynomial
 * identities", JACM 1980, lemma 1), as long as nobody chose the regions to fit the seed.
 */
#ifndef ENGINE_COMMON_COVERAGE_CHECK_H
#define ENGINE_COMMON_COVERAGE_CHECK_H

#include "engine/common/region.h"

typedef struct coverage {
    const geometry *g; /* the caller's */
    uint64_t seed;
    uint64_t tails[CKD_MAX_DIMS + 1]; /* weights of dimensions d and behind, whole */
    uint64_t sum;                     /* of the regions' weights */
    uint64_t elements;                /* of the regions, each counted as often as it is in one */
} coverage;

coverage coverage_begin(const geometry *g, uint64_t seed);
/* The region must be valid for the shape (region_count). */
void coverage_add(coverage *t, const ckd_region *region);
/* Takes a region that was added out again; not beyond UINT64_MAX elements in all. */
void coverage_remove(coverage *t, const ckd_region *region);
bool coverage_complete(const coverage *t);

#endif
