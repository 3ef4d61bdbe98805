/* Reading no faster than was asked for, and telling how far it has come. Internal to engine/. */
#ifndef ENGINE_PACE_H
#define ENGINE_PACE_H

#include "base/error.h"

typedef struct pace {
    uint64_t bytes_per_s; /* 0: no limit */
    ckd_progress_fn on_progress;
    void *context;
    const char *what; /* "the repair": for the error */
    uint64_t begun_ns, done, total;
} pace;
/* After so many bytes: waits until they are due. CANCELLED. */
ckd_status pace_add(pace *p, uint64_t bytes, ckd_error *err);

#endif
