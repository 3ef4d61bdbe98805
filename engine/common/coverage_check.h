/*
 * Checks whether regions tile a tensor, that is, whether every element is in exactly one of them. Internal to engine/.
 *
 * Takes boxes and flat ranges in any number, order and mixture, in time linear in their number. A region stands for the
 * sum of a weight over its elements. Element (x0, x1, ...) has the weight of the product of P0(x0 + 1) - P0(x0),
 * P1(x1 + 1) - P1(x1), ... in the integers modulo 2^61 - 1, where every Pd(x) is a hash of d, x and a seed. Such sums
 * telescope, so a box or a flat range of any size costs a few multiplications. Regions that tile the tensor always
 * add up to the tensor's weight. Other regions do so only if a nonzero polynomial of degree at most 16 in the Pd(x)
 * happens to vanish there, which has a probability of 2^-57 (Schwartz, "Fast probabilistic algorithms for verification
 * of polynomial identities", JACM 1980, lemma 1). This assumes that nobody chose the regions to fit the seed.
 */
#ifndef ENGINE_COMMON_COVERAGE_CHECK_H
#define ENGINE_COMMON_COVERAGE_CHECK_H

#include "engine/common/region.h"

typedef struct coverage {
    const geometry *g; /* belongs to the caller */
    uint64_t seed;
    /* tails[d]: weight of dimensions d and later, over their whole extent */
    uint64_t tails[CKD_MAX_DIMS + 1];
    uint64_t sum;      /* of the regions' weights */
    uint64_t elements; /* of all regions, overlaps counted repeatedly */
} coverage;

coverage coverage_begin(const geometry *g, uint64_t seed);
/* Adds a region, which must be valid for the shape (region_count). */
void coverage_add(coverage *t, const ckd_region *region);
/* Removes a region that was added before. At most UINT64_MAX elements in all. */
void coverage_remove(coverage *t, const ckd_region *region);
bool coverage_complete(const coverage *t);

#endif
