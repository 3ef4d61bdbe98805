/*
 * Structs that callers pass in. Each begins with its size, so programs compiled with older or newer headers still work.
 * Thread-safe.
 */
#ifndef BASE_STRUCTS_H
#define BASE_STRUCTS_H

#include <stddef.h>

#include "base/error.h"

/* Size of a struct up to and including a field. */
#define SIZE_UP_TO(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* Returns INVALID, naming the struct, unless its struct_size is at least `min`. */
ckd_status struct_check(const void *given, size_t min, const char *name, ckd_error *err);
/*
 * Copies a caller's struct into this version's struct. Fields that the caller's version lacks keep their values in
 * `to`, and its struct_size becomes `size`. given NULL: nothing is copied. Errors: INVALID as above; `to` is unchanged
 * then.
 */
ckd_status struct_copy(void *to, size_t size, const void *given, size_t min, const char *name,
                       ckd_error *err);
/* As struct_copy, for options whose only mandatory field is the size. */
#define COPY_OPTIONS(to, given, name, err) \
    struct_copy((to), sizeof(*(to)), (given), sizeof(size_t), (name), (err))

#endif
