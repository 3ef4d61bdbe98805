/*
 * The list of damage that a verification collects, and the checkpoints that depend on each damaged place. Also moves
 * unusable files to data/q.
 */
#include "engine/store/damage.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/manifests.h"

/* The path inside the store. Errors truncate long paths on the left, so the store's path may be missing already. */
static const char *inside(const damage_list *list, const char *file) {
    size_t length = strlen(list->store_path);
    if (strncmp(file, list->store_path, length) == 0) {
        file += length;
        while (*file == '/') {
            file++;
        }
    }
    return file;
}

static bool same_place(const ckd_damage *d, const char *file, const ckd_error *why) {
    return d->offset == why->offset && strcmp(d->file, file) == 0;
}

/*
 * Finds the entry of a place. Records of a bundle share a place: an entry without a tensor may get its name later, and
 * the next record gets an entry of its own.
 */
static ckd_damage *find(const damage_list *list, const char *file, const ckd_error *why) {
    ckd_damage *unnamed = NULL;
    for (size_t i = 0; i < list->result->damage_count; i++) {
        ckd_damage *d = &list->result->damage[i];
        if (!same_place(d, file, why)) {
            continue;
        }
        if (strcmp(d->tensor, why->tensor) == 0 || (why->offset != CKD_NO_OFFSET && !why->tensor[0])) {
            return d;
        }
        unnamed = why->offset != CKD_NO_OFFSET && !d->tensor[0] ? d : unnamed;
    }
    return unnamed;
}

static bool name_tensor(ckd_damage *d, const char *tensor) {
    char *copy = strdup(tensor);
    if (copy) {
        free((char *)d->tensor);
        d->tensor = copy;
    }
    return copy != NULL;
}

static ckd_damage *append(damage_list *list) {
    ckd_verify_result *r = list->result;
    if (ARRAY_GROW(r->damage, list->capacity, r->damage_count + 1, "damage", NULL) != CKD_OK) {
        return NULL;
    }
    ckd_damage *d = &r->damage[r->damage_count];
    memset(d, 0, sizeof(*d));
    return d;
}

static ckd_damage *new_damage(damage_list *list, const char *file, const ckd_error *why, uint64_t block) {
    ckd_damage *d = append(list);
    if (!d) {
        return NULL;
    }
    char *file_copy = strdup(file), *tensor = strdup(why->tensor), *what = strdup(why->message);
    if (!file_copy || !tensor || !what) {
        free(file_copy);
        free(tensor);
        free(what);
        return NULL;
    }
    *d = (ckd_damage){
        .file = file_copy, .tensor = tensor, .what = what, .block = block, .offset = why->offset};
    list->result->damage_count++;
    return d;
}

static bool add_checkpoint(ckd_damage *d, const char *checkpoint) {
    for (size_t i = 0; i < d->checkpoint_count; i++) {
        if (strcmp(d->checkpoints[i], checkpoint) == 0) {
            return true;
        }
    }
    const char **grown = realloc((void *)d->checkpoints, (d->checkpoint_count + 1) * sizeof(*grown));
    if (!grown) {
        return false;
    }
    d->checkpoints = grown;
    char *copy = strdup(checkpoint);
    if (copy) {
        grown[d->checkpoint_count++] = copy;
    }
    return copy != NULL;
}

ckd_status damage_add(damage_list *list, const ckd_error *why, uint64_t block, const char *checkpoint,
                      ckd_error *err) {
    const char *file = inside(list, why->file);
    ckd_damage *d = find(list, file, why);
    if (!d) {
        d = new_damage(list, file, why, block);
    } else if (d->block == CKD_NO_OFFSET) {
        d->block = block; /* the earlier entry came from another file, and did not know the block */
    }
    if (!d || (!d->tensor[0] && why->tensor[0] && !name_tensor(d, why->tensor)) ||
        (*checkpoint && !add_checkpoint(d, checkpoint))) {
        return err_nomem(err, sizeof(*d), "the list of damage");
    }
    return CKD_OK;
}

static bool names(const ckd_damage *d, const char *checkpoint) {
    bool found = false;
    for (size_t i = 0; i < d->checkpoint_count && !found; i++) {
        found = strcmp(d->checkpoints[i], checkpoint) == 0;
    }
    return found;
}

static bool depends_on_named(const dependency_info *l, const ckd_damage *d, const dependency_info *all,
                             size_t count) {
    for (size_t i = 0; i < l->dependency_count; i++) {
        for (size_t k = 0; k < count; k++) {
            if (memcmp(&all[k].id, &l->dependencies[i], sizeof(ckd_id)) == 0 && names(d, all[k].name)) {
                return true;
            }
        }
    }
    return false;
}

ckd_status damage_add_dependents(damage_list *list, const dependency_info *all, size_t count,
                                 ckd_error *err) {
    for (size_t i = 0; i < list->result->damage_count; i++) {
        ckd_damage *d = &list->result->damage[i];
        for (size_t before = 0; before != d->checkpoint_count;) { /* until no checkpoint is added */
            before = d->checkpoint_count;
            for (size_t k = 0; k < count; k++) {
                if (depends_on_named(&all[k], d, all, count) && !add_checkpoint(d, all[k].name)) {
                    return err_nomem(err, sizeof(*d), "the list of damage");
                }
            }
        }
    }
    return damage_add_trash(list, all, count, err);
}

static bool names_file(const dependency_info *l, const char *file) {
    bool found = false;
    for (size_t i = 0; i < l->file_count && !found; i++) {
        found = strcmp(path_chunk("", &l->files[i].id, "").text + 1, file) == 0;
    }
    return found;
}

ckd_status damage_add_trash(damage_list *list, const dependency_info *all, size_t count, ckd_error *err) {
    for (size_t i = 0; i < list->result->damage_count; i++) {
        ckd_damage *d = &list->result->damage[i];
        for (size_t k = 0; k < count; k++) {
            if (all[k].in_trash && names_file(&all[k], d->file) && !add_checkpoint(d, all[k].name)) {
                return err_nomem(err, sizeof(*d), "the list of damage");
            }
        }
    }
    return CKD_OK;
}

static void free_damage(ckd_damage *d) {
    for (size_t k = 0; k < d->checkpoint_count; k++) {
        free((char *)d->checkpoints[k]);
    }
    free((void *)d->checkpoints);
    free((char *)d->file);
    free((char *)d->tensor);
    free((char *)d->what);
}

void damage_drop_file(damage_list *list, const char *file) {
    ckd_verify_result *r = list->result;
    size_t kept = 0;
    for (size_t i = 0; i < r->damage_count; i++) {
        if (strcmp(r->damage[i].file, file) == 0) {
            free_damage(&r->damage[i]);
        } else {
            r->damage[kept++] = r->damage[i];
        }
    }
    r->damage_count = kept;
}

void damage_append_text(damage_list *list, const char *file, const char *more) {
    ckd_verify_result *r = list->result;
    for (size_t i = 0; i < r->damage_count; i++) {
        ckd_damage *d = &r->damage[i];
        size_t capacity = strlen(d->what) + strlen(more) + 3;
        char *text = strcmp(d->file, file) == 0 && !strstr(d->what, more) ? malloc(capacity) : NULL;
        if (text) {
            snprintf(text, capacity, "%s; %s", d->what, more);
            free((char *)d->what);
            d->what = text;
        }
    }
}

void ckd_verify_result_free(ckd_verify_result *result) {
    if (!result) {
        return;
    }
    for (size_t i = 0; i < result->damage_count; i++) {
        free_damage(&result->damage[i]);
    }
    free(result->damage);
    free(result);
}

bool is_damage(ckd_status status, const ckd_error *why) {
    return status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_NOT_FOUND ||
           (status == CKD_E_IO && file_is_unreadable(why->sys_errno));
}

ckd_status damage_record(damage_list *list, ckd_status status, const ckd_error *why, uint64_t block,
                         const char *checkpoint, ckd_error *err) {
    if (status != CKD_OK && is_damage(status, why)) {
        return damage_add(list, why, block, checkpoint, err);
    }
    return err_from(err, status, why);
}

ckd_status damage_add_all(damage_list *list, const damage_list *from, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < from->result->damage_count; i++) {
        const ckd_damage *d = &from->result->damage[i];
        ckd_error why = {.offset = d->offset};
        snprintf(why.file, sizeof(why.file), "%s", d->file);
        snprintf(why.tensor, sizeof(why.tensor), "%s", d->tensor);
        snprintf(why.message, sizeof(why.message), "%s", d->what);
        if (d->checkpoint_count == 0) {
            status = damage_add(list, &why, d->block, "", err);
        }
        for (size_t k = 0; k < d->checkpoint_count && status == CKD_OK; k++) {
            status = damage_add(list, &why, d->block, d->checkpoints[k], err);
        }
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

void checkpoint_text(char out[CHECKPOINT_TEXT], const char *run, uint64_t step, bool in_trash) {
    snprintf(out, CHECKPOINT_TEXT, "%s@%llu%s", run, (unsigned long long)step,
             in_trash ? " (in the trash)" : "");
}

dependency_info dependency_info_of(manifest *m, bool in_trash) {
    dependency_info l = {.id = m->checkpoint.id,
                         .dependencies = m->dependencies,
                         .dependency_count = m->dependency_count,
                         .files = m->files,
                         .file_count = m->file_count,
                         .in_trash = in_trash};
    checkpoint_text(l.name, m->checkpoint.run, m->checkpoint.step, in_trash);
    m->dependencies = NULL;
    m->files = NULL;
    m->dependency_count = m->file_count = 0;
    return l;
}

void dependency_infos_free(dependency_info *all, size_t count) {
    for (size_t i = 0; i < count; i++) {
        free(all[i].dependencies);
        free(all[i].files);
    }
    free(all);
}

/* Syncs the folder even if it exists, as its creator may have died before syncing. */
ckd_status damage_make_folder(const ckd_store *store, ckd_error *err) {
    ckd_status status = dir_create(path_in(store->path, DIR_DAMAGED).text, true, err);
    return status == CKD_OK ? dir_sync(path_in(store->path, "data").text, err) : status;
}

ckd_status damage_list_folder(dir_list *out, const ckd_store *store, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = dir_list_read(out, path_in(store->path, DIR_DAMAGED).text, &why);
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

pathname damage_path_aside(const ckd_store *store, const char *name) {
    char file[CKD_RUN_MAX + 96];
    snprintf(file, sizeof(file), "%s.%" PRIu64, name, clock_wall_ns());
    return path_of(store->path, DIR_DAMAGED, file);
}

ckd_status damage_put_aside(pathname *aside, const ckd_store *store, const char *dir, const char *name,
                            ckd_error *err) {
    pathname path = path_of(store->path, dir, name);
    *aside = damage_path_aside(store, name);
    ckd_status status = damage_make_folder(store, err);
    THEN(status, file_rename_noreplace(path.text, aside->text, err));
    THEN(status, dir_sync(path_in(store->path, DIR_DAMAGED).text, err));
    return status == CKD_OK ? dir_sync(path_in(store->path, dir).text, err) : status;
}

ckd_status damage_remove_or_put_aside(const ckd_store *store, const char *dir, const char *name,
                                      ckd_error *err) {
    pathname path = path_of(store->path, dir, name), aside;
    return dir_exists(path.text) ? damage_put_aside(&aside, store, dir, name, err)
                                 : file_remove(path.text, true, err);
}

/* ---- pins, tags, policies and parity settings ---- */

ckd_status settings_damage(damage_list *damage, const ckd_store *store, ckd_error *err) {
    setting_list n = {0};
    ckd_status status = settings_read(&n, store, err);
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = settings_why(&n.items[i], store, &why);
        if (found != CKD_OK) {
            err_in_file(&why, found, path_setting(store->path, &n.items[i].name).text);
        }
        status = damage_record(damage, found, &why, CKD_NO_OFFSET, "", err);
    }
    settings_free(&n);
    return status;
}
