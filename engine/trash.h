/* Deleted checkpoints whose files are still there. Internal to engine/. */
#ifndef ENGINE_TRASH_H
#define ENGINE_TRASH_H

#include "engine/store.h"

/*
 * Removes what can no longer be taken back, if nobody reads the store now. Under the publish lock. Only a lack of memory is an error; anything
 * else is told, and left for another time.
 */
ckd_status trash_collect_now(ckd_store *store, ckd_error *err);

#endif
