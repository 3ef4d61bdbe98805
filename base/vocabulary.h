/* Checks of public names and limits that several layers share. Pure functions, thread-safe. */
#ifndef BASE_VOCABULARY_H
#define BASE_VOCABULARY_H

#include <stdbool.h>
#include <stdint.h>

#include "include/ckptdelta.h"

/* 1 to CKD_RUN_MAX of A-Z a-z 0-9 . _ - ~, not starting with a dot or a dash. NULL is not valid. */
bool run_name_valid(const char *run);

/* Is it a floating-point type, with sign, exponent and mantissa in that order from the top bit? */
static inline bool dtype_is_float(ckd_dtype dtype) {
    return dtype >= CKD_F64 && dtype <= CKD_F8_E5M2;
}

/* Returns NULL if there is no such stage. */
const char *stage_name(uint32_t stage);

/*
 * Computes the number of elements of a shape: 1 for a scalar, 0 if a dimension is 0. Returns false for more than
 * CKD_MAX_DIMS dimensions or more than CKD_MAX_ELEMENTS elements. Dimensions of 0 do not count in the latter product,
 * so strides of empty tensors are bounded, too.
 */
bool shape_elements(uint64_t *out, uint32_t ndim, const uint64_t *shape);

#endif
