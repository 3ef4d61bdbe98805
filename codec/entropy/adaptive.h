/*
 * Adaptive arithmetic coding of small signed integers. It covers two cases that the tabled coder
 * (codec/entropy/symbols.h) is not made for: few integers of a known scale, and planes of mostly zeros whose density
 * follows rows and columns. It is denser and slower than the tabled coder: tens of nanoseconds per nonzero integer.
 * codec/FORMAT.md, "Adaptive streams", is normative.
 *
 * Encoders append a stream to `to`; out of memory sets to->failed. A stream of no integers is empty. Decoders take
 * exactly one stream. Any bytes give integers, or CORRUPT or UNSUPPORTED with all integers zero; time and memory are
 * bounded by their number. A missing or extra byte is CORRUPT. All functions are thread-safe, except that each thread
 * needs its own scratch.
 */
#ifndef CODEC_ADAPTIVE_H
#define CODEC_ADAPTIVE_H

#include "base/bytes.h"
#include "base/error.h"

/*
 * Memory for models and for trial streams: about 130 KiB, plus 4 bytes per column of a plane. Zero-initialise. Streams
 * do not depend on its content.
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

/* contexts: one byte per integer, taken modulo ADAPTIVE_CONTEXTS; NULL: all have context 0. */
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
 * `count` integers of a matrix in row-major order. The first is in column `phase` < columns; columns >= 1. hints: a
 * byte 0 ... 15 (taken modulo 16) per integer that the decoder knows, too; equal hints promise similar integers. hints
 * may be NULL.
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
