#include "engine/parity.h"

#include <stdlib.h>

static int by_id(const void *a, const void *b) {
    return memcmp(a, b, sizeof(ckd_id));
}

/* Members that are there and stay; and how many more losses the group can take then. */
static size_t members_left(size_t *strength, const parity_set *s, const ckd_store *store, const ckd_id *files,
                           size_t count) {
    size_t left = 0;
    for (size_t i = 0; i < s->group.member_count; i++) {
        const parity_member *m = &s->group.members[i];
        bool goes = bsearch(&m->file, files, count, sizeof(*files), by_id) != NULL;
        left += !goes && listed_file_there(store, &m->file, m->size);
    }
    size_t lost = s->group.member_count - left, rows = (size_t)__builtin_popcount(s->present);
    *strength = rows > lost ? rows - lost : 0;
    return left;
}

static bool concerned(const parity_set *s, const ckd_id *files, size_t count) {
    bool any = false;
    for (size_t i = 0; i < s->group.member_count && !any; i++) {
        any = bsearch(&s->group.members[i].file, files, count, sizeof(*files), by_id) != NULL;
    }
    return any;
}

static ckd_status forget(const parity_sets *sets, const ckd_store *store, const ckd_id *files, size_t count,
                         ckd_error *err) {
    ckd_status status = CKD_OK;
    size_t bare = 0, removed = 0;
    for (size_t i = 0; i < sets->count && status == CKD_OK; i++) {
        const parity_set *s = sets->items[i];
        size_t strength,
            left = concerned(s, files, count) ? members_left(&strength, s, store, files, count) : 0;
        if (!concerned(s, files, count) || (left && strength)) {
            continue;
        }
        status = parity_set_remove(s, store, err);
        bare += left;
        removed++;
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

ckd_status parity_forget(const ckd_store *store, const ckd_id *files, size_t count, ckd_error *err) {
    parity_sets sets = {0};
    if (!count || !file_exists(path_in(store->path, DIR_PARITY).text)) {
        return CKD_OK;
    }
    ckd_id *sorted = malloc(count * sizeof(*sorted));
    damage_list ignored = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = store->path};
    ckd_status status =
        sorted && ignored.result ? CKD_OK : err_nomem(err, count * sizeof(*sorted), "file names");
    if (status == CKD_OK) {
        memcpy(sorted, files, count * sizeof(*sorted));
        qsort(sorted, count, sizeof(*sorted), by_id);
        status = parity_sets_read(&sets, store, &ignored, err);
    }
    if (status == CKD_OK) {
        status = forget(&sets, store, sorted, count, err);
    }
    parity_sets_free(&sets);
    ckd_verify_result_free(ignored.result);
    free(sorted);
    return status;
}
