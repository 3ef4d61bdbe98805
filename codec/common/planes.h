/*
 * Byte planes: of n integers of `width` bytes, first all lowest bytes, then all second bytes, and so on. Neighbouring
 * integers share their high bytes; byte codecs find that only in planes. codec/FORMAT.md, "Byte planes", is normative.
 */
#ifndef CODEC_PLANES_H
#define CODEC_PLANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Is `size` a whole number of integers of 1, 2, 4 or 8 bytes? */
static inline bool planes_valid(unsigned width, size_t size) {
    return (width == 1 || width == 2 || width == 4 || width == 8) && size % width == 0;
}

/* Splits n integers of a valid width into planes. The buffers must not overlap. */
void planes_split(uint8_t *planes, unsigned width, const void *values, size_t n);
void planes_join(void *values, unsigned width, const uint8_t *planes, size_t n);

#endif
