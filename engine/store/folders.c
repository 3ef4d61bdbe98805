/* The folders of a store: those that are missing are made, and those that could harm whoever opens it are found. */
#include <sys/stat.h>

#include "engine/store/store.h"

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
 * A folder that is a link leads to files outside the store: recovery would remove everything there that no manifest
 * names. The path of the store itself may contain links.
 */
ckd_status store_check_folders(const ckd_store *store, ckd_error *err) {
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

void store_warn_open_to_all(const ckd_store *store) {
    static const char *const folders[] = {"data", DIR_CHUNKS, DIR_MANIFESTS};
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        pathname p = path_in(store->path, folders[i]);
        struct stat st;
        if (stat(p.text, &st) == 0 && (st.st_mode & S_IWOTH) && !(st.st_mode & S_ISVTX)) {
            store_message(
                store,
                "every user of this machine can remove and replace the checkpoints of this store, as %s is "
                "writable by all; chmod -R o-w takes that away",
                p.text);
            return;
        }
    }
}
