/* Threads that copy snapshots beside the trainer. Internal to engine/. */
#ifndef ENGINE_COPIERS_H
#define ENGINE_COPIERS_H

#include "engine/session/snapshot.h"

typedef struct copiers copiers;

/*
 * Whom else a new snapshot is news for: told by the first copier that begins it, so that the trainer wakes nobody but copiers. Each thread that is woken may take
 * the trainer's core.
 */
typedef void (*copiers_began)(void *context);

/* threads: may be 0. Errors: NOMEM, IO. */
ckd_status copiers_start(copiers **out, uint32_t threads, copiers_began began, void *context, ckd_error *err);
/* Begins the snapshot. Whatever they copied before must be copied. */
void copiers_begin(copiers *c, snapshot *s);
/* It is copied from now on, and told of: by the caller, if there are no threads. */
void copiers_wake(copiers *c);
/* What they copy is copied. In a child of the process that started them it only frees. Accepts NULL. */
void copiers_end(copiers *c, bool in_child);

#endif
