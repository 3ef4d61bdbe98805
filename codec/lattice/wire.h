/* Parts of the payload of a lossy block; codec/FORMAT.md, "Lattice blocks". Internal to codec/lattice/. */
#ifndef CODEC_LATTICE_WIRE_H
#define CODEC_LATTICE_WIRE_H

#include "codec/lattice/lattice.h"

typedef struct lattice_output {
    bytes *to;
    lattice_scratch *scratch;
    symbols_workspace *work;
    ckd_error *err;
} lattice_output;
typedef struct lattice_input {
    reader in;
    lattice_scratch *scratch;
    symbols_workspace *work;
    ckd_error *err;
    bool as_masks; /* as in lattice_payload */
} lattice_input;

/*
 * Writes an adaptive stream preceded by its size; failures set to->failed. contexts NULL: ADAPTIVE_EVEN, else SCALED.
 */
void lattice_put_integers(const lattice_output *out, const int32_t *values, size_t n,
                          const uint8_t *contexts);
/* Reads the steps of n rows or columns into `buffer`. Errors of all readers here: CORRUPT, UNSUPPORTED, NOMEM. */
ckd_status lattice_get_steps(const int32_t **values, lattice_input *from, size_t n, bytes *buffer);

/*
 * Returns the smallest width (1, 2 or 4 bytes) that holds all integers. With `levels`, INT32_MIN becomes the lowest
 * integer of any width.
 */
unsigned lattice_width(const int32_t *q, size_t n, bool levels);
void lattice_narrow(void *to, const int32_t *q, size_t n, unsigned width);
void lattice_widen(int32_t *q, const void *from, size_t n, unsigned width, bool levels);

/*
 * Factors: rows x rank integers; each component (a column) has its own scale. `symbols`: coded as symbols, not
 * adaptively; the form bits record it.
 */
ckd_status lattice_put_factor(const lattice_output *out, bool *symbols, const int32_t *factor, size_t rows,
                              uint32_t rank);
ckd_status lattice_get_factor(const int32_t **factor, lattice_input *from, uint64_t rows, uint32_t rank,
                              bool symbols, bytes *buffer);

/* Everything but the number of columns, which the reader knows. */
ckd_status lattice_put_columns(const lattice_output *out, const lattice_columns *c);
ckd_status lattice_get_columns(lattice_columns *c, lattice_input *from, uint64_t max_rank);

#endif
