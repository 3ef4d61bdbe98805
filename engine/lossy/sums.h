/*
 * Sums over a lossy tile, in one pass: panels of its rows in parallel, and rows a few at a time while they are in the nearest caches. Panels
 * and the order of sums depend on the tile's shape only, so that results do not depend on the number of threads. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_SUMS_H
#define ENGINE_LOSSY_SUMS_H

#include "engine/lossy/lossy.h"

/* A value that does not count, and where it is. */
typedef struct outlier {
    uint64_t row, column;
    double value;
} outlier;

/* What is wanted, and what was found. */
typedef struct tile_pass {
    float max[2];        /* magnitudes, and differences, that count */
    bool lattice;        /* before_bits and lowest_bit */
    const float *weight; /* of columns, for all.weighted; rows' are the plan's. NULL: none */
    bool means;          /* of rows and columns */
    bool magnitudes;     /* of magnitudes; else of what is positive */
    bool outliers;       /* are listed */
    double birth;        /* levels' scale; 0: no levels are wanted */

    lattice_sums all;
    double *row, *row_count, *column; /* sums, and how many are in them */
    uint32_t *column_count;
    int32_t *row_level;
    double *column_scales; /* of births, moved by the rows' levels */
    outlier *outlier;
    size_t outlier_count;
    tile_scratches *scratches; /* that all this lies in: the tile's, until its next pass, or */
    tile_scratches own;
} tile_pass;

/* Release with tile_pass_free, whatever the status; p is not copied until then. Errors: NOMEM. */
ckd_status tile_pass_run(tile_pass *p, const lossy_tile *t, const kernels *k, ckd_error *err);
void tile_pass_free(tile_pass *p);

/* Of what a pass over all means found, outliers included. out: zero, or others', whose memory is used again. Errors: NOMEM. */
ckd_status lossy_scales_of(lossy_scales *out, const tile_pass *p, const lossy_tile *t, ckd_error *err);

/* Levels between the means of two sums, in halves of octaves. */
int32_t level_distance(double now, double from);

/* Runs fn(context, p, ...) for all panels; returns by the tile's pool, if it has one. */
ckd_status tile_run(const lossy_tile *t, size_t count, pool_fn fn, void *context, ckd_error *err);
/* Rows of a tile, and element `first` and column of one; returns how many elements it has. Long vectors are cut into rows. */
uint64_t tile_rows(const lossy_tile *t);
uint64_t tile_span(const lossy_tile *t, uint64_t row, uint64_t *first, uint64_t *column);
/* Of so many rows in all, the first one of panel p of `panels`. */
uint64_t tile_panel(uint64_t rows, uint64_t p, uint64_t panels);
uint64_t tile_panels(const lossy_tile *t);

/* ---- sample.c: pieces of rows spread over a tile, on which is estimated what need not be exact ---- */
#define SAMPLE_PIECE 128u /* elements of one row that are looked at */
typedef struct tile_piece {
    uint64_t first, row, column, n;
    const float *now, *before; /* before NULL: no parent */
} tile_piece;
typedef struct tile_sample {
    const lossy_tile *tile;
    uint64_t stride, in_round, round; /* of pieces */
    uint64_t row, at;
    float *now, *before; /* of a tile on a device: all pieces, of which `next` comes next */
    uint64_t next;
} tile_sample;
/* Of about so many elements; all, if there are no more. Release with sample_end, whatever the status. Errors: NOMEM, DEVICE. */
ckd_status sample_begin(tile_sample *s, const lossy_tile *t, uint64_t elements, ckd_error *err);
bool sample_next(tile_piece *out, tile_sample *s);
void sample_end(tile_sample *s);

/*
 * A few values far from all others (spikes, what has come back from one) would make the steps of all: they are kept as they are. Finds
 * the largest magnitude that is not one of these, or more (t->exception_above, exception_moved), and the mean of what is positive and no larger.
 * Errors: NOMEM.
 */
ckd_status sample_typical_range(lossy_tile *t, double *mean, const kernels *k, ckd_error *err);
/* So many may be kept for that reason. */
uint64_t max_outliers(uint64_t elements);
/* Was that so of all? If not, they are found by all. */
bool usual_enough(const lossy_tile *t, const lattice_sums *s);
ckd_status find_typical_range(lossy_tile *t, const kernels *k, ckd_error *err);
/* Root mean square of values over rows' and columns' steps. weight: of columns. Errors: NOMEM, DEVICE. */
ckd_status sample_weighted(double *out, const lossy_tile *t, const float *weight, const kernels *k,
                           ckd_error *err);

#endif
