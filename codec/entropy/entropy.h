/*
 * Arrays of integers to bytes, and back: the interface of codec/entropy/ for other rooms. Its parts, in this order:
 *
 *   adaptive_*            adaptive arithmetic coding, for lossy blocks
 *   symbols_*             the class + ANS coder: plan a stream, then encode it
 *   coding, coder_*       all codings of arrays, by number. Begin here: coder_decode reads them
 *   planes_*              byte planes, for zstd and LZ4
 *   symbols_parts_* ...   symbol streams for integers in device memory
 */
#ifndef CODEC_ENTROPY_ENTROPY_H
#define CODEC_ENTROPY_ENTROPY_H

#include <stdbool.h>

#include "base/bytes.h"
#include "base/error.h"

/*
 * Adaptive arithmetic coding of small signed integers. It covers two cases that the symbol coder (`symbols_encode`) is
 * not made for: few integers of a known scale, and planes of mostly zeros whose density follows rows and columns. It is
 * denser and slower than the symbol coder: tens of nanoseconds per nonzero integer. codec/FORMAT.md, "Adaptive
 * streams", is normative.
 *
 * Encoders append a stream to `to`; NOMEM sets to->failed. A stream of no integers is empty. Decoders take exactly one
 * stream. Any bytes give integers, or CORRUPT or UNSUPPORTED with all integers zero. Time and memory are bounded by the
 * number of integers. A missing or extra byte is CORRUPT. All functions are thread-safe if each thread has its own
 * scratch.
 */

/*
 * Memory for models and trial streams: about 130 KiB, plus 4 bytes per column of a plane. Zero-initialise. Its content
 * does not influence streams.
 */
typedef struct adaptive_scratch {
    bytes models, tried;
} adaptive_scratch;
void adaptive_scratch_free(adaptive_scratch *scratch);

/* ---- integers with contexts ---- */

#define ADAPTIVE_CONTEXTS 64

/* The initial state of a context's models. Stored in the stream. */
typedef enum adaptive_start {
    ADAPTIVE_EVEN = 0,  /* no assumption */
    ADAPTIVE_SCALED = 1 /* rounded Gaussians with a standard deviation of 2^((context - 16) / 4) */
} adaptive_start;

/* Returns the ADAPTIVE_SCALED context nearest to a standard deviation; 0 if it is not a positive number. */
unsigned adaptive_context_of(double deviation);

/* contexts: one byte per integer, taken modulo ADAPTIVE_CONTEXTS. NULL: all integers have context 0. */
typedef struct adaptive_sequence {
    size_t count;
    const uint8_t *contexts;
} adaptive_sequence;

void adaptive_encode(bytes *to, adaptive_start start, const adaptive_sequence *sequence,
                     const int32_t *values, adaptive_scratch *scratch);
ckd_status adaptive_decode(int32_t *values, const adaptive_sequence *sequence, const void *from, size_t size,
                           adaptive_scratch *scratch, ckd_error *err);

/* ---- planes ---- */

/*
 * `count` integers of a matrix in row-major order. The first is in column `phase` < columns; columns >= 1. hints: per
 * integer, a byte 0 ... 15 (taken modulo 16) that the decoder also knows; integers with equal hints should be similar.
 * hints may be NULL.
 */
typedef struct adaptive_plane {
    size_t count;
    uint64_t columns, phase;
    const uint8_t *hints;
} adaptive_plane;

void adaptive_plane_encode(bytes *to, const adaptive_plane *plane, const int32_t *values,
                           adaptive_scratch *scratch);
ckd_status adaptive_plane_decode(int32_t *values, const adaptive_plane *plane, const void *from, size_t size,
                                 adaptive_scratch *scratch, ckd_error *err);

/*
 * The class + ANS coder: integers as (symbol, low bits). Symbols are coded with tabled asymmetric numeral systems
 * (Duda, arXiv:1311.2540); the element's context chooses the table. Low bits are noise and are stored as they are.
 * codec/FORMAT.md, "Symbol streams", is normative. A stream is self-contained: one per block, tables included.
 *
 * Two ways to split an integer of `width` bytes (1, 2, 4, 8):
 * - SYMBOLS_CLASS, for residuals: signed, centred per table; symbol = magnitude class, low bits = the bits below its
 *   leading one;
 * - SYMBOLS_SPLIT, for values: symbol = the leading bits (a float's exponent, after kernels' rotate_sign), low bits =
 *   the rest.
 */

typedef enum symbols_mode { SYMBOLS_CLASS = 0, SYMBOLS_SPLIT = 1 } symbols_mode;

/* Tables and histograms of one worker, about 9 MiB. One thread uses it at a time. Decoding does not disturb plans. */
typedef struct symbols_workspace symbols_workspace;
ckd_status symbols_workspace_create(symbols_workspace **out, ckd_error *err);
void symbols_workspace_free(symbols_workspace *w);

/*
 * n integers of `width` bytes (1, 2, 4 or 8). context: one byte per integer; NULL: all have the same context. The
 * decoder must get the same contexts as the encoder.
 */
typedef struct symbols_input {
    unsigned width;
    size_t n;
    const void *values;
    const uint8_t *context;
} symbols_input;
/* As symbols_input, but `values` receives the decoded integers. */
typedef struct symbols_output {
    unsigned width;
    size_t n;
    void *values;
    const uint8_t *context;
} symbols_output;

/* Position of the integers in a matrix: integer i is in column (phase + i) % columns. phase < columns. */
typedef struct symbols_grid {
    uint64_t columns, phase;
} symbols_grid;

/*
 * Plans the coding of at most 2^18 integers: histograms, choice of tables. grid: the rows and columns, or NULL; only in
 * SPLIT without contexts. With a grid, levels of rows and columns may serve as contexts. Returns the expected size in
 * bytes, usually with a margin of 1/1024. The workspace holds two plans, slots 0 and 1, so a delta and a standalone
 * coding can be compared before either is written.
 */
size_t symbols_plan(symbols_workspace *w, int slot, symbols_mode mode, const symbols_input *in,
                    const symbols_grid *grid);
/*
 * Estimates the size of a stream of `all` integers from a sample of 1 ... 2^18 of them. Otherwise as symbols_plan; the
 * grid is that of the sample. Discards the plan in slot 1 for SYMBOLS_CLASS, in slot 0 for other modes.
 */
size_t symbols_estimate(symbols_workspace *w, symbols_mode mode, const symbols_input *sample,
                        const symbols_grid *grid, size_t all);
/*
 * Returns the decoding work of the stream planned in `slot`, in integers of a dense stream. Change and run streams take
 * fewer than n.
 */
size_t symbols_coded(const symbols_workspace *w, int slot);
/* Returns the largest possible size in bytes of the stream planned in `slot`. */
size_t symbols_bound(const symbols_workspace *w, int slot);
/*
 * Writes the stream planned in `slot` from the same values and context. Returns its size, or 0 if that exceeds
 * `capacity` (never if capacity is symbols_bound). A stream of no integers is empty.
 */
size_t symbols_encode(symbols_workspace *w, int slot, const void *values, const uint8_t *context, void *to,
                      size_t capacity);

/*
 * Decodes exactly out->n integers. Any bytes give integers, CORRUPT or UNSUPPORTED (a kind of stream unknown to this
 * version), in time and memory bounded by n. The stream states its mode and whether it uses contexts. If it does,
 * out->context must not be NULL (CORRUPT).
 */
ckd_status symbols_decode(symbols_workspace *w, const symbols_output *out, const void *from, size_t size,
                          ckd_error *err);

/*
 * Reads the nonzero integers of a stream that lists them, so that they can be added to an array in place. First their
 * indices, each once in a stream of the encoder; then their values, with a context for each (NULL if the encoder had
 * none). All are valid until the workspace plans or decodes something else. symbols_decode gives the same integers.
 * Errors: as symbols_decode.
 */
typedef struct symbols_changes {
    unsigned width; /* bytes of an integer */
    size_t count;   /* at most n / 2 */
    const uint32_t *at;
    const void *values;
} symbols_changes;
/* A stream of n integers of `width` bytes. */
typedef struct symbols_stream {
    unsigned width;
    size_t n;
    const void *data;
    size_t size;
} symbols_stream;
typedef enum symbols_listing {
    SYMBOLS_ALL_INTEGERS,      /* the stream does not list changes */
    SYMBOLS_CHANGES_ALONE,     /* symbols_find_changes needs no contexts */
    SYMBOLS_CHANGES_BY_CONTEXT /* it needs the contexts of all n integers */
} symbols_listing;
symbols_listing symbols_lists_changes(const void *from, size_t size);
ckd_status symbols_find_changes(symbols_changes *out, symbols_workspace *w, const symbols_stream *stream,
                                const uint8_t *context, ckd_error *err);
ckd_status symbols_read_changes(const symbols_changes *c, symbols_workspace *w, const uint8_t *context,
                                ckd_error *err);

/*
 * How the n integers of a block, `width` bytes each, are stored: raw, zstd, LZ4, or as a symbol stream. zstd and LZ4
 * also work on byte planes. The predictor of the record defines what the integers mean (values, residuals); see
 * codec/FORMAT.md.
 */

/* Stored in files: numbers are stable. The next one is 8. */
typedef enum coding {
    CODING_RAW = 0,
    CODING_ZSTD = 1,
    CODING_LZ4 = 2,
    CODING_ZSTD_PLANES = 3,
    CODING_LZ4_PLANES = 4,
    CODING_SYMBOLS = 5,
    CODING_LATTICE = 6, /* a lossy block: codec/lattice/lattice.h */
    CODING_GRADIENT = 7 /* a first moment, stored as its gradient: two symbol streams */
} coding;

const char *coding_name(coding c); /* "raw", "zstd", ...; "?" if unknown */
/* Returns true if it stores one array of integers, which coder_decode decodes. engine/decode/ decodes the others. */
bool coding_is_array(uint32_t c);

/* Scratch of one worker: symbol tables, zstd and LZ4 contexts, a plane buffer. One thread uses it at a time. */
typedef struct coder coder;
ckd_status coder_create(coder **out, ckd_error *err);
void coder_free(coder *c);
symbols_workspace *coder_symbols(coder *c);

/* Returns an upper bound of coder_encode's output for `size` bytes of input, for every coding but SYMBOLS. */
size_t coding_bound(size_t size);

/* size / width integers to encode. */
typedef struct coder_source {
    const void *data;
    size_t size;
    unsigned width;
} coder_source;
/* Output memory for at least min(limit, coding_bound(size)) bytes. */
typedef struct coder_result {
    void *to;
    size_t limit;
    size_t stored; /* the result's size; 0 if it would not be smaller than the limit */
} coder_result;
/* Encodes with RAW, ZSTD, LZ4 or their planes. level 0: the coding's default. */
ckd_status coder_encode(coder *c, coding id, int level, const coder_source *from, coder_result *result,
                        ckd_error *err);

/* Output memory for size / width decoded integers. context: as in symbols_output; only CODING_SYMBOLS uses it. */
typedef struct coder_target {
    void *to;
    size_t size;
    unsigned width;
    const uint8_t *context;
} coder_target;
/* Decodes to exactly target->size bytes, else CORRUPT. */
ckd_status coder_decode(coder *c, coding id, const coder_target *target, const void *from, size_t stored,
                        ckd_error *err);

/*
 * Byte planes of n integers of `width` bytes: first all lowest bytes, then all second bytes, and so on. Neighbouring
 * integers share their high bytes, which byte codecs find only in planes. codec/FORMAT.md, "Byte planes", is normative.
 */

/* Returns true if `size` is a whole number of integers of 1, 2, 4 or 8 bytes. */
static inline bool planes_valid(unsigned width, size_t size) {
    return (width == 1 || width == 2 || width == 4 || width == 8) && size % width == 0;
}

/* Splits n integers of a valid width into planes. The buffers must not overlap. */
void planes_split(uint8_t *planes, unsigned width, const void *values, size_t n);
void planes_join(void *values, unsigned width, const uint8_t *planes, size_t n);

/*
 * Symbol streams for integers in device memory. They are planned from counts of symbols, and taken apart into plain
 * tables, with which a device reads and writes payloads. Only dense streams: nearly all large blocks use them. The
 * result equals the output of symbols_encode. codec/FORMAT.md, "Symbol streams", is normative.
 */

#define SYMBOLS_PARTS_TABLES 16
#define SYMBOLS_PARTS_SAMPLE 65 /* integers sampled to choose a centre */

/* ---- planning ---- */

/*
 * Returns the size of the sample for symbols_centre. The sample has integers i * n / count of n, sign-extended, for i =
 * 0 ... count - 1.
 */
static inline size_t symbols_sample_count(size_t n) {
    return n < SYMBOLS_PARTS_SAMPLE ? n : SYMBOLS_PARTS_SAMPLE;
}
/* Returns the value to subtract from differences of `width` bytes before they are classified. Sorts the samples. */
uint64_t symbols_centre(int64_t *samples, size_t count, unsigned width);
/* Returns `fine` (FORMAT.md) of the finest classes of `width`-byte differences. */
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
    uint64_t any, differing; /* any one of the integers, and the bits in which others differ from it */
} symbols_extent;
/* The finest symbols are (integer >> bits) - bias. */
typedef struct symbols_splitting {
    unsigned bits;
    uint64_t bias;
    unsigned shift; /* lowest bits that all integers share; omitted from the stream */
    uint64_t shared;
} symbols_splitting;
symbols_splitting symbols_split_finest(const symbols_extent *extent);

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
 * nonzero ones. squares: the sum of the squares of all symbols. Returns false if levels do not pay.
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
 * The frame in front of a stream planned by symbols_plan_split: its largest size in bytes (0: no frame), and writing
 * it, which returns its size.
 */
size_t symbols_parts_frame_bound(const symbols_workspace *w, int slot);
size_t symbols_parts_frame(symbols_workspace *w, int slot, uint8_t *to);
/*
 * Takes apart an encoded stream of integers of `width` bytes. *dense = false: the stream is of another kind and needs
 * symbols_decode. Errors: CORRUPT, UNSUPPORTED.
 */
ckd_status symbols_parts_read(symbols_parts *parts, bool *dense, unsigned width, const void *from,
                              size_t size, ckd_error *err);

#endif
