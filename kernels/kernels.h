/*
 * Array arithmetic: one table of functions per backend. The CPU table is the definition; other backends
 * (CUDA) give the same bits. Callers own all buffers; nothing is allocated, nothing fails. Thread-safe.
 * Buffers need no alignment; they must not overlap unless a comment allows it.
 *
 * The functions for exact coding, except optimizer_step, are integer arithmetic on the bits of values. NaN
 * payloads, -0 and denormals pass unchanged. Callers are in the library's floating-point mode
 * (base/float_mode.h).
 */
#ifndef KERNELS_KERNELS_H
#define KERNELS_KERNELS_H

#include <stdbool.h>

#include "include/ckptdelta.h"

#define KERNELS_VERSION 8

/* A rule of FORMAT.md, "Optimizer steps", and the coefficients of its group record, in the record's order. */
#define STEP_COEFFICIENTS 15
typedef struct step_rule {
    uint32_t rule;
    double coefficients[STEP_COEFFICIENTS];
} step_rule;
/* How the elements of one row of a lossy block lie on their lattice; codec/FORMAT.md, "Lattice blocks". */
typedef struct lattice_run {
    float unit, per_unit;     /* 2^e and 2^-e: the lattice's spacing */
    float row_step;           /* lattice units per integer, for its row ... */
    const float *column_step; /* ... times this, for its column; NULL: 1 */
    float low_rank_unit;      /* steps per unit of the low-rank part */
    float offset[3];          /* steps by which |q| = 1, 2 and more lie below |q| */
} lattice_run;

/* The same for second moments, whose lattice consists of levels: eighths of an octave. */
typedef struct level_run {
    bool has_parent;
    int32_t row;           /* levels added to the whole row ... */
    const int32_t *column; /* ... and these per element */
    int32_t birth;         /* the level to start from if there is no parent or its value is zero */
    int32_t step;          /* levels per integer */
} level_run;

/* Sums over runs of a lossy tile. Initialise with LATTICE_SUMS_INIT; sums_of adds to them. */
typedef struct lattice_sums {
    double now, moved, weighted;       /* sums of squares: now, now - parent_values, that times its weights */
    float largest, smallest, farthest; /* largest |now|, least now, largest |now - parent_values| */
    uint64_t finite, compared;         /* numbers of values and of differences in the sums */
    uint32_t parent_bits;              /* bits that are set in any of the parent's values */
    int32_t lowest_bit;                /* exponent of their lowest bit; INT32_MAX: all are zero */
} lattice_sums;
#define LATTICE_SUMS_INIT \
    { .smallest = __builtin_inff(), .lowest_bit = INT32_MAX }

/*
 * A run of one row, to be summed. parent_values (NULL: zeros) and weight (of columns) may be NULL. Only magnitudes of
 * now up to limits[0], and differences up to limits[1], count.
 */
typedef struct sums_run {
    const float *now, *parent_values, *weight;
    float row_weight;
    const float *limits;
    bool lattice; /* sums parent_bits and lowest_bit as well */
} sums_run;

/* Distances of |residual| below |q|, and their numbers, for |q| = 1, 2, more. */
typedef struct level_sums {
    double below[3];
    uint64_t count[3];
} level_sums;

/*
 * Sums of squares of input values and of errors, their number, and the largest error (infinite if any is not
 * finite).
 */
typedef struct error_sums {
    double energy, error;
    uint64_t finite;
    float largest;
} error_sums;

/* Sums over each column: elements that count, their rows' scales (or NULL), and their number. */
typedef struct moment_sums {
    double *sum, *scales;
    uint32_t *count;
} moment_sums;
/* Rows of columns to be summed, `stride` elements apart. */
typedef struct moment_rows {
    const float *now;
    size_t stride, rows;
    const double *scale; /* per row */
    bool magnitudes;     /* sums |now| */
    float limit;         /* larger elements do not count */
} moment_rows;

/*
 * Whole rows of a lossy block, and the factors of their low-rank part: left (rows x rank) and right (rank x columns),
 * integers in floats as for `products`. right is packed: for each LOW_RANK_PANEL columns it has all components, one
 * after the other, with zeros beyond the last column.
 */
typedef struct low_rank_tile {
    float *values;
    const int8_t *q8; /* NULL: all are zero */
    const float *left, *right;
    const float *row_step; /* per row; replaces the run's */
    size_t rows, rank, columns;
} low_rank_tile;

#define LOW_RANK_PANEL 16 /* columns */

typedef struct kernels {
    uint32_t version; /* KERNELS_VERSION; a backend of another version is not used */
    const char *name;

    /*
     * residual[i] = the bits of current[i] minus the bits of previous[i], as integers modulo 2^width; width:
     * the dtype's bits. This suits floats, too: nearby values of one sign have small differences, and a
     * change of sign flips the top bit of the difference of the magnitudes. residual may be current or
     * previous.
     */
    void (*ordered_residual)(ckd_dtype dtype, void *residual, const void *current, const void *previous,
                             size_t n);
    /* The inverse: current[i] from previous[i] and residual[i]. current may be previous or residual. */
    void (*ordered_apply)(ckd_dtype dtype, void *current, const void *previous, const void *residual,
                          size_t n);

    /*
     * Floats: rotates the bits left by one, so that the exponent leads and the sign is the lowest bit.
     * Integers stay unchanged. In place allowed.
     */
    void (*rotate_sign)(ckd_dtype dtype, void *rotated, const void *values, size_t n);
    void (*unrotate_sign)(ckd_dtype dtype, void *values, const void *rotated, size_t n);

    /*
     * Gives each element's context in an entropy coder, 0 ... 255, from a value that the decoder knows: the biased
     * exponent of a float (f64: in f32's bias, clamped), the bit length of an integer's magnitude.
     */
    void (*magnitude_context)(ckd_dtype dtype, uint8_t *context, const void *values, size_t n);

    /*
     * Rounds floats to a narrower float dtype, to nearest even. NaN becomes the quiet NaN 0x7fc0 (bf16),
     * 0x7e00 (f16) or 0x7fc00000 (f32); overflow becomes infinity; denormals are kept. Returns false if the
     * pair of dtypes is not supported (f32 -> bf16, f32 -> f16, f64 -> f32 are).
     */
    bool (*cast)(ckd_dtype to, void *out, ckd_dtype from, const void *in, size_t n);

    /*
     * Predicts n f32 values from the parent's and one or two other arrays, which the rule names (`second` is
     * not read if it takes one). out may be one of them. Returns false if the rule is unknown.
     */
    bool (*optimizer_step)(const step_rule *rule, void *out, const void *parent_values, const void *first,
                           const void *second, size_t n);
    /* Converts f32, f16 and bf16 to floats, exactly. Returns false for other dtypes. */
    bool (*widen)(float *to, ckd_dtype from, const void *in, size_t n);

    /*
     * Lossy blocks, n elements of one row at a time. values: the parent's (zeros without one) on entry, this
     * block's on return. low_rank: sums of products of factors, or NULL.
     */
    void (*lattice_apply)(float *values, const int32_t *q, const float *low_rank, size_t n,
                          const lattice_run *run);
    /* lattice_apply from zeros, with steps of one unit: values = q * unit. */
    void (*lattice_values)(float *values, const int32_t *q, size_t n, float unit);
    void (*widen_integers)(int32_t *to, const int8_t *q, size_t n);
    /* lattice_apply without a low-rank part, for integers that are mostly 0. */
    void (*lattice_apply_q8)(float *values, const int8_t *q, size_t n, const lattice_run *run);
    /*
     * sums = left (rows x rank) times right (rank x columns), integers in floats. The caller ensures that no
     * sum of magnitudes reaches 2^24, so sums are exact in any order.
     */
    void (*products)(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                     size_t columns);
    /*
     * Multiplies matrices of any floats; for encoders only. Bits may depend on the backend, and on
     * kernels/blas.h, which the CPU's gemm tries first.
     */
    void (*gemm)(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                 size_t columns);
    /* lattice_apply for whole rows, with the sums of products of their factors. */
    void (*low_rank_apply)(const low_rank_tile *tile, const lattice_run *run);
    /*
     * Converts a factor (count x rank) to floats, in the same order. Raises largest[rank] to the largest
     * magnitude of each component. Integers are below 2^24; in place allowed.
     */
    void (*factor_values)(float *values, float *largest, const int32_t *factor, size_t count, size_t rank);
    /*
     * Transposes a factor (columns x rank to rank x columns) and multiplies component k by scale[k]. Packs it
     * in panels of `wide` columns: all components of the first `wide` columns, then of the next. Zeros fill
     * up the last panel.
     */
    void (*factor_panels)(float *panels, const float *values, const float *scale, size_t columns, size_t rank,
                          size_t wide);
    /*
     * Residual in steps, before rounding: now minus the result of lattice_apply with q = 0. 0 where it
     * reaches 2^30 or is not finite.
     */
    void (*lattice_residual)(float *residual, const float *now, const float *previous, const float *low_rank,
                             size_t n, const lattice_run *run);
    /* Rounds residuals: q = 1 from up[0] on, 2 from 1 + up[1], n from n - 1 + up[2]; infinite: never. */
    void (*quantise)(int32_t *q, const float *residual, const float up[3], size_t n);

    /* The same operations for second moments. Values that are not positive and finite have level 0, which is zero. */
    void (*level_apply)(float *values, const int32_t *q, size_t n, const level_run *run);
    void (*level_quantise)(int32_t *q, const float *now, const float *previous, float up, size_t n,
                           const level_run *run);
    void (*level_of)(int32_t *level, const float *values, size_t n);

    /* Statistics for encoders, n elements of one row at a time. */
    void (*sums_of)(lattice_sums *s, const sums_run *run, size_t n);
    /*
     * Adds the positive finite elements of now, and their number, to two sums. magnitudes: uses |now|. max:
     * larger elements do not count.
     */
    void (*moment_row)(double sums[2], const float *now, bool magnitudes, float max, size_t n);
    /*
     * moment_row for n columns of some rows. Adds to to->sum, to->count and, unless it is NULL, to->scales,
     * to which an element adds its row's scale.
     */
    void (*moment_columns)(const moment_sums *to, const moment_rows *rows, size_t n);
    /* quantise to bytes; adds to s. If an integer is not in -127 ... 127, returns false, and q must not be used. */
    bool (*quantise_q8)(int8_t *q, level_sums *s, const float *residual, const float up[3], size_t n);
    /*
     * lattice_residual without a low-rank part, then quantise_q8 without sums. parent_values NULL: zeros.
     * Returns the largest magnitude of an integer. If it does not fit a byte, q must not be used.
     */
    int32_t (*quantise_run)(int8_t *q, const float *now, const float *parent_values, const float up[3],
                            size_t n, const lattice_run *run);
    /* Adds the errors of decoded values against finite input values. */
    void (*error_of)(error_sums *s, const float *given, const float *decoded, size_t n);
    /*
     * Is any value, parent's value or difference NaN, or larger than its finite limit (limits[0], [1], [2])?
     * Compares magnitudes. positive: negative values of now or of the parent count as too large.
     * parent_values NULL: checks only now.
     */
    bool (*beyond)(const float *now, const float *parent_values, const float limits[3], bool positive,
                   size_t n);
    /* Bins are the whole parts of magnitudes in units, at most `max`; NaN is in bin `max`. */
    void (*bins_of)(uint16_t *bin, const float *values, float per_unit, uint16_t max, size_t n);
    /* level_apply without a parent, with q = 0. */
    void (*level_fill)(float *values, size_t n, const level_run *run);

    /* Counts NaNs and infinities by their bits; 0 for integers. */
    uint64_t (*count_nonfinite)(ckd_dtype dtype, const void *values, size_t n);
} kernels;

/*
 * Returns the reference backend, never NULL. Each call chooses the widest vectors that the processor and the system
 * support; all tables give the same bits. CKD_CPU in the environment, "portable", "avx2" or "avx512", chooses another
 * table, if it can be run.
 */
const kernels *kernels_cpu(void);

#endif
