/* The catalog, which can be made from the manifests. */
#include "engine/integrity/internal.h"
#include "engine/store/store.h"

ckd_status catalog_condition(const ckd_store *store, ckd_error *why) {
    pathname p = path_in(store->path, FILE_CATALOG);
    catalog *c = NULL;
    ckd_status status = catalog_open(&c, p.text, CATALOG_READ, &store->id, 1000, why);
    THEN(status, catalog_check(c, why));
    catalog_close(c);
    bool journal = file_bytes(path_in(store->path, FILE_CATALOG "-journal").text) > 0;
    if (status != CKD_E_CORRUPT || journal) {
        /*
         * It is fine, missing (the next writer makes it), in use by a writer, or has the journal of one that died (the
         * next writer rolls it back). The manifests are what counts.
         */
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
