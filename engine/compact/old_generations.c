/*
 * Removes generations that newer ones have replaced. Chunk files go first, then manifests. An old manifest whose
 * files are gone does no harm below a newer one. A file that no manifest names would stay forever.
 */
#include "engine/compact/compact.h"
#include "engine/retain/trash.h"

typedef struct attempt {
    const ckd_store *store;
    uint32_t timeout_ms; /* for the publish lock */
    ckd_collected result;
    unlinker_wait wait;
} attempt;

static ckd_status try_removing(void *context, ckd_error *err) {
    attempt *a = context;
    file_lock *publish, *readers;
    ckd_status status = store_lock_publish_within(&publish, a->store, a->timeout_ms, err);
    if (status != CKD_OK) {
        return status;
    }
    status = store_lock_unlinker(&readers, &a->wait, a->store, err);
    if (status == CKD_OK) {
        status = trash_remove_replaced(&a->result, a->store, false, false, err);
        lock_release(readers);
    }
    lock_release(publish);
    return status;
}

static ckd_status count_left(uint64_t *left, const compaction *c, ckd_error *err) {
    const ckd_store *store = c->store;
    file_lock *publish;
    ckd_collected result = {0};
    ckd_status status = store_lock_publish_within(&publish, store, c->limits.timeout_ms, err);
    if (status == CKD_OK) {
        status = trash_remove_replaced(&result, store, true, false, err);
        lock_release(publish);
    }
    *left = result.files;
    return status;
}

ckd_status compact_remove_old(uint64_t *left, const compaction *c, uint32_t timeout_ms, ckd_error *err) {
    ckd_store *store = c->store;
    attempt a = {.store = store, .timeout_ms = c->limits.timeout_ms};
    *left = 0;
    if (!trash_any_replaced(store)) {
        return CKD_OK;
    }
    ckd_error why = {0};
    ckd_status status = keep_trying(try_removing, &a, timeout_ms, &why);
    if (status == CKD_E_STATE) { /* a repair needs them; the compaction itself succeeded */
        store_message(store, "files that were replaced stay for now: %s (%s)", why.message, why.file);
        status = CKD_E_BUSY;
    }
    return status == CKD_E_BUSY ? count_left(left, c, err) : err_from(err, status, &why);
}
