/*
 * The payload of a lossy block (coding 6), and of the part of it that the blocks of one matrix share: what stands in them, as
 * arrays of integers. What the integers mean for values is kernels/scalar_lattice.h's; codec/FORMAT.md, "Lattice blocks", is normative.
 */
#ifndef CODEC_LATTICE_H
#define CODEC_LATTICE_H

#include "base/bytes.h"
#include "codec/entropy/adaptive.h"
#include "codec/entropy/codings.h"

typedef enum lattice_map {
    LATTICE_LINEAR = 0, /* values are integers times 2^exponent */
    LATTICE_LEVELS = 1  /* values are floats with three bits of mantissa: second moments */
} lattice_map;

#define LATTICE_MAX_COLUMNS (1u << 18) /* of a matrix whose columns have something of their own */
#define LATTICE_MAX_RANK    2048u
#define LATTICE_MAX_FACTOR  (1u << 24) /* integers of a factor */
#define LATTICE_STEP_OCTAVE 4          /* steps are powers of the fourth root of two */
#define LATTICE_MOST_STEP   4096       /* of a row or column, whatever its sign */

/*
 * What all blocks of a matrix share. Inside the payload if there is one block, else a side record. What blocks next to each other share of
 * their rows is told in the same way, with rows for columns; its shifts mean nothing.
 */
typedef struct lattice_columns {
    uint64_t columns;
    const int32_t *step;   /* per column, quarter octaves (levels: levels); NULL: none */
    uint32_t rank;         /* of the low-rank part, at most `columns`; 0: none */
    const int32_t *shift;  /* rank: the component's products count 2^shift */
    const int32_t *factor; /* columns x rank */
} lattice_columns;

/* Element i lies in column (phase + i) % columns, and in row (phase + i) / columns, counted from the block's first. */
typedef struct lattice_block {
    lattice_map map;
    uint64_t count, columns, phase; /* without rows, columns and factors: one row, columns and phase 0 */
    int32_t exponent;               /* linear: the lattice's spacing is 2^exponent */
    int32_t step;       /* linear: lattice units of an integer, in quarter octaves; levels: levels */
    int32_t birth;      /* levels: where to start without a parent's value */
    uint8_t offset[3];  /* linear: how far below |q| = 1, 2, more its value stands, in 1/256 */
    const int32_t *row; /* per row, like lattice_columns' step; NULL: none */
    bool shared;        /* `own` is empty: a side record has it */
    bool shared_rows;   /* `row` and `factor` come from another side record; only with `shared` */
    lattice_columns own;
    int32_t low_rank_exponent; /* a product counts 2^(this + shift) steps */
    const int32_t *factor;     /* rows x rank; NULL: none */
    const int32_t *q;          /* NULL: see few */
    const int8_t *few;         /* instead of q, if all fit and none is -128 (linear). Neither: all zero */
    /* Values that are kept as they are: their places, ascending, and bits. */
    uint32_t exceptions;
    const uint32_t *exception_at;
    const uint32_t *exception_bits;
} lattice_block;

uint64_t lattice_rows(const lattice_block *b);

/* How q is written: fast to decode, or small. */
typedef enum lattice_effort { LATTICE_FAST, LATTICE_SMALL } lattice_effort;

/* Buffers that decoded blocks and columns point into, one of each a worker. Zero-initialise. */
typedef struct lattice_scratch {
    bytes row, step, shift, factor, own_factor, q, narrow, few, at, bits;
    bytes contexts, stream, tried; /* of integers: their contexts; streams that may not be taken */
    adaptive_scratch adaptive;
} lattice_scratch;
void lattice_scratch_free(lattice_scratch *s);

/* Appends the payload. With LATTICE_SMALL, `q` is given and not `few`. b->own's columns are written unless b->shared. Errors: NOMEM. */
ckd_status lattice_encode(bytes *to, const lattice_block *b, lattice_effort effort, lattice_scratch *scratch,
                          symbols_workspace *work, ckd_error *err);
ckd_status lattice_columns_encode(bytes *to, const lattice_columns *c, lattice_scratch *scratch,
                                  symbols_workspace *work, ckd_error *err);

/*
 * Any bytes give a block of `count` elements, or CORRUPT or UNSUPPORTED, in time and memory bounded by count and the limits
 * above: 5 bytes an integer of the factors (LATTICE_MAX_FACTOR of the columns', count + 2 columns of the rows'), 4 bytes a row and
 * column, 24 bytes an element. shared, rows: the columns and the rows that side records give, or NULL; the columns are needed for the factor's
 * width (CORRUPT without), the rows are there if and only if the payload says so (else CORRUPT). What `out` points at lies in the scratch (but
 * for what is shared) until it is used again.
 */
ckd_status lattice_decode(lattice_block *out, uint64_t count, const lattice_columns *shared,
                          const lattice_columns *rows, const void *from, size_t size,
                          lattice_scratch *scratch, symbols_workspace *work, ckd_error *err);
ckd_status lattice_columns_decode(lattice_columns *out, const void *from, size_t size,
                                  lattice_scratch *scratch, symbols_workspace *work, ckd_error *err);

/* Can blocks of this dtype be lossy? f32, f16 and bf16 can. */
static inline bool lattice_dtype(ckd_dtype dtype) {
    return dtype == CKD_F32 || dtype == CKD_F16 || dtype == CKD_BF16;
}

#endif
