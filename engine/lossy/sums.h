/*
 * Sums over a lossy tile in one pass: panels of rows in parallel, a few rows at a time while they are in the
 * nearest caches. Panels and the order of sums depend on the tile's shape only, so results do not depend on
 * the number of threads. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_SUMS_H
#define ENGINE_LOSSY_SUMS_H

#include "engine/lossy/lossy.h"

/* A value left out of the sums, and its place. */
typedef struct outlier {
    uint64_t row, column;
    double value;
} outlier;

/* Inputs of a pass, then its results. */
typedef struct tile_pass {
    float max[2];        /* largest magnitude, and largest difference, that count */
    bool lattice;        /* compute before_bits and lowest_bit */
    const float *weight; /* of columns, for all.weighted; the plan has the rows'. NULL: none */
    bool means;          /* sum up rows and columns */
    bool magnitudes;     /* sum magnitudes; else positive values */
    bool outliers;       /* list them */
    double birth;        /* scale of levels; 0: no levels */

    lattice_sums all;
    double *row, *row_count, *column; /* sums, and the numbers of their summands */
    uint32_t *column_count;
    int32_t *row_level;
    double *column_scales; /* sums of births, moved by the rows' levels */
    outlier *outlier;
    size_t outlier_count;
    tile_scratches *scratches; /* memory of these results: the tile's, until its next pass, or `own` */
    tile_scratches own;
} tile_pass;

/* Runs a pass. Release with tile_pass_free, whatever the status; do not copy p before. Errors: NOMEM. */
ckd_status tile_pass_run(tile_pass *p, const lossy_tile *t, const kernels *k, ckd_error *err);
void tile_pass_free(tile_pass *p);

/*
 * Computes scales from a pass with `means`, outliers included. out: zero, or earlier scales, whose memory is
 * reused. Errors: NOMEM.
 */
ckd_status lossy_scales_of(lossy_scales *out, const tile_pass *p, const lossy_tile *t, ckd_error *err);

/* Returns the distance of two means in levels, a multiple of half an octave. */
int32_t level_distance(double now, double from);
/* Returns the largest number of outliers in a tile of `elements` elements. */
uint64_t max_outliers(uint64_t elements);

/* Runs fn(context, p, ...) for all panels, on the tile's pool if it has one. */
ckd_status tile_run(const lossy_tile *t, size_t count, pool_fn fn, void *context, ckd_error *err);
/*
 * tile_rows counts the rows of a tile; long vectors are cut into rows. tile_span returns the number of
 * elements of one row, and its first element and column.
 */
uint64_t tile_rows(const lossy_tile *t);
uint64_t tile_span(const lossy_tile *t, uint64_t row, uint64_t *first, uint64_t *column);
/* Returns the first row of panel p, if `rows` rows make `panels` panels. */
uint64_t tile_panel(uint64_t rows, uint64_t p, uint64_t panels);
uint64_t tile_panels(const lossy_tile *t);
/* Tells whether factors may pay for the tile, which has been cut. Only first moments and weights have factors. */
bool lossy_may_factor(const lossy_tile *t);

/* ---- sample.c: estimates on pieces of rows that are spread over a tile ---- */
#define SAMPLE_PIECE 128u /* elements of a row */
typedef struct tile_piece {
    uint64_t first, row, column, n;
    const float *now, *before; /* before NULL: no parent */
} tile_piece;
typedef struct tile_sample {
    const lossy_tile *tile;
    uint64_t stride, in_round, round; /* of pieces */
    uint64_t row, at;
    float *now, *before; /* of a tile on a device: copies of all pieces; `next` is the next one */
    uint64_t next;
} tile_sample;
/*
 * Begins a sample of about `elements` elements, or of all if the tile has no more. Release with sample_end,
 * whatever the status. Errors: NOMEM, DEVICE.
 */
ckd_status sample_begin(tile_sample *s, const lossy_tile *t, uint64_t elements, ckd_error *err);
bool sample_next(tile_piece *out, tile_sample *s);
void sample_end(tile_sample *s);

/*
 * A few values far from all others (spikes, and values returning from one) would dominate all steps, so they
 * become exceptions. Estimates the largest magnitude and difference that are no such outliers, or an upper
 * bound of them (t->exception_above, exception_moved), and the mean of the positive values below. Errors:
 * NOMEM.
 */
ckd_status sample_typical_range(lossy_tile *t, double *mean, const kernels *k, ckd_error *err);
/*
 * usual_enough tells whether the sample's limits suit all elements. If not, find_typical_range finds limits
 * on all elements.
 */
bool usual_enough(const lossy_tile *t, const lattice_sums *s);
ckd_status find_typical_range(lossy_tile *t, const kernels *k, ckd_error *err);
/* Estimates the RMS of values over the steps of their rows and columns. weight: of columns. Errors: NOMEM, DEVICE. */
ckd_status sample_weighted(double *out, const lossy_tile *t, const float *weight, const kernels *k,
                           ckd_error *err);

#endif
