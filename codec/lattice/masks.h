/*
 * Integers in bytes of which most are zero, as masks: which of each eight are not zero, a bit each, the first one lowest, and those
 * that are not. codec/FORMAT.md, "Lattice blocks". Internal to codec/. Thread-safe.
 */
#ifndef CODEC_LATTICE_MASKS_H
#define CODEC_LATTICE_MASKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MASK_OF 8 /* integers of a mask */

size_t lattice_nonzeros(const int8_t *q, size_t n);
/* Returns how many others there are; room for MASK_OF more is needed. */
size_t lattice_to_masks(uint8_t *masks, int8_t *others, const int8_t *q, size_t n);
/* Bits that are set. */
size_t lattice_masks_bits(const uint8_t *masks, size_t groups);
/*
 * The inverse. `count` others, as many as bits of the masks; MASK_OF bytes more can be read. false: one of them is zero, or a mask has bits
 * beyond n.
 */
bool lattice_from_masks(int8_t *q, const uint8_t *masks, const int8_t *others, size_t count, size_t n);

#endif
