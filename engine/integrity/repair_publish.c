/*
 * Gives rebuilt files their names. Damaged files stay until a user purges them, because two half-damaged copies may be
 * all that is left.
 */
#include <stdio.h>

#include "engine/integrity/internal.h"

pathname path_rebuilt(const char *store, const ckd_id *file) {
    char hex[CKD_ID_TEXT], name[64];
    ckd_id_text(hex, file);
    snprintf(name, sizeof(name), "%s.ckd.tmp", hex);
    return path_of(store, DIR_PARITY, name);
}

/* Links the old file under a second name if possible. So its own name is never missing. */
static ckd_status keep_old(const ckd_store *store, const char *path, const pathname *aside, ckd_error *err) {
    ckd_status status = damage_make_folder(store, err);
    THEN(status, file_link(path, aside->text, err));
    if (status == CKD_E_IO || status == CKD_E_READ_ONLY) {
        status = file_rename_noreplace(path, aside->text, err);
    }
    return status == CKD_OK ? dir_sync(path_in(store->path, DIR_DAMAGED).text, err) : status;
}

ckd_status repair_publish(pathname *aside, const ckd_store *store, const char *from, const char *dir,
                          const char *name, ckd_error *err) {
    pathname path = path_of(store->path, dir, name);
    ckd_status status = CKD_OK;
    aside->text[0] = '\0';
    if (file_exists(path.text)) {
        *aside = damage_path_aside(store, name);
        status = keep_old(store, path.text, aside, err);
    }
    if (status == CKD_OK) { /* a directory cannot be linked, and was moved by now */
        status = file_exists(path.text) ? file_rename(from, path.text, err)
                                        : file_rename_noreplace(from, path.text, err);
    }
    return status == CKD_OK ? dir_sync(path_in(store->path, dir).text, err) : status;
}

ckd_status repair_purge(uint64_t *files, uint64_t *file_bytes_sum, const ckd_store *store, ckd_error *err) {
    dir_list list;
    pathname folder = path_in(store->path, DIR_DAMAGED);
    *files = *file_bytes_sum = 0;
    ckd_error why = {0};
    ckd_status status = dir_list_read(&list, folder.text, &why);
    if (status != CKD_OK) {
        return err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        pathname p = path_of(store->path, DIR_DAMAGED, list.names[i]);
        size_t length = strlen(list.names[i]), end = strlen(VANISHED_END);
        if (length > end && strcmp(list.names[i] + length - end, VANISHED_END) == 0) {
            continue; /* a checkpoint may still come back with its help */
        }
        uint64_t size = file_bytes(p.text);
        status = dir_exists(p.text) ? dir_remove(p.text, err) : file_remove(p.text, true, err);
        *files += status == CKD_OK;
        *file_bytes_sum += status == CKD_OK ? size : 0;
    }
    dir_list_free(&list);
    return status == CKD_OK ? dir_sync(folder.text, err) : status;
}

static ckd_status put_spare_aside(ckd_store *store, const parity_sets *sets, repair_moved_fn moved,
                                  void *context, ckd_error *err) {
    vanished v;
    ckd_status status = vanished_find(&v, store, err);
    for (size_t i = 0; i < v.stray_count && status == CKD_OK; i++) {
        size_t groups;
        (void)parity_sets_of(sets, &v.strays[i].id, &groups);
        if (v.strays[i].spare && !groups) {
            pathname path = path_chunk(store->path, &v.strays[i].id, ""), aside;
            status = damage_put_aside(&aside, store, DIR_CHUNKS, strrchr(path.text, '/') + 1, err);
            THEN(status, moved(context, path.text, aside.text, err));
        }
    }
    vanished_free(&v);
    vanished_forget_found(store);
    return status;
}

ckd_status repair_put_spare_aside(ckd_store *store, const parity_sets *sets, repair_moved_fn moved,
                                  void *context, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status == CKD_OK) {
        status = put_spare_aside(store, sets, moved, context, err);
        lock_release(lock);
    }
    return status;
}
