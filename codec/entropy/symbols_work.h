/* The workspace of the symbol coder, and the encoder's steps. Internal to codec/. */
#ifndef CODEC_SYMBOLS_WORK_H
#define CODEC_SYMBOLS_WORK_H

#include "base/bytes.h"
#include "codec/common/cpu.h"
#include "codec/entropy/symbols_format.h"
#include "codec/entropy/symbols_parts.h"

/*
 * The changes of a sparse stream: pairs of a gap and a difference, range by range, and the context that each of these
 * integers has in the dense stream that holds them (the range; for differences 16 more).
 */
#define SYMBOLS_SPARSE        0x80u /* the first byte of a sparse stream */
#define SYMBOLS_SPARSE_MAX    4     /* a decoder takes at most one pair for so many elements */
#define SYMBOLS_SPARSE_WORTH  32    /* and the encoder tries with at most one for so many */
#define SYMBOLS_SPARSE_MIN    1024  /* elements: fewer are not worth two headers */
#define SYMBOLS_SPARSE_HEADER (2u + SYMBOLS_MAX_TABLES * 4u)
typedef struct symbols_sparse {
    unsigned ranges;
    uint8_t range_end[SYMBOLS_MAX_TABLES];
    uint32_t count[SYMBOLS_MAX_TABLES]; /* pairs of each range */
    size_t pairs;
    uint64_t changed[SYMBOLS_MAX_COUNT / 64]; /* elements that are not zero (encoder) */
    uint8_t *context, *integers;              /* of the dense stream; the workspace's */
} symbols_sparse;

#define SYMBOLS_RUNS 0x82u /* the first byte of a run stream */

/*
 * What a framed stream says before its integers: lowest bits that all of these share, and levels of rows and columns, which
 * added up are the contexts of the elements. In a decoder at most n / FRAMED_MOST levels.
 */
#define SYMBOLS_FRAMED        0x81u /* the first byte of a framed stream */
#define SYMBOLS_FRAMED_MAX    8
#define SYMBOLS_FRAMED_HEADER 32u
typedef struct symbols_frame {
    uint64_t shared; /* the lowest `shift` bits of every integer */
    unsigned shift;
    /* element i is in row (phase + i) / columns, column (phase + i) % columns; columns = 0: there are no levels */
    uint32_t columns, phase, rows;
    uint8_t level[SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX]; /* of the rows, then of the columns */
} symbols_frame;

/* Of the rows, then of the columns (encoder). */
typedef struct symbols_level_sums {
    uint32_t sum[SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX], count[SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX];
    float mean[SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX];
} symbols_level_sums;

/* A planned dense stream. */
typedef struct symbols_slot {
    symbols_header header;
    unsigned width;
    unsigned shift; /* of each integer this many lowest bits are left away */
    size_t count;
    size_t zeros;                       /* integers whose finest symbol is 0 */
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

#define SYMBOLS_BINS 64 /* of symbols, to compare contexts by */

/* Ranges of contexts, each with the counts of its symbols. */
typedef struct symbols_groups {
    unsigned count;
    uint8_t end[SYMBOLS_CONTEXTS]; /* last context */
    uint8_t row[SYMBOLS_CONTEXTS]; /* of `merged` */
} symbols_groups;

/*
 * A planned stream: a dense one; a sparse one, whose integers are a dense one; a framed one, whose integers are a dense
 * one and whose levels, if it has any, are another; or a run stream, which is already written.
 */
typedef struct symbols_plan_slot {
    symbols_slot dense;
    bool is_sparse, is_framed, is_runs;
    bytes runs;     /* the workspace's; kept for the next plan */
    size_t nonzero; /* integers, of a run stream */
    union {
        symbols_sparse sparse;
        symbols_frame frame;
    };
    symbols_slot inner; /* the sparse stream's pairs, or the levels */
} symbols_plan_slot;

struct symbols_workspace {
    symbols_plan_slot plan[2];
    union {
        symbols_sparse decoding_sparse;
        symbols_frame decoding_frame;
    };
    /* Room for pairs: of each plan, and of the decoder, which takes more of them than the encoder makes. */
    uint8_t planned_context[2][SYMBOLS_MAX_COUNT / SYMBOLS_SPARSE_WORTH * 2];
    uint8_t planned_integers[2][SYMBOLS_MAX_COUNT / SYMBOLS_SPARSE_WORTH * 2 * 8];
    uint8_t decoding_context[SYMBOLS_MAX_COUNT / SYMBOLS_SPARSE_MAX * 2];
    uint8_t decoding_integers[SYMBOLS_MAX_COUNT / SYMBOLS_SPARSE_MAX * 2 * 8];
    symbols_level_sums level_sums;
    uint8_t level_context[SYMBOLS_MAX_COUNT]; /* of the elements, made of levels */
    symbols_histogram histogram;
    symbols_header decoding;
    uint32_t merged[SYMBOLS_CONTEXTS][SYMBOLS_ALPHABET]; /* counts of groups of contexts */
    uint32_t binned[SYMBOLS_CONTEXTS][SYMBOLS_BINS];     /* the same in bins of symbols */
    uint32_t finer[SYMBOLS_CONTEXTS][SYMBOLS_ALPHABET];  /* `merged` before classes became coarser */
    symbols_table smaller[SYMBOLS_MAX_TABLES];           /* tables before they got more states */
    float log2_of[SYMBOLS_MAX_STATES + 1];
    symbols_code codes[SYMBOLS_MAX_TABLES][SYMBOLS_ALPHABET];
    uint16_t
        next_state[(SYMBOLS_MAX_TABLES + 1) * SYMBOLS_MAX_STATES]; /* the first part is only pointed into */
    union {
        symbols_state narrow[SYMBOLS_MAX_TABLES * SYMBOLS_MAX_STATES];
        symbols_state_wide wide[SYMBOLS_MAX_TABLES * SYMBOLS_MAX_STATES];
    } states;
};

/* ---- dense streams: as the public functions (symbols_plan.c, symbols_encode.c, symbols_decode.c) ---- */

/* Fills the slot and the groups of contexts it found. Returns the size to expect, in bytes. n >= 1. */
size_t symbols_dense_plan(symbols_workspace *w, symbols_slot *p, symbols_groups *groups, symbols_mode mode,
                          unsigned width, const void *values, const uint8_t *context, size_t n);
/* The same in CLASS of integers that lie elsewhere, but for the slot's symbols. */
size_t symbols_counted_plan(symbols_workspace *w, symbols_slot *p, symbols_groups *groups,
                            const symbols_counts *counts);
/*
 * The same in SPLIT, framed: leaves away the bits that all integers share and takes levels as contexts, which are then in
 * `level_context`, each if it is worth it. *framed is false if neither is.
 */
size_t symbols_framed_plan(symbols_workspace *w, symbols_slot *p, symbols_frame *frame, bool *framed,
                           const symbols_grid *grid, unsigned width, const void *values, size_t n);
/* The same of integers that lie elsewhere, but for the slot's symbols; the frame has their levels. */
size_t symbols_counted_framed_plan(symbols_workspace *w, symbols_slot *p, symbols_frame *frame, bool *framed,
                                   const symbols_counts *counts, const symbols_splitting *split);
size_t symbols_dense_encode(symbols_workspace *w, const symbols_slot *p, const void *values,
                            const uint8_t *context, void *to, size_t capacity);
ckd_status symbols_dense_decode(symbols_workspace *w, void *values, unsigned width, size_t n,
                                const uint8_t *context, const void *from, size_t size, ckd_error *err);

/* Integer i of an array of integers of `width` bytes. */
CPU_INLINE uint64_t symbols_load(const uint8_t *values, unsigned width, size_t i) {
    switch (width) {
    case 1:
        return values[i];
    case 2:
        return load_le16(values + 2 * i);
    case 4:
        return load_le32(values + 4 * i);
    default:
        return load_le64(values + 8 * i);
    }
}

/* As wire_put_varint, to memory; returns where it ends. */
static inline size_t symbols_put_varint(uint8_t *to, size_t at, uint64_t v) {
    for (; v >= 128; v >>= 7) {
        to[at++] = (uint8_t)(v | 128);
    }
    to[at++] = (uint8_t)v;
    return at;
}

/* ---- sparse streams (symbols_sparse.c) ---- */

/*
 * Collects all elements whose symbol is not 0. groups are the ranges of contexts; context may be NULL for one. False if
 * they are not few.
 */
bool symbols_gather(symbols_sparse *s, const symbols_groups *groups, const uint8_t *symbols, unsigned width,
                    const void *values, const uint8_t *context, size_t n);
/* The inverse; false if a gap leads beyond the range's elements. */
bool symbols_scatter(const symbols_sparse *s, unsigned width, void *values, const uint8_t *context, size_t n);
/* Writes what stands before the dense stream, at most SYMBOLS_SPARSE_HEADER bytes; returns its size. */
size_t symbols_sparse_write(const symbols_sparse *s, uint8_t *to);
/* Reads it, and sets the contexts of all integers of the dense stream. False if it makes no sense for n elements. */
bool symbols_sparse_read(symbols_sparse *s, const uint8_t *from, size_t size, size_t n, size_t *used);

/* ---- run streams (symbols_runs.c) ---- */

/*
 * Writes the stream of n integers of 1, 2 or 4 bytes, of which so many are not zero, into `to`, instead of what it held. False if it
 * takes more than `limit` bytes, or memory fails.
 */
bool symbols_runs_encode(bytes *to, unsigned width, const void *values, size_t n, size_t nonzeros,
                         size_t limit);
bool symbols_runs_decode(unsigned width, void *values, size_t n, const uint8_t *from, size_t size);

/* ---- frames (symbols_frame.c, symbols_levels.c) ---- */

/* Finds the lowest bits that all n >= 1 integers share. */
void symbols_shared_bits(symbols_frame *f, unsigned width, const void *values, size_t n);
/* The inverse of leaving them away, in place. */
void symbols_add_shared(const symbols_frame *f, unsigned width, void *values, size_t n);
/* Chooses levels from the symbols of n elements, a sample of `of`. columns is 0 if rows and columns say too little. */
void symbols_choose_levels(symbols_frame *f, symbols_level_sums *s, const symbols_grid *grid,
                           const uint8_t *symbols, size_t n, size_t of);
/* Where rows and columns of n elements, a sample of `of`, lie. Are they few enough? */
bool symbols_set_grid(uint32_t *columns, uint32_t *phase, uint32_t *rows, const symbols_grid *grid, size_t n,
                      size_t of);
/* Chooses the levels of a frame with rows and columns from sums over these, which are in `s`. false: they say too little. */
bool symbols_choose_counted_levels(symbols_frame *f, symbols_level_sums *s, uint64_t squares, size_t n);
/* Plans the stream of a frame's levels, if there are any; returns what the frame takes. */
size_t symbols_plan_frame(symbols_workspace *w, symbols_plan_slot *p);
/* The contexts of n elements. */
void symbols_fill_levels(uint8_t *context, const symbols_frame *f, size_t n);
/* Writes the frame, at most SYMBOLS_FRAMED_HEADER bytes; the levels' own stream comes next. Returns its size. */
size_t symbols_frame_write(const symbols_frame *f, size_t stream_size, uint8_t *to);
/* Reads it. False if it makes no sense for n elements. */
bool symbols_frame_read(symbols_frame *f, size_t *stream_size, unsigned width, const uint8_t *from,
                        size_t size, size_t n, size_t *used);

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
/* SPLIT symbols: (value >> low_bits) - bias, which must lie in 0 ... 255. low_bits < the integers' bits. */
void symbols_split(uint8_t *symbols, unsigned width, const void *values, unsigned low_bits, uint64_t bias,
                   size_t n);

/* ---- statistics (symbols_histogram.c, symbols_tables.c) ---- */

/* Sets the counts of the contexts first ... last, 256 each; all others become 0. */
void symbols_set_counts(symbols_histogram *h, const uint32_t *counts, unsigned first, unsigned last);
/* Counts n symbols; context NULL: all in context 0. */
void symbols_count(symbols_histogram *h, const uint8_t *symbols, const uint8_t *context, size_t n);
/* Adds the counts of a context, 256 of them, to `to`; returns their sum. */
uint32_t symbols_counts_of(uint32_t *to, const symbols_histogram *h, unsigned context);

/* log2 of n, to about 1e-3; 0 for 0. */
static inline float symbols_log2(const symbols_workspace *w, uint32_t n) {
    unsigned shift = n > SYMBOLS_MAX_STATES ? 20u - (unsigned)__builtin_clz(n) : 0;
    return w->log2_of[n >> shift] + (float)shift;
}

/* Joins neighbouring contexts until at most 16 groups are left and no further join would save bits. */
void symbols_group(symbols_workspace *w, symbols_groups *groups, size_t n);
/* Bits of all symbols of a table, and, about, of the table. */
float symbols_table_bits(const symbols_workspace *w, const uint32_t *counts, uint32_t total,
                         float *table_bits);
/*
 * CLASS: chooses how fine classes are, and for each group the floor that makes it smallest. The counts become those of
 * the tables' own symbols.
 */
void symbols_choose_classes(symbols_workspace *w, symbols_slot *p, const symbols_groups *groups);
/* Chooses the table size and fills the header's tables; returns payload bits, estimated, without low bits. */
double symbols_choose_tables(symbols_workspace *w, symbols_header *h, const symbols_groups *groups,
                             unsigned width, size_t n);

#endif
