/*
 * Integers as symbol streams (codec/FORMAT.md, "Symbol streams") in the memory of a device. Planning is the codec's: here symbols are counted, and dense
 * streams written and read by the tables that the codec made. A call takes any number of streams, which are worked on at the same time: a stream's
 * lanes are all that is parallel in it while its states change, so few streams are slow.
 *
 * Descriptions lie in the device's memory, as does all that they point to.
 */
#ifndef KERNELS_DEVICE_SYMBOLS_H
#define KERNELS_DEVICE_SYMBOLS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DEVICE_SYMBOLS       256u       /* finest symbols, contexts */
#define DEVICE_STREAM_MAX    (1u << 18) /* integers in a stream */
#define DEVICE_STREAM_TABLES 16u
#define DEVICE_STREAM_LANES  8u
#define DEVICE_STREAM_LOG    12u    /* of a table's states, at most */
#define DEVICE_STREAMS       65535u /* of a call, at most */

/* Integers, and their finest symbols, of CLASS or of SPLIT, which are counted by context. Little-endian, aligned to their width. */
typedef struct device_classes {
    const void *integers;
    const uint8_t *contexts; /* NULL: all 0 */
    uint8_t *symbols;
    uint32_t *counts; /* of a context's symbols, DEVICE_SYMBOLS of them; then the next one's. Added to */
    uint64_t centre;  /* CLASS: subtracted first; SPLIT: from what is above the lowest `bits` */
    uint32_t n;       /* at most DEVICE_STREAM_MAX */
    uint32_t width;   /* bytes: 1, 2, 4 or 8 */
    uint32_t fine;
    uint32_t split;    /* SPLIT, not CLASS */
    uint32_t bits;     /* of SPLIT */
    uint32_t room;     /* for entries */
    uint32_t *entries; /* counters that are not 0, in any order; NULL: not wanted */
    uint64_t
        *entered; /* how many there are; added to. More than there is room for: those beyond are not there */
} device_classes;

/* A counter: its number (that of its context times DEVICE_SYMBOLS, and its symbol) above its lowest 16 bits. Of more than 65535 there are several entries, which add up. */
#define DEVICE_ENTRY_BITS 16u

/* What unsigned integers are like, DEVICE_EXTENT_ALL of them. */
typedef struct device_extent {
    uint64_t low, high;      /* the smallest, the largest */
    uint64_t any, differing; /* the first of all; the bits in which one of these differs from it */
} device_extent;
#define DEVICE_EXTENT_EACH 32u
#define DEVICE_EXTENT_ALL  (256u * DEVICE_EXTENT_EACH)
#define DEVICE_EXTENTS(n)  (((n) + DEVICE_EXTENT_ALL - 1) / DEVICE_EXTENT_ALL)

/* From integers to how they are split, and from there to contexts made of levels of their rows and columns. Symbols: (integer >> bits) - bias. */
typedef enum device_split_step {
    DEVICE_SPLIT_EXTENT,  /* extents */
    DEVICE_SPLIT_LINES,   /* sums, squares */
    DEVICE_SPLIT_CONTEXTS /* contexts, from levels */
} device_split_step;
typedef struct device_split {
    const void *integers;
    device_extent *extents; /* DEVICE_EXTENTS(n) */
    uint64_t *
        sums; /* of rows, then columns: of symbols, and 2^32 for each that is not 0; added to. NULL: not wanted */
    uint64_t *squares;     /* of all symbols; added to */
    const uint8_t *levels; /* of rows, then columns; NULL: contexts are not wanted */
    uint8_t *contexts;     /* the two levels, but at most 255 */
    uint64_t bias;
    uint32_t n, width, bits;
    uint32_t columns, phase, rows; /* element i is in row (phase + i) / columns */
} device_split;

/* A symbol with states. */
typedef struct device_symbol {
    uint64_t base;   /* what its low bits are added to, modulo the width */
    uint32_t before; /* states of those before it in its table */
    uint16_t states; /* 1 ... 2^log */
    uint8_t symbol;  /* ascending in a table */
    uint8_t low;     /* bits */
} device_symbol;

/* What a dense stream's tables are; the codec has seen to it that they make sense. */
typedef struct device_tables {
    const device_symbol *symbol;              /* of all tables, one after the other */
    const uint8_t *table_of;                  /* of each of DEVICE_SYMBOLS contexts */
    uint32_t first[DEVICE_STREAM_TABLES + 1]; /* of each table, and behind the last one: its first symbol */
    uint32_t tables, log, lanes;              /* lanes: 1, 2, 4 or 8 */
    uint32_t width, shift; /* shift: an integer's lowest bits that are no part of the stream */
    uint32_t unused;
} device_tables;

/* How a finest symbol is written. */
typedef struct device_code {
    uint64_t base;
    uint32_t add_bits; /* (state + add_bits) >> 16: the number of state bits */
    int16_t next;      /* of the table's next states, at (state >> that number) */
    uint8_t low, unused;
} device_code;

/* Elements that a thread writes, and a group of threads; scratch is measured in these groups. */
#define DEVICE_WRITE_EACH      32u
#define DEVICE_WRITE_ALL       (256u * DEVICE_WRITE_EACH)
#define DEVICE_WRITE_GROUPS(n) (((n) + DEVICE_WRITE_ALL - 1) / DEVICE_WRITE_ALL)

/* Writing the payload of a dense stream: what follows its header. */
typedef struct device_encoding {
    device_tables tables;
    const uint8_t *
        own; /* of each table and finest symbol: which of the table's symbols, counted from its first, it becomes */
    const void *integers;
    const uint8_t *symbols;  /* the finest */
    const uint8_t *contexts; /* NULL: all 0 */
    uint32_t n;              /* 1 ... DEVICE_STREAM_MAX */
    uint32_t room;           /* words of the payload: those beyond are not written */
    uint32_t *payload;       /* words of 32 bits, the lowest first */
    uint32_t *bits;          /* that the payload has, the mark at its end included */
    /* scratch */
    device_code *codes;   /* tables x DEVICE_SYMBOLS */
    uint16_t *next;       /* tables x 2^log */
    uint16_t *trace;      /* n */
    uint32_t *group_bits; /* DEVICE_WRITE_GROUPS(n) */
    uint16_t *last;       /* DEVICE_STREAM_LANES: states at the end */
} device_encoding;

/* Reading it. Whatever the payload says, nothing outside is read or written. */
typedef struct device_decoding {
    device_tables tables;
    const uint32_t *payload; /* words of 32 bits, the lowest first: as many as `bits` take */
    uint64_t shared;         /* the lowest `shift` bits of every integer */
    const uint8_t *contexts; /* NULL: all 0 */
    void *integers;          /* aligned to their width */
    uint32_t *failed; /* 1: the payload does not end where it should, and integers are anything; else 0 */
    uint32_t *states; /* scratch: tables x 2^log */
    uint32_t n;       /* 1 ... DEVICE_STREAM_MAX */
    uint32_t bits;    /* of the payload, those below the mark */
} device_decoding;

#ifdef __cplusplus
}
#endif

#endif
