/*
 * How far lossy moments change the direction of an Adam step, m / (sqrt(v) + eps): estimated on a sample of elements, because second
 * moments and first ones are saved one after the other. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_DIRECTION_H
#define ENGINE_LOSSY_DIRECTION_H

#include "base/bytes.h"

#define DIRECTION_SAMPLE 4096u /* elements of a tile, about */

/* Every stride-th element of a tile of second moments: as given, and as a decoder will get it. Zero-initialise. */
typedef struct direction_sample {
    uint64_t count, stride; /* of the tile */
    float *input, *decoded; /* in: */
    bytes memory;
} direction_sample;
/* s: zero, or another tile's, whose memory is used again. Errors: NOMEM. */
ckd_status direction_begin(direction_sample *s, uint64_t count, ckd_error *err);
void direction_free(direction_sample *s);
/* Elements at, at + 1, ... of the tile. */
void direction_record(direction_sample *s, uint64_t at, uint64_t count, const float *input,
                      const float *decoded);

/* Sums over the sample, of first moments of the same tile. */
typedef struct direction_sums {
    double change, all; /* squares */
} direction_sums;
void direction_add(direction_sums *sums, const direction_sample *s, uint64_t at, uint64_t count,
                   const float *input, const float *decoded, double eps);
/*
 * The same of elements from, from + 1, ... of the sample: with sums they are compared with the second moments' that were noted, and without
 * (NULL) they are these.
 */
void direction_take(direction_sums *sums, direction_sample *s, uint64_t from, uint64_t n, const float *input,
                    const float *decoded, double eps);
/* NaN if there is nothing to compare. */
double direction_change(const direction_sums *sums);

#endif
