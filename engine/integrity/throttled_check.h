/* Looks for damage in listed chunk files, at a limited rate and without delaying collections. Internal to engine/. */
#ifndef ENGINE_INTEGRITY_THROTTLED_CHECK_H
#define ENGINE_INTEGRITY_THROTTLED_CHECK_H

#include "engine/store/store.h"
#include "engine/common/common.h"

typedef struct throttled_check {
    ckd_store *store;
    damage_list *damage;
    const live_files *files;
    rate_limiter *limiter;
    bytes payload;     /* release with bytes_free */
    file_lock *reader; /* held until the file is open; NULL between calls */
} throttled_check;

/*
 * Reads a file through. *right: the file is still needed, exists and is undamaged. *listed: the file is still
 * needed. Both may be NULL. Errors: those of the rate limiter, BUSY, IO, NOMEM.
 */
ckd_status throttled_check_file(bool *right, bool *listed, throttled_check *c, const live_file *f,
                                ckd_error *err);

#endif
