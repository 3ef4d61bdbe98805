/* The workspace of the symbol coder, and the encoder's steps. Internal to codec/. */
#ifndef CODEC_SYMBOLS_WORK_H
#define CODEC_SYMBOLS_WORK_H

#include "codec/symbols_format.h"

/* A planned stream. */
typedef struct symbols_slot {
    symbols_header header;
    unsigned width;
    size_t count;
    uint64_t bits;                      /* of the payload, estimated */
    size_t bound;                       /* bytes of the stream, at most */
    uint8_t symbols[SYMBOLS_MAX_COUNT]; /* of each integer, before `remap`: the finest ones */
    uint8_t remap[SYMBOLS_MAX_TABLES][SYMBOLS_ALPHABET]; /* of each table: to its own symbols */
} symbols_slot;

/*
 * How often each symbol occurs in each context. In two halves, so that equal neighbours do not wait for each other. All
 * zero but for the contexts first_context ... last_context.
 */
typedef struct symbols_histogram {
    uint32_t count[2][SYMBOLS_CONTEXTS * SYMBOLS_ALPHABET];
    unsigned first_context, last_context;
} symbols_histogram;

/* A state of the decoder: what the symbol stands for, and where to go. */
typedef struct symbols_state {
    uint32_t base; /* added to the low bits, modulo 2^32 */
    uint16_t next; /* state bits are added to it */
    uint8_t state_bits;
    uint8_t bits; /* state bits and low bits together */
} symbols_state;
typedef struct symbols_state_wide {
    uint64_t base;
    uint16_t next;
    uint8_t state_bits;
    uint8_t low_bits;
} symbols_state_wide;

/* A symbol of the encoder (as in FSE): which state bits to write, and where to look up the next state. */
typedef struct symbols_code {
    const uint16_t *next; /* at (state >> number of bits) */
    uint32_t add_bits;    /* (state + add_bits) >> 16: the number of state bits */
    uint32_t low_bits;
    uint64_t base; /* subtracted from the integer: the low bits */
} symbols_code;

struct symbols_workspace {
    symbols_slot slot[2];
    symbols_histogram histogram;
    symbols_header decoding;
    uint32_t merged[SYMBOLS_CONTEXTS][SYMBOLS_ALPHABET]; /* counts of groups of contexts */
    float log2_of[SYMBOLS_MAX_STATES + 1];
    symbols_code codes[SYMBOLS_MAX_TABLES][SYMBOLS_ALPHABET];
    uint16_t
        next_state[(SYMBOLS_MAX_TABLES + 1) * SYMBOLS_MAX_STATES]; /* the first part is only pointed into */
    union {
        symbols_state narrow[SYMBOLS_MAX_TABLES * SYMBOLS_MAX_STATES];
        symbols_state_wide wide[SYMBOLS_MAX_TABLES * SYMBOLS_MAX_STATES];
    } states;
};

/* ---- splitting integers (symbols_classify.c) ---- */

/* The finest classes whose symbols, with changed and unchanged top bit, fit a byte, by the integers' bits. */
#define SYMBOLS_FINE_8  3
#define SYMBOLS_FINE_16 2
#define SYMBOLS_FINE_32 1
#define SYMBOLS_FINE_64 0

/* The finest CLASS symbols of values - centre. */
void symbols_classify(uint8_t *symbols, unsigned width, const void *values, uint64_t centre, size_t n);
/* The smallest and the largest of n >= 1 unsigned integers. */
void symbols_range(uint64_t *low, uint64_t *high, unsigned width, const void *values, size_t n);
/* SPLIT symbols: (value >> low_bits) - bias, which must lie in 0 ... 255. */
void symbols_split(uint8_t *symbols, unsigned width, const void *values, unsigned low_bits, uint64_t bias,
                   size_t n);

/* ---- statistics (symbols_histogram.c, symbols_tables.c) ---- */

/* Counts n symbols; context NULL: all in context 0. */
void symbols_count(symbols_histogram *h, const uint8_t *symbols, const uint8_t *context, size_t n);
/* Adds the counts of a context, 256 of them, to `to`; returns their sum. */
uint32_t symbols_counts_of(uint32_t *to, const symbols_histogram *h, unsigned context);

/* log2 of n, to about 1e-3; 0 for 0. */
static inline float symbols_log2(const symbols_workspace *w, uint32_t n) {
    unsigned shift = n > SYMBOLS_MAX_STATES ? 20u - (unsigned)__builtin_clz(n) : 0;
    return w->log2_of[n >> shift] + (float)shift;
}

/* Ranges of contexts, each with the counts of its symbols. */
typedef struct symbols_groups {
    unsigned count;
    uint8_t end[SYMBOLS_CONTEXTS]; /* last context */
    uint8_t row[SYMBOLS_CONTEXTS]; /* of `merged` */
} symbols_groups;

/* Joins neighbouring contexts until at most 16 groups are left and no further join would save bits. */
void symbols_group(symbols_workspace *w, symbols_groups *groups);
/*
 * CLASS: gives each group the floor that makes it smallest; its counts become those of its own symbols. low_bits is what
 * all integers store below their symbols.
 */
void symbols_choose_floors(symbols_workspace *w, symbols_slot *p, const symbols_groups *groups);
/* Chooses the table size and fills the header's tables; returns payload bits, estimated, without low bits. */
double symbols_choose_tables(symbols_workspace *w, symbols_header *h, const symbols_groups *groups,
                             unsigned width, size_t n);

#endif
