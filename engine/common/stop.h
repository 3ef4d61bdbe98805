/*
 * Work that takes long asks now and then whether it is still wanted: between blocks, and inside of what takes longer than these. Internal
 * to engine/.
 */
#ifndef ENGINE_STOP_H
#define ENGINE_STOP_H

#include "base/file.h"

#define STOP_SHARE 20 /* of the time that looking may take, one part in so many: some file systems are slow */

/* Used by one thread at a time. */
typedef struct stop_check {
    ckd_status (*look)(void *context,
                       ckd_error *err); /* the error that the work is to end with; NULL: it is wanted */
    void *context;
    uint64_t every_ns; /* not more often */
    uint64_t next_ns;
} stop_check; /* zero-initialise */

/* CKD_OK: go on. Nothing more than a look at the clock most of the time, so it may be called often. s may be NULL. */
static inline ckd_status stop_look(stop_check *s, ckd_error *err) {
    if (!s || !s->look) {
        return CKD_OK;
    }
    uint64_t begun = clock_monotonic_ns();
    if (begun < s->next_ns) {
        return CKD_OK;
    }
    ckd_status status = s->look(s->context, err);
    uint64_t now = clock_monotonic_ns(), pause = STOP_SHARE * (now - begun);
    s->next_ns = now + (pause > s->every_ns ? pause : s->every_ns);
    return status;
}

#endif
