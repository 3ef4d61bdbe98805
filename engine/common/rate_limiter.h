/* A limit on bytes read and written a second, with progress and cancellation. Internal to engine/. */
#ifndef ENGINE_COMMON_RATE_LIMITER_H
#define ENGINE_COMMON_RATE_LIMITER_H

#include "base/error.h"

/* Reports progress. CANCELLED: the caller wants to stop. */
typedef ckd_status (*pace_tell_fn)(void *context, ckd_error *err);
/* Calls `tell`, then waits until so many bytes since begun_ns are due, and calls it at least every 0.1 s. bytes_per_s 0: no limit. */
ckd_status pace_wait(uint64_t bytes_per_s, uint64_t begun_ns, uint64_t moved, pace_tell_fn tell,
                     void *context, ckd_error *err);

typedef struct rate_limiter {
    uint64_t bytes_per_s; /* 0: no limit */
    ckd_progress_fn on_progress;
    void *context;
    const char *cancelled; /* the error's message */
    uint64_t begun_ns, done, total;
} rate_limiter;
/* After so many bytes: waits until they are due. CANCELLED. */
ckd_status rate_limiter_add(rate_limiter *p, uint64_t bytes, ckd_error *err);

#endif
