/*
 * Shared by the encoder and the decoder of symbol streams: the parsed header, and the assignment of states to symbols.
 * codec/FORMAT.md, "Symbol streams", is normative. Internal to codec/.
 */
#ifndef CODEC_SYMBOLS_FORMAT_H
#define CODEC_SYMBOLS_FORMAT_H

#include <stdbool.h>

#include "codec/entropy/entropy.h"

#define SYMBOLS_MAX_COUNT  (1u << 18) /* integers per stream */
#define SYMBOLS_MAX_TABLES 16
#define SYMBOLS_MIN_LOG    5
#define SYMBOLS_MAX_LOG    12
#define SYMBOLS_MAX_STATES (1u << SYMBOLS_MAX_LOG)
#define SYMBOLS_ALPHABET   256
#define SYMBOLS_MAX_LANES  8
#define SYMBOLS_CONTEXTS   256

/* A distribution: symbol s has counts[s] of the 2^log states. */
typedef struct symbols_table {
    uint16_t first, last; /* lowest and highest symbol with states */
    uint16_t counts[SYMBOLS_ALPHABET];
    uint64_t centre; /* CLASS: added to the decoded class value, modulo 2^bits */
    unsigned floor;  /* CLASS: log2 of the width of the class around the centre */
} symbols_table;

typedef struct symbols_header {
    symbols_mode mode;
    bool contexts;                         /* the element's context selects the table */
    unsigned lanes_log;                    /* element i is coded in state i mod 2^lanes_log */
    unsigned log;                          /* log2 of the states per table */
    unsigned tables;                       /* 1 ... 16 */
    uint8_t range_end[SYMBOLS_MAX_TABLES]; /* last context of each table, ascending; the final one is 255 */
    unsigned fine;                         /* CLASS: magnitude bits in the symbol, below the leading one */
    unsigned low_bits;                     /* SPLIT: bits below the symbol */
    uint64_t bias;                         /* SPLIT: subtracted from the leading bits */
    symbols_table table[SYMBOLS_MAX_TABLES];
} symbols_header;

/*
 * CLASS. Let u be the difference of the bits of two values. The top bit of u tells whether the sign of a float changed.
 * The other bits, as a signed number d, tell how far the magnitude moved. Without this split, a weight that crosses
 * zero would look like the largest change. The symbol encodes the size of |d|, the sign of d and the top bit. Below
 * 2^fine the size is |d| itself; above, it combines the bit length with the `fine` bits below the leading one. Symbols
 * count up from 0 if the top bit is unchanged, and down from 255 if it changed.
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
 * The value of a symbol of a table: its `low` bits are added to `base`, modulo 2^bits. A table may have a floor. Its
 * symbols 0 and 255 then cover all d in -2^(floor - 1) ... 2^(floor - 1) - 1, and the other symbols continue from
 * there. Rare small differences thus share states.
 */
typedef struct symbols_meaning {
    uint64_t base;
    unsigned low;
} symbols_meaning;

/* Returns the number of sizes that a floor merges, not counting 0. */
static inline unsigned symbols_below_floor(unsigned floor, unsigned fine) {
    return floor ? symbols_size_of(UINT64_C(1) << (floor - 1), fine) - 1 : 0;
}
symbols_meaning symbols_mean(const symbols_header *h, unsigned width, unsigned table, unsigned symbol);
/* Returns true if every symbol with states stands for a single integer. */
bool symbols_without_low_bits(const symbols_header *h, unsigned width);

/* Sets owner[state] = symbol for 2^log states. The counts must add up to 2^log. */
void symbols_spread(uint8_t *owner, const symbols_table *table, unsigned log);
/* Finds the table of each of the 256 contexts. */
void symbols_map_contexts(uint8_t *table_of, const symbols_header *h);

/* Returns the size of the encoded header in bytes; at most SYMBOLS_MAX_HEADER. */
#define SYMBOLS_MAX_HEADER (64u + SYMBOLS_MAX_TABLES * (16u + SYMBOLS_ALPHABET * 4u))
size_t symbols_header_size(const symbols_header *h, unsigned width);
/* Writes symbols_header_size bytes. */
void symbols_header_write(const symbols_header *h, unsigned width, uint8_t *to);
/*
 * Parses and validates a header: all counts add up, all symbols fit mode and width, ranges ascend, and no reserved bit
 * is set. *used becomes the size of the header. Errors: CORRUPT, UNSUPPORTED (a future mode).
 */
ckd_status symbols_header_read(symbols_header *h, unsigned width, const uint8_t *from, size_t size,
                               size_t *used, ckd_error *err);

#endif
