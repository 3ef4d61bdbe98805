/*
 * The ranks of a group as files in data/r: entering, finding each other, leaving, and removing the files of dead ranks.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/hash.h"
#include "engine/ranks/internal.h"

#define ENTER_MS 5000 /* limit for taking the lock: others test it by holding it for a moment */
#define BACK_NS \
    UINT64_C(500000000) /* others do not wait for a rank that leaves during a join and stays away this long */

pathname path_message(const ckd_store *store, const ckd_id *sender, uint64_t number, const char *suffix) {
    char hex[CKD_ID_TEXT], name[CKD_ID_TEXT + 32];
    ckd_id_text(hex, sender);
    snprintf(name, sizeof(name), "%s.%" PRIu64 "%s", hex, number, suffix);
    return path_of(store->path, DIR_RANKS, name);
}

void member_name(member *m, const rank_files *f, uint32_t rank) {
    char hex[CKD_ID_TEXT];
    ckd_id_text(hex, &m->id);
    snprintf(m->name, sizeof(m->name), "%s-%016" PRIx64 "-%u-%u", hex, f->group, (unsigned)rank,
             (unsigned)f->world);
}

/* Returns whether this is the file of a rank of the same group. */
static bool is_peer(member *out, uint32_t *rank, const rank_files *f, const char *name) {
    if (strlen(name) < CKD_ID_TEXT + 16 + 4 || name[CKD_ID_TEXT - 1] != '-' || !id_parse(&out->id, name)) {
        return false;
    }
    char *end;
    *rank = (uint32_t)strtoul(name + CKD_ID_TEXT + 17, &end, 10);
    if (*rank >= f->world) {
        return false;
    }
    member_name(out, f, *rank);
    return strcmp(out->name, name) == 0;
}

bool member_lives(const rank_files *f, const member *m) {
    file_lock *lock;
    pathname p = path_of(f->store->path, DIR_RANKS, m->name);
    ckd_status status = lock_acquire(&lock, p.text, LOCK_EXCLUSIVE, false, 0, NULL);
    lock_release(lock);
    return status != CKD_OK && status != CKD_E_NOT_FOUND;
}

ckd_status members_enter(rank_files *f, ckd_error *err) {
    member *me = &f->members[f->rank];
    file_lock *publish;
    ckd_status status = ckd_id_new(&me->id, err);
    if (status == CKD_OK) {
        /* recovery must not mistake the new file for a dead rank's */
        status = store_lock_publish(&publish, f->store, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    member_name(me, f, f->rank);
    status = dir_create(path_in(f->store->path, DIR_RANKS).text, true, err);
    if (status == CKD_OK) {
        pathname p = path_of(f->store->path, DIR_RANKS, me->name);
        status = lock_acquire(&f->lock, p.text, LOCK_SHARED, true, ENTER_MS, err);
    }
    lock_release(publish);
    return status;
}

/* ---- finding each other ---- */

static ckd_status twice(uint32_t rank, ckd_error *err) {
    return err_set(
        err, CKD_E_BUSY,
        "two running processes are both rank %u of this group: give each launch its own group name",
        (unsigned)rank);
}

bool member_is_gone(member *m, bool present) {
    uint64_t now = clock_monotonic_ns();
    m->seen_ns = present ? now : m->seen_ns;
    return m->seen_ns && now - m->seen_ns > BACK_NS;
}

static ckd_status missing(const rank_files *f, ckd_error *err) {
    uint32_t first = 0, count = 0;
    for (uint32_t r = f->world; r-- > 0;) {
        bool present = !id_is_zero(&f->members[r].id);
        if (member_is_gone(&f->members[r], present)) {
            return rank_died(r, f->world, "before all had joined", err);
        }
        if (!present) {
            first = r;
            count++;
        }
    }
    return count == 0 ? CKD_OK
                      : err_set(err, CKD_E_BUSY, "%u of %u ranks have not joined, the first of them rank %u",
                                (unsigned)count, (unsigned)f->world, (unsigned)first);
}

static ckd_status find_once(void *context, ckd_error *err) {
    rank_files *f = context;
    dir_list list;
    ckd_status status = cancel_poll(&f->stop, err);
    if (status != CKD_OK) {
        return status;
    }
    status = dir_list_read(&list, path_in(f->store->path, DIR_RANKS).text, err);
    for (uint32_t r = 0; r < f->world; r++) { /* a rank that died before all had joined may have come back */
        f->members[r].id = r == f->rank ? f->members[r].id : (ckd_id){{0}};
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        member m;
        uint32_t rank;
        if (!is_peer(&m, &rank, f, list.names[i]) || id_equal(&m.id, &f->members[f->rank].id) ||
            !member_lives(f, &m)) {
            continue;
        }
        if (!id_is_zero(&f->members[rank].id)) {
            status = twice(rank, err);
        }
        f->members[rank].id = m.id;
        memcpy(f->members[rank].name, m.name, sizeof(m.name));
    }
    dir_list_free(&list);
    return status == CKD_OK ? missing(f, err) : status;
}

ckd_status members_find_all(rank_files *f, ckd_error *err) {
    return retry_while_busy(find_once, f, f->timeout_ms, err);
}

bool members_next_coordinator(member *out, const rank_files *f, const dir_list *list, size_t *at) {
    for (; *at < list->count; (*at)++) {
        uint32_t rank;
        if (is_peer(out, &rank, f, list->names[*at]) && rank == 0 && member_lives(f, out)) {
            (*at)++;
            return true;
        }
    }
    return false;
}

/* ---- leaving ---- */

static ckd_status remove_messages(const ckd_store *store, const dir_list *list, const char *hex,
                                  ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < list->count && status == CKD_OK; i++) {
        if (strncmp(list->names[i], hex, CKD_ID_TEXT - 1) == 0 && list->names[i][CKD_ID_TEXT - 1] == '.') {
            status = file_remove(path_of(store->path, DIR_RANKS, list->names[i]).text, true, err);
        }
    }
    return status;
}

static ckd_status others_left(void *context, ckd_error *err) {
    rank_files *f = context;
    for (uint32_t r = 0; r < f->world; r++) {
        if (r != f->rank && !id_is_zero(&f->members[r].id) && member_lives(f, &f->members[r])) {
            return err_set(err, CKD_E_BUSY, "rank %u is still there", (unsigned)r);
        }
    }
    return CKD_OK;
}

void members_leave(rank_files *f) {
    if (!f->lock || f->process != getpid()) {
        lock_release(f->lock);
        f->lock = NULL;
        return;
    }
    if (f->rank == 0 && !f->silent) { /* the others may not have read its last message */
        retry_while_busy(others_left, f, f->timeout_ms, NULL);
    }
    const member *me = &f->members[f->rank];
    dir_list list;
    if (dir_list_read(&list, path_in(f->store->path, DIR_RANKS).text, NULL) == CKD_OK) {
        remove_messages(f->store, &list, me->name, NULL);
        file_remove(path_of(f->store->path, DIR_RANKS, me->name).text, true, NULL);
    }
    dir_list_free(&list);
    lock_release(f->lock);
    f->lock = NULL;
}

/* ---- cleaning up after dead ranks ---- */

static bool has_member(const dir_list *list, const char *message) {
    for (size_t i = 0; i < list->count; i++) {
        if (strncmp(list->names[i], message, CKD_ID_TEXT - 1) == 0 &&
            list->names[i][CKD_ID_TEXT - 1] == '-') {
            return true;
        }
    }
    return false;
}

static ckd_status visit(const ckd_store *store, const dir_list *list, const char *name, ckd_error *err) {
    ckd_id id;
    pathname p = path_of(store->path, DIR_RANKS, name);
    if (strlen(name) <= CKD_ID_TEXT || !id_parse(&id, name)) {
        return CKD_OK;
    }
    if (name[CKD_ID_TEXT - 1] == '.' && !has_member(list, name)) {
        return file_remove(p.text, true, err);
    }
    if (name[CKD_ID_TEXT - 1] != '-') {
        return CKD_OK;
    }
    file_lock *lock;
    if (lock_acquire(&lock, p.text, LOCK_EXCLUSIVE, false, 0, NULL) != CKD_OK) {
        return CKD_OK; /* it is alive, or has just left */
    }
    ckd_status status = remove_messages(store, list, name, err);
    THEN(status, file_remove(p.text, true, err));
    lock_release(lock);
    return status;
}

ckd_status ranks_recover(const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_error why = {0};
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_RANKS).text, &why);
    if (status != CKD_OK) { /* NOT_FOUND: no ranks ever saved here together */
        return err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        status = visit(store, &list, list.names[i], err);
    }
    dir_list_free(&list);
    return status;
}
