#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/tensor_check.h"

#include <string.h>

#include "base/bytes.h"
#include "base/error.h"

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
