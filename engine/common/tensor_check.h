/* Validates a caller's description of a tensor. Internal to engine/. */
#ifndef ENGINE_TENSOR_CHECK_H
#define ENGINE_TENSOR_CHECK_H

#include "engine/common/region.h"

/*
 * Copies a caller's description, of whatever struct_size, into this version's struct. Errors: INVALID (NULL, or too
 * small).
 */
ckd_status tensor_copy(ckd_tensor *out, const ckd_tensor *given, ckd_error *err);
/* Does the same for an optimizer. Errors: INVALID (too small); *out then has no kind. */
ckd_status optimizer_copy(ckd_optimizer *out, const ckd_optimizer *given, ckd_error *err);
/*
 * Checks name, dtype, shape and region, and counts the region's elements. t comes from tensor_copy, so it is complete.
 * Errors: INVALID, MISMATCH (the region lies outside the shape).
 */
ckd_status tensor_check(uint64_t *elements, const ckd_tensor *t, ckd_error *err);

#endif
