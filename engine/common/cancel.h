/*
 * Work that takes long asks now and then whether it is still wanted: between blocks, and inside of what takes longer than these. Internal
 * to engine/.
 */
#ifndef ENGINE_COMMON_CANCEL_H
#define ENGINE_COMMON_CANCEL_H

#include "base/file.h"

#define CANCEL_SHARE \
    20 /* of the time that looking may take, one part in so many: some file systems are slow */

/* Used by one thread at a time. */
typedef struct cancel_check {
    ckd_status (*poll)(void *context,
                       ckd_error *err); /* the error that the work is to end with; NULL: it is wanted */
    void *context;
    uint64_t every_ns; /* not more often */
    uint64_t next_ns;
} cancel_check; /* zero-initialise */

/* CKD_OK: go on. Nothing more than a look at the clock most of the time, so it may be called often. s may be NULL. */
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
