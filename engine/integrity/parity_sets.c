/*
 * Reads the parity groups of a store, removes groups, and takes the parity lock. A group goes file by file, so a mark
 * shows that its removal has begun.
 */
#include "engine/integrity/internal.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- reading ---- */

/* File names are sorted, so only the last set can be the same. */
static parity_set *same_as_last(const parity_sets *s, const ckd_id *id) {
    parity_set *last = s->count ? s->items[s->count - 1] : NULL;
    return last && id_equal(&last->group.id, id) ? last : NULL;
}

/* Takes over the members of g. */
static ckd_status add_set(parity_sets *s, parity_group *g, ckd_error *err) {
    if (ARRAY_GROW(s->items, s->capacity, s->count + 1, "parity groups", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    parity_set *set = calloc(1, sizeof(*set));
    if (!set) {
        return err_nomem(err, sizeof(*set), "a parity group");
    }
    set->group = *g;
    set->place = s->count;
    g->members = NULL;
    s->items[s->count++] = set;
    return CKD_OK;
}

static ckd_status add_row(parity_sets *s, parity_file *f, const ckd_id *id, uint32_t row, ckd_error *why) {
    const char *path = file_path(f->file);
    if (!id_equal(&f->group.id, id) || f->group.row != row) {
        return err_corrupt(why, path, CKD_NO_OFFSET,
                           "the group of this parity file is not the one in its name");
    }
    parity_set *set = same_as_last(s, id);
    if (set && !parity_group_same(&set->group, &f->group)) {
        return err_corrupt(why, path, CKD_NO_OFFSET, "the parity file contradicts the others of its group");
    }
    ckd_status status = set ? CKD_OK : add_set(s, &f->group, why);
    if (status == CKD_OK) {
        set = s->items[s->count - 1];
        set->present |= UINT32_C(1) << row;
        set->bytes += file_size(f->file);
    }
    return status;
}

static ckd_status add_lost(parity_sets *s, const ckd_id *id, uint32_t row, ckd_error *err) {
    parity_lost *grown = realloc(s->lost, (s->lost_count + 1) * sizeof(*grown));
    if (!grown) {
        return err_nomem(err, (s->lost_count + 1) * sizeof(*grown), "damaged parity files");
    }
    s->lost = grown;
    s->lost[s->lost_count++] = (parity_lost){*id, row};
    return CKD_OK;
}

static int by_name(const void *a, const void *b) {
    const char *const *x = a, *const *y = b;
    return strcmp(*x, *y);
}

static bool is_marked(const ckd_id *group, const ckd_store *store, const dir_list *list) {
    pathname p = path_parity_mark(store->path, group);
    const char *name = strrchr(p.text, '/') + 1;
    return bsearch(&name, list->names, list->count, sizeof(*list->names), by_name);
}

static ckd_status read_row(parity_sets *s, const ckd_store *store, const ckd_id *group, uint32_t row,
                           damage_list *damage, ckd_error *err) {
    const ckd_id id = *group;
    parity_file *f;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname p = path_parity(store->path, group, row, "");
    ckd_status status = parity_open(&f, &store->id, p.text, &why);
    if (status == CKD_E_NOT_FOUND) { /* it was removed meanwhile */
        return CKD_OK;
    }
    s->files++;
    if (status == CKD_OK) {
        s->bytes += file_size(f->file);
        status = add_row(s, f, &id, row, &why);
        parity_close(f);
    }
    if (status != CKD_OK) {
        s->unreadable++;
        err_in_file(&why, status, p.text);
    }
    if (status == CKD_E_CORRUPT && add_lost(s, &id, row, err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    return damage_record(damage, status, &why, CKD_NO_OFFSET, "", err);
}

static ckd_status index_members(parity_sets *s, ckd_error *err) {
    size_t total = 0;
    for (size_t i = 0; i < s->count; i++) {
        total += s->items[i]->group.member_count;
    }
    s->memberships = calloc(total + 1, sizeof(*s->memberships));
    if (!s->memberships) {
        return err_nomem(err, total * sizeof(*s->memberships), "members of parity groups");
    }
    for (size_t i = 0; i < s->count; i++) {
        const parity_set *set = s->items[i];
        for (size_t k = 0; k < set->group.member_count; k++) {
            s->memberships[s->membership_count++] = (parity_membership){set->group.members[k].file, set, k};
        }
    }
    if (s->membership_count) {
        qsort(s->memberships, s->membership_count, sizeof(*s->memberships), id_compare);
    }
    return CKD_OK;
}

const parity_membership *parity_sets_of(const parity_sets *s, const ckd_id *file, size_t *count) {
    size_t low = 0, high = s->membership_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (memcmp(&s->memberships[middle].file, file, sizeof(*file)) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (high = low; high < s->membership_count && id_equal(&s->memberships[high].file, file); high++) {
    }
    *count = high - low;
    return *count ? &s->memberships[low] : NULL;
}

ckd_status parity_sets_read(parity_sets *out, const ckd_store *store, damage_list *damage, ckd_error *err) {
    dir_list list;
    *out = (parity_sets){0};
    ckd_error why = {0};
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_PARITY).text, &why);
    if (status != CKD_OK) {
        return err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        ckd_id group;
        uint32_t row;
        /* Nobody may rely on a marked group. The next holder of the parity lock removes the rest of it. */
        if (parity_name_parse(&group, &row, list.names[i]) && !is_marked(&group, store, &list)) {
            status = read_row(out, store, &group, row, damage, err);
        }
    }
    dir_list_free(&list);
    return status == CKD_OK ? index_members(out, err) : status;
}

void parity_sets_free(parity_sets *s) {
    for (size_t i = 0; i < s->count; i++) {
        parity_group_free(&s->items[i]->group);
        free(s->items[i]);
    }
    free(s->items);
    free(s->memberships);
    free(s->lost);
    *s = (parity_sets){0};
}

/* ---- one group ---- */

const parity_set *parity_sets_find(const parity_sets *s, const ckd_id *id) {
    size_t low = 0, high = s->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (memcmp(&s->items[middle]->group.id, id, sizeof(*id)) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < s->count && id_equal(&s->items[low]->group.id, id) ? s->items[low] : NULL;
}

bool parity_members_exist(const parity_group *g, const ckd_store *store) {
    bool exist = true;
    for (size_t i = 0; i < g->member_count && exist; i++) {
        exist = live_file_exists(store, &g->members[i].file, g->members[i].size);
    }
    return exist;
}

int parity_set_redundancy(const parity_set *s, const ckd_store *store) {
    int redundancy = __builtin_popcount(s->present);
    for (size_t i = 0; i < s->group.member_count; i++) {
        const parity_member *m = &s->group.members[i];
        redundancy -= !live_file_exists(store, &m->file, m->size);
    }
    return redundancy;
}

ckd_status parity_set_open(parity_file **out, const parity_set *s, uint32_t row, const ckd_store *store,
                           ckd_error *err) {
    pathname p = path_parity(store->path, &s->group.id, row, "");
    ckd_status status = parity_open(out, &store->id, p.text, err);
    if (status == CKD_OK && (!parity_group_same(&(*out)->group, &s->group) || (*out)->group.row != row)) {
        parity_close(*out);
        *out = NULL;
        status = err_corrupt(err, p.text, CKD_NO_OFFSET,
                             "the group of this parity file is not the one in its name");
    }
    return status;
}

/* ---- removing ---- */

/* Renames one file of the group to the mark, because that needs no space on a full disk. */
static ckd_status mark_incomplete(const parity_set *s, const ckd_store *store, ckd_error *err) {
    uint32_t row = (uint32_t)__builtin_ctz(s->present);
    ckd_error why = {0};
    ckd_status status = file_rename(path_parity(store->path, &s->group.id, row, "").text,
                                    path_parity_mark(store->path, &s->group.id).text, &why);
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

static ckd_status remove_rows(const ckd_id *group, const ckd_store *store, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t row = 0; row < CKD_PARITY_MAX && status == CKD_OK; row++) {
        pathname p = path_parity(store->path, group, row, "");
        status = damage_remove_or_put_aside(store, DIR_PARITY, strrchr(p.text, '/') + 1, err);
    }
    return status;
}

ckd_status parity_sets_remove(const parity_sets *s, const bool *removed, const ckd_store *store,
                              ckd_error *err) {
    pathname folder = path_in(store->path, DIR_PARITY);
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < s->count && status == CKD_OK; i++) {
        status = removed[i] ? mark_incomplete(s->items[i], store, err) : CKD_OK;
    }
    THEN(status, dir_sync(folder.text, err));
    for (size_t i = 0; i < s->count && status == CKD_OK; i++) {
        status = removed[i] ? remove_rows(&s->items[i]->group.id, store, err) : CKD_OK;
    }
    THEN(status, dir_sync(folder.text, err));
    for (size_t i = 0; i < s->count && status == CKD_OK; i++) {
        pathname mark = path_parity_mark(store->path, &s->items[i]->group.id);
        status = removed[i] ? file_remove(mark.text, true, err) : CKD_OK;
    }
    return status;
}

/* ---- the lock ---- */

static bool is_leftover(const char *name) {
    size_t length = strlen(name);
    return length > 4 && strcmp(name + length - 4, ".tmp") == 0;
}

/*
 * Removes groups for which a dead process had named or removed only some files. Without their marks they would look
 * damaged. So the marks, which are leftovers, too, go afterwards.
 */
static ckd_status remove_incomplete(const ckd_store *store, const dir_list *list, ckd_error *err) {
    bool any = false;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < list->count && status == CKD_OK; i++) {
        ckd_id group;
        if (parity_mark_parse(&group, list->names[i])) {
            status = remove_rows(&group, store, err);
            any = true;
        }
    }
    return status == CKD_OK && any ? dir_sync(path_in(store->path, DIR_PARITY).text, err) : status;
}

static ckd_status remove_leftovers(const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_PARITY).text, err);
    if (status != CKD_OK) {
        return status;
    }
    status = remove_incomplete(store, &list, err);
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        if (is_leftover(list.names[i])) {
            status = file_remove(path_of(store->path, DIR_PARITY, list.names[i]).text, true, err);
        }
    }
    dir_list_free(&list);
    return status;
}

void parity_recover(const ckd_store *store) {
    dir_list list;
    file_lock *lock;
    bool any = false;
    if (dir_list_read(&list, path_in(store->path, DIR_PARITY).text, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < list.count && !any; i++) {
        any = is_leftover(list.names[i]);
    }
    dir_list_free(&list);
    if (any && lock_acquire(&lock, path_in(store->path, FILE_PARITY_LOCK).text, LOCK_EXCLUSIVE, true, 0,
                            NULL) == CKD_OK) {
        remove_leftovers(store, NULL);
        lock_release(lock);
    }
}

ckd_status parity_lock(file_lock **out, const ckd_store *store, ckd_error *err) {
    *out = NULL;
    ckd_status status = dir_create(path_in(store->path, DIR_PARITY).text, true, err);
    /* The maker of the folder may have died before it was durable. */
    THEN(status, dir_sync(path_in(store->path, "data").text, err));
    THEN(status,
         lock_acquire(out, path_in(store->path, FILE_PARITY_LOCK).text, LOCK_EXCLUSIVE, true, 0, err));
    if (status == CKD_E_BUSY) {
        return err_set(err, status,
                       "another process is making parity for this store or repairing it; try again later");
    }
    if (status == CKD_OK) {
        status = remove_leftovers(store, err);
        if (status != CKD_OK) {
            lock_release(*out);
            *out = NULL;
        }
    }
    return status;
}
