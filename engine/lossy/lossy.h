/*
 * Lossy coding of a tensor, one tile at a time. A tile is a matrix, a vector, or a panel of a large matrix.
 * It is compared with the values that the parent decodes to, and becomes small integers on a lattice.
 *
 *   tile_prepare   statistics of the whole tile: its movement, the weights of rows and columns, steps, low-rank factors
 *   lossy_block    (parallel) integers of one block, its payload, and the values that a decoder will get
 *
 * The loop is closed: the error of a checkpoint is that of one rounding, however long its chain is. Where
 * codec/FORMAT.md makes no claim the arithmetic is free: doubles, sums in any order. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_H
#define ENGINE_LOSSY_H

#include "base/hash.h"
#include "base/threads.h"
#include "engine/decode/lattice_values.h"
#include "engine/lossy/low_rank.h"
#include "engine/common/region.h"

#define LOSSY_LEVEL_UP    0.6f /* fraction of a step of levels; from there on a value rounds up */
#define LOSSY_LEVELS_NONE 4096 /* a step of levels so large that every difference rounds to 0 */

/* The three ways to code a tensor lossily; all other tensors are exact. */
typedef enum lossy_part {
    LOSSY_NONE,
    LOSSY_WEIGHT, /* residual to the parent; steps follow the movement since the parent */
    LOSSY_MOMENT, /* first moments: no parent; steps follow their own rows and columns */
    LOSSY_SECOND  /* second moments: no parent; levels, as differences to their rows and columns */
} lossy_part;
/* Returns the way for a role and dtype. */
lossy_part lossy_part_of(ckd_role role, ckd_dtype dtype);

/* Quantizer parameters. Steps are relative to the values that they quantise, so they fit any model. */
typedef struct quant_params {
    double weight;         /* step, in RMS of the movement since the parent */
    double leftover;       /* error that earlier deltas may leave, in the same unit, before steps get finer */
    double moment;         /* step, in RMS of the normalised moments */
    int32_t second;        /* step, in levels; LOSSY_LEVELS_NONE: rows and columns suffice */
    int32_t second_vector; /* step of vectors, which have no rows and columns */
    double vector;         /* steps of vectors, relative to those of matrices */
    double target;         /* bits per element; 0: no target, the steps decide */
    double root_units;     /* lattice units in the RMS of weights without a parent */
    double lambda;         /* price of a bit, in squared steps */
    double max_error;      /* bound on |error|, in RMS of the tensor; 0: none */
    int effort;            /* 1 ... 9 */
    double bits_for_load;  /* in a chain: bits worth the decoding time of one base load */
    uint32_t max_rank;     /* largest number of components of a matrix's factors */
    unsigned rounds;       /* of the search for components */
} quant_params;
quant_params quant_params_of(ckd_fidelity fidelity, int effort);

/* Base-2 logarithms of the mean second moment of each row, of each column, and of the whole matrix. */
typedef struct lossy_scales {
    uint64_t rows, columns;
    double *row, *column; /* point into `memory` */
    double all;
    bytes memory;
} lossy_scales;
void lossy_scales_free(lossy_scales *s);

#define TILE_PANELS 32u /* largest number of panels of a tile, which are summed in parallel */

/* Scratch for a tile's statistics; the next tile reuses it. Zero-initialise all but `workers`. */
typedef struct tile_scratch {
    lattice_work work;
    bytes rows;
} tile_scratch;
typedef struct tile_scratches {
    tile_scratch *workers; /* one per thread of the pool */
    uint32_t count;
    bytes now, moved, parts;
    bytes sums, panels, outliers, outliers_of[TILE_PANELS]; /* of the last pass */
    lossy_scales scales;
    bytes counts, histogram;
    lattice_work work; /* steps of the tile */
    low_rank_scratch search;
} tile_scratches;
void tile_scratches_free(tile_scratches *r);

/* For one eps of an optimizer: the largest update of the input, and the limit for every decoded update. */
typedef struct pair_bound {
    double eps, largest, max;
} pair_bound;
/* The optimizer's eps, and its effective value after few steps. */
enum { PAIR_EPS, PAIR_LOW_EPS, PAIR_BOUNDS };

/* The other moment of the same elements: its input values, followed by its decoded values (moment_pair.h). */
typedef struct lossy_pair {
    const uint16_t *values;
    struct file_scratch *file; /* holds the values if `values` is NULL; both NULL: unknown */
    uint64_t count;            /* elements of each */
    /* Of a panel: columns of the tile, first column of the panel, columns of the panel. width 0: not a panel. */
    uint64_t stride, first, width;
    pair_bound bounds[PAIR_BOUNDS];
    double decoded; /* of a tile on a device: the largest update of its decoded values */
} lossy_pair;

/* Elements first ... first + count - 1 of a region, as a matrix. */
typedef struct lossy_tile {
    lossy_part part;
    ckd_dtype dtype;
    const quant_params *params;
    uint64_t first, count, columns, phase;
    bool vector;
    const void *values;         /* input elements */
    const float *now;           /* the input as floats */
    const float *before;        /* values that the parent decodes to; NULL: no parent */
    double before_error;        /* mean square error of `before` against the state that it stands for */
    double expected_movement;   /* RMS of the movement; NaN: estimate it from `before` */
    const lossy_scales *scales; /* of the second moment; NULL: unknown */
    /* Output: scales of second moments. NULL: not wanted. Stays empty if there are none. */
    lossy_scales *found;
    thread_pool *pool;           /* for statistics; NULL: none */
    tile_scratches *scratches;   /* of that pool; NULL: each pass allocates its own */
    cancel_check *stop;          /* cancellation; NULL: none */
    struct lossy_device *device; /* holds `now` and `before` in its memory; NULL: they are in host memory */
    uint64_t sampled;            /* of a panel: index of its first element in samples of the whole tile */
    lossy_pair pair;             /* of moments only */
    /* Set by lossy_tile_prepare: */
    hash128 shared_content; /* if plan.shared: content of the side record that has the columns' part */
    lattice_block plan;     /* of the whole tile, without q and exceptions */
    float up[3];            /* thresholds from which integers are rounded up */
    /* A larger magnitude, or a larger distance from the parent's value, makes a value an exception. */
    float exception_above, exception_moved;
    double bound;           /* on |error|; infinite: none */
    double standalone_bits; /* estimated bits per element without a parent */
    bool still;             /* nothing moved; the parent's values stay */
    /* All values are on the lattice and can stand alone as integers; else they stand alone only exactly. */
    bool on_lattice;
    double movement;    /* estimated RMS of the movement */
    bool offsets_known; /* the plan has them */
    bool levels_known;  /* rows and columns determine second moments; no integers are made */
    bool ordinary;      /* no value is an outlier, infinite or (second moments) negative */
    float largest;      /* bound on magnitudes other than exceptions; of second moments: 0 */
    bytes row, column, weight;
    low_rank factors;
} lossy_tile;

/* Only weights use a parent. A delta of moments would take about as many bytes, and a chain to decode. */
bool lossy_wants_parent(const lossy_tile *t);
/*
 * A tile has at most LOSSY_TILE_ELEMENTS elements. Less staging memory makes tiles smaller, down to
 * LOSSY_TILE_MIN. An element takes up to LOSSY_TILE_BYTES: the input, floats, the parent's values, a panel of
 * these, and factors.
 */
#define LOSSY_TILE_ELEMENTS (UINT64_C(1) << 24)
#define LOSSY_TILE_MIN      (UINT64_C(1) << 20)
#define LOSSY_TILE_BYTES    16u
/* Cuts the tile that begins at `first` of a region, with at most `max` elements: sets its end and its rows. */
void lossy_tile_cut(lossy_tile *t, const geometry *g, const ckd_region *region, uint64_t elements,
                    uint64_t first, uint64_t max);
/*
 * Returns the number of elements of the block that begins at element `at` of the tile: whole rows, if they
 * are short enough.
 */
uint64_t lossy_block_count(const lossy_tile *t, uint64_t at);

/* Prepares a tile. *worth = false: coding it exactly is better. Errors: NOMEM, and those of t->stop. */
ckd_status lossy_tile_prepare(lossy_tile *t, bool *worth, const kernels *k, ckd_error *err);
/* Chooses thresholds, and factors where they pay. A part of lossy_tile_prepare (plan.c). */
ckd_status lossy_tile_plan_rate(lossy_tile *t, const kernels *k, ckd_error *err);
/* Replaces *t by `other`, which is not prepared. *t keeps its memory. */
void lossy_tile_reset(lossy_tile *t, const lossy_tile *other);
void lossy_tile_free(lossy_tile *t);

/* Distance of lossy values from the state. */
typedef struct lossy_error {
    double energy, error;        /* sums of squares over finite values */
    double largest;              /* |error| */
    uint64_t finite, exceptions; /* exceptions: values that are not finite; they are stored verbatim */
} lossy_error;

/* Adds the error of n more values. */
void lossy_error_add(lossy_error *e, const float *input, const float *decoded, uint64_t n, const kernels *k);

/* The elements of a tile that become one block: at ... at + count - 1. */
typedef struct lossy_elements {
    const lossy_tile *tile;
    uint64_t at, count;
    const void *original; /* in their dtype; not for a tile on a device */
    const kernels *kernels;
} lossy_elements;

/* Scratch of one worker, and its result for one block. */
typedef struct lossy_job {
    lattice_work work;
    bytes q, few, rebuilt, at, bits, other;
    bytes values;         /* decoded values in the dtype */
    const float *decoded; /* decoded values as floats, valid until the next block */
    lattice_block block;
    lossy_error error;
    bool within;   /* the error keeps the tile's bound */
    double update; /* largest decoded update; NaN: the other moment is unknown */
} lossy_job;
void lossy_job_free(lossy_job *j);

/* Codes a block: sets j->values, error and within, and writes the payload. Errors: NOMEM. */
ckd_status lossy_block(lossy_job *j, bytes *payload, const lossy_elements *e, symbols_workspace *work,
                       ckd_error *err);
/*
 * Codes the values of the last lossy_block without a parent. They stay the same. An empty payload: no lattice
 * holds them.
 */
ckd_status lossy_block_standalone(lossy_job *j, bytes *payload, const lossy_tile *t, const kernels *k,
                                  symbols_workspace *work, ckd_error *err);
/* Estimates its size in bytes. */
uint64_t lossy_standalone_size(const lossy_tile *t, uint64_t count);

#endif
