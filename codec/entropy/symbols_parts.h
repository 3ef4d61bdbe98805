/*
 * Symbol streams for those who work on integers elsewhere than here, in the memory of a device: planned from counts of symbols, and taken apart into
 * tables as plain data, by which payloads are written and read. Of dense streams, as these are nearly all of what large blocks take; and what is
 * written so is what symbols_encode would have written. codec/FORMAT.md, "Symbol streams", is normative.
 */
#ifndef CODEC_SYMBOLS_PARTS_H
#define CODEC_SYMBOLS_PARTS_H

#include <stdbool.h>

#include "codec/entropy/symbols.h"

#define SYMBOLS_PARTS_TABLES 16
#define SYMBOLS_PARTS_SAMPLE 65 /* integers by which a centre is chosen */

/* ---- planning ---- */

/* Integer i * n / count of n, sign-extended, for i = 0 ... count - 1: what symbols_centre wants to see. */
static inline size_t symbols_sample_count(size_t n) {
    return n < SYMBOLS_PARTS_SAMPLE ? n : SYMBOLS_PARTS_SAMPLE;
}
/* What is subtracted from differences of `width` bytes before they are classified. Sorts the samples. */
uint64_t symbols_centre(int64_t *samples, size_t count, unsigned width);
/* How fine the finest classes of differences of so many bytes are: FORMAT.md's `fine`. */
unsigned symbols_finest(unsigned width);

/* What n (1 ... 2^18) differences of `width` bytes have as finest symbols. */
typedef struct symbols_counts {
    unsigned width;
    size_t n;
    uint64_t centre;
    unsigned first_context, last_context; /* the lowest and the highest that occur */
    const uint32_t *counts; /* of each of these contexts' symbols, 256 of them; then the next context's */
} symbols_counts;

/*
 * As symbols_plan in CLASS with contexts. false: a stream that is not dense may be better, or as good: symbols_plan is to see the integers;
 * nothing is planned then.
 */
bool symbols_plan_counts(symbols_workspace *w, int slot, const symbols_counts *counts, size_t *planned);

/* ---- planning values on their own, in SPLIT, with what a frame says of them ---- */

/* What n (1 ... 2^18) unsigned integers of `width` bytes are like. */
typedef struct symbols_extent {
    unsigned width;
    size_t n;
    uint64_t low, high;      /* the smallest, the largest */
    uint64_t any, differing; /* one of them, and the bits in which others differ from it */
} symbols_extent;
/* Their finest symbols are (integer >> bits) - bias. */
typedef struct symbols_splitting {
    unsigned bits;
    uint64_t bias;
    unsigned shift; /* lowest bits that all share, and that are left away */
    uint64_t shared;
} symbols_splitting;
symbols_splitting symbols_split_finest(const symbols_extent *of);

/* Levels of rows and columns, of which there are so many; their sum, at most 255, is an element's context. */
typedef struct symbols_lines {
    uint32_t columns, phase, rows; /* columns 0: none */
} symbols_lines;
/* May n elements have them? */
symbols_lines symbols_lines_of(const symbols_grid *grid, size_t n);
/*
 * Chooses levels, of rows and then of columns. sums: of each, the sum of its finest symbols, and, times 2^32, how many of these are not 0; squares:
 * of all symbols. false: they are not worth it.
 */
bool symbols_levels_of(uint8_t *levels, symbols_workspace *w, const symbols_lines *lines,
                       const uint64_t *sums, uint64_t squares, size_t n);

/* As symbols_plan in SPLIT. counts: their centre is not looked at; contexts are levels. levels NULL: none, all contexts are 0. */
void symbols_plan_split(symbols_workspace *w, int slot, const symbols_counts *counts,
                        const symbols_splitting *split, const symbols_lines *lines, const uint8_t *levels,
                        size_t *planned);

/* ---- tables ---- */

/* A symbol with states. */
typedef struct symbols_part {
    uint64_t base;   /* what its low bits are added to, modulo the width */
    uint32_t before; /* states of those before it in its table */
    uint16_t states;
    uint8_t symbol; /* ascending in a table */
    uint8_t low;    /* bits */
} symbols_part;

/* What a dense stream is, but for its payload. About 70 KiB. */
typedef struct symbols_parts {
    unsigned width, tables, log, lanes;
    unsigned shift;        /* planned: lowest bits of integers that are no part of the stream */
    bool contexts;         /* the table depends on the context; else all elements have the first one */
    uint8_t table_of[256]; /* of each context */
    uint32_t first[SYMBOLS_PARTS_TABLES + 1]; /* of each table, and behind the last one: its first symbol */
    symbols_part symbol[SYMBOLS_PARTS_TABLES * 256];
    uint8_t own[SYMBOLS_PARTS_TABLES]
               [256]; /* planned: which of the table's symbols, from its first, a finest one becomes */
    size_t header;    /* bytes before the payload, but for a frame */
    size_t bound;     /* planned: bytes of the payload, at most */
} symbols_parts;

/* Of the stream planned by symbols_plan_counts or symbols_plan_split. Its size is at most symbols_bound. */
void symbols_parts_planned(symbols_parts *parts, const symbols_workspace *w, int slot);
/* Writes parts->header bytes. */
void symbols_parts_header(const symbols_workspace *w, int slot, uint8_t *to);
/* What comes before the header of a stream planned by symbols_plan_split, a frame with its levels: bytes at most (0: nothing), and as written. */
size_t symbols_parts_frame_bound(const symbols_workspace *w, int slot);
size_t symbols_parts_frame(symbols_workspace *w, int slot, uint8_t *to);
/*
 * Of a stream of integers of `width` bytes. false in *dense: it is of another kind, and symbols_decode's work. *bits: of the payload, those below its end's
 * mark. Errors: CORRUPT, UNSUPPORTED.
 */
ckd_status symbols_parts_read(symbols_parts *parts, bool *dense, uint32_t *bits, unsigned width,
                              const void *from, size_t size, ckd_error *err);

#endif
