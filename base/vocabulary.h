/* What the public vocabulary allows, where several layers must check it. Pure functions, thread-safe. */
#ifndef BASE_VOCABULARY_H
#define BASE_VOCABULARY_H

#include <stdbool.h>
#include <stdint.h>

#include "include/ckptdelta.h"

/* 1 to CKD_RUN_MAX of A-Z a-z 0-9 . _ - ~, not starting with a dot or a dash. NULL is not valid. */
bool run_name_valid(const char *run);

/* Sign, exponent and mantissa, in that order from the top bit. */
static inline bool dtype_is_float(ckd_dtype dtype) {
    return dtype >= CKD_F64 && dtype <= CKD_F8_E5M2;
}

/* NULL: there is no such stage. */
const char *stage_name(uint32_t stage);

/*
 * Elements of a shape (1 for a scalar, 0 if a dimension is 0). false: more than CKD_MAX_DIMS dimensions, or more than
 * CKD_MAX_ELEMENTS elements, dimensions of 0 left out of the product, so that strides are bounded for empty tensors too.
 */
bool shape_elements(uint64_t *out, uint32_t ndim, const uint64_t *shape);

#endif
