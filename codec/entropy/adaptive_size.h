/*
 * Sizes: magnitudes of nonzero integers, minus one. The lowest few bits are plain. The bits above them are unary, with
 * one model per step. Larger sizes continue with an exponential Golomb code whose prefix and first two bits are
 * modelled. Internal to codec/.
 */
#ifndef CODEC_ADAPTIVE_SIZE_H
#define CODEC_ADAPTIVE_SIZE_H

#include "codec/entropy/adaptive_coder.h"

#define ADAPTIVE_UNARY  14
#define ADAPTIVE_PREFIX 32

typedef struct adaptive_size_models {
    adaptive_bit more[ADAPTIVE_UNARY]; /* more[j]: the size is larger than j */
    adaptive_bit longer[ADAPTIVE_PREFIX];
    adaptive_bit
        top[ADAPTIVE_PREFIX]
           [4]; /* by length; [1] models the first bit, [2] and [3] the second bit after a zero or a one */
} adaptive_size_models;

static inline void adaptive_size_begin(adaptive_size_models *m, unsigned probability, unsigned seen) {
    for (unsigned i = 0; i < ADAPTIVE_UNARY; i++) {
        m->more[i] = adaptive_bit_of(probability, seen);
    }
    for (unsigned i = 0; i < ADAPTIVE_PREFIX; i++) {
        m->longer[i] = adaptive_bit_of(probability, seen);
        for (unsigned j = 0; j < 4; j++) {
            m->top[i][j] = adaptive_bit_of(128, seen);
        }
    }
}

/*
 * Codes `rest`, where rest + 1 has `length` bits below its leading one. Decoding yields at most 2^32 - 2, or 2^33 if
 * the length is invalid.
 */
CPU_INLINE uint64_t adaptive_code_rest(adaptive_coder *c, bool decoding, adaptive_size_models *m,
                                       adaptive_pace pace, uint64_t rest) {
    unsigned length = 0, max = decoding ? 0 : 63u - (unsigned)__builtin_clzll(rest + 1);
    while (adaptive_code_bit(c, decoding, &m->longer[length], pace, length < max)) {
        if (++length == ADAPTIVE_PREFIX) {
            return UINT64_C(1) << 33;
        }
    }
    uint64_t number = 1;
    unsigned left = length;
    for (unsigned modelled = 1; left > 0 && modelled < 4; left--) {
        unsigned bit = (unsigned)((rest + 1) >> (left - 1) & 1);
        bit = adaptive_code_bit(c, decoding, &m->top[length][modelled], pace, bit);
        number = number << 1 | bit;
        modelled = modelled << 1 | bit;
    }
    uint32_t low = adaptive_code_plain(c, decoding, left, (uint32_t)(rest + 1));
    return (number << left | low) - 1;
}

/* Decoding may yield a size that is too large for an integer. plain <= 16. */
CPU_INLINE uint64_t adaptive_code_size(adaptive_coder *c, bool decoding, adaptive_size_models *m,
                                       adaptive_pace pace, unsigned plain, uint64_t size) {
    uint64_t high = size >> plain, j = 0;
    while (j < ADAPTIVE_UNARY && adaptive_code_bit(c, decoding, &m->more[j], pace, high > j)) {
        j++;
    }
    if (j == ADAPTIVE_UNARY) {
        j += adaptive_code_rest(c, decoding, m, pace, decoding ? 0 : high - ADAPTIVE_UNARY);
    }
    return j << plain | adaptive_code_plain(c, decoding, plain, (uint32_t)size);
}

/* Returns the integer of a size; 0 if the size is too large. */
static inline int32_t adaptive_value(uint64_t size, unsigned negative) {
    if (size >= (uint64_t)INT32_MAX + negative) {
        return 0;
    }
    return negative ? (int32_t)(-(int64_t)size - 1) : (int32_t)(size + 1);
}

/* ---- the start of a stream: two bits for its kind ---- */

#define ADAPTIVE_PLANE 2u /* the kinds below are those of adaptive_start */

/* Checks that the kind is in min ... max. kind may be NULL. */
static inline ckd_status adaptive_check_kind(adaptive_coder *c, unsigned min, unsigned max, ckd_error *err,
                                             unsigned *kind) {
    if (c->size == 0) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "an adaptive stream is empty");
    }
    unsigned found = adaptive_code_plain(c, true, 2, 0);
    if (kind) {
        *kind = found;
    }
    return found >= min && found <= max
               ? CKD_OK
               : err_unsupported(err, NULL, CKD_NO_OFFSET, "an adaptive stream has the unknown kind %u",
                                 found);
}

static inline ckd_status adaptive_check_empty(size_t size, ckd_error *err) {
    return size == 0 ? CKD_OK
                     : err_corrupt(err, NULL, CKD_NO_OFFSET,
                                   "an adaptive stream of no integers has %zu bytes", size);
}

#endif
