/*
 * Adaptive binary arithmetic coding, the engine of adaptive streams. It combines a 32-bit range coder with carries
 * (Martin, "Range encoding", 1979) with one-bit models (as in CABAC, Marpe et al., IEEE Trans. CSVT 13, 2003). A model
 * averages a fast and a slow running mean. Integer arithmetic only. codec/FORMAT.md, "Adaptive streams", is normative.
 * Internal to codec/.
 *
 * One function codes a bit in both directions, so the reader of a stream cannot differ from its writer. `decoding` is a
 * constant at every call; when it is true, the value passed in is ignored.
 */
#ifndef CODEC_ADAPTIVE_CODER_H
#define CODEC_ADAPTIVE_CODER_H

#include "base/bytes.h"
#include "codec/common/common.h"

#define ADAPTIVE_ONE 0x1000000u /* unit of a model's means */

/* The probability of a one. `seen` sets how far a bit moves the means: 1 / (seen + 2) of the way, down to a limit. */
typedef struct adaptive_bit {
    uint32_t fast, slow;
    uint32_t seen;
} adaptive_bit;

/* The slowest rates of a kind of models: seen grows at most to fast or slow - 2. */
typedef struct adaptive_pace {
    uint32_t fast, slow;
} adaptive_pace;

/* Makes a model with this probability of a one, in units of 1/256, as confident as after `seen` bits. */
static inline adaptive_bit adaptive_bit_of(unsigned probability, unsigned seen) {
    return (adaptive_bit){probability << 16, probability << 16, seen};
}

typedef struct adaptive_coder {
    uint32_t range;
    uint32_t code;   /* decoding: the number read, minus the interval's lower bound */
    uint32_t window; /* decoding: the last four bytes read */
    uint64_t low;    /* encoding: the low 32 bits of the interval's lower bound */
    bytes *to;
    size_t start; /* start of the number in `to` */
    const uint8_t *from;
    size_t size, at; /* `at` may run past size: bytes there count as zero */
} adaptive_coder;

void adaptive_begin_encoding(adaptive_coder *c, bytes *to);
/* Writes the final bytes, as few as possible. */
void adaptive_end_encoding(adaptive_coder *c);
void adaptive_begin_decoding(adaptive_coder *c, const uint8_t *from, size_t size);
/* Returns true if the number is the one that the encoder writes after these bits, read to its end. */
bool adaptive_end_decoding(const adaptive_coder *c);
/* Appends the top byte of `low` and adds its carry to the bytes before. */
void adaptive_shift_out(adaptive_coder *c);

/* Returns false once more bytes have been read than any valid stream needs at its end. */
static inline bool adaptive_sound(const adaptive_coder *c) {
    return c->at <= c->size + 4;
}

CPU_INLINE void adaptive_normalise(adaptive_coder *c, bool decoding) {
    while (c->range < ADAPTIVE_ONE) {
        c->range <<= 8;
        if (decoding) {
            uint32_t next = c->at < c->size ? c->from[c->at] : 0;
            c->at++;
            c->code = c->code << 8 | next;
            c->window = c->window << 8 | next;
        } else {
            adaptive_shift_out(c);
        }
    }
}

/* Codes a bit that is one with probability p / 65536; 1 <= p <= 65535. */
CPU_INLINE unsigned adaptive_code(adaptive_coder *c, bool decoding, uint32_t p, unsigned bit) {
    uint32_t bound = (uint32_t)((uint64_t)c->range * p >> 16);
    if (decoding) {
        bit = c->code < bound;
    }
    if (bit) {
        c->range = bound;
    } else {
        c->range -= bound;
        if (decoding) {
            c->code -= bound;
        } else {
            c->low += bound;
        }
    }
    adaptive_normalise(c, decoding);
    return bit;
}

/* Codes the lowest `count` (at most 12) bits of v, all values equally probable. */
CPU_INLINE uint32_t adaptive_code_few(adaptive_coder *c, bool decoding, unsigned count, uint32_t v) {
    uint32_t max = (1u << count) - 1, each = c->range >> count;
    if (decoding) {
        v = count == 1 ? c->code >= each : c->code / each;
        v = v < max ? v : max;
        c->code -= v * each;
    } else {
        v &= max;
        c->low += (uint64_t)v * each;
    }
    c->range = each;
    adaptive_normalise(c, decoding);
    return v;
}

/* Codes the lowest `count` (at most 32) bits of v, the highest first. */
CPU_INLINE uint32_t adaptive_code_plain(adaptive_coder *c, bool decoding, unsigned count, uint32_t v) {
    uint32_t out = 0;
    while (count > 0) {
        unsigned few = count < 12 ? count : 12;
        count -= few;
        out = out << few | adaptive_code_few(c, decoding, few, v >> count);
    }
    return out;
}

CPU_INLINE uint32_t adaptive_probability(const adaptive_bit *m) {
    return (m->fast + m->slow) >> 9 | 1;
}

/* 65536 / (seen + 2), rounded down. A table, because divisions would take most of the time. */
#define ADAPTIVE_SHARES 1024u
extern const uint16_t adaptive_shares[ADAPTIVE_SHARES];

CPU_INLINE uint32_t adaptive_step(uint32_t distance, uint32_t seen, uint32_t limit) {
    uint32_t share = seen + 2 >= limit        ? 65536u / limit
                     : seen < ADAPTIVE_SHARES ? adaptive_shares[seen]
                                              : 65536u / (seen + 2);
    return (uint32_t)((uint64_t)distance * share >> 16);
}

CPU_INLINE void adaptive_learn(adaptive_bit *m, adaptive_pace pace, unsigned bit) {
    if (bit) {
        m->fast += adaptive_step(ADAPTIVE_ONE - m->fast, m->seen, pace.fast);
        m->slow += adaptive_step(ADAPTIVE_ONE - m->slow, m->seen, pace.slow);
    } else {
        m->fast -= adaptive_step(m->fast, m->seen, pace.fast);
        m->slow -= adaptive_step(m->slow, m->seen, pace.slow);
    }
    m->seen += m->seen < pace.slow;
}

/* Codes a bit by its model, then updates the model. */
CPU_INLINE unsigned adaptive_code_bit(adaptive_coder *c, bool decoding, adaptive_bit *m, adaptive_pace pace,
                                      unsigned bit) {
    bit = adaptive_code(c, decoding, adaptive_probability(m), bit);
    adaptive_learn(m, pace, bit);
    return bit;
}

#endif
