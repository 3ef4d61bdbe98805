/*
 * The two moments of a parameter as an optimizer uses them: the update of an element is |m| / (sqrt(v) +
 * eps). Both moments can be accurate enough and the update still far too large: where v is tiny, a small
 * error of m suffices. The moments are saved one after the other. The second one saved is checked against the
 * first, and no update exceeds PAIR_MAX times the largest true one. This holds for the optimizer's eps and
 * for a lower one: Adam corrects its moments for bias, and after few steps eps counts for less. Internal to
 * engine/.
 */
#ifndef ENGINE_LOSSY_MOMENT_PAIR_H
#define ENGINE_LOSSY_MOMENT_PAIR_H

#include "base/bytes.h"
#include "engine/lossy/block.h"

#define PAIR_MAX 2.0 /* times the largest true update of the tile */

/*
 * Stores the values of one moment as the high halves of their floats, with an error below a hundredth. Input
 * values are rounded so that their updates do not grow, decoded values so that their updates do not shrink.
 * Values that are not finite, and negative second moments, become NaN.
 */
void pair_record(uint16_t *to, lossy_part part, bool decoded, const float *values, uint64_t n);

/*
 * Raises so_far[b] to the largest update of n elements with the eps of bound b. part: of `here`; `other` is
 * the other moment. NaN has no update.
 */
void pair_largest(double so_far[PAIR_BOUNDS], lossy_part part, const float *here, const uint16_t *other,
                  uint64_t n, const pair_bound bounds[PAIR_BOUNDS]);

/* Sets the largest update of the input, and the limit that follows from it. */
static inline void pair_set_bound(pair_bound *b, double largest) {
    b->largest = largest;
    b->max = PAIR_MAX * largest;
}

static inline bool pair_known(const lossy_pair *p) {
    return p->values || p->file;
}
/* Reads n elements of the other moment from index `at` on. Errors: those of file_scratch_read. */
ckd_status pair_read(uint16_t *to, const lossy_pair *p, bool decoded, uint64_t at, uint64_t n,
                     ckd_error *err);

/* Converts element `at` of a tile or panel to an index of the other moment's array. */
static inline uint64_t pair_index(const lossy_pair *p, uint64_t at) {
    return p->width ? at / p->width * p->stride + p->first + at % p->width : at;
}

/* Returns how many of n elements from `at` on lie in one row of the other moment's array. */
static inline uint64_t pair_in_row(const lossy_pair *p, uint64_t at, uint64_t n) {
    uint64_t left = p->width ? p->width - at % p->width : n;
    return left < n ? left : n;
}

/*
 * Limits the updates of a block that has just been coded (j->decoded is set), and sets j->update. It raises
 * second moments by their integers. It makes first moments exceptions, shrunk as far as necessary. If these
 * would be too many, it sets their integers to 0 and drops the factors. Errors: NOMEM.
 */
ckd_status pair_finish(lossy_job *j, const lossy_elements *e, ckd_error *err);
/* Only sets j->update, for values that stay as they are. Errors: NOMEM. */
ckd_status pair_measure(lossy_job *j, const lossy_tile *t, uint64_t at, const float *decoded, uint64_t n,
                        ckd_error *err);

/* ---- direction ---- */
/*
 * How far lossy moments change the direction of an Adam step, m / (sqrt(v) + eps), is estimated on a sample of
 * elements, as first and second moments are saved one after the other.
 */
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
/* Input and decoded values of elements at ... at + count - 1 of a tile. */
typedef struct direction_values {
    const float *input, *decoded;
    uint64_t at, count;
} direction_values;
/* Records second moments where the sample has them. */
void direction_record(direction_sample *s, const direction_values *v);

/* Sums over the sample, with the first moments of the same tile. */
typedef struct direction_sums {
    double change, all; /* sums of squares */
} direction_sums;
void direction_add(direction_sums *sums, const direction_sample *s, const direction_values *v, double eps);
/*
 * Handles values of the sample's elements alone: `at` and `count` are those in the sample. sums == NULL: records them
 * as second moments. Else compares them, as first moments, with the recorded second moments.
 */
void direction_take(direction_sums *sums, direction_sample *s, const direction_values *v, double eps);
/* Returns the relative change; NaN if there is nothing to compare. */
double direction_change(const direction_sums *sums);

#endif
