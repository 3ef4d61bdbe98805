/*
 * Entropy-constrained scalar quantisation (Chou, Lookabaugh, Gray, IEEE Trans. ASSP 37(1), 1989). An element
 * takes the level with the least cost: squared error plus lambda times code length. For sorted levels this is
 * a threshold between neighbours. The plan is made on a histogram of magnitudes, so one setting fits any
 * distribution. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_RATE_H
#define ENGINE_LOSSY_RATE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

#define RATE_BINS   1024 /* the last bin holds all larger magnitudes */
#define RATE_IN_ONE 32   /* bins per step */
#define RATE_APART  4

/* Magnitudes in steps, of fewer than 2^32 elements. Zero-initialise. */
typedef struct rate_histogram {
    /* Partial counts: neighbouring elements mostly share a bin, and updates of one counter wait for each other. */
    uint32_t apart[RATE_APART][RATE_BINS];
    uint64_t n;
} rate_histogram;
void rate_add(rate_histogram *h, const float *residual, size_t n, const kernels *k);
void rate_join(rate_histogram *h, const rate_histogram *from);

/* Thresholds: level 1 from up[0] on, level 2 from 1 + up[1], level n from n - 1 + up[2]. */
typedef struct rate_plan {
    float up[3];
    double below[3];   /* mean distance of values below their level, in steps: levels 1, 2, higher */
    double bits;       /* all elements together */
    double distortion; /* sum of squares, in steps */
} rate_plan;
rate_plan rate_plan_of(const rate_histogram *h, double lambda);
/* Returns the plan that makes all integers 0. */
rate_plan rate_plan_none(const rate_histogram *h);

#endif
