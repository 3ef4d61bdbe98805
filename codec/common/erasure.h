/*
 * Erasure coding over pieces of equal size: Reed-Solomon in GF(2^8) with polynomial 0x11d. Row 0 of the code is plain XOR; sums with other coefficients are
 * computed by ISA-L, which is opened when it is first needed (libisal.so.2, or what CKD_ISAL in the environment names); nothing is linked with it.
 * codec/FORMAT.md, "Parity", is normative. Thread-safe.
 */
#ifndef CODEC_ERASURE_H
#define CODEC_ERASURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define ERASURE_DATA_MAX   128u /* columns */
#define ERASURE_PARITY_MAX 16u  /* rows */

/* What a byte of the piece in a column counts in a row of parity; not 0. Any square part of this matrix can be inverted. */
uint8_t erasure_coefficient(unsigned row, unsigned column);

/* Can other rows than row 0 be computed? If not, err (UNSUPPORTED) says what to install. */
ckd_status erasure_ready(ckd_error *err);

/*
 * out[r] = the sum over c of matrix[r * columns + c] * in[c], each of `size` bytes; no buffer twice. Without ISA-L only where every coefficient is 0 or
 * 1. At most ERASURE_PARITY_MAX rows, ERASURE_DATA_MAX + ERASURE_PARITY_MAX columns. Errors: UNSUPPORTED, NOMEM.
 */
ckd_status erasure_sums(uint8_t *const *out, size_t rows, const uint8_t *matrix, const uint8_t *const *in,
                        size_t columns, size_t size, ckd_error *err);

/*
 * The matrix that gives the pieces of `lost` columns (count of them, ascending) from as many rows of parity and the other columns: its inputs are first the
 * parity of `rows`, then the pieces of `known` columns, in the orders given. matrix has room for count * (count + known_count).
 */
void erasure_matrix(uint8_t *matrix, const unsigned *lost, const unsigned *rows, size_t count,
                    const unsigned *known, size_t known_count);

#endif
