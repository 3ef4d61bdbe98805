/* Threads that copy snapshots beside the trainer. Internal to engine/. */
#ifndef ENGINE_COPIERS_H
#define ENGINE_COPIERS_H

#include "engine/snapshot.h"

typedef struct copiers copiers;

/* threads: may be 0. Errors: NOMEM, IO. */
ckd_status copiers_start(copiers **out, uint32_t threads, ckd_error *err);
/* Begins the snapshot, and copies it from now on. Whatever they copied before must be copied. */
void copiers_begin(copiers *c, snapshot *s);
/* What they copy is copied. In a child of the process that started them it only frees. Accepts NULL. */
void copiers_end(copiers *c, bool in_child);

#endif
