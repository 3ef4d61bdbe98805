/*
 * Estimates how far lossy moments change the direction of an Adam step, m / (sqrt(v) + eps). It uses a sample
 * of elements, as first and second moments are saved one after the other. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_DIRECTION_H
#define ENGINE_LOSSY_DIRECTION_H

#include "base/bytes.h"

#define DIRECTION_SAMPLE 4096u /* approximate number of elements per tile */

/* Every stride-th element of a tile of second moments: input and decoded. Zero-initialise. */
typedef struct direction_sample {
    uint64_t count, stride; /* of the tile */
    float *input, *decoded; /* point into `memory` */
    bytes memory;
} direction_sample;
/* s: zero, or an earlier tile's sample, whose memory is reused. Errors: NOMEM. */
ckd_status direction_begin(direction_sample *s, uint64_t count, ckd_error *err);
void direction_free(direction_sample *s);
/* Records elements at ... at + count - 1 of the tile where the sample has them. */
void direction_record(direction_sample *s, uint64_t at, uint64_t count, const float *input,
                      const float *decoded);

/* Sums over the sample, with the first moments of the same tile. */
typedef struct direction_sums {
    double change, all; /* sums of squares */
} direction_sums;
void direction_add(direction_sums *sums, const direction_sample *s, uint64_t at, uint64_t count,
                   const float *input, const float *decoded, double eps);
/*
 * Handles sample elements from ... from + n - 1. sums == NULL: records them as second moments. Else compares
 * them, as first moments, with the recorded second moments.
 */
void direction_take(direction_sums *sums, direction_sample *s, uint64_t from, uint64_t n, const float *input,
                    const float *decoded, double eps);
/* Returns the relative change; NaN if there is nothing to compare. */
double direction_change(const direction_sums *sums);

#endif
