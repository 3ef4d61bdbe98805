/* Threads that copy snapshots beside the trainer. Internal to engine/. */
#ifndef ENGINE_SESSION_COPY_THREADS_H
#define ENGINE_SESSION_COPY_THREADS_H

#include "engine/session/snapshot.h"

typedef struct copy_threads copy_threads;

/*
 * Whom else a new snapshot is news for: told by the first copier that begins it, so that the trainer wakes nobody but copiers. Each thread that is woken may take
 * the trainer's core.
 */
typedef void (*copy_threads_began)(void *context);

/* threads: may be 0. Errors: NOMEM, IO. */
ckd_status copy_threads_start(copy_threads **out, uint32_t threads, copy_threads_began began, void *context,
                              ckd_error *err);
/* Begins the snapshot. Whatever they copied before must be copied. */
void copy_threads_begin(copy_threads *c, snapshot *s);
/* It is copied from now on, and told of: by the caller, if there are no threads. */
void copy_threads_wake(copy_threads *c);
/* What they copy is copied. In a child of the process that started them it only frees. Accepts NULL. */
void copy_threads_end(copy_threads *c, bool in_child);

#endif
