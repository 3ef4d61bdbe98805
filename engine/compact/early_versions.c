/*
 * Prepares stores of early versions. Their manifests name own files only. A load finds the other files by the newest
 * manifests of the dependencies. A rewritten dependency keeps its values, but not the links that other checkpoints
 * need. So before anything is rewritten, each manifest is replaced by one that names all files.
 */
#include "engine/compact/internal.h"

/*
 * Publishes a manifest that names the files that a load was proven to read. Damaged checkpoints are left to
 * name_rest.
 */
static ckd_status upgrade_proven(compaction *c, const ckd_id *id, ckd_error *err) {
    rewrite_plan p = {.why = 0};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    file_lock *readers;
    uint64_t stored;
    ckd_status status = store_lock_reader_within(&readers, c->store, c->limits.timeout_ms, err);
    if (status != CKD_OK) {
        return status;
    }
    status = compact_open(&p.view, &p.published, c, id, &why);
    THEN(status, compact_update_manifest(&stored, c, &p, &why));
    compact_close_views(c);
    lock_release(readers);
    return status == CKD_OK || compact_is_local_error(status, &why) ? CKD_OK : err_from(err, status, &why);
}

/*
 * Completes the manifests of checkpoints in the trash, of damaged ones, and of those that others deleted meanwhile.
 * They then name all files that their dependencies name now. More is not known for a damaged checkpoint, which a repair
 * may still restore.
 */
static ckd_status upgrade_rest(const compaction *c, ckd_error *err) {
    ckd_store *store = c->store;
    manifest_set n = {0};
    file_lock *lock;
    ckd_status status = store_lock_publish_within(&lock, store, c->limits.timeout_ms, err);
    if (status != CKD_OK) {
        return status;
    }
    status = manifest_set_read(&n, store, err);
    THEN(status, manifest_set_upgrade_all(&n, store, err));
    ckd_error why = {0};
    pthread_mutex_lock(&store->mutex);
    if (store_refresh_catalog_locked(store, &why) != CKD_OK) {
        store_message(
            store, "the catalog could not be updated; the next save or open for writing will update it: %s",
            why.message);
    }
    pthread_mutex_unlock(&store->mutex);
    manifest_set_free(&n);
    lock_release(lock);
    return status;
}

ckd_status compact_upgrade_early(compaction *c, ckd_error *err) {
    manifest_set n = {0};
    bool any = false;
    ckd_status status = manifest_set_read(&n, c->store, err);
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        const manifest_entry *x = &n.items[i];
        if (x->was_own_only && !x->superseded && !x->is_incomplete) {
            any = true;
            status = x->in_trash ? CKD_OK : upgrade_proven(c, &x->m.checkpoint.id, err);
        }
    }
    manifest_set_free(&n);
    compact_close_views(c);
    return status == CKD_OK && any ? upgrade_rest(c, err) : status;
}
