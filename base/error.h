/*
 * Fills ckd_error: the message, the place (tensor, file, offset) and errno. All functions accept err == NULL and return
 * the status. Thread-safe; nothing is allocated. Arguments may point into *err. Long texts are cut between UTF-8
 * characters; paths are cut on the left.
 */
#ifndef BASE_ERROR_H
#define BASE_ERROR_H

#include "include/ckptdelta.h"

/* Runs the next of several steps if `status` is CKD_OK, and stores its result in `status`. So the first error stays. */
#define THEN(status, step)        \
    do {                          \
        if ((status) == CKD_OK) { \
            (status) = (step);    \
        }                         \
    } while (0)

#define ERR_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* Starts a fresh error: clears tensor, file, offset and errno. */
ckd_status err_set(ckd_error *err, ckd_status status, const char *format, ...) ERR_PRINTF(3, 4);

/*
 * Reports a failed system call on `path` (may be NULL). The status follows errno: ENOSPC, EDQUOT -> NOSPACE; EROFS,
 * EACCES and EPERM -> READ_ONLY; ENOENT -> NOT_FOUND; EEXIST -> EXISTS; ENOMEM -> NOMEM; else IO. Appends ": " and the
 * meaning of errno, in English whatever the locale.
 */
ckd_status err_sys(ckd_error *err, int errnum, const char *path, const char *format, ...) ERR_PRINTF(4, 5);

/* "out of memory for %zu bytes of %s" */
ckd_status err_nomem(ckd_error *err, size_t bytes, const char *what);

/* CORRUPT (or UNSUPPORTED with err_unsupported) at an offset of a file; offset may be CKD_NO_OFFSET. */
ckd_status err_corrupt(ckd_error *err, const char *path, uint64_t offset, const char *format, ...)
    ERR_PRINTF(4, 5);
ckd_status err_unsupported(ckd_error *err, const char *path, uint64_t offset, const char *format, ...)
    ERR_PRINTF(4, 5);

/* Adds the tensor or file to an error on its way up, unless one is set already. Does nothing if status is CKD_OK. */
ckd_status err_in_tensor(ckd_error *err, ckd_status status, const char *tensor);
ckd_status err_in_file(ckd_error *err, ckd_status status, const char *path);

/* Passes on an error from a lower layer and returns its status. */
static inline ckd_status err_from(ckd_error *err, ckd_status status, const ckd_error *why) {
    if (err && status != CKD_OK) {
        *err = *why;
    }
    return status;
}
/* As err_from, but ignores one kind of failure: returns CKD_OK then, and leaves *err unchanged. */
static inline ckd_status err_except(ckd_error *err, ckd_status status, ckd_status forgiven,
                                    const ckd_error *why) {
    return status == forgiven ? CKD_OK : err_from(err, status, why);
}

#endif
