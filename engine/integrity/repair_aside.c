/*
 * Chunk files in data/q may be intact. A file goes there if it cannot be read at that time, or if nobody can tell
 * whether its checkpoint was committed. So a repair looks there before it gives a file up.
 */
#include <stdio.h>
#include <stdlib.h>

#include "codec/chunk/chunk.h"
#include "engine/integrity/repair.h"

ckd_status repair_find_aside(bool *found, pathname *out, const ckd_store *store, const file_ref *file,
                             ckd_error *err) {
    dir_list list;
    char name[64], hex[CKD_ID_TEXT];
    ckd_status status = CKD_OK;
    ckd_id_text(hex, &file->id);
    snprintf(name, sizeof(name), "%s.ckd", hex);
    *found = false;
    if (dir_list_read(&list, path_in(store->path, DIR_DAMAGED).text, NULL) != CKD_OK) {
        return CKD_OK;
    }
    for (size_t i = 0; i < list.count && !*found && status != CKD_E_NOMEM; i++) {
        ckd_error why = {0};
        if (strncmp(list.names[i], name, strlen(name)) == 0) {
            *out = path_of(store->path, DIR_DAMAGED, list.names[i]);
            status = read_named_file_at(store, out->text, file, &why);
            *found = status == CKD_OK;
            err_from(err, status == CKD_E_NOMEM ? status : CKD_OK, &why);
        }
    }
    dir_list_free(&list);
    return status == CKD_E_NOMEM ? status : CKD_OK;
}

/* Whether the file of data/q is missing in data/c, intact, and has records of one of the checkpoints. */
static bool is_of(const ckd_store *store, const char *name, const ckd_checkpoint *lost, size_t count) {
    chunk *c;
    ckd_id id;
    bool found = false;
    pathname p = path_of(store->path, DIR_DAMAGED, name);
    if (strlen(name) < CKD_ID_TEXT - 1 || !id_parse(&id, name) ||
        file_exists(path_chunk(store->path, &id, "").text) ||
        chunk_open_bundled(&c, p.text, NULL) != CKD_OK) {
        return false;
    }
    const file_ref file = {.id = id, .size = c->size, .root = c->root};
    for (size_t i = 0; i < c->outer_count && !found; i++) {
        for (size_t k = 0; k < count && !found; k++) {
            found = id_equal(&c->outer[i].tensor->checkpoint, &lost[k].id);
        }
    }
    chunk_close(c);
    return found && read_named_file_at(store, p.text, &file, NULL) == CKD_OK;
}

static ckd_status give_back(const ckd_store *store, const char *name, ckd_error *err) {
    ckd_id id;
    (void)id_parse(&id, name);
    pathname from = path_of(store->path, DIR_DAMAGED, name), to = path_chunk(store->path, &id, "");
    ckd_status status = file_rename_noreplace(from.text, to.text, err);
    return status == CKD_OK ? dir_sync(path_in(store->path, DIR_CHUNKS).text, err) : status;
}

ckd_status repair_return_aside(bool *any, ckd_store *store, const vanished *v, ckd_error *err) {
    dir_list list;
    file_lock *lock;
    if (!v->count || dir_list_read(&list, path_in(store->path, DIR_DAMAGED).text, NULL) != CKD_OK) {
        return CKD_OK;
    }
    ckd_status status = store_lock_publish(&lock, store, err);
    if (status == CKD_OK) {
        for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
            if (is_of(store, list.names[i], v->items, v->count)) {
                status = give_back(store, list.names[i], err);
                *any = *any || status == CKD_OK;
            }
        }
        lock_release(lock);
    }
    dir_list_free(&list);
    return status;
}
