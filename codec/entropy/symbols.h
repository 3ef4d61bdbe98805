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
#ifndef CODEC_SYMBOLS_H
#define CODEC_SYMBOLS_H

#include "base/error.h"

typedef enum symbols_mode { SYMBOLS_CLASS = 0, SYMBOLS_SPLIT = 1 } symbols_mode;

/* Tables and histograms of one worker, about 5 MiB. One thread uses it at a time. Decoding does not disturb plans. */
typedef struct symbols_workspace symbols_workspace;
ckd_status symbols_workspace_create(symbols_workspace **out, ckd_error *err);
void symbols_workspace_free(symbols_workspace *w);

/*
 * n integers of `width` bytes (1, 2, 4 or 8). context: a byte for each of them; NULL: all have the same context. The
 * decoder must get the same contexts as the encoder.
 */
typedef struct symbols_input {
    unsigned width;
    size_t n;
    const void *values;
    const uint8_t *context;
} symbols_input;
/* As symbols_input, with memory for the decoded integers. */
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
 * SPLIT without contexts. With a grid, levels of rows and columns may replace contexts. Returns the expected size in
 * bytes, including a margin of 1/1024. The workspace holds two plans, slots 0 and 1, so a delta and a standalone coding
 * can be compared before either is written.
 */
size_t symbols_plan(symbols_workspace *w, int slot, symbols_mode mode, const symbols_input *in,
                    const symbols_grid *grid);
/*
 * Estimates the size of a stream of `of` integers from a sample of 1 ... 2^18. Otherwise as symbols_plan; the grid is
 * the sample's own. Discards all plans of the workspace.
 */
size_t symbols_estimate(symbols_workspace *w, symbols_mode mode, const symbols_input *sample,
                        const symbols_grid *grid, size_t of);
/*
 * Returns the number of integers in the stream planned in `slot`, which determines decoding time. A sparse stream has
 * fewer than n.
 */
size_t symbols_coded(const symbols_workspace *w, int slot);
/* Returns the largest possible size in bytes of the stream planned in `slot`. */
size_t symbols_bound(const symbols_workspace *w, int slot);
/*
 * Writes the stream planned in `slot` from the same values and context. Returns its size, or 0 if that exceeds capacity
 * (never if capacity is symbols_bound). A stream of no integers is empty.
 */
size_t symbols_encode(symbols_workspace *w, int slot, const void *values, const uint8_t *context, void *to,
                      size_t capacity);

/*
 * Decodes exactly out->n integers. Any bytes give integers or CORRUPT, in time and memory bounded by n. The stream
 * states its mode, and whether it uses contexts: if so, out->context must not be NULL (CORRUPT).
 */
ckd_status symbols_decode(symbols_workspace *w, const symbols_output *out, const void *from, size_t size,
                          ckd_error *err);

#endif
