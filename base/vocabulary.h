/* Checks of callers' arguments that several layers share: names, shapes, structs. Thread-safe. */
#ifndef BASE_VOCABULARY_H
#define BASE_VOCABULARY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
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

/*
 * Structs that callers pass in. Each begins with its size, so programs compiled with older or newer headers still work.
 */

/* Size of a struct up to and including a field. */
#define SIZE_UP_TO(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* Returns INVALID, naming the struct, unless its struct_size is at least `min`. */
ckd_status struct_check(const void *from, size_t min, const char *name, ckd_error *err);
/*
 * Copies a caller's struct into this version's struct. Fields that the caller's version lacks keep their values in
 * `to`, and its struct_size becomes `size`. from NULL: nothing is copied. Errors: INVALID as above; `to` is unchanged
 * then.
 */
ckd_status struct_copy(void *to, size_t size, const void *from, size_t min, const char *name, ckd_error *err);
/* As struct_copy, for options whose only mandatory field is the size. */
#define COPY_OPTIONS(to, given, name, err) \
    struct_copy((to), sizeof(*(to)), (given), sizeof(size_t), (name), (err))

#endif
