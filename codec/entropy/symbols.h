/*
 * The class + ANS coder: integers as (symbol, low bits). Symbols are coded with tabled asymmetric numeral systems (Duda,
 * arXiv:1311.2540) under a table chosen by the element's context; low bits are noise and stored as they are.
 * codec/FORMAT.md, "Symbol streams", is normative. Self-contained: one stream per block, tables included.
 *
 * Two ways to split an integer of `width` bytes (1, 2, 4, 8):
 * - SYMBOLS_CLASS, for residuals: signed, centred per table, symbol = magnitude class, low bits = what is below its leading bit;
 * - SYMBOLS_SPLIT, for values: symbol = the leading bits (a float's exponent, after kernels' rotate_sign), low bits = the rest.
 */
#ifndef CODEC_SYMBOLS_H
#define CODEC_SYMBOLS_H

#include "base/error.h"

typedef enum symbols_mode { SYMBOLS_CLASS = 0, SYMBOLS_SPLIT = 1 } symbols_mode;

/* Tables and histograms of one worker, about 5 MiB. Not to be shared between threads at one time. Decoding leaves plans alone. */
typedef struct symbols_workspace symbols_workspace;
ckd_status symbols_workspace_create(symbols_workspace **out, ckd_error *err);
void symbols_workspace_free(symbols_workspace *w);

/* How the integers lie in a matrix: integer i is in column (phase + i) % columns. phase < columns. */
typedef struct symbols_grid {
    uint64_t columns, phase;
} symbols_grid;

/*
 * Plans the coding of n (<= 2^18) integers: histograms, choice of tables. context: n bytes, or NULL for one context. grid: NULL, or,
 * only without contexts and in SPLIT, where rows and columns are: their levels may then take the place of contexts.
 * *planned is the size to expect in bytes, one part in 1024 for safety included. The plan lives in the workspace, which holds two: slot 0 or 1 (so that a delta and a standalone coding can be compared before either is
 * written).
 */
void symbols_plan(symbols_workspace *w, int slot, symbols_mode mode, unsigned width, const void *values,
                  const uint8_t *context, const symbols_grid *grid, size_t n, size_t *planned);
/*
 * The size to expect of a stream of `of` integers, of which n (1 ... 2^18) are given as a sample. Otherwise as symbols_plan, with a grid of
 * the sample's own. Any plan of the workspace is lost.
 */
size_t symbols_estimate(symbols_workspace *w, symbols_mode mode, unsigned width, const void *values,
                        const uint8_t *context, const symbols_grid *grid, size_t n, size_t of);
/* Integers that the stream planned in `slot` holds, which is what decoding takes: of a sparse one fewer than n. */
size_t symbols_coded(const symbols_workspace *w, int slot);
/* The most that the stream planned in `slot` can take, in bytes. */
size_t symbols_bound(const symbols_workspace *w, int slot);
/*
 * Writes the stream planned in `slot` from the same values and context. Returns its size, 0 if that exceeds capacity (which
 * symbols_bound excludes). Of no integers the stream is empty.
 */
size_t symbols_encode(symbols_workspace *w, int slot, const void *values, const uint8_t *context, size_t n,
                      void *to, size_t capacity);

/*
 * Decodes exactly n integers. Any bytes give integers or CORRUPT, in time and memory bounded by n. The stream names its
 * mode; whether it was made with contexts stands in it, too: `context` must be given then (CORRUPT if NULL).
 */
ckd_status symbols_decode(symbols_workspace *w, void *values, unsigned width, size_t n,
                          const uint8_t *context, const void *from, size_t size, ckd_error *err);

#endif
