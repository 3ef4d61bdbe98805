/* Limits the bytes read and written per second, with progress and cancellation. Internal to engine/. */
#ifndef ENGINE_COMMON_RATE_LIMITER_H
#define ENGINE_COMMON_RATE_LIMITER_H

#include "base/error.h"

/* Reports progress. Returns CANCELLED if the caller wants to stop. */
typedef ckd_status (*pace_tell_fn)(void *context, ckd_error *err);
/*
 * Calls `tell`, then waits until `moved` bytes since begun_ns are within the rate. Calls `tell` at least every 0.1 s
 * meanwhile. bytes_per_s 0: no limit.
 */
ckd_status pace_wait(uint64_t bytes_per_s, uint64_t begun_ns, uint64_t moved, pace_tell_fn tell,
                     void *context, ckd_error *err);

typedef struct rate_limiter {
    uint64_t bytes_per_s; /* 0: no limit */
    ckd_progress_fn on_progress;
    void *context;
    const char *cancelled; /* message of the CANCELLED error */
    uint64_t begun_ns, done, total;
} rate_limiter;
/* Counts `bytes` and waits until they are within the rate. Errors: CANCELLED. */
ckd_status rate_limiter_add(rate_limiter *p, uint64_t bytes, ckd_error *err);

#endif
