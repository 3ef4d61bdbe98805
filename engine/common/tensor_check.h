/* Does a caller's description of a tensor make sense? Internal to engine/. */
#ifndef ENGINE_TENSOR_CHECK_H
#define ENGINE_TENSOR_CHECK_H

#include "engine/common/region.h"

/* A caller's description, of whatever struct_size, as this version has it. Errors: INVALID (it is NULL, or too small). */
ckd_status tensor_copy(ckd_tensor *out, const ckd_tensor *given, ckd_error *err);
/* The same of an optimizer. Errors: INVALID (too small): *out is none then, of no kind. */
ckd_status optimizer_copy(ckd_optimizer *out, const ckd_optimizer *given, ckd_error *err);
/*
 * Name, dtype, shape and region, and how many elements the region has. t is whole: copied from the caller's, of whatever struct_size. Errors: INVALID,
 * MISMATCH (a region outside of the shape).
 */
ckd_status tensor_check(uint64_t *elements, const ckd_tensor *t, ckd_error *err);

#endif
