/* Structs of callers, which begin with their size, so that programs compiled with older or newer headers fit. Thread-safe. */
#ifndef BASE_STRUCTS_H
#define BASE_STRUCTS_H

#include <stddef.h>

#include "base/error.h"

/* Bytes of a struct up to a field, the field included. */
#define SIZE_UP_TO(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* INVALID, naming the struct, unless its struct_size is at least `min` bytes. */
ckd_status struct_check(const void *given, size_t min, const char *name, ckd_error *err);
/*
 * Copies a caller's struct into one of this version's: what the caller's version lacks stays as it is in `to`, whose struct_size becomes
 * `size`. `given` NULL: nothing is copied. Errors: INVALID as above; `to` is unchanged then.
 */
ckd_status struct_copy(void *to, size_t size, const void *given, size_t min, const char *name,
                       ckd_error *err);
/* The same for options, of which a caller must have set nothing but the size. */
#define COPY_OPTIONS(to, given, name, err) \
    struct_copy((to), sizeof(*(to)), (given), sizeof(size_t), (name), (err))

#endif
