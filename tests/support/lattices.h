/* Lossy blocks in tests: what has to hold for any block, however it came about. */
#ifndef TESTS_SUPPORT_LATTICES_H
#define TESTS_SUPPORT_LATTICES_H

#include "engine/decode/decode.h"

/* The integer of element i, wherever it is. */
int32_t lattices_integer(const lattice_block *b, uint64_t i);

/* Do they give the same values? Columns and phase of a block in which nothing depends on them do not count. */
bool lattices_same_columns(const lattice_columns *a, const lattice_columns *b);
bool lattices_same(const lattice_block *a, const lattice_block *b);

/*
 * What a decoded block must fulfil: coded again, either way, it comes back; all backends rebuild the same bits from it, be its integers
 * in `few` or in `q`, and none writes beyond the values. parent: the parent's values in the dtype, or NULL. Aborts if it does
 * not hold. Returns the status of the rebuild: OK or CORRUPT.
 */
ckd_status lattices_check(const lattice_block *b, const lattice_columns *shared, ckd_dtype dtype,
                          const void *parent);

/* What the side record says that the block's rows are in; NULL if they are in none. Lives until the next one. */
const lattice_columns *lattices_rows(const lattice_block *b);

/* Blocks of random contents. */
enum {
    LATTICES_LEVELS = 1,
    LATTICES_ROWS = 2,
    LATTICES_STEPS = 4, /* of columns */
    LATTICES_FACTOR = 8,
    LATTICES_EXCEPTIONS = 16,
    LATTICES_SHARED = 32,
    LATTICES_SHARED_ROWS =
        64, /* only with LATTICES_SHARED and rows or a factor; else as if it were not there */
    LATTICES_FORMS = 128
};
/* Integers: all 0, few and small, of one byte, of two, of four; each way with zeros of second moments, if they are levels. */
enum { LATTICES_NONE, LATTICES_FEW, LATTICES_BYTES, LATTICES_WORDS, LATTICES_WIDE, LATTICES_KINDS };

typedef struct lattices_made {
    lattice_block b; /* points to what follows */
    int32_t *q, *row, *step, *shift, *columns_factor, *factor;
    uint32_t *at, *bits;
} lattices_made;
/* count, columns >= 1; phase < columns. The low-rank part is exact, exceptions are of 16 bits. */
void lattices_make(lattices_made *out, unsigned forms, unsigned kind, uint64_t count, uint64_t columns,
                   uint64_t phase);
void lattices_made_free(lattices_made *m);

#endif
