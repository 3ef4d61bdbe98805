/*
 * Cancellation. Long work asks regularly whether to continue: between blocks, and within steps that take longer than a
 * block. Internal to engine/.
 */
#ifndef ENGINE_COMMON_CANCEL_H
#define ENGINE_COMMON_CANCEL_H

#include "base/file.h"

#define CANCEL_SHARE \
    20 /* polling may take one part in this many of the elapsed time, as some file systems are slow */

/* Used by one thread at a time. */
typedef struct cancel_check {
    /* Returns the error that the work shall end with, or CKD_OK. NULL: the work is never cancelled. */
    ckd_status (*poll)(void *context, ckd_error *err);
    void *context;
    uint64_t every_ns; /* minimum time between polls */
    uint64_t next_ns;
} cancel_check; /* zero-initialise */

/*
 * Returns CKD_OK if the work shall continue. Cheap enough to call often: most calls only read the clock. s may be NULL.
 */
static inline ckd_status cancel_poll(cancel_check *s, ckd_error *err) {
    if (!s || !s->poll) {
        return CKD_OK;
    }
    uint64_t begun = clock_monotonic_ns();
    if (begun < s->next_ns) {
        return CKD_OK;
    }
    ckd_status status = s->poll(s->context, err);
    uint64_t now = clock_monotonic_ns(), pause = CANCEL_SHARE * (now - begun);
    s->next_ns = now + (pause > s->every_ns ? pause : s->every_ns);
    return status;
}

#endif
