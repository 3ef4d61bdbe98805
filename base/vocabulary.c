/*
 * Checks of callers' arguments. struct_copy accepts structs of another version's size, so programs need not be compiled
 * again.
 */
#include "base/vocabulary.h"

#include <string.h>

#include "base/bytes.h"

bool run_name_valid(const char *run) {
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-~";
    size_t length = run ? strnlen(run, CKD_RUN_MAX + 1) : 0;
    if (length == 0 || length > CKD_RUN_MAX || run[0] == '.' || run[0] == '-') {
        return false;
    }
    return strspn(run, allowed) == length;
}

const char *stage_name(uint32_t stage) {
    static const char *const names[CKD_STAGE_LAST + 1] = {NULL,    "snapshot", "analyse", "encode",
                                                          "write", "sync",     "wait",    "commit"};
    return stage <= CKD_STAGE_LAST ? names[stage] : NULL;
}

bool shape_elements(uint64_t *out, uint32_t ndim, const uint64_t *shape) {
    uint64_t elements = 1;
    bool empty = false;
    if (ndim > CKD_MAX_DIMS || (ndim && !shape)) {
        return false;
    }
    for (uint32_t d = 0; d < ndim; d++) {
        if (shape[d] == 0) {
            empty = true;
        } else if (!size_mul(&elements, elements, shape[d]) || elements > CKD_MAX_ELEMENTS) {
            return false;
        }
    }
    *out = empty ? 0 : elements;
    return true;
}

ckd_status struct_check(const void *from, size_t min, const char *name, ckd_error *err) {
    size_t size;
    memcpy(&size, from, sizeof(size)); /* a wrong pointer may be misaligned */
    return size >= min
               ? CKD_OK
               : err_set(err, CKD_E_INVALID,
                         "the struct_size of %s is %zu, but must be at least %zu: start from its INIT macro",
                         name, size, min);
}

ckd_status struct_copy(void *to, size_t size, const void *from, size_t min, const char *name,
                       ckd_error *err) {
    if (!from) {
        return CKD_OK;
    }
    ckd_status status = struct_check(from, min, name, err);
    if (status == CKD_OK) {
        size_t has;
        memcpy(&has, from, sizeof(has));
        memcpy(to, from, has < size ? has : size);
        memcpy(to, &size, sizeof(size));
    }
    return status;
}
