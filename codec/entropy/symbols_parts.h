/*
 * Symbol streams for code that handles the integers elsewhere, in device memory. Streams are planned from counts of
 * symbols, and taken apart into tables as plain data, with which a device reads and writes payloads. Only dense
 * streams: nearly all large blocks use them. The result equals what symbols_encode would write. codec/FORMAT.md,
 * "Symbol streams", is normative.
 */
#ifndef CODEC_SYMBOLS_PARTS_H
#define CODEC_SYMBOLS_PARTS_H

#include <stdbool.h>

#include "codec/entropy/symbols.h"

#define SYMBOLS_PARTS_TABLES 16
#define SYMBOLS_PARTS_SAMPLE 65 /* integers sampled to choose a centre */

/* ---- planning ---- */

/*
 * Size of the sample for symbols_centre. The sample has integers i * n / count of n, sign-extended, for i = 0 ... count
 * - 1.
 */
static inline size_t symbols_sample_count(size_t n) {
    return n < SYMBOLS_PARTS_SAMPLE ? n : SYMBOLS_PARTS_SAMPLE;
}
/* Returns the value to subtract from differences of `width` bytes before they are classified. Sorts the samples. */
uint64_t symbols_centre(int64_t *samples, size_t count, unsigned width);
/* Returns FORMAT.md's `fine` of the finest classes of `width`-byte differences. */
unsigned symbols_finest(unsigned width);

/* Counts of the finest symbols of n (1 ... 2^18) differences of `width` bytes. */
typedef struct symbols_counts {
    unsigned width;
    size_t n;
    uint64_t centre;
    unsigned first_context, last_context; /* lowest and highest that occur */
    const uint32_t *counts; /* 256 counts for the first of these contexts, then for the next, and so on */
} symbols_counts;

/*
 * As symbols_plan in CLASS with contexts. Returns false, and plans nothing, if a stream that is not dense may be as
 * good or better; then call symbols_plan with the integers.
 */
bool symbols_plan_counts(symbols_workspace *w, int slot, const symbols_counts *counts, size_t *planned);

/* ---- planning standalone values in SPLIT, with a frame ---- */

/* Extent of n (1 ... 2^18) unsigned integers of `width` bytes. */
typedef struct symbols_extent {
    unsigned width;
    size_t n;
    uint64_t low, high;      /* smallest and largest */
    uint64_t any, differing; /* any one of them, and the bits in which others differ from it */
} symbols_extent;
/* The finest symbols are (integer >> bits) - bias. */
typedef struct symbols_splitting {
    unsigned bits;
    uint64_t bias;
    unsigned shift; /* lowest bits that all share; omitted from the stream */
    uint64_t shared;
} symbols_splitting;
symbols_splitting symbols_split_finest(const symbols_extent *of);

/*
 * Numbers of rows and columns that have levels. An element's context is the sum of its row's and column's levels, at
 * most 255.
 */
typedef struct symbols_lines {
    uint32_t columns, phase, rows; /* columns 0: no levels */
} symbols_lines;
/* Returns the lines of n elements on a grid; columns is 0 if they cannot have levels. */
symbols_lines symbols_lines_of(const symbols_grid *grid, size_t n);
/*
 * Chooses levels of rows, then of columns. sums: per line, the sum of its finest symbols, plus 2^32 times the number of
 * nonzero ones. squares: over all symbols. Returns false if levels are not worth it.
 */
bool symbols_levels_of(uint8_t *levels, symbols_workspace *w, const symbols_lines *lines,
                       const uint64_t *sums, uint64_t squares, size_t n);

/*
 * As symbols_plan in SPLIT. The centre of `counts` is ignored; its contexts are levels. levels NULL: none, all contexts
 * are 0.
 */
size_t symbols_plan_split(symbols_workspace *w, int slot, const symbols_counts *counts,
                          const symbols_splitting *split, const symbols_lines *lines, const uint8_t *levels);

/* ---- tables ---- */

/* A symbol that has states. */
typedef struct symbols_part {
    uint64_t base;   /* its low bits are added to this, modulo the width */
    uint32_t before; /* states of earlier symbols in the table */
    uint16_t states;
    uint8_t symbol; /* ascending within a table */
    uint8_t low;    /* number of low bits */
} symbols_part;

/* A dense stream without its payload. About 70 KiB. */
typedef struct symbols_parts {
    unsigned width, tables, log, lanes;
    unsigned shift;        /* planned: lowest bits of integers that the stream omits */
    bool contexts;         /* the context selects the table; otherwise all elements use the first one */
    uint8_t table_of[256]; /* per context */
    /* index of each table's first symbol; one more entry marks the end */
    uint32_t first[SYMBOLS_PARTS_TABLES + 1];
    symbols_part symbol[SYMBOLS_PARTS_TABLES * 256];
    /* planned: maps a finest symbol to an index in its table, counted from the table's first symbol */
    uint8_t own[SYMBOLS_PARTS_TABLES][256];
    size_t header; /* bytes before the payload, without a frame */
    size_t bound;  /* planned: largest size of the payload in bytes */
    uint32_t bits; /* read: bits of the payload below its end mark */
} symbols_parts;

/* Takes apart the stream planned by symbols_plan_counts or symbols_plan_split. Its size is at most symbols_bound. */
void symbols_parts_planned(symbols_parts *parts, const symbols_workspace *w, int slot);
/* Writes parts->header bytes. */
void symbols_parts_header(const symbols_workspace *w, int slot, uint8_t *to);
/*
 * The frame with levels in front of the header of a stream planned by symbols_plan_split: its largest size in bytes (0:
 * no frame), and writing it.
 */
size_t symbols_parts_frame_bound(const symbols_workspace *w, int slot);
size_t symbols_parts_frame(symbols_workspace *w, int slot, uint8_t *to);
/*
 * Takes apart an encoded stream of integers of `width` bytes. *dense = false: it is of another kind and needs
 * symbols_decode. Errors: CORRUPT, UNSUPPORTED.
 */
ckd_status symbols_parts_read(symbols_parts *parts, bool *dense, unsigned width, const void *from,
                              size_t size, ckd_error *err);

#endif
