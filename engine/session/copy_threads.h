/* Threads that copy snapshots beside the trainer. Internal to engine/. */
#ifndef ENGINE_SESSION_COPY_THREADS_H
#define ENGINE_SESSION_COPY_THREADS_H

#include "engine/session/snapshot.h"

typedef struct copy_threads copy_threads;

/*
 * Called by the first copy thread that takes up a new snapshot, to notify others. The trainer thus wakes only copy
 * threads. Each additional thread that it wakes might take the trainer's core.
 */
typedef void (*copy_started_fn)(void *context);

/* Starts the threads. threads: may be 0. Errors: NOMEM, IO. */
ckd_status copy_threads_start(copy_threads **out, uint32_t threads, copy_started_fn began, void *context,
                              ckd_error *err);
/* Hands the threads a new snapshot. The previous one must be copied. may_be_held: copy_threads_hold applies to it. */
void copy_threads_begin(copy_threads *c, snapshot *s, bool may_be_held);
/* Wakes the threads to copy it. Without threads, the caller calls `began` itself. */
void copy_threads_wake(copy_threads *c);
/* While `held`, threads take up no further slice of a snapshot that may be held. Callable from any thread. */
void copy_threads_hold(copy_threads *c, bool held);
/* Somebody waits for the current snapshot, so the threads copy it even while they are held. */
void copy_threads_hurry(copy_threads *c);
/*
 * Ends the threads. Their snapshot must be copied. In a child of the process that started them it only frees memory.
 * Accepts NULL.
 */
void copy_threads_end(copy_threads *c, bool in_child);

#endif
