/* Checks that must hold for any lossy block in a test. */
#ifndef TESTS_SUPPORT_LATTICES_H
#define TESTS_SUPPORT_LATTICES_H

#include "engine/decode/decode.h"

/* The integer of element i, in whichever array it is. */
int32_t lattices_integer(const lattice_block *b, uint64_t i);

/*
 * Returns whether both give the same values. Columns and phase are ignored in a block that does not depend on
 * them.
 */
bool lattices_same_columns(const lattice_columns *a, const lattice_columns *b);
bool lattices_same(const lattice_block *a, const lattice_block *b);

/*
 * Checks a decoded block. It must survive encoding and decoding in both ways. All backends must rebuild the
 * same bits from it, whether its integers are in `few` or in `q`, and must not write beyond the values.
 * parent: the parent's values in the dtype, or NULL. Aborts if a check fails. Returns the status of the
 * rebuild: OK or CORRUPT.
 */
ckd_status lattices_check(const lattice_block *b, const lattice_columns *shared, ckd_dtype dtype,
                          const void *parent);

/* The columns in the side record that hold the block's rows; NULL if none do. Valid until the next call. */
const lattice_columns *lattices_rows(const lattice_block *b);

/* Random blocks. */
enum {
    LATTICES_LEVELS = 1,
    LATTICES_ROWS = 2,
    LATTICES_STEPS = 4, /* of columns */
    LATTICES_FACTOR = 8,
    LATTICES_EXCEPTIONS = 16,
    LATTICES_SHARED = 32,
    LATTICES_SHARED_ROWS = 64, /* only with LATTICES_SHARED and rows or a factor; ignored otherwise */
    LATTICES_FORMS = 128
};
/*
 * Integers: all 0, few and small, of one byte, of two, of four. If they are levels, some of them are the
 * zeros of second moments.
 */
enum { LATTICES_NONE, LATTICES_FEW, LATTICES_BYTES, LATTICES_WORDS, LATTICES_WIDE, LATTICES_KINDS };

typedef struct lattices_made {
    lattice_block b; /* points to the arrays below */
    int32_t *q, *row, *step, *shift, *columns_factor, *factor;
    uint32_t *at, *bits;
} lattices_made;
/* Count, columns >= 1; phase < columns. The low-rank part is exact. Exceptions have 16 bits. */
void lattices_make(lattices_made *out, unsigned forms, unsigned kind, uint64_t count, uint64_t columns,
                   uint64_t phase);
void lattices_made_free(lattices_made *m);

#endif
