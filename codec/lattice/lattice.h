/*
 * The payload of a lossy block (coding 6), and the data that the blocks of one matrix share, as arrays of integers.
 * kernels/scalar_lattice.h defines what the integers mean for values; codec/FORMAT.md, "Lattice blocks", is normative.
 */
#ifndef CODEC_LATTICE_LATTICE_H
#define CODEC_LATTICE_LATTICE_H

#include "base/bytes.h"
#include "codec/entropy/entropy.h"

typedef enum lattice_map {
    LATTICE_LINEAR = 0, /* values are integers times 2^exponent */
    LATTICE_LEVELS = 1  /* values are floats with three mantissa bits: second moments */
} lattice_map;

#define LATTICE_MAX_COLUMNS (1u << 18) /* columns of a matrix with per-column data */
#define LATTICE_MAX_RANK    2048u
#define LATTICE_MAX_FACTOR  (1u << 24) /* integers per factor */
#define LATTICE_STEP_OCTAVE 4          /* steps are powers of the fourth root of two */
#define LATTICE_MAX_STEP    4096       /* of a row or column, in absolute value */

/*
 * Data that all blocks of a matrix share. A matrix of one block stores it in the payload, other matrices in a side
 * record. Rows shared by neighbouring blocks have the same form, with rows in place of columns and `shift` unused.
 */
typedef struct lattice_columns {
    uint64_t columns;
    const int32_t *step;   /* per column, in quarter octaves (levels: in levels); NULL: none */
    uint32_t rank;         /* rank of the low-rank part, at most `columns`; 0: none */
    const int32_t *shift;  /* per component: its products are scaled by 2^shift */
    const int32_t *factor; /* columns x rank */
} lattice_columns;

/* Element i is in column (phase + i) % columns and row (phase + i) / columns, counted from the block's first row. */
typedef struct lattice_block {
    lattice_map map;
    uint64_t count, columns, phase; /* without row or column data: one row, columns and phase not stored */
    int32_t exponent;               /* linear: the lattice's spacing is 2^exponent */
    int32_t step;       /* linear: lattice units per integer, in quarter octaves; levels: levels */
    int32_t birth;      /* levels: starting level if the parent has no value */
    uint8_t offset[3];  /* linear: how far below |q| = 1, 2 and more the value lies, in 1/256 */
    const int32_t *row; /* per row, like `step` of lattice_columns; NULL: none */
    bool shared;        /* `own` is empty: a side record has the columns */
    bool shared_rows;   /* `row` and `factor` come from another side record; only with `shared` */
    lattice_columns own;
    int32_t low_rank_exponent; /* products are scaled by 2^(this + shift) steps */
    const int32_t *factor;     /* rows x rank; NULL: none */
    const int32_t *q;          /* NULL: use `q8` */
    const int8_t *q8;          /* replaces q if all fit and none is -128 (linear). Both NULL: all zero */
    /*
     * With lattice_payload.as_masks these replace q and q8. `masks` has one bit per integer, the first one lowest, set
     * if the integer is not zero. `others` has the nonzero integers in order. masks NULL: not used.
     */
    const uint8_t *masks;
    const int8_t *others;
    uint64_t other_count;
    /* Values stored verbatim: their positions, ascending, and their bits. */
    uint32_t exceptions;
    const uint32_t *exception_at;
    const uint32_t *exception_bits;
} lattice_block;

uint64_t lattice_rows(const lattice_block *b);

/* How q is coded: fast to decode, or small. */
typedef enum lattice_effort { LATTICE_FAST, LATTICE_SMALL } lattice_effort;

/* Buffers that decoded blocks and columns point into; one set per worker. Zero-initialise. */
typedef struct lattice_scratch {
    bytes row, step, shift, factor, own_factor, q, narrow, q8, at, bits;
    bytes contexts, stream, tried; /* contexts of integers; trial streams */
    adaptive_scratch adaptive;
} lattice_scratch;
void lattice_scratch_free(lattice_scratch *s);

/*
 * Appends the payload. LATTICE_SMALL needs `q`, not `q8`. Writes the columns of b->own unless b->shared. Errors:
 * NOMEM.
 */
ckd_status lattice_encode(bytes *to, const lattice_block *b, lattice_effort effort, lattice_scratch *scratch,
                          symbols_workspace *work, ckd_error *err);
ckd_status lattice_columns_encode(bytes *to, const lattice_columns *c, lattice_scratch *scratch,
                                  symbols_workspace *work, ckd_error *err);

/*
 * The payload of a block of `count` elements, with the columns and the rows from its side records, or NULL. The rank of
 * `columns` is the width of the factor. `rows` must be given exactly if the payload shares rows, else it is CORRUPT.
 */
typedef struct lattice_payload {
    const void *data;
    size_t size;
    uint64_t count;
    const lattice_columns *columns, *rows;
    /* gives masks if at most one integer in LATTICE_FEW is nonzero and there is no low-rank part */
    bool as_masks;
} lattice_payload;
#define LATTICE_FEW 8
/*
 * Decodes a block. Any bytes give a block, CORRUPT or UNSUPPORTED; missing columns or rows are CORRUPT. Time and memory
 * are bounded by count and the limits above: 5 bytes per integer of the factors (columns: LATTICE_MAX_FACTOR, rows:
 * count + 2 columns), 4 bytes per row and column, 24 bytes per element. The pointers in *out, except to shared data,
 * are valid until the scratch is used again.
 */
ckd_status lattice_decode(lattice_block *out, const lattice_payload *from, lattice_scratch *scratch,
                          symbols_workspace *work, ckd_error *err);
ckd_status lattice_columns_decode(lattice_columns *out, const void *from, size_t size,
                                  lattice_scratch *scratch, symbols_workspace *work, ckd_error *err);

/* Returns true if blocks of this dtype can be lossy. */
static inline bool lattice_dtype(ckd_dtype dtype) {
    return dtype == CKD_F32 || dtype == CKD_F16 || dtype == CKD_BF16;
}

#endif
