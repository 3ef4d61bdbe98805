/*
 * A compaction proves the files that it writes. But it may be killed before it removes the old files, or a reader may
 * prevent the removal. If the new files rot meanwhile, only the previous generation has the values. So files that this
 * compaction has not written are read in full before the files that they replaced are removed.
 *
 * That happens under the publish lock, with all readers excluded. So one call reads little more than CHECK_BYTES.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/retain/replaced.h"

#include <stdlib.h>

#define CHECK_BYTES (UINT64_C(256) << 20)
#define READ_TIME_S UINT64_C(3600) /* a load on another machine takes less */

void checked_files_free(checked_files *c) {
    free(c->intact.slots);
    free(c->damaged.slots);
    *c = (checked_files){.read = 0};
}

bool replaced_any(const ckd_store *store) {
    manifest_list list = {0};
    bool any = false;
    if (manifests_read(&list, store, NULL) != CKD_OK) {
        return false;
    }
    for (size_t i = 1; i < list.count && !any; i++) {
        any = same_checkpoint_name(&list.items[i - 1], &list.items[i]);
    }
    manifests_free(&list);
    return any;
}

/* ---- files of the newer generation ---- */

static ckd_status check_file(bool *intact, checked_files *checked, const ckd_store *store,
                             const file_ref *file, ckd_error *err) {
    uint64_t hash = hash64(&file->id, sizeof(ckd_id));
    *intact = hash_set_has(&checked->intact, hash);
    if (*intact || hash_set_has(&checked->damaged, hash)) {
        return CKD_OK;
    }
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = read_named_file(store, file, &why);
    checked->read += file->size;
    *intact = status == CKD_OK;
    if (*intact) {
        return hash_set_add(&checked->intact, hash, err);
    }
    if (!is_damage(status, &why) && status != CKD_E_NOT_FOUND && status != CKD_E_UNSUPPORTED) {
        return err_from(err, status, &why);
    }
    store_message(
        store,
        "a chunk file that a compaction wrote is damaged, and the files that it replaced stay: %s (%s); "
        "run ckptdelta repair",
        why.message, path_chunk(store->path, &file->id, "").text);
    return hash_set_add(&checked->damaged, hash, err);
}

static bool names_file(const manifest *m, const ckd_id *file) {
    bool found = false;
    for (size_t i = 0; i < m->file_count && !found; i++) {
        found = id_equal(&m->files[i].id, file);
    }
    return found;
}

static bool names_all(const manifest *m, const manifest *files) {
    bool all = true;
    for (size_t i = 0; i < files->file_count && all; i++) {
        all = names_file(m, &files->files[i].id);
    }
    return all;
}

static bool all_files_exist(const ckd_store *store, const manifest *m) {
    for (size_t i = 0; i < m->file_count; i++) {
        if (file_bytes(path_chunk(store->path, &m->files[i].id, "").text) != m->files[i].size) {
            return false;
        }
    }
    return true;
}

/* ---- generations ---- */

/*
 * May loads on other machines still read the older generation? Nobody here sees their locks, so a bucket keeps it for a
 * time from when this machine first saw the newer one.
 */
static bool may_be_read_elsewhere(const ckd_store *store, const manifest *newer) {
    const char *set = secure_getenv("CKPTDELTA_READ_TIME");
    uint64_t seconds = set && *set ? strtoull(set, NULL, 10) : READ_TIME_S;
    const ckd_checkpoint *c = &newer->checkpoint;
    uint64_t since = file_modified_ns(path_manifest(store->path, c->run, c->step, c->generation).text);
    return store_is_remote(store) && clock_wall_ns() < since + seconds * UINT64_C(1000000000);
}

/* Whether both generations name the files that both have in the same order: equal records are read from the first. */
static bool same_order(const manifest *newer, const manifest *older) {
    size_t at = 0;
    for (size_t i = 0; i < newer->file_count; i++) {
        size_t k = 0;
        while (k < older->file_count && !id_equal(&older->files[k].id, &newer->files[i].id)) {
            k++;
        }
        if (k < older->file_count && k < at) {
            return false;
        }
        at = k < older->file_count ? k : at;
    }
    return true;
}

/*
 * A file that both generations name is needed anyway. If the newer generation names all files of the older one, no file
 * is removed. If it names fewer but no new one, or names them in another order, it reads some records from other files
 * than the older one did. It is not known from which, so all are read.
 */
static ckd_status check_newer(bool *intact, checked_files *checked, const ckd_store *store,
                              const manifest *newer, const manifest *older, ckd_error *err) {
    ckd_status status = CKD_OK;
    bool loses = checked && !names_all(newer, older),
         moves = names_all(older, newer) || !same_order(newer, older);
    *intact = true;
    for (size_t i = 0; i < newer->file_count && loses && *intact && status == CKD_OK; i++) {
        if (moves || !names_file(older, &newer->files[i].id)) {
            status = check_file(intact, checked, store, &newer->files[i], err);
        }
    }
    return status;
}

/* A manifest never replaces itself, whatever a listing says. */
static bool same_name(const manifest *a, const manifest *b) {
    return a->checkpoint.generation == b->checkpoint.generation && a->checkpoint.step == b->checkpoint.step &&
           strcmp(a->checkpoint.run, b->checkpoint.run) == 0;
}

ckd_status replaced_choose(size_t *count, manifest_set *n, const ckd_store *store, checked_files *checked,
                           ckd_error *err) {
    const manifest_entry *newest = NULL;
    bool exists = false;
    ckd_status status = CKD_OK;
    *count = 0;
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        manifest_entry *x = &n->items[i];
        x->chosen = false;
        if (!x->superseded) {
            newest = x;
            exists = i + 1 < n->count && n->items[i + 1].superseded && all_files_exist(store, &x->m) &&
                     !may_be_read_elsewhere(store, &x->m);
        } else if (!x->in_trash && newest && exists && !x->in_use && !same_name(&newest->m, &x->m)) {
            if (checked && checked->read >= CHECK_BYTES) {
                checked->more = true;
            } else {
                status = check_newer(&x->chosen, checked, store, &newest->m, &x->m, err);
            }
            *count += x->chosen;
        }
    }
    return status;
}
