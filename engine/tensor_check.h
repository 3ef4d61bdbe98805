/* Does a caller's description of a tensor make sense? Internal to engine/. */
#ifndef ENGINE_TENSOR_CHECK_H
#define ENGINE_TENSOR_CHECK_H

#include "engine/region.h"

/*
 * Name, dtype, shape and region, and how many elements the region has. t is whole: copied from the caller's, of whatever struct_size. Errors: INVALID,
 * MISMATCH (a region outside of the shape).
 */
ckd_status tensor_check(uint64_t *elements, const ckd_tensor *t, ckd_error *err);

#endif
