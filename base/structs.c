#include "base/structs.h"

#include <string.h>

ckd_status struct_check(const void *given, size_t min, const char *name, ckd_error *err) {
    size_t size;
    memcpy(&size, given, sizeof(size)); /* a wrong pointer may be misaligned */
    return size >= min
               ? CKD_OK
               : err_set(err, CKD_E_INVALID,
                         "the struct_size of %s is %zu, at least %zu is needed: start from its INIT macro",
                         name, size, min);
}

ckd_status struct_copy(void *to, size_t size, const void *given, size_t min, const char *name,
                       ckd_error *err) {
    if (!given) {
        return CKD_OK;
    }
    ckd_status status = struct_check(given, min, name, err);
    if (status == CKD_OK) {
        size_t has;
        memcpy(&has, given, sizeof(has));
        memcpy(to, given, has < size ? has : size);
        memcpy(to, &size, sizeof(size));
    }
    return status;
}
