/* Deleted checkpoints whose files are still there. Internal to engine/. */
#ifndef ENGINE_TRASH_H
#define ENGINE_TRASH_H

#include "engine/store/manifest_set.h"
#include "engine/store/store.h"

/* Checkpoints to delete, and for how long that can be taken back. */
typedef struct trash_choice {
    ckd_id *ids; /* freed by trash_put, also after a failure */
    size_t count;
    uint64_t undo_s;
} trash_choice;
typedef ckd_status (*trash_choose_fn)(void *context, trash_choice *out, ckd_error *err);
/*
 * Deletes what `choose` says, as ckd_store_delete does. `choose` is called under the publish lock, without the mutex, the catalog in step: nobody saves or deletes between the choice and the
 * deletion. Waits for the lock as long as timeout_ms. Errors: those of `choose` and ckd_store_delete.
 */
ckd_status trash_put(ckd_store *store, trash_choose_fn choose, void *context, uint32_t timeout_ms,
                     ckd_error *err);

/*
 * Removes what can no longer be taken back, if nobody reads the store now. Under the publish lock. Only a lack of memory is an error; anything
 * else is told, and left for another time.
 */
ckd_status trash_collect_now(ckd_store *store, ckd_error *err);

/*
 * Removes generations of listed checkpoints that newer ones have replaced, if all files of the newer one are there. Under the publish lock and the exclusive reader
 * lock; `dry`: only counts, without that one. Errors: as manifest_set_read; IO.
 */
ckd_status trash_remove_replaced(ckd_collected *out, const ckd_store *store, bool dry, bool force,
                                 ckd_error *err);
/* What removing the chosen ones would free: files that no other names, and manifests. Errors: NOMEM. */
ckd_status trash_would_free(ckd_collected *out, const manifest_set *chosen, ckd_error *err);
/* By names alone: is there any? */
bool trash_any_replaced(const ckd_store *store);

#endif
