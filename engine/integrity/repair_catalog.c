/* The catalog can be made from the manifests. A damaged one is made again. */
#include "engine/integrity/repair.h"

ckd_status catalog_condition(const ckd_store *store, ckd_error *why) {
    pathname p = path_in(store->path, FILE_CATALOG);
    catalog *c = NULL;
    ckd_status status = catalog_open(&c, p.text, CATALOG_READ, &store->id, 1000, why);
    THEN(status, catalog_check(c, why));
    catalog_close(c);
    if (status != CKD_E_CORRUPT) {
        /* It is fine, missing (the next writer makes it), or in use by a writer. The manifests are what counts. */
        return CKD_OK;
    }
    return err_in_file(why, status, p.text);
}

ckd_status repair_catalog(ckd_store *store, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    pthread_mutex_lock(&store->mutex);
    status = store_rebuild_catalog(store, true, err);
    pthread_mutex_unlock(&store->mutex);
    lock_release(lock);
    return status;
}
