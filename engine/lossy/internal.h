/* Declarations that only the files of engine/lossy/ use. */
#ifndef ENGINE_LOSSY_INTERNAL_H
#define ENGINE_LOSSY_INTERNAL_H

#include "engine/lossy/lossy.h"
#include "engine/lossy/rate.h"

/* Returns the tile's plan for one block. */
lattice_block lossy_block_of(const lossy_tile *t, uint64_t at, uint64_t count);

/* ---- residual.c: residuals of a tile's elements in steps, before rounding; not for vectors ---- */
/* Counts the residuals in a histogram. Errors: NOMEM. */
ckd_status lossy_residual(rate_histogram *h, const lossy_tile *t, const kernels *k, ckd_error *err);

/*
 * The residuals as a matrix whose submatrices are computed on demand. The tile's steps must not change meanwhile, and
 * it must have no factors.
 */
typedef struct lossy_matrix {
    const lossy_tile *tile;
    const kernels *kernels;
    const lattice_work *work;
} lossy_matrix;
/* work: borrowed until the last product. Errors: NOMEM. */
ckd_status lossy_matrix_begin(lossy_matrix *m, const lossy_tile *t, const kernels *k, lattice_work *work,
                              ckd_error *err);
/* Implements low_rank_matrix.submatrix, for at most SUBMATRIX_SIDE columns. */
void lossy_submatrix(const void *matrix, float *to, size_t row, size_t rows, size_t column, size_t columns);

/* Converts the mean distance below an integer, in steps, to the unit of payloads. */
uint8_t lossy_offset(double below);

/*
 * Quantises and rebuilds a block whose tile determines everything but its integers. It works in chunks that
 * stay in the nearer caches. j->block: the tile's plan for the block. *done = false: the block is not of this kind,
 * or an integer does not fit a byte. Errors: NOMEM (stream.c).
 */
ckd_status lossy_stream(bool *done, lossy_job *j, const lossy_elements *e, ckd_error *err);

/*
 * Recomputes j->values, j->decoded, the error and `within` from the integers and exceptions in j->block.
 * Errors: NOMEM.
 */
ckd_status lossy_block_rebuild(lossy_job *j, const lossy_elements *e, ckd_error *err);
/* Quantises and rebuilds the block again, as if the tile had no factors. Errors: NOMEM. */
ckd_status lossy_block_without_factor(lossy_job *j, const lossy_elements *e, ckd_error *err);

/* ---- exceptions.c ---- */
void lossy_no_exceptions(lossy_job *j);
/*
 * lossy_add_exception appends an element of the block, in ascending order. lossy_exceptions_done makes the
 * list the block's exceptions. Errors: NOMEM.
 */
void lossy_add_exception(lossy_job *j, uint32_t place, uint32_t bits);
ckd_status lossy_exceptions_done(lossy_job *j, ckd_error *err);
/*
 * Finds the exceptions among elements from ... to - 1 of the block, appends them, and sets their integers to
 * 0. Errors: NOMEM.
 */
ckd_status lossy_find_exceptions(lossy_job *j, const lossy_elements *e, uint64_t from, uint64_t to,
                                 ckd_error *err);
void lossy_check_bound(lossy_job *j, const tile_limits *limits);

/* ---- direction ---- */
/*
 * A sample of elements shows how far lossy moments change the direction of an Adam step, m / (sqrt(v) + eps). First and
 * second moments are saved one after the other, so not all elements can be compared.
 */
#define DIRECTION_SAMPLE 4096u /* approximate number of elements per tile */

/* A value left out of the sums, and its place. */
typedef struct outlier {
    uint64_t row, column;
    double value;
} outlier;

/* Inputs of a pass, then its results. */
typedef struct tile_pass {
    float max[2];        /* largest magnitude, and largest difference, that count */
    bool lattice;        /* compute parent_bits and lowest_bit */
    const float *weight; /* columns' weights, for all.weighted; the plan has the rows'. NULL: none */
    bool means;          /* sum rows and columns */
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

/*
 * Runs a pass. Release with tile_pass_free, whatever the status; do not copy p before that. Errors: as
 * lossy_tile_prepare.
 */
ckd_status tile_pass_run(tile_pass *p, const lossy_tile *t, const kernels *k, ckd_error *err);
void tile_pass_free(tile_pass *p);

/*
 * Computes scales from a pass with `means`, outliers included. out: zero, or earlier scales, whose memory is
 * reused. Errors: NOMEM.
 */
ckd_status lossy_scales_of(lossy_scales *out, const tile_pass *p, const tile_shape *shape, ckd_error *err);

/* Returns the distance of two means in levels, a multiple of half an octave. */
int32_t level_distance(double now, double from);
/* Returns the largest number of outliers in a tile of `elements` elements. */
uint64_t max_outliers(uint64_t elements);

/*
 * A few values far from all others (spikes, and values returning from one) would dominate all steps, so they become
 * exceptions. Estimates the largest magnitude and difference that are not such outliers, or an upper bound of them
 * (t->limits.exception_above, exception_moved), and the mean of the positive values within them. Errors: NOMEM, DEVICE.
 */
ckd_status sample_typical_range(lossy_tile *t, double *mean, const kernels *k, ckd_error *err);
/*
 * typical_range_holds tells whether the sample's limits suit all elements. If not, find_typical_range finds limits
 * on all elements.
 */
bool typical_range_holds(const lossy_tile *t, const lattice_sums *s);
ckd_status find_typical_range(lossy_tile *t, const kernels *k, ckd_error *err);
/* Estimates the RMS of values divided by the steps of rows and columns. weight: of columns. Errors: NOMEM, DEVICE. */
ckd_status sample_weighted(double *out, const lossy_tile *t, const float *weight, const kernels *k,
                           ckd_error *err);

/* Rounds an array's size up, so that the next array is aligned for any access. */
static inline uint64_t lossy_device_aligned(uint64_t size) {
    return (size + 255) / 256 * 256;
}
/* Takes the next array from the scratch. */
static inline void *lossy_device_take(const struct lossy_device *d, uint64_t *used, uint64_t size) {
    void *at = d->scratch + *used;
    *used += lossy_device_aligned(size);
    return at;
}
ckd_status lossy_device_check_scratch(const struct lossy_device *d, uint64_t used, ckd_error *err);
static inline ckd_status lossy_device_status(const struct lossy_device *d, const device_failure *why,
                                             ckd_error *err) {
    return device_status(why, d->lease->queue.device, err);
}

/* Device versions of tile_pass_run and lossy_residual, of sample slices, and of the residual matrix. */
ckd_status lossy_device_pass(tile_pass *p, const lossy_tile *t, ckd_error *err);
ckd_status lossy_device_residual(rate_histogram *h, const lossy_tile *t, ckd_error *err);
/* Copies slices of `from`, in the device's memory, to `to` on the host, one after the other. */
ckd_status lossy_device_gather(float *to, struct lossy_device *d, const float *from,
                               const device_slice *slices, uint64_t count, ckd_error *err);
/* Makes the residuals in steps, without factors, as the matrix for the search below. */
ckd_status lossy_device_matrix(const lossy_tile *t, ckd_error *err);

/* ---- low_rank_device.c ---- */
/* The search for factors of a tile's matrix; the context is the tile. It owns the scratch until it ends. */
extern const vectors_backend lossy_device_vectors;
/* Bytes of scratch for `count` vectors of each side. */
uint64_t lossy_device_search_size(uint64_t rows, uint64_t columns, uint64_t count);

/* Puts the plan's steps into the scratch from *used on, without the products of its factors. */
ckd_status lossy_device_steps(device_tile *out, const lossy_tile *t, uint64_t *used, ckd_error *err);
/*
 * Multiplies the plan's factors into d->matrix, with the scratch after `used`: as integers if the factors are small
 * enough, else as floats. Does nothing without factors.
 */
ckd_status lossy_device_factors(device_tile *tile, const lossy_tile *t, uint64_t used, ckd_error *err);

#endif
