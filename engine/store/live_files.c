/* The files that checkpoints need, for verify and repair. retain/trash.c decides what is removed. */
#include "engine/store/damage.h"

#include <stdlib.h>

#include "engine/store/manifests.h"
#include "engine/store/strays.h"

static ckd_status add_files(live_files *f, const manifest *m, const manifest_name *name, bool in_trash,
                            ckd_error *err) {
    if (ARRAY_GROW(f->items, f->capacity, f->count + m->file_count, "the files of a store", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    for (size_t i = 0; i < m->file_count; i++) {
        f->items[f->count++] = (live_file){m->files[i], *name, m->checkpoint.created_ns, in_trash};
    }
    return CKD_OK;
}

static ckd_status add_manifest(live_files *f, const ckd_store *store, const manifest_name *name,
                               bool in_trash, damage_list *damage, ckd_error *err) {
    manifest m;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = store_read_manifest(&m, store, name->run, name->step, name->generation, &why);
    if (status == CKD_E_NOT_FOUND) { /* it was collected, or replaced by one that is not listed */
        f->is_outdated = true;
        return CKD_OK;
    }
    if (status != CKD_OK) {
        char checkpoint[CHECKPOINT_TEXT];
        checkpoint_text(checkpoint, name->run, name->step, in_trash);
        f->incomplete = true;
        err_in_file(&why, status, path_manifest(store->path, name->run, name->step, name->generation).text);
        return damage_record(damage, status, &why, CKD_NO_OFFSET, checkpoint, err);
    }
    status = add_files(f, &m, name, in_trash, err);
    if (status == CKD_OK) {
        f->dependency_infos[f->dependency_info_count++] = dependency_info_of(&m, in_trash);
    }
    manifest_free(&m);
    return status;
}

static bool files_exist(const ckd_store *store, const manifest_name *name) {
    manifest m;
    if (store_read_manifest(&m, store, name->run, name->step, name->generation, NULL) != CKD_OK) {
        return false;
    }
    bool exist = true;
    for (size_t i = 0; i < m.file_count && exist; i++) {
        exist = live_file_exists(store, &m.files[i].id, m.files[i].size);
    }
    manifest_free(&m);
    return exist;
}

/*
 * Whether a deleted checkpoint can still be restored. After its grace period it does not count, and may have lost files
 * already. The name of a tombstone suffices for a deletion. If the tombstone is unreadable, the checkpoint counts only
 * while all its files exist.
 */
static ckd_status can_come_back(bool *out, const ckd_store *store, const manifest_name *name,
                                const manifest_name *covering, damage_list *damage, ckd_error *err) {
    tombstone t;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = tombstone_read(&t, store, covering, &why);
    *out = status == CKD_OK ? tombstone_in_grace(&t, clock_wall_ns())
                            : status != CKD_E_NOT_FOUND && files_exist(store, name);
    if (status == CKD_OK || !*out) {
        return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
    }
    err_in_file(&why, status,
                path_tombstone(store->path, covering->run, covering->step, covering->generation).text);
    return damage_record(damage, status, &why, CKD_NO_OFFSET, "", err);
}

/* Files of listed checkpoints first. */
static int by_id_and_age(const void *a, const void *b) {
    const live_file *x = a, *y = b;
    int order = memcmp(&x->file.id, &y->file.id, sizeof(ckd_id));
    order = order ? order : (int)x->in_trash - (int)y->in_trash;
    return order ? order : (x->created_ns > y->created_ns) - (x->created_ns < y->created_ns);
}

static void keep_one_of_each(live_files *f) {
    size_t kept = 0;
    if (f->count) {
        qsort(f->items, f->count, sizeof(*f->items), by_id_and_age);
    }
    for (size_t i = 0; i < f->count; i++) {
        if (kept == 0 || !id_equal(&f->items[kept - 1].file.id, &f->items[i].file.id)) {
            f->bytes += f->items[i].file.size;
            f->items[kept++] = f->items[i];
        }
    }
    f->count = kept;
}

/*
 * Takes the newest generation of each checkpoint: among those that count, and among each contiguous set that was
 * deleted together.
 */
static ckd_status add_all(live_files *f, const ckd_store *store, const manifest_list *names,
                          const manifest_list *tombstones, damage_list *damage, ckd_error *err) {
    const manifest_name *before = NULL;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < names->count && status == CKD_OK; i++) {
        const manifest_name *name = &names->items[i],
                            *covering = manifests_covering_tombstone(tombstones, name);
        bool newest = i == 0 || covering != before || !same_checkpoint_name(name - 1, name), counts = newest;
        before = covering;
        if (newest && covering) {
            status = can_come_back(&counts, store, name, covering, damage, err);
        }
        if (status == CKD_OK && counts) {
            status = add_manifest(f, store, name, covering != NULL, damage, err);
        }
    }
    return status;
}

static ckd_status read_once(live_files *out, const ckd_store *store, damage_list *damage, ckd_error *err) {
    manifest_list names = {0}, tombstones = {0};
    *out = (live_files){0};
    ckd_status status = manifests_read_all(&names, store, err);
    if (status == CKD_OK) { /* after the manifests, so that no deleted checkpoint seems to be listed */
        status = manifests_tombstones(&tombstones, store, err);
    }
    if (status == CKD_OK) {
        out->dependency_infos = calloc(names.count + 1, sizeof(*out->dependency_infos));
        status = out->dependency_infos
                     ? CKD_OK
                     : err_nomem(err, names.count * sizeof(*out->dependency_infos), "manifests");
    }
    THEN(status, add_all(out, store, &names, &tombstones, damage, err));
    manifests_free(&names);
    manifests_free(&tombstones);
    keep_one_of_each(out);
    return status;
}

ckd_status live_files_read(live_files *out, const ckd_store *store, damage_list *damage, ckd_error *err) {
    enum { TRIES = 100 };
    ckd_status status = read_once(out, store, damage, err);
    for (int i = 1; i < TRIES && status == CKD_OK && out->is_outdated; i++) {
        live_files_free(out);
        status = read_once(out, store, damage, err); /* the same damage is not added twice */
    }
    return status;
}

void live_files_free(live_files *f) {
    dependency_infos_free(f->dependency_infos, f->dependency_info_count);
    free(f->items);
    *f = (live_files){0};
}

const live_file *live_files_find(const live_files *f, const ckd_id *id) {
    return f->count ? bsearch(id, f->items, f->count, sizeof(*f->items), id_compare) : NULL;
}

static bool manifest_names(const ckd_store *store, const manifest_name *name, const ckd_id *file) {
    manifest m;
    if (store_read_manifest(&m, store, name->run, name->step, name->generation, NULL) != CKD_OK) {
        return false;
    }
    bool named = false;
    for (size_t i = 0; i < m.file_count && !named; i++) {
        named = id_equal(&m.files[i].id, file);
    }
    manifest_free(&m);
    return named;
}

ckd_status live_file_is_named(bool *out, const ckd_store *store, const live_file *f, ckd_error *err) {
    bytes named = {0}, unused = {0};
    bool complete = true;
    *out = manifest_names(store, &f->name, &f->file.id);
    if (*out) {
        return CKD_OK;
    }
    ckd_status status = strays_add_manifests(&named, &unused, &complete, store, err);
    if (status == CKD_OK) {
        ids_sort(&named);
        *out = !complete || ids_contain(&named, &f->file.id);
    }
    bytes_free(&named);
    bytes_free(&unused);
    return status;
}

void live_file_checkpoint(char out[CHECKPOINT_TEXT], const live_file *f) {
    checkpoint_text(out, f->name.run, f->name.step, f->in_trash);
}

bool live_file_exists(const ckd_store *store, const ckd_id *id, uint64_t size) {
    pathname p = path_chunk(store->path, id, "");
    return file_bytes(p.text) == size;
}

ckd_status live_file_check(const ckd_store *store, const file_ref *file, ckd_error *err) {
    uint64_t size;
    pathname p = path_chunk(store->path, &file->id, "");
    ckd_status status = file_open_size(&size, p.text, err);
    if (status != CKD_OK) {
        return status;
    }
    return size == file->size ? CKD_OK
                              : err_corrupt(err, p.text, CKD_NO_OFFSET, "%s has %llu bytes instead of %llu",
                                            p.text, (unsigned long long)size, (unsigned long long)file->size);
}
