/*
 * Entropy-constrained scalar quantisation (Chou, Lookabaugh, Gray, IEEE Trans. ASSP 37(1), 1989): an element takes the level that costs
 * least in squared error plus lambda times its code length, which for sorted levels is a threshold between neighbours. Planned on a
 * histogram of magnitudes, so that one setting fits any distribution. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_RATE_H
#define ENGINE_LOSSY_RATE_H

#include <stddef.h>
#include <stdint.h>

#define RATE_BINS   1024 /* the last one has all that is larger */
#define RATE_IN_ONE 32   /* bins in a step */

/* Magnitudes in steps. Zero-initialise. */
typedef struct rate_histogram {
    uint64_t bins[RATE_BINS];
    uint64_t n;
} rate_histogram;
void rate_add(rate_histogram *h, const float *residual, size_t n);

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
