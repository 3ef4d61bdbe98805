/*
 * Entropy-constrained scalar quantisation (Chou, Lookabaugh, Gray, IEEE Trans. ASSP 37(1), 1989): an element takes the level that costs
 * least in squared error plus lambda times its code length, which for sorted levels is a threshold between neighbours. Planned on a
 * histogram of magnitudes, so that one setting fits any distribution. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_RATE_H
#define ENGINE_LOSSY_RATE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

#define RATE_BINS   1024 /* the last one has all that is larger */
#define RATE_IN_ONE 32   /* bins in a step */
#define RATE_APART  4

/* Magnitudes in steps, of fewer than 2^32 elements. Zero-initialise. */
typedef struct rate_histogram {
    uint32_t apart
        [RATE_APART]
        [RATE_BINS]; /* to be added up: neighbours, most of them in the same bin, need not wait for each other */
    uint64_t n;
} rate_histogram;
void rate_add(rate_histogram *h, const float *residual, size_t n, const kernels *k);
/* Adds another one. */
void rate_join(rate_histogram *h, const rate_histogram *more);

/* Level 1 from up[0] on, level 2 from 1 + up[1], level n from n - 1 + up[2]. */
typedef struct rate_plan {
    float up[3];
    double below[3];   /* how far values of level 1, 2 and more are below it on average, in steps */
    double bits;       /* of all elements */
    double distortion; /* sum of squares, in steps */
} rate_plan;
rate_plan rate_plan_of(const rate_histogram *h, double lambda);
/* All zero. */
rate_plan rate_plan_none(const rate_histogram *h);

#endif
