/*
 * What the encoder and the decoder of symbol streams share: the parsed stream header and the order in which a table's
 * states are given to its symbols. codec/FORMAT.md, "Symbol streams", is normative. Internal to codec/.
 */
#ifndef CODEC_SYMBOLS_FORMAT_H
#define CODEC_SYMBOLS_FORMAT_H

#include <stdbool.h>

#include "codec/symbols.h"

#define SYMBOLS_MAX_COUNT  (1u << 18) /* integers in a stream */
#define SYMBOLS_MAX_TABLES 16
#define SYMBOLS_MIN_LOG    5
#define SYMBOLS_MAX_LOG    12
#define SYMBOLS_MAX_STATES (1u << SYMBOLS_MAX_LOG)
#define SYMBOLS_ALPHABET   256
#define SYMBOLS_MAX_LANES  8
#define SYMBOLS_CONTEXTS   256

/* One distribution: symbol s has counts[s] of the 2^log states. */
typedef struct symbols_table {
    uint16_t first, last; /* the lowest and the highest symbol with states */
    uint16_t counts[SYMBOLS_ALPHABET];
    uint64_t centre; /* CLASS: added to what the class says, modulo 2^bits */
} symbols_table;

typedef struct symbols_header {
    symbols_mode mode;
    bool contexts;      /* the table depends on the element's context */
    unsigned lanes_log; /* element i is coded in state i mod 2^lanes_log */
    unsigned log;       /* states of each table: 2^log */
    unsigned tables;    /* 1 ... 16 */
    uint8_t
        range_end[SYMBOLS_MAX_TABLES]; /* the last context of each table, ascending; the last one is 255 */
    unsigned low_bits;                 /* SPLIT: bits below the symbol */
    uint64_t bias;                     /* SPLIT: subtracted from the leading bits */
    symbols_table table[SYMBOLS_MAX_TABLES];
} symbols_header;

/* CLASS: the symbol of the difference u, sign extended: twice its magnitude's bit length, plus 1 if it is negative. */
static inline unsigned symbols_class_of(int64_t u) {
    uint64_t magnitude = u < 0 ? UINT64_C(0) - (uint64_t)u : (uint64_t)u;
    unsigned length = magnitude ? 64u - (unsigned)__builtin_clzll(magnitude) : 0;
    return 2 * length + (u < 0);
}
/* The bits below the leading one of a class. */
static inline unsigned symbols_class_low(unsigned symbol) {
    return symbol < 4 ? 0 : (symbol >> 1) - 1;
}
/* The smallest integer of a class, modulo 2^64; its low bits are added to it. */
static inline uint64_t symbols_class_base(unsigned symbol) {
    unsigned length = symbol >> 1;
    if (length == 0) {
        return 0;
    }
    return symbol & 1 ? UINT64_C(1) - (UINT64_C(1) << (length - 1) << 1) : UINT64_C(1) << (length - 1);
}
/* The highest symbol of a mode. Symbol 1 of CLASS, "negative zero", has no states. */
static inline unsigned symbols_last_of(symbols_mode mode, unsigned width) {
    return mode == SYMBOLS_CLASS ? 16 * width + 1 : SYMBOLS_ALPHABET - 1;
}
/* Bits stored below the symbol, and what they are added to (centre or bias included), modulo 2^64. */
unsigned symbols_low_bits(const symbols_header *h, unsigned symbol);
uint64_t symbols_base(const symbols_header *h, unsigned table, unsigned symbol);

/* owner[state] = symbol, for 2^log states. The counts must add up to 2^log. */
void symbols_spread(uint8_t *owner, const symbols_table *table, unsigned log);
/* The table of each of the 256 contexts. */
void symbols_map_contexts(uint8_t *table_of, const symbols_header *h);

/* Size in bytes of the header as written. Never more than SYMBOLS_MAX_HEADER. */
#define SYMBOLS_MAX_HEADER (64u + SYMBOLS_MAX_TABLES * (16u + SYMBOLS_ALPHABET * 4u))
size_t symbols_header_size(const symbols_header *h, unsigned width);
/* Writes symbols_header_size bytes. */
void symbols_header_write(const symbols_header *h, unsigned width, uint8_t *to);
/*
 * Parses and validates: all counts add up, all symbols fit mode and width, ranges ascend, nothing reserved is set.
 * *used is the header's size. CORRUPT or UNSUPPORTED (a mode of the future) otherwise.
 */
ckd_status symbols_header_read(symbols_header *h, unsigned width, const uint8_t *from, size_t size,
                               size_t *used, ckd_error *err);

#endif
