/*
 * Adaptive arithmetic coding of small signed integers, for what the tabled coder (codec/entropy/symbols.h) is not made for: few integers
 * whose scale is known beforehand, and planes of mostly zeros whose density follows rows and columns. Denser and slower than the
 * tabled coder: tens of nanoseconds for an integer that is not zero. codec/FORMAT.md, "Adaptive streams", is normative.
 *
 * Encoders append a stream to `to`; what fails there (memory) sets to->failed. Of no integers a stream is empty. Decoders take exactly
 * one stream: any bytes give integers, or CORRUPT or UNSUPPORTED with all integers zero, in time and memory bounded by their
 * number; a byte too many or too few is CORRUPT. All functions are thread-safe but for the room, of which each thread has its own.
 */
#ifndef CODEC_ADAPTIVE_H
#define CODEC_ADAPTIVE_H

#include "base/bytes.h"
#include "base/error.h"

/* What the models stand in, and streams that are tried: some 130 KiB, and 4 bytes for each of a plane's columns. Zero-initialise; streams do not depend on it. */
typedef struct adaptive_scratch {
    bytes models, tried;
} adaptive_scratch;
void adaptive_scratch_free(adaptive_scratch *scratch);

/* ---- integers with contexts ---- */

#define ADAPTIVE_CONTEXTS 64

/* What the models of a context expect at first. Stands in the stream. */
typedef enum adaptive_start {
    ADAPTIVE_EVEN = 0,  /* nothing */
    ADAPTIVE_SCALED = 1 /* rounded Gaussians with a standard deviation of 2^((context - 16) / 4) */
} adaptive_start;

/* The context for ADAPTIVE_SCALED that is nearest to a standard deviation; 0 for one that is no positive number. */
unsigned adaptive_context_of(double deviation);

/* contexts: a byte for each integer, below ADAPTIVE_CONTEXTS (taken modulo it), or NULL: all have context 0. */
void adaptive_encode(bytes *to, adaptive_start start, const int32_t *values, size_t n,
                     const uint8_t *contexts, adaptive_scratch *scratch);
ckd_status adaptive_decode(int32_t *values, size_t n, const uint8_t *contexts, const void *from, size_t size,
                           adaptive_scratch *scratch, ckd_error *err);

/* ---- planes ---- */

/*
 * `count` integers of a matrix in row-major order, the first one in column `phase` < columns; columns >= 1. hints: a byte of
 * 0 ... 15 (taken modulo 16) for each integer, known to the decoder as well, of which equal ones promise similar integers; or NULL.
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

#endif
