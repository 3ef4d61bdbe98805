/*
 * The two moments of a parameter, which are saved one after the other, as an optimizer uses them: |m| / (sqrt(v) + eps), the update of an element. Each moment alone
 * can be near enough and the update of an element far too large: where v is tiny, m need not be off by much. So the one that comes last
 * is held against the other one, and no update becomes more than PAIR_MAX times the largest true one. That holds for the optimizer's eps and for a lower one: Adam corrects
 * its moments for bias, which after few steps makes eps count for less. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_MOMENT_PAIR_H
#define ENGINE_LOSSY_MOMENT_PAIR_H

#include "base/bytes.h"
#include "engine/lossy/block.h"

#define PAIR_MAX 2.0 /* times the largest true update of the tile */

/*
 * Values of one moment are held as the high halves of their floats. Those that were given are rounded so that their updates are not too large, and those that a
 * decoder gets so that they are not too small; hence both are off by less than a hundredth. What is not finite, and a negative second moment, is NaN.
 */
void pair_record(uint16_t *to, lossy_part part, bool decoded, const float *values, uint64_t n);

/* By the eps of each bound, the largest update of n elements, unless `so_far` is larger. part: of `here`; other: of the other moment. What is NaN has none. */
void pair_largest(double so_far[PAIR_BOUNDS], lossy_part part, const float *here, const uint16_t *other,
                  uint64_t n, const pair_bound bounds[PAIR_BOUNDS]);

static inline bool pair_known(const lossy_pair *p) {
    return p->values || p->file;
}
/* Of the other moment, n elements from place `at` of its array on. Errors: those of file_scratch_read. */
ckd_status pair_read(uint16_t *to, const lossy_pair *p, bool decoded, uint64_t at, uint64_t n,
                     ckd_error *err);

/* Element `at` of a tile or panel in the other moment's array. */
static inline uint64_t pair_index(const lossy_pair *p, uint64_t at) {
    return p->width ? at / p->width * p->stride + p->first + at % p->width : at;
}

/* Of n elements from `at` on, those in one row of the other moment's array. */
static inline uint64_t pair_in_row(const lossy_pair *p, uint64_t at, uint64_t n) {
    uint64_t left = p->width ? p->width - at % p->width : n;
    return left < n ? left : n;
}

/*
 * Behind a block's coding, j->decoded being what a decoder gets: makes the updates of its elements as small as they must be, and sets j->update. Second moments are
 * raised by their integers. First ones are kept as they are, as far as they may be so large; if these are many, they become 0, and factors are done without. Errors: NOMEM.
 */
ckd_status pair_finish(lossy_job *j, const lossy_tile *t, uint64_t at, const void *original, const kernels *k,
                       ckd_error *err);
/* Only sets j->update, of values that stay as they are. Errors: NOMEM. */
ckd_status pair_measure(lossy_job *j, const lossy_tile *t, uint64_t at, const float *decoded, uint64_t n,
                        ckd_error *err);

#endif
