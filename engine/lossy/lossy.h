/*
 * Lossy coding of a tensor: a tile of it at a time, which is a matrix (or a vector, or a panel of a large matrix), is compared with
 * what the parent's decoder gives, and becomes small integers on a lattice.
 *
 *   tile_prepare   statistics of the whole tile: how far it moved, what its rows and columns weigh, steps, low-rank factors
 *   lossy_block    (parallel) integers of one block, payload, and the values that a decoder will get
 *
 * Closed loop: the error of a checkpoint is that of one rounding, however long its chain. Where no claim of codec/FORMAT.md is
 * concerned the arithmetic is free: doubles, sums in any order. Internal to engine/.
 */
#ifndef ENGINE_LOSSY_H
#define ENGINE_LOSSY_H

#include "base/hash.h"
#include "base/threads.h"
#include "engine/decode/lattice_values.h"
#include "engine/lossy/low_rank.h"
#include "engine/common/region.h"

#define LOSSY_LEVEL_UP    0.6f /* of a step of levels: from there on the next integer is taken */
#define LOSSY_LEVELS_NONE 4096 /* a step of levels that no difference reaches */

/* Which of three ways a tensor is coded; the others are exact. */
typedef enum lossy_part {
    LOSSY_NONE,
    LOSSY_WEIGHT, /* residual to the parent, steps that follow its movement */
    LOSSY_MOMENT, /* first moments: anew each time, steps that follow its own rows and columns */
    LOSSY_SECOND  /* second moments: anew each time, levels, as differences to their rows and columns */
} lossy_part;
/* Of a role and dtype. */
lossy_part lossy_part_of(ckd_role role, ckd_dtype dtype);

/* How finely. Steps are relative to what they quantise, so that they fit any model. */
typedef struct quant_params {
    double weight;         /* step, in root mean squares of the movement since the parent */
    double leftover;       /* what earlier deltas may have left out, in the same, before steps get finer */
    double moment;         /* step, in root mean squares of the normalised moments */
    int32_t second;        /* step, in levels; LOSSY_LEVELS_NONE: rows and columns say enough */
    int32_t second_vector; /* of vectors, which have none */
    double vector;         /* steps of vectors, in those of matrices */
    double target;         /* bits an element; 0: whatever the steps give */
    double root_units;     /* lattice units in the root mean square of weights without a parent */
    double lambda;         /* what a bit is worth, in squared steps */
    double max_error;      /* bound on |error|, in root mean squares of the tensor; 0: none */
    int effort;            /* 1 ... 9 */
    double bits_for_load;  /* bits that a base load of decoding time is worth, in a chain */
    uint32_t max_rank;     /* components of a matrix at most */
    unsigned rounds;       /* of the search for them */
} quant_params;
quant_params quant_params_of(ckd_fidelity fidelity, int effort);

/* Logarithms (base 2) of the mean second moment of each row and column of a matrix, and of all of it. */
typedef struct lossy_scales {
    uint64_t rows, columns;
    double *row, *column; /* in: */
    double all;
    bytes memory;
} lossy_scales;
void lossy_scales_free(lossy_scales *s);

#define TILE_PANELS 32u /* in which a tile is looked at, at most */

/* Scratch of a tile's statistics, which the next tile's use again. Zero-initialise, but for workers. */
typedef struct tile_scratch {
    lattice_work work;
    bytes rows;
} tile_scratch;
typedef struct tile_scratches {
    tile_scratch *workers; /* one for each thread of the pool */
    uint32_t count;
    bytes now, moved, parts;
    bytes sums, panels, outliers, outliers_of[TILE_PANELS]; /* of the one pass that is looked at */
    lossy_scales scales;
    bytes counts, histogram;
    lattice_work work; /* the tile's steps */
    low_rank_scratch search;
} tile_scratches;
void tile_scratches_free(tile_scratches *r);

/* Of an optimizer's eps: the largest update that was given, and what none that a decoder gets may exceed. */
typedef struct pair_bound {
    double eps, largest, max;
} pair_bound;
enum { PAIR_EPS, PAIR_LOW_EPS, PAIR_BOUNDS }; /* the optimizer's, and its effect after few steps */

/* The other moment of the same elements: what was given, and behind it what a decoder gets (moment_pair.h). */
typedef struct lossy_pair {
    const uint16_t *values;
    struct file_scratch *file; /* has them, if `values` is NULL; neither: nothing is known */
    uint64_t count;            /* of each */
    uint64_t stride, first,
        width; /* of a panel: the tile's columns, the panel's first one, and its own; width 0: none */
    pair_bound bounds[PAIR_BOUNDS];
} lossy_pair;

/* Elements first ... first + count - 1 of a region, as a matrix. */
typedef struct lossy_tile {
    lossy_part part;
    ckd_dtype dtype;
    const quant_params *params;
    uint64_t first, count, columns, phase;
    bool vector;
    const void *values;         /* the elements as they were given */
    const float *now;           /* the same as floats */
    const float *before;        /* what the parent's decoder gives; NULL: no parent */
    double before_error;        /* mean square error of `before` against what it stands for */
    double expected_movement;   /* root mean square, if it is not to be found from `before`; NaN: it is */
    const lossy_scales *scales; /* of the second moment; NULL: not known */
    lossy_scales
        *found;        /* where those of second moments go; NULL: nowhere. Left empty where there are none */
    thread_pool *pool; /* for statistics; NULL: none */
    tile_scratches *scratches;   /* of that pool; NULL: each pass has its own */
    cancel_check *stop;          /* whether it is still wanted; NULL: it is */
    struct lossy_device *device; /* in whose memory now and before are; NULL: the host's */
    uint64_t sampled;            /* where its elements begin in samples of what it is a panel of */
    lossy_pair pair;             /* of moments */
    /* set by tile_prepare */
    hash128 shared_content; /* if plan.shared: of the side record that has the columns' part */
    lattice_block plan;     /* of the whole tile, without q and exceptions */
    float up[3];            /* from where on integers are rounded up */
    float exception_above,
        exception_moved;    /* values so large, or so far from the parent's, are kept as they are */
    double bound;           /* on |error|; infinite: none */
    double standalone_bits; /* about what an element takes without a parent */
    bool still;             /* nothing moved: the parent's values stay */
    bool on_lattice;        /* all values are, so that they can stand alone as integers; else only exactly */
    double movement;        /* estimated root mean square of the movement */
    bool offsets_known;     /* the plan has them */
    bool levels_known;      /* rows and columns say all of second moments: no integers are made */
    bool ordinary;          /* nothing is so large, infinite or, of second moments, negative */
    float largest;          /* magnitude that is not kept; of second moments: 0 */
    bytes row, column, weight;
    low_rank factors;
} lossy_tile;

/* Moments are coded anew each time: differences would take about as many bytes, and a chain to decode. */
bool lossy_wants_parent(const lossy_tile *t);
/* Of a tile at most. Of smaller ones, as many as are in memory at once in up to 16 bytes each: given, as floats, the parent's, a panel of these, and factors. */
#define LOSSY_TILE_ELEMENTS (UINT64_C(1) << 24)
#define LOSSY_TILE_MIN      (UINT64_C(1) << 20)
#define LOSSY_TILE_BYTES    16u
/* Where a tile of a region ends that begins at `first`, of `max` elements at most, and what its rows are. */
void lossy_tile_cut(lossy_tile *t, const geometry *g, const ckd_region *region, uint64_t elements,
                    uint64_t first, uint64_t max);
/* Elements of the block of a tile that begins at element `at` of it: whole rows, if they are short enough. */
uint64_t lossy_block_count(const lossy_tile *t, uint64_t at);

/* false in *worth: better coded exactly. Errors: NOMEM, and what the stop says. */
ckd_status lossy_tile_prepare(lossy_tile *t, bool *worth, const kernels *k, ckd_error *err);
/* Thresholds, and factors where they pay; a part of lossy_tile_prepare (plan.c). */
ckd_status lossy_tile_plan_rate(lossy_tile *t, const kernels *k, ckd_error *err);
/* Once it is cut: is it one whose factors may pay? Of first moments and weights. */
bool lossy_may_factor(const lossy_tile *t);
/* *t becomes the other one, which is not prepared, and keeps its memory. */
void lossy_tile_reset(lossy_tile *t, const lossy_tile *other);
void lossy_tile_free(lossy_tile *t);

/* How far lossy values are from those they stand for. */
typedef struct lossy_error {
    double energy, error;        /* sums of squares, of finite values */
    double largest;              /* |error| */
    uint64_t finite, exceptions; /* values that are not finite are kept as they are */
} lossy_error;

/* Adds that of n values more. */
void lossy_error_add(lossy_error *e, const float *input, const float *decoded, uint64_t n, const kernels *k);

/* Scratch of one worker, and what it made of one block. */
typedef struct lossy_job {
    lattice_work work;
    bytes q, few, rebuilt, at, bits, other;
    bytes values;         /* the block as a decoder will get it, in the dtype */
    const float *decoded; /* the same as floats, until the next block */
    lattice_block block;
    lossy_error error;
    bool within;   /* the bound, if there is one, is kept */
    double update; /* the largest that a decoder gets; NaN: the tile has no other moment */
} lossy_job;
void lossy_job_free(lossy_job *j);

/*
 * Codes elements at ... at + count - 1 of the tile; sets j->values, error and within, and appends the payload. original: the
 * elements in their dtype. Errors: NOMEM.
 */
ckd_status lossy_block(lossy_job *j, bytes *payload, const lossy_tile *t, uint64_t at, uint64_t count,
                       const void *original, const kernels *k, symbols_workspace *work, ckd_error *err);
/* What lossy_block gave, without a parent: the same values, on their own. */
ckd_status lossy_block_standalone(lossy_job *j, bytes *payload, const lossy_tile *t, const kernels *k,
                                  symbols_workspace *work, ckd_error *err);
/* About its size in bytes. */
uint64_t lossy_standalone_size(const lossy_tile *t, uint64_t count);

#endif
