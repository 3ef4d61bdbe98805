/*
 * The store's deletion mark (manifests.h), which shows whether a catalog is older than some deletion. deletion.c in
 * engine/retain makes the deletions.
 */
#include "engine/store/manifests.h"
#include "engine/store/view.h"

#include <stdio.h>

#define MARK_MAX 4096 /* maximum bytes read of the file */

ckd_status deletion_mark_read(char out[CATALOG_META], const ckd_store *store, ckd_error *err) {
    ckd_id mark;
    bytes data = {0};
    ckd_error why = {0};
    pathname p = path_in(store->path, FILE_DELETIONS);
    out[0] = '\0';
    ckd_status status = file_read_all(&data, p.text, MARK_MAX, &why);
    if (status == CKD_OK &&
        deletions_decode(&mark, &store->id, data.data, data.size, p.text, NULL) == CKD_OK) {
        char hex[CKD_ID_TEXT];
        ckd_id_text(hex, &mark);
        snprintf(out, CATALOG_META, "%s", hex);
    }
    bytes_free(&data);
    bool known = status == CKD_OK || status == CKD_E_NOT_FOUND || status == CKD_E_CORRUPT;
    return known ? CKD_OK : err_from(err, status, &why);
}

/*
 * Writes the new mark unsynced: an unreadable mark matches no catalog, so its content need not be durable. The old
 * mark, however, must not come back.
 */
static ckd_status write_mark(const char *path, const bytes *data, ckd_error *err) {
    file_writer *f;
    ckd_status status = file_create(&f, path, 0, err);
    if (status != CKD_OK) {
        return status;
    }
    status = file_append(f, data->data, data->size, err);
    if (status != CKD_OK) {
        file_discard(f);
        return status;
    }
    return file_close(f, err);
}

static ckd_status replace_mark(const ckd_store *store, ckd_error *err) {
    ckd_id mark;
    bytes data = {0};
    pathname temp = path_in(store->path, "data/.tmp-deletions");
    ckd_status status = ckd_id_new(&mark, err);
    if (status != CKD_OK) {
        return status;
    }
    deletions_encode(&data, &store->id, &mark);
    status = data.failed ? err_nomem(err, data.size, "the deletion mark") : CKD_OK;
    if (status == CKD_OK) { /* perhaps left by a writer that died */
        status = file_remove(temp.text, true, err);
    }
    THEN(status, write_mark(temp.text, &data, err));
    THEN(status, file_rename(temp.text, path_in(store->path, FILE_DELETIONS).text, err));
    THEN(status, dir_sync(path_in(store->path, "data").text, err));
    if (status != CKD_OK) {
        file_remove(temp.text, true, NULL);
    }
    bytes_free(&data);
    return status;
}

static ckd_status remove_mark(const ckd_store *store, ckd_error *err) {
    ckd_status status = file_remove(path_in(store->path, FILE_DELETIONS).text, true, err);
    return status == CKD_OK ? dir_sync(path_in(store->path, "data").text, err) : status;
}

/* A missing mark matches no catalog either. So a full disk keeps nobody from deleting. */
ckd_status deletion_mark_renew(const ckd_store *store, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = replace_mark(store, &why);
    return status == CKD_E_NOSPACE ? remove_mark(store, err) : err_from(err, status, &why);
}

void deletion_mark_restore(const ckd_store *store) {
    char mark[CATALOG_META];
    ckd_error why = {0};
    bool known = deletion_mark_read(mark, store, NULL) == CKD_OK;
    if (known && !mark[0] && deletion_mark_renew(store, &why) != CKD_OK) {
        store_message(store, "the deletion mark cannot be written: %s", why.message);
    }
}

bool deletion_make_room(const ckd_store *store) {
    return materialized_drop_all(store) ||
           (file_exists(path_in(store->path, FILE_DELETIONS).text) && remove_mark(store, NULL) == CKD_OK);
}

ckd_status deletion_mark_is_current(bool *out, const char noted[CATALOG_META], const ckd_store *store,
                                    ckd_error *err) {
    char now[CATALOG_META];
    ckd_status status = deletion_mark_read(now, store, err);
    *out = now[0] && strcmp(now, noted) == 0;
    return status;
}
