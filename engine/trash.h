/* Deleted checkpoints whose files are still there. Internal to engine/. */
#ifndef ENGINE_TRASH_H
#define ENGINE_TRASH_H

#include "engine/needs.h"
#include "engine/store.h"

/*
 * Deletes what a policy lets go, as ckd_store_delete does, but for what is gone meanwhile and for the newest two of each run as they are now; waits for the publish lock as long as
 * patience_ms.
 */
ckd_status trash_put(ckd_store *store, const ckd_id *checkpoints, size_t count, uint64_t undo_s,
                     uint32_t patience_ms, ckd_error *err);

/*
 * Removes what can no longer be taken back, if nobody reads the store now. Under the publish lock. Only a lack of memory is an error; anything
 * else is told, and left for another time.
 */
ckd_status trash_collect_now(ckd_store *store, ckd_error *err);

/*
 * Removes generations of listed checkpoints that newer ones have replaced, if all files of the newer one are there. Under the publish lock and the exclusive reader
 * lock; `dry`: only counts, without that one. Errors: as needs_read; IO.
 */
ckd_status trash_remove_replaced(ckd_collected *out, const ckd_store *store, bool dry, bool give_up,
                                 ckd_error *err);
/* What removing the chosen ones would free: files that no other names, and manifests. Errors: NOMEM. */
ckd_status trash_would_free(ckd_collected *out, const needs *chosen, ckd_error *err);
/* By names alone: is there any? */
bool trash_any_replaced(const ckd_store *store);

#endif
