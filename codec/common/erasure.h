/*
 * Erasure coding over pieces of equal size: Reed-Solomon in GF(2^8) with polynomial 0x11d. Row 0 is plain XOR. Other
 * rows use ISA-L, which is opened with dlopen on first use (libisal.so.2, or the file named by CKD_ISAL in the
 * environment). codec/FORMAT.md, "Parity", is normative. Thread-safe.
 */
#ifndef CODEC_ERASURE_H
#define CODEC_ERASURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define ERASURE_DATA_MAX   128u /* columns */
#define ERASURE_PARITY_MAX 16u  /* rows */

/* Returns the coefficient of a column's piece in a row of parity; never 0. Every square submatrix is invertible. */
uint8_t erasure_coefficient(unsigned row, unsigned column);

/* Returns CKD_OK if rows other than row 0 can be computed; otherwise err (UNSUPPORTED) says what to install. */
ckd_status erasure_ready(ckd_error *err);

/*
 * out[r] = the sum over c of matrix[r * columns + c] * in[c]. All buffers are distinct. At most ERASURE_PARITY_MAX rows
 * and ERASURE_DATA_MAX + ERASURE_PARITY_MAX columns.
 */
typedef struct erasure_product {
    uint8_t *const *out;
    const uint8_t *const *in;
    const uint8_t *matrix;
    size_t rows, columns;
    size_t size; /* bytes of each buffer */
} erasure_product;
/* Without ISA-L every coefficient must be 0 or 1. Errors: UNSUPPORTED, NOMEM. */
ckd_status erasure_sums(const erasure_product *p, ckd_error *err);

/*
 * Makes the matrix that rebuilds the pieces of `count` lost columns (ascending) from `count` rows of parity and the
 * other columns. Its inputs are the parity of `rows`, then the pieces of `known` columns, in the given orders. matrix
 * has room for count * (count + known_count).
 */
void erasure_matrix(uint8_t *matrix, const unsigned *lost, const unsigned *rows, size_t count,
                    const unsigned *known, size_t known_count);

#endif
