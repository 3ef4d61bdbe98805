/* Rebuilds the catalog on request. */
#include "engine/store/store.h"

static ckd_status renew(ckd_rebuild_result *result, ckd_store *store, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status == CKD_OK) {
        status = store_recover(store, err);
        THEN(status, store_rebuild_catalog(store, true, err));
        lock_release(lock);
    }
    ckd_checkpoint_list list = {0};
    if (status == CKD_OK && result) {
        status = catalog_list(&list, store->catalog, NULL, err);
        if (status == CKD_OK) {
            *result = (ckd_rebuild_result){.checkpoints = list.count, .skipped = store->manifests_skipped};
        }
        catalog_list_free(&list);
    }
    return status;
}

ckd_status store_rebuild(ckd_rebuild_result *result, const char *path, const ckd_store_options *options,
                         const store_hooks *hooks, ckd_error *err) {
    if (result) {
        memset(result, 0, sizeof(*result));
    }
    ckd_store *store;
    ckd_status status = store_open_without_catalog(&store, path, options, hooks, err);
    if (status == CKD_OK) {
        status = renew(result, store, err);
        ckd_store_close(store);
    }
    return status;
}
