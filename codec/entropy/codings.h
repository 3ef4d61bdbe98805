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

/*
 * Encodes `size` bytes (size / width integers) with RAW, ZSTD, LZ4 or their planes. level 0: the coding's default. If
 * the result would not be smaller than `limit` bytes, returns CKD_OK with *stored = 0, so the caller can stop trying.
 * capacity >= min(limit, coding_bound(size)).
 */
ckd_status coder_encode(coder *c, coding how, int level, unsigned width, const void *from, size_t size,
                        void *to, size_t limit, size_t *stored, ckd_error *err);

/* Decodes to exactly `raw` bytes, else CORRUPT. context is as in symbols_decode; only CODING_SYMBOLS uses it. */
ckd_status coder_decode(coder *c, coding how, unsigned width, void *to, size_t raw, const uint8_t *context,
                        const void *from, size_t stored, ckd_error *err);

#endif
