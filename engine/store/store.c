/* Opens and creates a store. */
#include "engine/store/view.h"
#include "engine/store/handle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- folders ---- */

ckd_status store_make_directories(const char *root, ckd_error *err) {
    static const char *const dirs[] = {"data",         DIR_CHUNKS,       DIR_MANIFESTS, DIR_INTENTS,
                                       DIR_TOMBSTONES, DIR_MATERIALIZED, DIR_SETTINGS};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < sizeof(dirs) / sizeof(dirs[0]) && status == CKD_OK; i++) {
        status = dir_create(path_in(root, dirs[i]).text, true, err);
    }
    return status;
}

/*
 * Refuses folders that are links: recovery and collections might remove files outside the store. The path of the store
 * itself may contain links.
 */
static ckd_status check_folders(const ckd_store *store, ckd_error *err) {
    static const char *const folders[] = {"data",         DIR_CHUNKS,       DIR_MANIFESTS, DIR_INTENTS,
                                          DIR_TOMBSTONES, DIR_MATERIALIZED, DIR_RANKS,     DIR_SETTINGS,
                                          DIR_INCOMING,   DIR_PARITY,       DIR_DAMAGED};
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        pathname p = path_in(store->path, folders[i]);
        struct stat st;
        if (lstat(p.text, &st) == 0 && S_ISLNK(st.st_mode)) {
            return err_corrupt(
                err, p.text, CKD_NO_OFFSET,
                "a folder of the store is a symbolic link, which is not followed: put the folder "
                "itself there, or mount it there");
        }
    }
    return CKD_OK;
}

/* Reports a store that every user of the machine can write to. */
static void warn_open_to_all(const ckd_store *store) {
    static const char *const folders[] = {"data", DIR_CHUNKS, DIR_MANIFESTS};
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        pathname p = path_in(store->path, folders[i]);
        struct stat st;
        if (stat(p.text, &st) == 0 && (st.st_mode & S_IWOTH) && !(st.st_mode & S_ISVTX)) {
            store_message(
                store,
                "every user of this machine can remove or replace checkpoints of this store, as %s is "
                "world-writable; run chmod -R o-w on the store",
                p.text);
            return;
        }
    }
}

/* ---- opening ---- */

#define CATALOG_PATH_MAX 504 /* bytes: SQLite allows 512, with its journal's suffix */

/* A store may be created in an empty directory, or where an earlier creation was interrupted. */
static ckd_status check_creatable(const char *root, ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, root, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        if (strcmp(list.names[i], "data") != 0) {
            status = err_set(
                err, CKD_E_INVALID,
                "'%s' is not a ckptdelta store and not empty (it has '%s'); name a new or empty directory",
                root, list.names[i]);
        }
    }
    dir_list_free(&list);
    return status;
}

/* The directory that holds the store, for syncing the store's own name. */
static pathname parent_directory(const char *root) {
    pathname p;
    snprintf(p.text, sizeof(p.text), "%s", root);
    size_t length = strlen(p.text);
    while (length > 1 && p.text[length - 1] == '/') {
        p.text[--length] = '\0';
    }
    char *slash = strrchr(p.text, '/');
    if (!slash) {
        strcpy(p.text, ".");
    } else {
        slash[slash == p.text ? 1 : 0] = '\0';
    }
    return p;
}

/*
 * Creates missing directories above `path`. Syncs all of them, existing ones too: another process may have created them
 * and died before syncing. A directory that we may not open was not made by us.
 */
static ckd_status create_parents(const char *path, ckd_error *err) {
    pathname parent = parent_directory(path);
    if (strcmp(parent.text, ".") == 0 || strcmp(parent.text, "/") == 0) {
        return CKD_OK;
    }
    ckd_status status = create_parents(parent.text, err);
    THEN(status, dir_create(parent.text, true, err));
    if (status == CKD_OK) {
        ckd_error why = {0};
        status = dir_sync(parent_directory(parent.text).text, &why);
        status = err_except(err, status, CKD_E_READ_ONLY, &why);
    }
    return status;
}

static ckd_status create_store(ckd_store *store, ckd_error *err) {
    bool exists;
    ckd_status status = identity_is_expected(&exists, store, err);
    if (status != CKD_OK || exists) {
        return status;
    }
    status = create_parents(store->path, err);
    THEN(status, dir_create(store->path, true, err));
    if (status == CKD_OK) {
        ckd_error why = {0};
        status = check_creatable(store->path, &why);
        if (status == CKD_E_INVALID && file_exists(path_in(store->path, FILE_IDENTITY).text)) {
            return CKD_OK; /* another process created it meanwhile */
        }
        err_from(err, status, &why);
    }
    THEN(status, store_make_directories(store->path, err));
    file_lock *lock = NULL;
    if (status == CKD_OK) {
        ckd_error why = {0};
        status =
            lock_acquire(&lock, path_in(store->path, FILE_READER_LOCK).text, LOCK_EXCLUSIVE, true, 0, &why);
        status = err_except(err, status, CKD_E_BUSY, &why); /* it exists, which is enough */
        lock_release(lock);
    }
    THEN(status, dir_sync(path_in(store->path, "data").text, err));
    THEN(status, store_lock_publish(&lock, store, err));
    if (status == CKD_OK) {
        status = identity_create(store, err);
        lock_release(lock);
    }
    return status;
}

/*
 * Makes the store's own names durable before anything in it counts as durable, because its creator may have died before
 * syncing. We may not be allowed to open the directory above the store.
 */
static ckd_status sync_own_names(const ckd_store *store, ckd_error *err) {
    ckd_status status = dir_sync(store->path, err);
    if (status == CKD_OK) {
        ckd_error why = {0};
        status = dir_sync(parent_directory(store->path).text, &why);
        status = err_except(err, status, CKD_E_READ_ONLY, &why);
    }
    return status;
}

static ckd_status open_for_writing(ckd_store *store, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    status = sync_own_names(store, err);
    THEN(status, store_recover(store, err));
    THEN(status, store_open_catalog(store, err));
    if (status == CKD_OK) {
        materialized_evict(store);
    }
    lock_release(lock);
    return status;
}

/* The length of the path as SQLite will resolve it: absolute, without links. Its last directories may not exist yet. */
static size_t resolved_length(const char *root) {
    pathname p;
    snprintf(p.text, sizeof(p.text), "%s", root);
    for (;;) {
        bool last = strcmp(p.text, ".") == 0 || strcmp(p.text, "/") == 0;
        char *real = realpath(p.text, NULL);
        if (real) {
            bool inside =
                strncmp(root, p.text, strlen(p.text)) == 0; /* else it is ".", which the path leaves out */
            size_t length = strlen(real) + strlen(root) - (inside ? strlen(p.text) : 0) + !inside;
            free(real);
            return length;
        }
        if (last) {
            return strlen(root);
        }
        p = parent_directory(p.text);
    }
}

/* Readers work without the catalog, but a writer would rebuild it at every save. */
static ckd_status check_length(const char *root, ckd_error *err) {
    size_t length = resolved_length(root), limit = CATALOG_PATH_MAX - strlen("/" FILE_CATALOG);
    if (length <= limit) {
        return CKD_OK;
    }
    err_set(
        err, CKD_E_INVALID,
        "the store's path has %zu bytes, links resolved; a store can only be written where it has at most %zu: "
        "choose a shorter one, or move the store",
        length, limit);
    return err_in_file(err, CKD_E_INVALID, root);
}

/* Opens everything but the catalog. */
static ckd_status open_store(ckd_store **out, const char *root, ckd_open_mode mode,
                             const ckd_store_options *options, const store_hooks *hooks, ckd_error *err) {
    ckd_status status = store_new(out, root, mode, options, hooks, err);
    if (status == CKD_OK && file_bars_directory(root)) {
        status = err_set(
            err, CKD_E_INVALID,
            "'%s' is not a ckptdelta store: it, or a part of its path, is a file instead of a directory",
            root);
    }
    if (status == CKD_OK && mode != CKD_OPEN_READ) {
        status = check_length(root, err);
    }
    THEN(status, check_folders(*out, err));
    if (status == CKD_OK && mode == CKD_OPEN_CREATE) {
        status = create_store(*out, err);
    }
    THEN(status, identity_open(*out, err));
    THEN(status, pool_create(&(*out)->pool, (*out)->options.threads, err));
    if (status != CKD_OK) {
        ckd_store_close(*out);
        *out = NULL;
        return status;
    }
    warn_open_to_all(*out);
    return CKD_OK;
}

ckd_status store_open_without_catalog(ckd_store **out, const char *root, const ckd_store_options *options,
                                      const store_hooks *hooks, ckd_error *err) {
    return open_store(out, root, CKD_OPEN_WRITE, options, hooks, err);
}

ckd_status store_open(ckd_store **out, const char *root, ckd_open_mode mode, const ckd_store_options *options,
                      const store_hooks *hooks, ckd_error *err) {
    ckd_status status = open_store(out, root, mode, options, hooks, err);
    THEN(status, mode == CKD_OPEN_READ ? store_open_catalog(*out, err) : open_for_writing(*out, err));
    if (status != CKD_OK) {
        ckd_store_close(*out);
        *out = NULL;
    }
    return status;
}

/* ---- rebuilding the catalog ---- */

static ckd_status rebuild(ckd_rebuild_result *result, ckd_store *store, ckd_error *err) {
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
        status = rebuild(result, store, err);
        ckd_store_close(store);
    }
    return status;
}
