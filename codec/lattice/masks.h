/*
 * Byte arrays of mostly zeros, as masks plus the nonzero bytes (the others). A mask has one bit for each of eight
 * integers, the first one lowest. codec/FORMAT.md, "Lattice blocks". Internal to codec/. Thread-safe.
 */
#ifndef CODEC_LATTICE_MASKS_H
#define CODEC_LATTICE_MASKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MASK_OF 8 /* integers per mask */

size_t lattice_nonzeros(const int8_t *q, size_t n);
/* Returns the number of nonzero integers. `others` needs room for MASK_OF more. */
size_t lattice_to_masks(uint8_t *masks, int8_t *others, const int8_t *q, size_t n);
/* Returns the number of set bits. */
size_t lattice_masks_bits(const uint8_t *masks, size_t groups);
/* Returns false if one of the others is zero, or if a mask has bits beyond n. */
bool lattice_masks_valid(const uint8_t *masks, const int8_t *others, size_t count, size_t n);
/*
 * The inverse of lattice_to_masks, for valid masks. `others` has one byte per set bit; MASK_OF more bytes behind it
 * must be readable.
 */
void lattice_from_masks(int8_t *q, const uint8_t *masks, const int8_t *others, size_t n);

#endif
