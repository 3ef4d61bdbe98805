/*
 * What the encoder and the decoder of symbol streams share: the parsed stream header and the order in which a table's
 * states are given to its symbols. codec/FORMAT.md, "Symbol streams", is normative. Internal to codec/.
 */
#ifndef CODEC_SYMBOLS_FORMAT_H
#define CODEC_SYMBOLS_FORMAT_H

#include <stdbool.h>

#include "codec/entropy/symbols.h"

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
    unsigned floor;  /* CLASS: log2 of the width of the class around the centre */
} symbols_table;

typedef struct symbols_header {
    symbols_mode mode;
    bool contexts;      /* the table depends on the element's context */
    unsigned lanes_log; /* element i is coded in state i mod 2^lanes_log */
    unsigned log;       /* states of each table: 2^log */
    unsigned tables;    /* 1 ... 16 */
    uint8_t
        range_end[SYMBOLS_MAX_TABLES]; /* the last context of each table, ascending; the last one is 255 */
    unsigned fine;                     /* CLASS: bits of the magnitude in the symbol, below the leading one */
    unsigned low_bits;                 /* SPLIT: bits below the symbol */
    uint64_t bias;                     /* SPLIT: subtracted from the leading bits */
    symbols_table table[SYMBOLS_MAX_TABLES];
} symbols_header;

/*
 * CLASS. Of the difference u of two values' bits, `bits` wide, the top bit says whether a float's sign changed, and the
 * rest d, as a signed number, how far its magnitude moved: without that a weight that crosses zero would look like the
 * largest of changes. The symbol is the size of |d|, its sign and the top bit; the size is |d| itself below 2^fine and
 * otherwise its bit length and the `fine` bits below the leading one, numbered on. Symbols count up from 0 where the top
 * bit is unchanged and down from 255 where it changed.
 */
static inline unsigned symbols_size_of(uint64_t magnitude, unsigned fine) {
    if (magnitude >> fine == 0) {
        return (unsigned)magnitude;
    }
    unsigned length = 64u - (unsigned)__builtin_clzll(magnitude);
    unsigned below = (unsigned)(magnitude >> (length - 1 - fine)) & ((1u << fine) - 1);
    return (length - fine) << fine | below;
}
static inline unsigned symbols_class_of(uint64_t u, unsigned bits, unsigned fine) {
    uint64_t d = (uint64_t)((int64_t)(u << (65 - bits)) >> (65 - bits));
    bool changed = (u ^ d) >> (bits - 1) & 1;
    bool negative = d >> 63;
    unsigned size = symbols_size_of(negative ? UINT64_C(0) - d : d, fine);
    unsigned symbol = size ? 2 * size - 1 + negative : 0;
    return changed ? 255 - symbol : symbol;
}

/*
 * What a symbol of a table stands for: its `low` bits are added to `base`, modulo 2^bits. A table may have a floor: its
 * symbols 0 and 255 then hold all d of -2^(floor - 1) ... 2^(floor - 1) - 1, and the others go on from there. Rare small
 * differences share states that way.
 */
typedef struct symbols_meaning {
    uint64_t base;
    unsigned low;
} symbols_meaning;

/* The sizes that a floor swallows, 0 not counted. */
static inline unsigned symbols_below_floor(unsigned floor, unsigned fine) {
    return floor ? symbols_size_of(UINT64_C(1) << (floor - 1), fine) - 1 : 0;
}
symbols_meaning symbols_mean(const symbols_header *h, unsigned width, unsigned table, unsigned symbol);
/* Is every symbol with states one integer? */
bool symbols_without_low_bits(const symbols_header *h, unsigned width);

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
