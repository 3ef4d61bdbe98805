/* Parts of the payload of a lossy block; codec/FORMAT.md, "Lattice blocks". Internal to codec/lattice*.c. */
#ifndef CODEC_LATTICE_WIRE_H
#define CODEC_LATTICE_WIRE_H

#include "codec/lattice/lattice.h"

/* An adaptive stream with its size in front; what fails sets to->failed. contexts: of scaled models, or NULL. */
void lattice_put_integers(bytes *to, const int32_t *values, size_t n, const uint8_t *contexts,
                          lattice_scratch *scratch);
/* Steps of n rows or columns, into `room`. Errors: CORRUPT, UNSUPPORTED, NOMEM; so with all that read here. */
ckd_status lattice_get_steps(const int32_t **out, reader *from, size_t n, bytes *room,
                             lattice_scratch *scratch, ckd_error *err);

/*
 * The fewest bytes, 1, 2 or 4, that hold all integers, and integers of so many bytes. levels: INT32_MIN stands for the lowest integer
 * of any width.
 */
unsigned lattice_width(const int32_t *q, size_t n, bool levels);
void lattice_narrow(void *to, const int32_t *q, size_t n, unsigned width);
void lattice_widen(int32_t *q, const void *from, size_t n, unsigned width, bool levels);

/* Factors: rows x rank, each component (a column) with a scale of its own. symbols: how, which stands in the form. */
ckd_status lattice_put_factor(bool *symbols, bytes *to, const int32_t *factor, size_t rows, uint32_t rank,
                              lattice_scratch *scratch, symbols_workspace *work, ckd_error *err);
ckd_status lattice_get_factor(const int32_t **out, reader *from, uint64_t rows, uint32_t rank, bool symbols,
                              bytes *room, lattice_scratch *scratch, symbols_workspace *work, ckd_error *err);

/* All but the number of columns, which is known. */
ckd_status lattice_put_columns(bytes *to, const lattice_columns *c, lattice_scratch *scratch,
                               symbols_workspace *work, ckd_error *err);
ckd_status lattice_get_columns(lattice_columns *c, reader *from, uint64_t max_rank, lattice_scratch *scratch,
                               symbols_workspace *work, ckd_error *err);

#endif
