/*
 * Array arithmetic behind one table of functions a backend. The CPU table is the definition; other backends (CUDA) give
 * the same bits. Callers own all buffers, nothing is allocated, nothing fails. Thread-safe. Buffers need no alignment; they must not
 * overlap unless a comment allows it.
 *
 * The functions for exact coding, but for optimizer_step, are integer arithmetic on the bits of the values, so that NaN payloads, -0 and
 * denormals pass unchanged. Callers are in the library's floating-point mode (base/float_mode.h).
 */
#ifndef KERNELS_KERNELS_H
#define KERNELS_KERNELS_H

#include <stdbool.h>

#include "include/ckptdelta.h"

#define KERNELS_VERSION 6

/* A rule of FORMAT.md, "Optimizer steps", and the coefficients of its group record, in the record's order. */
#define STEP_COEFFICIENTS 15
typedef struct step_rule {
    uint32_t rule;
    double coefficients[STEP_COEFFICIENTS];
} step_rule;
/* How the elements of one row of a lossy block lie on their lattice; codec/FORMAT.md, "Lattice blocks". */
typedef struct lattice_run {
    float unit, per_unit;     /* 2^e and 2^-e: the lattice's spacing */
    float row_step;           /* lattice units of an integer of this row ... */
    const float *column_step; /* ... times this of its column; NULL: 1 */
    float low_rank_unit;      /* steps of one unit of the low-rank part */
    float offset[3];          /* steps that |q| = 1, 2, more stand below |q| */
} lattice_run;

/* The same for second moments, whose lattice are levels: eighths of an octave. */
typedef struct level_run {
    bool has_parent;
    int32_t row;           /* levels added to all of the row ... */
    const int32_t *column; /* ... and to each of its elements */
    int32_t birth;         /* the level to start from where there is no parent, or it is zero */
    int32_t step;          /* levels of an integer */
} level_run;

/* Sums over runs of a lossy tile; initialised with LATTICE_SUMS_INIT, added to by lattice_sums. */
typedef struct lattice_sums {
    double now, moved, weighted;    /* squares: of now, of now - before, of that times its weights */
    float largest, least, farthest; /* |now|, now, |now - before| */
    uint64_t finite, compared;      /* those of now, and differences, that are in sums */
    uint32_t before_bits;           /* that are set anywhere */
    int32_t lowest_bit;             /* the exponent of before's lowest bit; INT32_MAX: all are zero */
} lattice_sums;
#define LATTICE_SUMS_INIT \
    { .least = __builtin_inff(), .lowest_bit = INT32_MAX }

/* How far |residual| was below |q|, and how often, for |q| = 1, 2, more. */
typedef struct level_sums {
    double below[3];
    uint64_t count[3];
} level_sums;

/* Sums of squares of what was given, and of errors; how many are in them, and the largest error: infinite if one is not finite. */
typedef struct error_sums {
    double energy, error;
    uint64_t finite;
    float largest;
} error_sums;

/* Sums over columns: of what counts, how much does, and (or NULL) of the scales of the rows where it does. */
typedef struct moment_sums {
    double *sum, *scales;
    uint32_t *count;
} moment_sums;

#define LOW_RANK_PANEL 16 /* columns */

typedef struct kernels {
    uint32_t version; /* KERNELS_VERSION: a backend of another one is not used */
    const char *name;

    /*
     * residual[i] = the bits of current[i] minus the bits of previous[i], as integers modulo 2^width, width the dtype's
     * bits. Floats as well: nearby values of one sign have small differences, and where the sign changed, that flips the
     * top bit of the difference of the magnitudes. residual may be current or previous.
     */
    void (*ordered_residual)(ckd_dtype dtype, void *residual, const void *current, const void *previous,
                             size_t n);
    /* The inverse: current[i] from previous[i] and residual[i]. current may be previous or residual. */
    void (*ordered_apply)(ckd_dtype dtype, void *current, const void *previous, const void *residual,
                          size_t n);

    /*
     * Floats: bits rotated left by one, so that the exponent leads and the sign is the lowest bit; integers: unchanged.
     * In place allowed.
     */
    void (*rotate_sign)(ckd_dtype dtype, void *rotated, const void *values, size_t n);
    void (*unrotate_sign)(ckd_dtype dtype, void *values, const void *rotated, size_t n);

    /*
     * The context of each element in an entropy coder, from a value that the decoder knows: the biased exponent of a
     * float (f64: in f32's bias, clamped to 0 ... 255), the bit length of an integer's magnitude. 0 ... 255.
     */
    void (*magnitude_context)(ckd_dtype dtype, uint8_t *context, const void *values, size_t n);

    /*
     * Rounds floats to a narrower float dtype, to nearest even, NaN to the quiet NaN 0x7fc0 (bf16) or 0x7e00 (f16),
     * 0x7fc00000 (f32), overflow to infinity, denormals kept. false if the pair of dtypes is not supported (f32 -> bf16,
     * f32 -> f16, f64 -> f32 are).
     */
    bool (*cast)(ckd_dtype to, void *out, ckd_dtype from, const void *in, size_t n);

    /*
     * Predicts n f32 values from those of the step before and one or two other arrays, which the rule names (second is not read
     * if it takes one). out may be one of them. false if the rule is not known.
     */
    bool (*optimizer_step)(const step_rule *rule, void *out, const void *before, const void *first,
                           const void *second, size_t n);
    /* f32, f16 and bf16 as floats, exactly. false for other dtypes. */
    bool (*widen)(float *to, ckd_dtype from, const void *in, size_t n);

    /*
     * Lossy blocks, a run of n elements of one row at a time. values: the parent's (zeros without one), and then
     * this block's. low_rank: sums of products of factors, or NULL.
     */
    void (*lattice_apply)(float *values, const int32_t *q, const float *low_rank, size_t n,
                          const lattice_run *run);
    /* The same from zeros, with steps of one unit: values = q * unit. */
    void (*lattice_values)(float *values, const int32_t *q, size_t n, float unit);
    void (*widen_integers)(int32_t *to, const int8_t *q, size_t n);
    /* The same without a low-rank part, for integers of which few are not 0. */
    void (*lattice_apply_few)(float *values, const int8_t *q, size_t n, const lattice_run *run);
    /*
     * sums = left (rows x rank) times right (rank x columns), integers in floats: exact, in whatever order, because no sum of
     * magnitudes reaches 2^24 (for the caller to see to).
     */
    void (*products)(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                     size_t columns);
    /*
     * The same of any floats, for encoders alone: bits may depend on the backend, and on kernels/blas.h, which the CPU's asks first.
     */
    void (*gemm)(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                 size_t columns);
    /*
     * Whole rows of a lossy block: lattice_apply with the sums of products of left (rows x rank) and right (rank x columns), for which
     * the same holds as for `products`. right is packed: for every LOW_RANK_PANEL columns all components, one after the other, and zeros beyond the last
     * column. few: or NULL, all zero. row_step: of each row, in place of the run's.
     */
    void (*low_rank_apply)(float *values, const int8_t *few, const float *left, const float *right,
                           const float *row_step, size_t rows, size_t rank, size_t columns,
                           const lattice_run *run);
    /*
     * A factor (count x rank) as floats, in the same order; what the magnitudes of a component reach is raised in largest[rank].
     * Integers below 2^24; in place allowed.
     */
    void (*factor_values)(float *values, float *largest, const int32_t *factor, size_t count, size_t rank);
    /*
     * Transposed (columns x rank to rank x columns), component k times scale[k], in panels of `wide` columns: all components of the first
     * `wide`, then of the next ...; zeros fill the last one up.
     */
    void (*factor_panels)(float *panels, const float *values, const float *scale, size_t columns, size_t rank,
                          size_t wide);
    /* What q has to say, in steps: now, less what lattice_apply would give with q = 0. 0 where that is not finite. */
    void (*lattice_residual)(float *residual, const float *now, const float *previous, const float *low_rank,
                             size_t n, const lattice_run *run);
    /* q = residual as integers: 1 from up[0] on, 2 from 1 + up[1], n from n - 1 + up[2]; infinite: never. */
    void (*quantise)(int32_t *q, const float *residual, const float up[3], size_t n);

    /* The same for second moments. values that are not positive and finite have level 0, which is zero. */
    void (*level_apply)(float *values, const int32_t *q, size_t n, const level_run *run);
    void (*level_quantise)(int32_t *q, const float *now, const float *previous, float up, size_t n,
                           const level_run *run);
    void (*level_of)(int32_t *level, const float *values, size_t n);

    /*
     * Statistics for encoders, a run of one row at a time. before, weight (of columns): or NULL; without `before` differences are to
     * zero. Only magnitudes of now up to most[0], and of differences up to most[1], count. lattice: before_bits and lowest_bit as well.
     */
    void (*sums_of)(lattice_sums *s, const float *now, const float *before, const float *weight,
                    float row_weight, const float most[2], bool lattice, size_t n);
    /*
     * Adds what is positive and finite in now, and how many are, to two sums. magnitudes: of |now|. most: larger ones do not count.
     */
    void (*moment_row)(double sums[2], const float *now, bool magnitudes, float most, size_t n);
    /*
     * The same for columns, of `rows` rows that begin `stride` elements apart: adds to to->sum, to->count and, unless it is NULL,
     * to->scales, where each of a row counts as its scale.
     */
    void (*moment_columns)(const moment_sums *to, const float *now, size_t stride, size_t rows,
                           const double *scale, bool magnitudes, float most, size_t n);
    /* quantise, if all integers fit a byte (and are not -128); false, and q of no use, if one does not. */
    bool (*quantise_few)(int8_t *q, level_sums *s, const float *residual, const float up[3], size_t n);
    /*
     * lattice_residual without a low-rank part, and quantise_few of that. before NULL: zeros. Returns the largest magnitude of an integer: q
     * is of no use if that does not fit.
     */
    int32_t (*quantise_run)(int8_t *q, const float *now, const float *before, const float up[3], size_t n,
                            const lattice_run *run);
    /* Adds how far decoded values are from finite given ones. */
    void (*error_of)(error_sums *s, const float *given, const float *decoded, size_t n);
    /*
     * Is any of now, of before or of their differences larger than its finite limit, in this order, or not a number? Of magnitudes;
     * positive: of values, of which those with a sign are said to be too large, but magnitudes of differences. before NULL: only of now.
     */
    bool (*beyond)(const float *now, const float *before, const float limits[3], bool positive, size_t n);
    /* Whole parts of magnitudes in units, of which none is more than `most`; of what is not a number: most. */
    void (*bins_of)(uint16_t *bin, const float *values, float per_unit, uint16_t most, size_t n);
    /* level_apply without a parent, with q = 0. */
    void (*level_fill)(float *values, size_t n, const level_run *run);
} kernels;

/*
 * The reference backend. Never NULL. Chooses the widest vectors that processor and system have, each time it is called; all give the same
 * bits. CKD_CPU in the environment, "portable", "avx2" or "avx512", chooses another table, if it can be run.
 */
const kernels *kernels_cpu(void);

#endif
