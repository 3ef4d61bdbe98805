/* The trash: deleted checkpoints whose files still exist. Internal to engine/. */
#ifndef ENGINE_TRASH_H
#define ENGINE_TRASH_H

#include "engine/store/manifest_set.h"
#include "engine/store/store.h"

/* Checkpoints to delete, and how long they can be restored. */
typedef struct trash_choice {
    ckd_id *ids; /* freed by trash_put, also after a failure */
    size_t count;
    uint64_t undo_s;
} trash_choice;
typedef ckd_status (*trash_choose_fn)(void *context, trash_choice *out, ckd_error *err);
/*
 * Deletes what `choose` selects, as ckd_store_delete does. `choose` is called under the publish lock, without the
 * mutex, with the catalog in step. So nobody saves or deletes between the choice and the deletion. Waits up to
 * timeout_ms for the lock. Errors: those of `choose` and ckd_store_delete.
 */
ckd_status trash_put(ckd_store *store, trash_choose_fn choose, void *context, uint32_t timeout_ms,
                     ckd_error *err);

/*
 * Removes checkpoints whose grace period has ended, if nobody reads the store now. The caller holds the publish
 * lock. Errors: NOMEM. Other failures are reported to on_message, and the work is left for another time.
 */
ckd_status trash_collect_now(ckd_store *store, ckd_error *err);

/*
 * Removes generations of listed checkpoints that newer ones have replaced, if all files of the newer one exist. Waits
 * at most lock_ms for the publish lock, and timeout_ms for readers. *left: files that could not be removed yet, because
 * somebody reads, or a repair needs them. Errors: as manifest_set_read; BUSY, IO.
 */
ckd_status trash_remove_replaced(uint64_t *left, ckd_store *store, uint32_t lock_ms, uint32_t timeout_ms,
                                 ckd_error *err);
/*
 * Counts what removing the chosen checkpoints would free: their manifests, and files that no other manifest names.
 * Errors: NOMEM.
 */
ckd_status trash_would_free(ckd_collected *out, const manifest_set *chosen, ckd_error *err);

#endif
