/* The interface of engine/lossy/ for other rooms. README.md has an overview. */
#ifndef ENGINE_LOSSY_LOSSY_H
#define ENGINE_LOSSY_LOSSY_H

#include <pthread.h>

#include "base/bytes.h"
#include "base/hash.h"
#include "base/threads.h"
#include "engine/common/common.h"
#include "engine/decode/decode.h"
#include "engine/device/device.h"
#include "engine/lossy/low_rank.h"

/*
 * Lossy coding of a tensor, one tile at a time. A tile is a matrix, a vector, or a panel of a large matrix.
 * It is compared with the values that the parent decodes to, and becomes small integers on a lattice.
 *
 *   lossy_tile_prepare   statistics of the whole tile: movement, weights of rows and columns, steps, low-rank factors
 *   lossy_block    (parallel) integers of one block, its payload, and the values that a decoder will get
 *
 * The loop is closed: a checkpoint has the error of one rounding, however long its chain is. Arithmetic that
 * codec/FORMAT.md does not specify is free: doubles, sums in any order.
 */

#define LOSSY_LEVEL_UP    0.6f /* fraction of a level step from which a value rounds up */
#define LOSSY_LEVELS_NONE 4096 /* a level step so large that every difference rounds to 0 */

/* The three ways to code a tensor lossily; all other tensors are exact. */
typedef enum lossy_part {
    LOSSY_NONE,
    LOSSY_WEIGHT, /* residual to the parent; steps follow the movement since the parent */
    LOSSY_MOMENT, /* first moments: no parent; steps follow their own rows and columns */
    LOSSY_SECOND  /* second moments: no parent; levels, as differences from their rows and columns */
} lossy_part;
/* Returns how to code a tensor of this role and dtype. */
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
    unsigned rounds;       /* subspace iterations beyond the first */
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
    bytes sums, panels, outliers, outliers_of[TILE_PANELS]; /* results of the last pass */
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
/* The optimizer's eps, and its lower effective value in the first steps. */
enum { PAIR_EPS, PAIR_LOW_EPS, PAIR_BOUNDS };

/* The other moment of the same elements: its input values, followed by its decoded values. */
typedef struct lossy_pair {
    const uint16_t *values;
    struct file_scratch *file; /* holds the values if `values` is NULL; both NULL: unknown */
    uint64_t count;            /* elements of each */
    /* A panel's layout: columns of the tile, first column of the panel, columns of the panel. width 0: not a panel. */
    uint64_t stride, first, width;
    pair_bound bounds[PAIR_BOUNDS];
    double decoded; /* on a device: the largest update of the tile's decoded values */
} lossy_pair;

/* Place of a tile: elements first ... first + count - 1 of a region, as a matrix. */
typedef struct tile_shape {
    uint64_t first, count, columns;
    uint64_t phase; /* column of the first element */
    bool vector;
} tile_shape;

typedef struct tile_input {
    const void *values;         /* in the tensor's dtype */
    const float *now;           /* the same as floats */
    const float *parent_values; /* values that the parent decodes to; NULL: no parent */
    struct lossy_device
        *device;      /* holds `now` and `parent_values` in its memory; NULL: they are in host memory */
    uint64_t sampled; /* for a panel: index of its first element in samples of the whole tile */
} tile_input;

/* Facts about a tile from the parent, and from other tensors of the same parameter. */
typedef struct tile_context {
    double parent_error;        /* mean square error of `parent_values` against the parent's original state */
    double expected_movement;   /* RMS of the movement; NaN: estimate it from `parent_values` */
    const lossy_scales *scales; /* scales of the second moment; NULL: unknown */
    lossy_pair pair;            /* for moments only */
} tile_context;

/* Threads and memory for a tile's statistics. */
typedef struct tile_resources {
    thread_pool *pool;         /* NULL: none */
    tile_scratches *scratches; /* for that pool; NULL: each pass allocates its own */
    cancel_check *stop;        /* cancellation; NULL: none */
} tile_resources;

/* Which values are coded as integers. The others are exceptions. */
typedef struct tile_limits {
    /* A larger magnitude, or a larger distance from the parent's value, makes a value an exception. */
    float exception_above, exception_moved;
    bool ordinary; /* no value is an outlier or infinite, and no second moment is negative */
    float largest; /* bound on the magnitudes of values that are not exceptions; 0 for second moments */
    double bound;  /* on |error|; infinite: none */
    /* largest step, even if the target of bits asks for a larger one; infinite: none */
    double step;
} tile_limits;

/* How the blocks of a tile are coded. Set by lossy_tile_prepare. */
typedef struct tile_plan {
    lattice_block lattice;  /* the whole tile, without q and exceptions */
    hash128 shared_content; /* if lattice.shared: content of the side record that has the columns' part */
    float up[3];            /* thresholds from which integers are rounded up */
    low_rank factors;
    bool still; /* nothing moved; the parent's values stay */
    /* All values are on the lattice, so blocks can stand alone as integers; else they do only exactly. */
    bool on_lattice;
    bool offsets_known;     /* the lattice has them */
    bool levels_known;      /* rows and columns determine second moments; no integers are made */
    double standalone_bits; /* estimated bits per element without a parent */
    double movement;        /* estimated RMS of the movement */
    bytes row_memory, column_memory, weight_memory; /* for the lattice's steps, and for weights */
} tile_plan;

/*
 * A tile. lossy_tile_cut sets the shape, the caller sets the input and the context, and lossy_tile_prepare sets the
 * limits and the plan. A function takes the whole tile only if it needs several of these.
 */
typedef struct lossy_tile {
    lossy_part part;
    ckd_dtype dtype;
    const quant_params *params;
    tile_shape shape;
    tile_input input;
    tile_context context;
    tile_resources resources;
    /* Output: scales of second moments. NULL: not wanted. Stays empty if there are none. */
    lossy_scales *found;
    tile_limits limits;
    tile_plan plan;
} lossy_tile;

/* Only weights use a parent. A delta of moments would take about as many bytes, and would add a chain to decode. */
bool lossy_wants_parent(const lossy_tile *t);
/*
 * A tile has at most LOSSY_TILE_ELEMENTS elements. Less staging memory makes tiles smaller, down to
 * LOSSY_TILE_MIN. An element takes up to LOSSY_TILE_BYTES: the input, floats, the parent's values, a panel of
 * these, and factors.
 */
#define LOSSY_TILE_ELEMENTS (UINT64_C(1) << 24)
#define LOSSY_TILE_MIN      (UINT64_C(1) << 20)
#define LOSSY_TILE_BYTES    16u
/* Cuts the tile that begins at element `first` of a region, with at most `max` elements. */
void lossy_tile_cut(tile_shape *shape, const geometry *g, const ckd_region *region, uint64_t elements,
                    uint64_t first, uint64_t max);
/*
 * Returns the number of elements of the block that begins at element `at` of the tile: whole rows, if they
 * are short enough.
 */
uint64_t lossy_block_count(const tile_shape *shape, uint64_t at);

/*
 * Prepares a tile. *worth = false: coding it exactly is better. Errors: NOMEM, DEVICE, and those of t->resources.stop.
 */
ckd_status lossy_tile_prepare(lossy_tile *t, bool *worth, const kernels *k, ckd_error *err);
/* Chooses thresholds, and factors where they pay. A part of lossy_tile_prepare (plan.c). */
ckd_status lossy_tile_plan_rate(lossy_tile *t, const kernels *k, ckd_error *err);
/* Replaces *t by `from`, which is not prepared. *t keeps its memory. */
void lossy_tile_reset(lossy_tile *t, const lossy_tile *from);
void lossy_tile_free(lossy_tile *t);

/* Distance of lossy values from the state. */
typedef struct lossy_error {
    double energy, error;        /* sums of squares over finite values */
    double largest;              /* |error| */
    uint64_t finite, exceptions; /* exceptions: values stored verbatim */
} lossy_error;

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
    bytes q, q8, rebuilt, at, bits, other_moment;
    bytes values;         /* decoded values in the dtype */
    const float *decoded; /* decoded values as floats, valid until the next block */
    lattice_block block;
    lossy_error error;
    bool within;   /* the error is within the tile's bound */
    double update; /* largest decoded update; NaN: the other moment is unknown */
} lossy_job;
void lossy_job_free(lossy_job *j);

/* Codes a block: sets j->values, error and within, and writes the payload. Errors: NOMEM, and those of pair_read. */
ckd_status lossy_block(lossy_job *j, bytes *payload, const lossy_elements *e, symbols_workspace *work,
                       ckd_error *err);
/*
 * Codes the values of the last lossy_block without a parent, and does not change them. The payload is empty if no
 * lattice holds them.
 */
ckd_status lossy_block_standalone(lossy_job *j, bytes *payload, const lossy_tile *t, const kernels *k,
                                  symbols_workspace *work, ckd_error *err);
/* Estimates the size of a standalone block in bytes. */
uint64_t lossy_standalone_size(const lossy_tile *t, uint64_t count);

/*
 * The two moments of a parameter as an optimizer uses them: the update of an element is |m| / (sqrt(v) + eps). Even if
 * both are accurate, an update can be far too large: where v is tiny, a small error of m suffices. The moments are
 * saved one after the other. The second one saved is checked against the first, and no update exceeds PAIR_MAX times
 * the largest true one. This holds for the optimizer's eps and for a lower one: Adam corrects its moments for bias, so
 * eps counts for less in the first steps. Internal to engine/.
 */

#define PAIR_MAX 2.0 /* times the largest true update of the tile */

/*
 * Stores the values of one moment as the high halves of their floats, with an error below a hundredth. Input
 * values are rounded so that their updates do not grow, decoded values so that their updates do not shrink.
 * Values that are not finite, and negative second moments, become NaN.
 */
void pair_record(uint16_t *to, lossy_part part, bool decoded, const float *values, uint64_t n);

/*
 * Raises so_far[b] to the largest update of n elements with the eps of bound b. part: of `values`; `other` is
 * the other moment. NaN has no update.
 */
void pair_largest(double so_far[PAIR_BOUNDS], lossy_part part, const float *values, const uint16_t *other,
                  uint64_t n, const pair_bound bounds[PAIR_BOUNDS]);

/* Sets the largest update of the input, and the limit that follows from it. */
static inline void pair_set_bound(pair_bound *b, double largest) {
    b->largest = largest;
    b->max = PAIR_MAX * largest;
}

static inline bool pair_known(const lossy_pair *p) {
    return p->values || p->file;
}
/* Reads n elements of the other moment from index `at` on. Errors: those of file_scratch_read. */
ckd_status pair_read(uint16_t *to, const lossy_pair *p, bool decoded, uint64_t at, uint64_t n,
                     ckd_error *err);

/* Converts element `at` of a tile or panel to an index of the other moment's array. */
static inline uint64_t pair_index(const lossy_pair *p, uint64_t at) {
    return p->width ? at / p->width * p->stride + p->first + at % p->width : at;
}

/* Returns how many of n elements from `at` on lie in one row of the other moment's array. */
static inline uint64_t pair_in_row(const lossy_pair *p, uint64_t at, uint64_t n) {
    uint64_t left = p->width ? p->width - at % p->width : n;
    return left < n ? left : n;
}

/*
 * Limits the updates of a block that has just been coded (j->decoded is set), and sets j->update. It raises second
 * moments through their integers. It makes first moments exceptions, shrunk as far as necessary. If these would be too
 * many, it sets their integers to 0 and drops the factors. Errors: NOMEM, and those of pair_read.
 */
ckd_status pair_finish(lossy_job *j, const lossy_elements *e, ckd_error *err);
/* Only sets j->update, for values that stay as they are. Errors: as pair_finish. */
ckd_status pair_measure(lossy_job *j, const lossy_tile *t, uint64_t at, const float *decoded, uint64_t n,
                        ckd_error *err);

/* Every stride-th element of a tile of second moments: input and decoded. Zero-initialise. */
typedef struct direction_sample {
    uint64_t count, stride; /* elements of the tile, and from one sample to the next */
    float *input, *decoded; /* point into `memory` */
    bytes memory;
} direction_sample;
/* s: zero, or an earlier tile's sample, whose memory is reused. Errors: NOMEM. */
ckd_status direction_begin(direction_sample *s, uint64_t count, ckd_error *err);
void direction_free(direction_sample *s);
/* Input and decoded values of elements at ... at + count - 1 of a tile. */
typedef struct direction_values {
    const float *input, *decoded;
    uint64_t at, count;
} direction_values;
/* Records the second moments of sampled elements. */
void direction_record(direction_sample *s, const direction_values *v);

/* Sums over the sample, with the first moments of the same tile. */
typedef struct direction_sums {
    double change, all; /* sums of squares */
} direction_sums;
void direction_add(direction_sums *sums, const direction_sample *s, const direction_values *v, double eps);
/*
 * Takes the values of sampled elements only; `at` and `count` are in samples. sums == NULL: records them as second
 * moments. Otherwise compares them, as first moments, with the recorded second moments.
 */
void direction_take(direction_sums *sums, direction_sample *s, const direction_values *v, double eps);
/* Returns the relative change; NaN if there is nothing to compare. */
double direction_change(const direction_sums *sums);

/*
 * Sums over a lossy tile in one pass: panels of rows in parallel, a few rows at a time while they are in the
 * nearest caches. Panels and the order of sums depend on the tile's shape only, so results do not depend on
 * the number of threads.
 */

/* Runs fn(context, p, ...) for all panels, on the tile's pool if it has one. */
ckd_status tile_run_panels(const lossy_tile *t, size_t count, pool_fn fn, void *context, ckd_error *err);
/*
 * tile_rows counts the rows of a tile; long vectors are cut into rows. tile_row_span returns the number of
 * elements of one row, and its first element and column.
 */
uint64_t tile_rows(const tile_shape *shape);
uint64_t tile_row_span(const tile_shape *shape, uint64_t row, uint64_t *first, uint64_t *column);
/* Returns the first row of panel p, if `rows` rows make `panels` panels. */
uint64_t tile_panel(uint64_t rows, uint64_t p, uint64_t panels);
uint64_t tile_panels(const tile_shape *shape);
/* Tells whether factors may pay for the tile, which has been cut. Only first moments and weights have factors. */
bool lossy_may_factor(const lossy_tile *t);

/* ---- sample.c: estimates on slices of rows that are spread over a tile ---- */
#define SAMPLE_SLICE 128u /* elements of a row */
typedef struct tile_slice {
    uint64_t first, row, column, n;
    const float *now, *parent_values; /* parent_values NULL: no parent */
} tile_slice;
typedef struct tile_sample {
    const lossy_tile *tile;
    uint64_t stride, in_round, round; /* in slices */
    uint64_t row, at;
    float *now, *parent_values; /* on a device: copies of all slices; `next` is the offset of the next one */
    uint64_t next;
} tile_sample;
/*
 * Begins a sample of about `elements` elements, or of all if the tile has no more. Release with sample_end,
 * whatever the status. Errors: NOMEM, DEVICE.
 */
ckd_status sample_begin(tile_sample *s, const lossy_tile *t, uint64_t elements, ckd_error *err);
bool sample_next(tile_slice *out, tile_sample *s);
void sample_end(tile_sample *s);

/*
 * A lossy tile in the memory of a device. The device makes its statistics, integers and decoded values. The host
 * receives sums, hashes, and the integers at two bits each. The host makes plans, rounds factors and does the entropy
 * coding, as for other tiles.
 *
 * The device takes the usual tiles of training: whole rows, a parent if they are weights, and few exceptions. Other
 * tiles are copied to the host and coded there.
 */

/* A master's block as it will appear in a rounded copy of a narrower dtype. */
typedef struct lossy_device_rounded {
    hash128 original, content;
    lossy_error error;
} lossy_device_rounded;

typedef struct lossy_device_block {
    uint64_t at, count; /* in the tile */
    hash128 original, content;
    hash128 parent_content; /* f32 only: hash of the parent's values */
    bool nonzero;           /* some integer is not 0 */
    lossy_error error;
    lossy_device_rounded bf16, f16; /* masters only */
} lossy_device_block;

/*
 * Arrays of a tile, or of a panel of it, in the device's memory: input, input as floats, the parent's values,
 * decoded values.
 */
typedef struct lossy_device_arrays {
    const void *input;
    const float *now;
    float *parent_values; /* NULL: no parent */
    float *values;
    void *cast;             /* decoded values in the dtype; NULL if that is f32 */
    const int8_t *integers; /* in host memory; NULL: all are 0 */
    /* In host memory: the exceptions, ascending; q: their bits in the dtype. */
    const device_element_at *exceptions;
    uint64_t exception_count;
    uint64_t count;
} lossy_device_arrays;

struct lossy_device {
    device_lease *lease;
    ckd_store *store;
    device_reference *reference; /* the tile's values from the last save, kept on the device; NULL: none */
    uint64_t rows, columns, count;
    ckd_dtype dtype;
    bool master;                   /* the blocks' hashes will identify rounded copies of it */
    lossy_device_arrays whole, at; /* at: the arrays that blocks lie in: the whole tile or a panel */
    float *matrix;                 /* residuals in steps, or products of factors */
    int8_t *q8;
    device_exceptions exceptions; /* room for exceptions, without limits yet */
    uint8_t *panel;               /* memory for a panel's arrays */
    uint8_t *scratch;             /* reused by one operation after the other */
    uint64_t scratch_size;
    struct { /* a search for factors, in the scratch */
        float *spare, *mix;
        double *scale;
        uint32_t *largest;
    } search;
    bytes integers, panel_integers;         /* int8 each */
    bytes exception_list, panel_exceptions; /* device_element_at each */
    lossy_device_block *blocks;
    size_t block_count, block_scratch;
    pthread_mutex_t mutex; /* held while the queue is used; blocks are coded in parallel */
};

/*
 * Tells whether a device can code the tile, which has been cut and has its part, dtype and parameters. input: the
 * tile's address on the device.
 */
bool lossy_device_can_code(const lossy_tile *t, const void *input);
/*
 * A tile on a device and its parent's values. At most one of these is set: `parent_values` (on the host),
 * `reference` (kept on the device), makes_parent_values (decoded on the device later).
 */
typedef struct lossy_device_values {
    ckd_store *store;
    device_lease *lease;
    const void *input;
    const float *parent_values;
    device_reference *reference; /* taken by the caller; lossy_device_end releases it */
    /* The caller decodes the parent's values, then calls lossy_device_before_made before anything else. */
    bool makes_parent_values;
    uint64_t widest; /* largest number of columns of its panels */
    bool master;
    bool only_input; /* only hashes of the input are wanted */
} lossy_device_values;
/*
 * Allocates memory for the tile and converts its elements to floats. Sets t->input.device, now and parent_values; the
 * last two are NULL with only_input. Release with lossy_device_end. Errors: NOMEM (also of the device: the host can
 * code the tile), DEVICE.
 */
ckd_status lossy_device_begin(struct lossy_device *d, lossy_tile *t, const lossy_device_values *values,
                              ckd_error *err);
void lossy_device_end(struct lossy_device *d);
/*
 * `parent_values`: where the caller decodes the parent's values, in the tile's dtype. `spare`: memory that is free
 * until then.
 */
typedef struct lossy_device_scratch {
    void *parent_values, *spare;
    uint64_t size; /* size of `spare`: at least 9 bytes per element */
} lossy_device_scratch;
lossy_device_scratch lossy_device_scratch_of(const struct lossy_device *d);
/* Called when the parent's values are decoded. Converts them to floats if the tile has another dtype. */
ckd_status lossy_device_before_made(struct lossy_device *d, ckd_error *err);

/*
 * A block of the parent in the tile. It begins at element `at` and has `width` elements in each row of the
 * tile. width = count: it is contiguous.
 */
typedef struct lossy_device_part {
    uint64_t at, width, count;
    hash128 content;
} lossy_device_part;
/*
 * Compares the hashes of the tile's reference with those of the parent's blocks. `parts` has these blocks' places in
 * the tile.
 */
ckd_status lossy_device_compare(bool *same, const struct lossy_device *d, const lossy_device_part *parts,
                                size_t count, ckd_error *err);
/*
 * Keeps the decoded values on the device for the next save, under `key`. With only_input it does nothing.
 * Errors: NOMEM, DEVICE.
 */
ckd_status lossy_device_keep_reference(struct lossy_device *d, const device_reference_key *key,
                                       ckd_error *err);

/* ---- device_code.c ---- */
/* Makes the integers and decoded values of a prepared tile. *done = false: the tile does not suit a device. */
ckd_status lossy_device_code(bool *done, lossy_tile *t, ckd_error *err);
/*
 * Gathers the arrays of the panel t, which begins at column `first` of the tile. They replace the tile's
 * arrays until the next panel.
 */
ckd_status lossy_device_panel(lossy_tile *t, uint64_t first, ckd_error *err);
/* Does the work of lossy_block with the device's results. */
ckd_status lossy_device_block_encode(lossy_job *j, bytes *payload, const lossy_elements *e,
                                     symbols_workspace *work, ckd_error *err);
/* Copies elements of a block in their dtype to `to`: the input, or the decoded values. Thread-safe. */
ckd_status lossy_device_fetch(void *to, struct lossy_device *d, uint64_t at, uint64_t count, bool decoded,
                              ckd_error *err);
/* Records the sample of second moments, or adds first moments to the sums. Errors: NOMEM, DEVICE. */
ckd_status lossy_device_direction(direction_sums *sums, direction_sample *s, const lossy_tile *t, double eps,
                                  ckd_error *err);

/* ---- device_moments.c ---- */
/* Converts the input and the decoded values of a coded tile to halves (pair_record), for the other moment. */
ckd_status lossy_device_halves(const lossy_tile *t, ckd_error *err);
/* Copies n halves from index `at` on. The input's halves come first, then those of the decoded values. */
ckd_status lossy_device_get_halves(uint16_t *to, struct lossy_device *d, uint64_t at, uint64_t n,
                                   ckd_error *err);
/* Puts n halves of the other moment, from index `at` on, on the device. */
ckd_status lossy_device_put_halves(struct lossy_device *d, const uint16_t *from, uint64_t at, uint64_t n,
                                   ckd_error *err);
/*
 * Finds the largest updates with the other moment, all of whose halves are on the device. Sets t->context.pair.decoded
 * and, for the given eps, t->context.pair.bounds. *within = false: an update of the decoded values is too large.
 */
ckd_status lossy_device_updates(bool *within, lossy_tile *t, ckd_error *err);

/* ---- device_blocks.c ---- */
/*
 * lossy_device_add_block adds the next block of the tile or panel; at = 0 starts a new list. lossy_device_measure then
 * computes hashes and errors of all blocks.
 */
ckd_status lossy_device_add_block(struct lossy_device *d, uint64_t at, uint64_t count, ckd_error *err);
ckd_status lossy_device_measure(const struct lossy_device *d, ckd_error *err);
const lossy_device_block *lossy_device_block_of(const struct lossy_device *d, uint64_t at);

#endif
