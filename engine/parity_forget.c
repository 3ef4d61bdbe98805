#include "engine/parity.h"

#include <stdlib.h>

static int by_id(const void *a, const void *b) {
    return memcmp(a, b, sizeof(ckd_id));
}

static bool among(const parity_files *files, const ckd_id *id) {
    return files->count && bsearch(id, files->items, files->count, sizeof(*id), by_id);
}

/* What becomes of a group. */
typedef struct outlook {
    bool concerned;              /* a member goes */
    size_t left;                 /* members that are there and stay */
    size_t lost_now, lost_then;  /* members that are not there, before the removal and after it */
    const parity_member *wanted; /* one that is to stay, and is not there; or NULL */
} outlook;

static outlook look_at(const parity_set *s, const ckd_store *store, const parity_files *gone,
                       const parity_files *stay) {
    outlook o = {0};
    for (size_t i = 0; i < s->group.member_count; i++) {
        const parity_member *m = &s->group.members[i];
        bool goes = among(gone, &m->file), there = listed_file_there(store, &m->file, m->size);
        o.concerned = o.concerned || goes;
        o.left += !goes && there;
        o.lost_now += !there;
        o.lost_then += goes || !there;
        if (!there && !goes && among(stay, &m->file)) {
            o.wanted = m;
        }
    }
    return o;
}

static size_t rows_of(const parity_set *s) {
    return (size_t)__builtin_popcount(s->present);
}

/* One that brings a lost file back is not, however little it can do besides. */
static bool useless(const parity_set *s, const outlook *o) {
    bool repairs = o->wanted && o->lost_then <= rows_of(s);
    return o->concerned && !repairs && (o->left == 0 || rows_of(s) <= o->lost_then);
}

/* Before anything is removed: a group that would go must not be what brings a lost file back. */
static ckd_status check_wanted(const parity_sets *sets, const ckd_store *store, const parity_files *gone,
                               const parity_files *stay, bool give_up, ckd_error *err) {
    for (size_t i = 0; i < sets->count; i++) {
        const parity_set *s = sets->items[i];
        outlook o = look_at(s, store, gone, stay);
        bool last = o.wanted && o.lost_now <= rows_of(s) && o.concerned && o.lost_then > rows_of(s);
        if (last && give_up) {
            store_message(store,
                          "a missing chunk file is given up, as what it could be rebuilt with is removed: %s",
                          path_chunk(store->path, &o.wanted->file, "").text);
        } else if (last) {
            ckd_status status =
                err_set(err, CKD_E_STATE,
                        "this chunk file is missing, and can only be rebuilt with the help of files that "
                        "are to be removed: run ckptdelta repair first; where that cannot do it, delete what "
                        "needs the file, or give the file up with ckptdelta trash --empty --give-up");
            return err_in_file(err, status, path_chunk(store->path, &o.wanted->file, "").text);
        }
    }
    return CKD_OK;
}

static ckd_status forget(const parity_sets *sets, const ckd_store *store, const parity_files *gone,
                         const parity_files *stay, bool give_up, ckd_error *err) {
    ckd_status status = check_wanted(sets, store, gone, stay, give_up, err);
    size_t bare = 0, removed = 0;
    for (size_t i = 0; i < sets->count && status == CKD_OK; i++) {
        outlook o = look_at(sets->items[i], store, gone, stay);
        if (useless(sets->items[i], &o)) {
            status = parity_set_remove(sets->items[i], store, err);
            bare += o.left;
            removed++;
        }
    }
    if (status == CKD_OK && removed) {
        status = dir_sync(path_in(store->path, DIR_PARITY).text, err);
    }
    if (status == CKD_OK && bare) {
        store_message(
            store,
            "%zu chunk files have lost their parity, as others of their groups are removed: ckptdelta parity "
            "makes it anew",
            bare);
    }
    return status;
}

ckd_status parity_forget(const ckd_store *store, const parity_files *gone, const parity_files *stay,
                         bool give_up, ckd_error *err) {
    parity_sets sets = {0};
    if (!gone->count || !file_exists(path_in(store->path, DIR_PARITY).text)) {
        return CKD_OK;
    }
    damage_list ignored = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = store->path};
    ckd_status status =
        ignored.result ? CKD_OK : err_nomem(err, sizeof(ckd_verify_result), "parity to forget");
    if (status == CKD_OK) {
        status = parity_sets_read(&sets, store, &ignored, err);
    }
    if (status == CKD_OK) {
        status = forget(&sets, store, gone, stay, give_up, err);
    }
    parity_sets_free(&sets);
    ckd_verify_result_free(ignored.result);
    return status;
}
