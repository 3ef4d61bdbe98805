/*
 * Copies and checks the tensors and optimizers that callers describe. Saves, sessions and plans share it, so all refuse
 * the same arguments.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/common/common.h"

#include <string.h>

#include "base/bytes.h"
#include "base/vocabulary.h"

ckd_status tensor_copy(ckd_tensor *out, const ckd_tensor *from, ckd_error *err) {
    *out = (ckd_tensor)CKD_TENSOR_INIT;
    return from
               ? struct_copy(out, sizeof(*out), from, SIZE_UP_TO(ckd_tensor, read_context), "ckd_tensor", err)
               : err_set(err, CKD_E_INVALID, "no tensor is given");
}

ckd_status optimizer_copy(ckd_optimizer *out, const ckd_optimizer *from, ckd_error *err) {
    *out = (ckd_optimizer)CKD_OPTIMIZER_INIT;
    return struct_copy(out, sizeof(*out), from, SIZE_UP_TO(ckd_optimizer, step), "ckd_optimizer", err);
}

ckd_status tensor_check(uint64_t *elements, const ckd_tensor *t, ckd_error *err) {
    size_t length = t->name ? strnlen(t->name, CKD_NAME_MAX + 1) : 0;
    if (length == 0 || length > CKD_NAME_MAX || !utf8_valid(t->name, length)) {
        return err_set(err, CKD_E_INVALID, "a tensor's name must be 1 to 1023 bytes of UTF-8");
    }
    geometry g;
    if (ckd_dtype_size(t->dtype) == 0) {
        return err_set(err, CKD_E_INVALID, "tensor %s has no known dtype", t->name);
    }
    if (!geometry_init(&g, t->ndim, t->shape)) {
        return err_set(err, CKD_E_INVALID,
                       "tensor %s has more than %d dimensions, more than 2^40 elements, or no shape", t->name,
                       CKD_MAX_DIMS);
    }
    return region_count(elements, &g, &t->region)
               ? CKD_OK
               : err_set(err, CKD_E_MISMATCH, "the region of tensor %s does not lie in its shape", t->name);
}
