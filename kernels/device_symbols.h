/*
 * Integers as symbol streams (codec/FORMAT.md, "Symbol streams") in device memory. The codec makes the plan
 * and its tables. A device counts symbols, and writes and reads dense streams. A call takes many streams and
 * works on them in parallel. Within a stream only the lanes compute states in parallel, so few streams are
 * slow.
 *
 * Descriptions lie in device memory, as does all that they point to.
 */
#ifndef KERNELS_DEVICE_SYMBOLS_H
#define KERNELS_DEVICE_SYMBOLS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DEVICE_SYMBOLS       256u       /* number of finest symbols, and of contexts */
#define DEVICE_STREAM_MAX    (1u << 18) /* largest number of integers in a stream */
#define DEVICE_STREAM_TABLES 16u
#define DEVICE_STREAM_LANES  8u
#define DEVICE_STREAM_LOG    12u    /* largest log of a table's states */
#define DEVICE_STREAMS       65535u /* largest number of streams per call */

/*
 * Integers, and their finest symbols (CLASS or SPLIT), which are counted by context. Integers are
 * little-endian, aligned to their width.
 */
typedef struct device_classes {
    const void *integers;
    const uint8_t *contexts; /* NULL: all 0 */
    uint8_t *symbols;
    uint32_t *counts; /* DEVICE_SYMBOLS per context, context after context; added to */
    uint64_t centre;  /* CLASS: subtracted first; SPLIT: subtracted from the bits above the lowest `bits` */
    uint32_t n;       /* at most DEVICE_STREAM_MAX */
    uint32_t width;   /* bytes: 1, 2, 4 or 8 */
    uint32_t fine;
    uint32_t split;    /* SPLIT instead of CLASS */
    uint32_t bits;     /* for SPLIT */
    uint32_t capacity; /* entries */
    uint32_t *entries; /* nonzero counters, in any order; NULL: not wanted */
    /* Number of entries, added to. If it exceeds the capacity, the list lacks the rest. */
    uint64_t *entered;
} device_classes;

/*
 * The lowest 16 bits of an entry are a count. The bits above are the counter's number: context times
 * DEVICE_SYMBOLS, plus symbol. The counts of a counter above 65535 are split over several entries.
 */
#define DEVICE_ENTRY_BITS 16u

/* Summary of up to DEVICE_EXTENT_ALL unsigned integers. */
typedef struct device_extent {
    uint64_t low, high; /* smallest, largest */
    /* any: the stream's first integer; differing: bits in which any of these integers differs from it. */
    uint64_t any, differing;
} device_extent;
#define DEVICE_EXTENT_EACH 32u
#define DEVICE_EXTENT_ALL  (256u * DEVICE_EXTENT_EACH)
#define DEVICE_EXTENTS(n)  (((n) + DEVICE_EXTENT_ALL - 1) / DEVICE_EXTENT_ALL)

/*
 * Steps from integers to their split, and on to contexts from levels of rows and columns. Symbols are
 * (integer >> bits) - bias.
 */
typedef enum device_split_step {
    DEVICE_SPLIT_EXTENT,  /* extents */
    DEVICE_SPLIT_LINES,   /* sums, squares */
    DEVICE_SPLIT_CONTEXTS /* contexts, from levels */
} device_split_step;
typedef struct device_split {
    const void *integers;
    device_extent *extents; /* DEVICE_EXTENTS(n) */
    /* Sums of symbols of rows, then of columns, plus 2^32 for each that is not 0; added to. NULL: not wanted. */
    uint64_t *sums;
    uint64_t *squares;     /* over all symbols; added to */
    const uint8_t *levels; /* of rows, then columns; NULL: contexts are not wanted */
    uint8_t *contexts;     /* sum of the two levels, but at most 255 */
    uint64_t bias;
    uint32_t n, width, bits;
    uint32_t columns, phase, rows; /* element i is in row (phase + i) / columns */
} device_split;

/* A symbol that has states. */
typedef struct device_symbol {
    uint64_t base;   /* an integer is this plus its low bits, modulo the width */
    uint32_t before; /* states of earlier symbols in its table */
    uint16_t states; /* 1 ... 2^log */
    uint8_t symbol;  /* ascending in a table */
    uint8_t low;     /* number of low bits */
} device_symbol;

/* The tables of a dense stream. The codec has checked them. */
typedef struct device_tables {
    const device_symbol *symbol;              /* of all tables, one after the other */
    const uint8_t *table_of;                  /* table of each of DEVICE_SYMBOLS contexts */
    uint32_t first[DEVICE_STREAM_TABLES + 1]; /* first symbol of each table; then the end */
    uint32_t tables, log, lanes;              /* lanes: 1, 2, 4 or 8 */
    uint32_t width, shift; /* shift: number of an integer's lowest bits that are not in the stream */
    uint32_t zero;         /* 0: the context of all elements of a stream without contexts */
} device_tables;

/* How to write a finest symbol. */
typedef struct device_code {
    uint64_t base;
    uint32_t add_bits; /* (state + add_bits) >> 16: the number of state bits */
    int16_t next;      /* offset in the table's next states, for (state >> that number) */
    uint8_t low, unused;
} device_code;

/* Elements per thread and per group of threads of a writer; scratch is measured in these groups. */
#define DEVICE_WRITE_EACH      32u
#define DEVICE_WRITE_ALL       (256u * DEVICE_WRITE_EACH)
#define DEVICE_WRITE_GROUPS(n) (((n) + DEVICE_WRITE_ALL - 1) / DEVICE_WRITE_ALL)

/* Writes the payload of a dense stream: everything after its header. */
typedef struct device_encoding {
    device_tables tables;
    /* For each table and finest symbol, the symbol of the table that it becomes, counted from the first. */
    const uint8_t *own;
    const void *integers;
    const uint8_t *symbols;  /* the finest */
    const uint8_t *contexts; /* NULL: all 0 */
    uint32_t n;              /* 1 ... DEVICE_STREAM_MAX */
    uint32_t capacity;       /* words of the payload; words beyond are not written */
    uint32_t *payload;       /* words of 32 bits, lowest bits first */
    uint32_t *bits;          /* of the payload, including the mark at its end */
    /* Scratch: */
    device_code *codes;   /* tables x DEVICE_SYMBOLS */
    uint16_t *next;       /* tables x 2^log */
    uint16_t *trace;      /* n */
    uint32_t *group_bits; /* DEVICE_WRITE_GROUPS(n) */
    uint16_t *last;       /* DEVICE_STREAM_LANES: final states */
} device_encoding;

/* Reads the payload of a dense stream. No payload can make it read or write out of bounds. */
typedef struct device_decoding {
    device_tables tables;
    const uint32_t *payload; /* words of 32 bits, lowest bits first, for `bits` bits */
    uint64_t shared;         /* the lowest `shift` bits of every integer */
    const uint8_t *contexts; /* NULL: all 0 */
    void *integers;          /* aligned to their width */
    /* 1: the payload does not end where it should, and the integers are undefined; else 0 */
    uint32_t *failed;
    uint32_t *states; /* scratch: tables x 2^log */
    uint32_t n;       /* 1 ... DEVICE_STREAM_MAX */
    uint32_t bits;    /* of the payload, below the mark */
} device_decoding;

#ifdef __cplusplus
}
#endif

#endif
