/*
 * Chooses the catalog that a handle uses: the file, or, if the file is unusable, one in memory made from the manifests.
 * No load or commit depends on the file: a writer continues without it and tries it again the next time. Only recovery
 * asks it for something that the manifests cannot tell: whether a dead writer had committed.
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/damage.h"
#include "engine/store/handle.h"

/*
 * Writers of a store wait for each other at the publish lock. Only foreign programs hold SQLite's own locks longer than
 * this.
 */
#define SQLITE_TIMEOUT_MS 1000

/*
 * Drops our catalog if a rebuild, by any process, has put another file in its place. Uses only the file's name, because
 * closing any descriptor of the file would drop SQLite's locks on it.
 */
static void drop_replaced_file(ckd_store *store) {
    if (store->catalog && !store->catalog_in_memory &&
        file_inode(path_in(store->path, FILE_CATALOG).text) != store->catalog_number) {
        catalog_close(store->catalog);
        store->catalog = NULL;
    }
}

/*
 * An empty file counts as damaged, for a writer as for a reader. SQLite would turn it into an empty catalog, and
 * recovery would take that as evidence that the writers of older intents committed nothing.
 */
static catalog_mode mode_for(const ckd_store *store, const char *name, const char *path) {
    bool is_empty = strcmp(name, FILE_CATALOG) == 0 && file_bytes(path) == 0;
    return store->mode == CKD_OPEN_READ || is_empty ? CATALOG_READ : CATALOG_WRITE;
}

static ckd_status use_file(ckd_store *store, const char *name, ckd_error *err) {
    catalog_close(store->catalog);
    store->catalog = NULL;
    store->catalog_in_memory = false;
    store->catalog_compared = false;
    pathname p = path_in(store->path, name);
    ckd_status status = catalog_open(&store->catalog, p.text, mode_for(store, name, p.text), &store->id,
                                     SQLITE_TIMEOUT_MS, err);
    store->catalog_number = status == CKD_OK ? file_inode(p.text) : 0;
    return status;
}

ckd_status store_use_memory_catalog(ckd_store *store, ckd_error *err) {
    catalog_close(store->catalog);
    store->catalog = NULL;
    store->catalog_in_memory = true;
    store->catalog_compared = true; /* it is made from the manifests alone */
    ckd_status status = catalog_open(&store->catalog, NULL, CATALOG_MEMORY, &store->id, 0, err);
    reconcile_result result;
    return status == CKD_OK ? store_reconcile_catalog(&result, store, err) : status;
}

static ckd_status open_for_reading(ckd_store *store, ckd_error *err) {
    ckd_error why = {0};
    reconcile_result result = {0};
    ckd_status status = use_file(store, FILE_CATALOG, &why);
    THEN(status, store_reconcile_catalog(&result, store, &why));
    if ((status == CKD_OK && !result.behind) || status == CKD_E_NOMEM) {
        return err_from(err, status, &why);
    }
    /*
     * The file is missing, damaged, newer, locked, or has a journal that only a writer may roll back. The manifests
     * have it all.
     */
    if (status != CKD_OK && status != CKD_E_NOT_FOUND) {
        store_message(store, "the catalog is not used, the manifests are read instead: %s", why.message);
    }
    return store_use_memory_catalog(store, err);
}

/* Removes the unfinished new catalog of a writer that died. */
static void drop_unfinished(const ckd_store *store) {
    (void)file_remove(path_in(store->path, FILE_NEW_CATALOG "-journal").text, true, NULL);
    (void)file_remove(path_in(store->path, FILE_NEW_CATALOG).text, true, NULL);
}

/*
 * A catalog that is made from the manifests never saw what the writers of older intents committed. So it is no evidence
 * that they committed nothing (recovery.c). Nothing makes an intent meanwhile, as the caller holds the publish lock.
 */
static ckd_status record_older_intents(ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_error missing = {0};
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_INTENTS).text, &missing);
    if (status != CKD_OK) {
        return err_except(err, status, CKD_E_NOT_FOUND, &missing);
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        char key[CATALOG_META];
        older_intent_key(key, list.names[i]);
        status = store_record_meta(store, key, "older", err);
    }
    dir_list_free(&list);
    return status;
}

/* Fills the new catalog, durably, under its temporary name. */
static ckd_status fill_new_file(reconcile_result *result, ckd_store *store, ckd_error *err) {
    drop_unfinished(store);
    *result = (reconcile_result){.catalog_failed = true};
    ckd_status status = use_file(store, FILE_NEW_CATALOG, err);
    THEN(status, store_reconcile_catalog(result, store, err));
    if (status == CKD_OK) {
        status = record_older_intents(store, err);
        result->catalog_failed = status != CKD_OK;
    }
    return status;
}

/*
 * Moves the old catalog aside. First its old name is removed durably, then its journal, and only then does the new
 * catalog get the name. So a crash at any point neither leads to a journal being applied to another database, nor loses
 * a journal that is needed.
 */
static ckd_status put_aside(const ckd_store *store, ckd_error *err) {
    pathname p = path_in(store->path, FILE_CATALOG), journal = path_in(store->path, FILE_CATALOG "-journal");
    ckd_status status = CKD_OK;
    if (file_exists(p.text)) {
        status = file_rename(p.text, path_in(store->path, FILE_CATALOG ".old").text, err);
    }
    THEN(status, dir_sync(store->path, err));
    THEN(status, file_remove(journal.text, true, err));
    return status == CKD_OK ? dir_sync(store->path, err) : status;
}

/* Gives the new catalog the final name, and opens it. */
static ckd_status put_in_place(ckd_store *store, ckd_error *err) {
    catalog_close(store->catalog);
    store->catalog = NULL;
    ckd_status status = put_aside(store, err);
    THEN(status, file_rename(path_in(store->path, FILE_NEW_CATALOG).text,
                             path_in(store->path, FILE_CATALOG).text, err));
    THEN(status, dir_sync(store->path, err));
    THEN(status, use_file(store, FILE_CATALOG, err));
    store->catalog_compared = status == CKD_OK; /* it is made from the manifests alone */
    return status;
}

/* Makes a new catalog file. The old one stays until the new one is complete. */
static ckd_status make_file(bool *catalog_failed, ckd_store *store, ckd_error *err) {
    reconcile_result result;
    ckd_status status = fill_new_file(&result, store, err);
    *catalog_failed = status != CKD_OK && result.catalog_failed;
    if (status == CKD_OK) {
        status = put_in_place(store, err);
        *catalog_failed = status != CKD_OK;
    }
    if (status != CKD_OK) {
        catalog_close(store->catalog);
        store->catalog = NULL;
        drop_unfinished(store);
    }
    return status;
}

/* catalog_failed: whether the file itself failed. */
static ckd_status reconcile_file(bool *catalog_failed, ckd_store *store, ckd_error *err) {
    reconcile_result result = {.catalog_failed = true};
    ckd_status status = CKD_OK;
    drop_replaced_file(store);
    bool no_file = !store->catalog || store->catalog_in_memory;
    if (no_file && !file_exists(path_in(store->path, FILE_CATALOG).text)) {
        return make_file(catalog_failed, store, err);
    }
    if (no_file) {
        status = use_file(store, FILE_CATALOG, err);
    }
    THEN(status, store_reconcile_catalog(&result, store, err));
    *catalog_failed = status != CKD_OK && result.catalog_failed;
    return status;
}

ckd_status store_rebuild_catalog(ckd_store *store, bool on_request, ckd_error *err) {
    bool ignored;
    ckd_error why = {0};
    ckd_status status = vanished_save_found(store, &why);
    /*
     * No further rows of a damaged catalog can be kept. Any other catalog stays until its lost checkpoints are
     * recorded.
     */
    if (status == CKD_E_NOMEM || (status != CKD_OK && on_request)) {
        return err_from(err, status, &why);
    }
    return make_file(&ignored, store, err);
}

ckd_status store_refresh_catalog_locked(ckd_store *store, ckd_error *err) {
    ckd_error why = {0};
    bool catalog_failed;
    ckd_status status = reconcile_file(&catalog_failed, store, &why);
    if (catalog_failed &&
        (status == CKD_E_CORRUPT || status == CKD_E_NOT_FOUND || status == CKD_E_MISMATCH)) {
        store_message(
            store,
            "the catalog %s (%s); rebuilding it from the manifests, and keeping the old one as " FILE_CATALOG
            ".old",
            status == CKD_E_MISMATCH ? "is of an older version" : "is damaged", why.message);
        status = store_rebuild_catalog(store, false, &why);
    }
    /* If a newer version wrote the catalog, or we may not write it, we may not write the store either. */
    if (!catalog_failed || status == CKD_OK || status == CKD_E_NOMEM || status == CKD_E_UNSUPPORTED ||
        status == CKD_E_READ_ONLY) {
        return err_from(err, status, &why);
    }
    store_message(store, "continuing without the catalog: %s", why.message);
    return store_use_memory_catalog(store, err);
}

bool store_refresh_usable_catalog(ckd_store *store) {
    reconcile_result result;
    uint64_t skipped = store->manifests_skipped;
    if (pthread_mutex_trylock(&store->mutex) != 0) {
        return false;
    }
    drop_replaced_file(store);
    /* the file may have become usable again */
    bool exists = file_exists(path_in(store->path, FILE_CATALOG).text);
    bool is_new = !store->catalog || store->catalog_in_memory;
    bool usable = exists && (!is_new || use_file(store, FILE_CATALOG, NULL) == CKD_OK);
    bool in_step = usable && store_reconcile_catalog(&result, store, NULL) == CKD_OK;
    if (usable && !in_step && is_new) {
        catalog_close(store->catalog);
        store->catalog = NULL;
    }
    store->manifests_skipped = skipped;
    pthread_mutex_unlock(&store->mutex);
    return in_step || !exists;
}

ckd_status store_refresh_catalog(ckd_store *store, ckd_error *err) {
    file_lock *lock;
    if (store->mode == CKD_OPEN_READ) {
        return CKD_OK;
    }
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status == CKD_OK) {
        pthread_mutex_lock(&store->mutex);
        status = store_refresh_catalog_locked(store, err);
        pthread_mutex_unlock(&store->mutex);
        lock_release(lock);
    }
    return status;
}

ckd_status store_open_catalog(ckd_store *store, ckd_error *err) {
    if (store->mode == CKD_OPEN_READ) {
        return open_for_reading(store, err);
    }
    drop_unfinished(store);
    return store_refresh_catalog_locked(store, err);
}

/* ---- queries ---- */

/* A reader's file may also be behind: the writer of the newest manifests may not have reached the catalog. */
static bool query_again(const ckd_store *store, ckd_status status) {
    switch (status) {
    case CKD_E_NOT_FOUND:
        return store->mode == CKD_OPEN_READ;
    case CKD_E_CORRUPT:
    case CKD_E_BUSY:
    case CKD_E_IO:
    case CKD_E_NOSPACE:
        return true;
    default:
        return false;
    }
}

/* Provides a catalog that is as new as the manifests. */
static ckd_status catch_up(ckd_store *store, ckd_status failed, ckd_error *err) {
    reconcile_result result = {0};
    if (store->catalog && store->catalog_in_memory) {
        return store_reconcile_catalog(&result, store, err);
    }
    if (failed == CKD_E_NOT_FOUND && store_reconcile_catalog(&result, store, NULL) == CKD_OK &&
        !result.behind) {
        return CKD_OK;
    }
    return store_use_memory_catalog(store, err);
}

ckd_status store_query(ckd_store *store, store_query_fn query, void *context, ckd_error *err) {
    ckd_error why = {0};
    pthread_mutex_lock(&store->mutex);
    ckd_status status = CKD_E_CORRUPT; /* not queried yet: a catalog in memory catches up first */
    drop_replaced_file(store);
    if (!store->catalog) {
        /* the new file was not compared with the manifests, and a writer cannot repair it here */
        store->mode == CKD_OPEN_READ ? open_for_reading(store, NULL) : store_use_memory_catalog(store, NULL);
    }
    if (store->catalog && !store->catalog_in_memory) {
        status = query(context, store->catalog, &why);
    }
    if (query_again(store, status)) {
        status = catch_up(store, status, &why);
        THEN(status, query(context, store->catalog, &why));
    }
    pthread_mutex_unlock(&store->mutex);
    return err_from(err, status, &why);
}

/* ---- when chunk files were last read in full and found intact ---- */

void scrub_times_name(char name[64], const ckd_id *file) {
    char hex[CKD_ID_TEXT];
    ckd_id_text(hex, file);
    snprintf(name, 64, "%s.ckd", hex);
}

catalog_file_state *scrub_times_load(size_t *count, ckd_store *store) {
    catalog_file_state *files = NULL;
    *count = 0;
    pthread_mutex_lock(&store->mutex);
    if (store->catalog) {
        catalog_file_states(&files, count, store->catalog, NULL);
    }
    pthread_mutex_unlock(&store->mutex);
    return files;
}

ckd_status scrub_times_add(scrubbed_files *f, const manifest *m, ckd_error *err) {
    if (ARRAY_GROW(f->ids, f->capacity, f->count + m->file_count, "the files that were verified", err) !=
        CKD_OK) {
        return CKD_E_NOMEM;
    }
    for (size_t i = 0; i < m->file_count; i++) {
        f->ids[f->count++] = m->files[i].id;
    }
    return CKD_OK;
}

void scrub_times_queue(ckd_store *store, scrubbed_files *f) {
    pthread_mutex_lock(&store->mutex);
    free(store->scrubbed.ids); /* left over from an earlier call, whose deletion failed */
    store->scrubbed = *f;
    pthread_mutex_unlock(&store->mutex);
    *f = (scrubbed_files){0};
}

ckd_status scrub_times_write(ckd_store *store, ckd_error *err) {
    scrubbed_files *f = &store->scrubbed;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < f->count && status == CKD_OK; i++) {
        char name[64];
        scrub_times_name(name, &f->ids[i]);
        status = catalog_set_verified(store->catalog, name, f->at_ns, err);
    }
    return status;
}
