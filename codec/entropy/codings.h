/*
 * How a block's array of n integers of `width` bytes is stored: raw, zstd, LZ4, or as a symbol stream. zstd and LZ4
 * also work on byte planes (all lowest bytes first, then the next ones ...). The record's predictor defines what the
 * integers mean (values, residuals); see codec/FORMAT.md.
 */
#ifndef CODEC_CODINGS_H
#define CODEC_CODINGS_H

#include <stdbool.h>

#include "codec/entropy/symbols.h"

/* Stored in files: numbers are stable, new ones are appended. */
typedef enum coding {
    CODING_RAW = 0,
    CODING_ZSTD = 1,
    CODING_LZ4 = 2,
    CODING_ZSTD_PLANES = 3,
    CODING_LZ4_PLANES = 4,
    CODING_SYMBOLS = 5,
    CODING_COUNT,                 /* number of codings of integer arrays */
    CODING_LATTICE = CODING_COUNT /* a lossy block: codec/lattice/lattice.h */
} coding;

const char *coding_name(coding c); /* "raw", "zstd", ...; "?" if unknown */
/* Can this build decode it? */
bool coding_known(uint32_t c);

/* Scratch of one worker: symbol tables, zstd and LZ4 contexts, a plane buffer. One thread uses it at a time. */
typedef struct coder coder;
ckd_status coder_create(coder **out, ckd_error *err);
void coder_free(coder *c);
symbols_workspace *coder_symbols(coder *c);

/* Upper bound of coder_encode's output for `size` bytes of input, for every coding but SYMBOLS. */
size_t coding_bound(size_t size);

/* size / width integers to encode. */
typedef struct coder_source {
    const void *data;
    size_t size;
    unsigned width;
} coder_source;
/* Where the result goes: memory for at least min(limit, coding_bound(size)) bytes. */
typedef struct coder_result {
    void *to;
    size_t limit;
    size_t stored; /* the result's size; 0 if it would not be smaller than the limit */
} coder_result;
/* Encodes with RAW, ZSTD, LZ4 or their planes. level 0: the coding's default. */
ckd_status coder_encode(coder *c, coding how, int level, const coder_source *from, coder_result *result,
                        ckd_error *err);

/* Where size / width decoded integers go. context: as in symbols_output; only CODING_SYMBOLS uses it. */
typedef struct coder_target {
    void *to;
    size_t size;
    unsigned width;
    const uint8_t *context;
} coder_target;
/* Decodes to exactly target->size bytes, else CORRUPT. */
ckd_status coder_decode(coder *c, coding how, const coder_target *target, const void *from, size_t stored,
                        ckd_error *err);

/*
 * Byte planes: of n integers of `width` bytes, first all lowest bytes, then all second bytes, and so on. Neighbouring
 * integers share their high bytes; byte codecs find that only in planes. codec/FORMAT.md, "Byte planes", is normative.
 */

/* Is `size` a whole number of integers of 1, 2, 4 or 8 bytes? */
static inline bool planes_valid(unsigned width, size_t size) {
    return (width == 1 || width == 2 || width == 4 || width == 8) && size % width == 0;
}

/* Splits n integers of a valid width into planes. The buffers must not overlap. */
void planes_split(uint8_t *planes, unsigned width, const void *values, size_t n);
void planes_join(void *values, unsigned width, const uint8_t *planes, size_t n);

#endif
