/*
 * Handles groups that lose members on purpose. The members that stay are read before a group goes, because unnoticed
 * damage may be repairable only with the files to be removed. They get new parity before they lose the old one.
 */
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/integrity/internal.h"

static bool among(const parity_files *files, const ckd_id *id) {
    return id_among(id, files->items, files->count);
}

/* The state of a group before and after the removal. */
typedef struct outlook {
    bool concerned;             /* a member is removed */
    size_t left;                /* undamaged members that exist and stay */
    size_t lost_now, lost_then; /* members that are missing or damaged, before and after the removal */
    size_t rows;                /* parity files that exist and showed no damage */
    /* A lost or damaged member that must stay, and that the group can still rebuild; or NULL. */
    const parity_member *wanted;
    /* Bit set of members that were read and found damaged. */
    uint32_t damaged[CKD_PARITY_DATA_MAX / 32 + 1];
} outlook;

typedef struct parity_removal {
    const ckd_store *store;
    const parity_files *removed, *remaining, *ending;
    bool force;
    parity_sets sets;
    outlook *outlooks; /* by index of the set */
    bytes payload;
    file_lock *lock;    /* NULL: no group is read, or `unlocked` says why there is no lock */
    ckd_error unlocked; /* message "": nothing failed */
} parity_removal;

static size_t rows_of(const parity_set *s) {
    return (size_t)__builtin_popcount(s->present);
}

static bool is_damaged(const outlook *o, size_t member) {
    return o->damaged[member / 32] >> member % 32 & 1;
}

/* A group that can rebuild a lost file is never useless. */
static bool useless(const outlook *o) {
    bool repairs = o->wanted && o->lost_then <= o->rows;
    return o->concerned && !repairs && (o->left == 0 || o->rows <= o->lost_then);
}

/* Whether the group could still rebuild a member that is lost after the removal. */
static bool covers(const outlook *o) {
    return !useless(o) && o->rows > o->lost_then;
}

/* ---- looking at groups ---- */

/* Without ISA-L the answer is unknown and counts as yes, because a later repair may have ISA-L. */
static ckd_status can_rebuild(bool *can, const parity_removal *f, const parity_set *s, size_t member,
                              ckd_error *err) {
    const parity_member *m = &s->group.members[member];
    file_ref expected = {.id = m->file, .size = m->size, .root = m->root};
    rate_limiter unlimited = {0};
    rebuild_request q = {.set = s, .member = member, .expected = &expected, .limiter = &unlimited};
    ckd_error why = {0};
    ckd_status status = repair_rebuild(can, f->store, &q, &why, err);
    *can = *can || status == CKD_E_UNSUPPORTED;
    return status == CKD_E_NOMEM ? status : CKD_OK;
}

/*
 * An existing file that no manifest names may belong to a checkpoint whose manifest is lost. A missing file that no
 * manifest names was deleted earlier. Files that only expired checkpoints need are never repaired, so no group has to
 * stay for them.
 */
static bool may_be_needed(const parity_removal *f, const ckd_id *file) {
    return !among(f->ending, file) &&
           (among(f->remaining, file) || file_exists(path_chunk(f->store->path, file, "").text));
}

/* Judges by names and sizes alone. */
static outlook assess_group(const parity_removal *f, const parity_set *s) {
    outlook o = {.rows = rows_of(s)};
    for (size_t i = 0; i < s->group.member_count; i++) {
        const parity_member *m = &s->group.members[i];
        bool goes = among(f->removed, &m->file), exists = live_file_exists(f->store, &m->file, m->size);
        o.concerned = o.concerned || goes;
        o.left += !goes && exists;
        o.lost_now += !exists;
        o.lost_then += goes || !exists;
        if (!exists && !goes && may_be_needed(f, &m->file)) {
            o.wanted = m;
        }
    }
    o.wanted = o.lost_now <= rows_of(s) ? o.wanted : NULL;
    return o;
}

/* Reads the members that stay: at most as many files as a group has members. */
static ckd_status read_members(outlook *o, parity_removal *f, const parity_set *s, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < s->group.member_count && status == CKD_OK; i++) {
        const parity_member *m = &s->group.members[i];
        bool right = true, can = false;
        if (!among(f->removed, &m->file) && live_file_exists(f->store, &m->file, m->size)) {
            status = parity_check_member(&right, m, f->store, &f->payload, NULL, err);
        }
        if (status == CKD_OK && !right) {
            status = can_rebuild(&can, f, s, i, err);
            o->damaged[i / 32] |= UINT32_C(1) << i % 32;
            o->left--;
            o->lost_then++;
            o->wanted = can && may_be_needed(f, &m->file) ? m : o->wanted;
        }
    }
    return status;
}

/*
 * Reads the parity files of a group. A damaged row cannot be made again once a member is gone, so it does not count for
 * a group that stays.
 */
static ckd_status read_rows(outlook *o, const parity_removal *f, const parity_set *s, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t row = 0; row < s->group.rows && status == CKD_OK; row++) {
        damage_list found = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = f->store->path};
        if (!found.result) {
            return err_nomem(err, sizeof(ckd_verify_result), "a check");
        }
        if (s->present >> row & 1) {
            status = parity_check_row(s, row, f->store, &found, NULL, err);
            o->rows -= status == CKD_OK && found.result->damage_count;
        }
        ckd_verify_result_free(found.result);
    }
    return status;
}

/* Does a file that stays lose another group, but not this one? */
static bool is_relied_on(const parity_removal *f, const parity_set *s) {
    bool found = false;
    for (size_t i = 0; i < s->group.member_count && !found; i++) {
        const ckd_id *file = &s->group.members[i].file;
        size_t count;
        const parity_membership *c = parity_sets_of(&f->sets, file, &count);
        for (size_t k = 0; k < count && !found; k++) {
            found = among(f->remaining, file) && useless(&f->outlooks[c[k].set->place]);
        }
    }
    return found && covers(&f->outlooks[s->place]);
}

static ckd_status read_relied_on(parity_removal *f, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < f->sets.count && status == CKD_OK; i++) {
        const parity_set *s = f->sets.items[i];
        outlook *o = &f->outlooks[i];
        if (!o->concerned && is_relied_on(f, s)) {
            status = read_members(o, f, s, err);
            THEN(status, read_rows(o, f, s, err));
        }
    }
    return status;
}

/* Does any member of the group stay? A group whose members all go is not read. */
static bool is_read(const outlook *o) {
    return o->concerned && (o->left || o->wanted);
}

/*
 * Only the holder of the parity lock can make new groups. So it is taken before files are read. A caller that finds it
 * taken tries again later, and would otherwise read the files each time. A full disk must not stop a collection that
 * would free space.
 */
static ckd_status lock_parity(parity_removal *f, ckd_error *err) {
    bool any = false;
    for (size_t i = 0; i < f->sets.count && !any; i++) {
        any = is_read(&f->outlooks[i]);
    }
    ckd_status status = any ? parity_lock(&f->lock, f->store, &f->unlocked) : CKD_OK;
    return status == CKD_E_BUSY || status == CKD_E_NOMEM ? err_from(err, status, &f->unlocked) : CKD_OK;
}

static ckd_status assess_groups(parity_removal *f, ckd_error *err) {
    f->outlooks = calloc(f->sets.count + 1, sizeof(*f->outlooks));
    if (!f->outlooks) {
        return err_nomem(err, f->sets.count * sizeof(*f->outlooks), "parity to forget");
    }
    for (size_t i = 0; i < f->sets.count; i++) {
        f->outlooks[i] = assess_group(f, f->sets.items[i]);
    }
    ckd_status status = lock_parity(f, err);
    for (size_t i = 0; i < f->sets.count && status == CKD_OK; i++) {
        if (is_read(&f->outlooks[i])) {
            status = read_members(&f->outlooks[i], f, f->sets.items[i], err);
            THEN(status, read_rows(&f->outlooks[i], f, f->sets.items[i], err));
        }
    }
    return status == CKD_OK ? read_relied_on(f, err) : status;
}

/* Called before anything is removed. A group that would go must not be the only one that can rebuild a lost file. */
static ckd_status check_wanted(const parity_removal *f, ckd_error *err) {
    for (size_t i = 0; i < f->sets.count; i++) {
        const outlook *o = &f->outlooks[i];
        bool last = o->wanted && o->concerned && o->lost_then > o->rows;
        if (last && f->force) {
            store_message(
                f->store,
                "gave up a lost or damaged chunk file, as the files that could rebuild it are removed: %s",
                path_chunk(f->store->path, &o->wanted->file, "").text);
        } else if (last) {
            ckd_status status = err_set(
                err, CKD_E_STATE,
                "this chunk file is lost or damaged, and can only be rebuilt with the help of files that "
                "are to be removed: run ckptdelta repair first; if that cannot do it, delete what "
                "needs the file, or give the file up with ckptdelta trash --empty --give-up");
            return err_in_file(err, status, path_chunk(f->store->path, &o->wanted->file, "").text);
        }
    }
    return CKD_OK;
}

/* ---- removing ---- */

static bool covered_elsewhere(const parity_removal *f, const ckd_id *file) {
    size_t count;
    const parity_membership *c = parity_sets_of(&f->sets, file, &count);
    bool covered = false;
    for (size_t i = 0; i < count && !covered; i++) {
        covered = covers(&f->outlooks[c[i].set->place]);
    }
    return covered;
}

/* Lists members that stay, but lose their only group. Each is listed once, sorted by id. */
static ckd_status find_unprotected(parity_files *out, ckd_id **ids, const parity_removal *f, ckd_error *err) {
    size_t total = 0, count = 0, kept = 0;
    for (size_t i = 0; i < f->sets.count; i++) {
        total += f->outlooks[i].concerned ? f->sets.items[i]->group.member_count : 0;
    }
    *ids = calloc(total + 1, sizeof(**ids));
    if (!*ids) {
        return err_nomem(err, total * sizeof(**ids), "chunk file names");
    }
    for (size_t i = 0; i < f->sets.count; i++) {
        const parity_set *s = f->sets.items[i];
        const outlook *o = &f->outlooks[i];
        for (size_t k = 0; k < s->group.member_count && useless(o); k++) {
            const parity_member *m = &s->group.members[k];
            bool stays = among(f->remaining, &m->file) && !is_damaged(o, k) &&
                         live_file_exists(f->store, &m->file, m->size);
            if (stays && !covered_elsewhere(f, &m->file)) {
                (*ids)[count++] = m->file;
            }
        }
    }
    qsort(*ids, count, sizeof(**ids), id_compare);
    for (size_t i = 0; i < count; i++) {
        if (kept == 0 || !id_equal(&(*ids)[kept - 1], &(*ids)[i])) {
            (*ids)[kept++] = (*ids)[i];
        }
    }
    *out = (parity_files){*ids, kept};
    return CKD_OK;
}

/* Returns the largest group that goes, as a model for files without a setting. There is at least one. */
static const parity_group *largest_useless(const parity_removal *f) {
    const parity_group *largest = NULL;
    for (size_t i = 0; i < f->sets.count; i++) {
        const parity_group *g = &f->sets.items[i]->group;
        if (useless(&f->outlooks[i]) && (!largest || g->member_count > largest->member_count)) {
            largest = g;
        }
    }
    return largest;
}

/* Failures do not stop a collection, which may be needed to relieve a full disk. */
static ckd_status protect_again(const parity_removal *f, ckd_error *err) {
    parity_files bare = {0};
    ckd_id *ids;
    size_t covered = 0;
    ckd_error why = f->unlocked;
    ckd_status status = find_unprotected(&bare, &ids, f, err);
    if (status == CKD_OK && bare.count && f->lock) {
        ckd_status made = parity_protect_again(&covered, f->store, &bare, largest_useless(f), &why);
        status = made == CKD_E_NOMEM ? err_from(err, made, &why) : CKD_OK;
    }
    if (status == CKD_OK && covered < bare.count) {
        store_message(
            f->store,
            "%zu chunk files lost their parity, as other files of their groups are removed: run ckptdelta "
            "parity to protect them again%s%s",
            bare.count - covered, why.message[0] ? "; this could not be done now: " : "", why.message);
    }
    free(ids);
    return status;
}

static ckd_status remove_groups(const parity_removal *f, ckd_error *err) {
    bool *removed = calloc(f->sets.count + 1, sizeof(*removed)), any = false;
    if (!removed) {
        return err_nomem(err, f->sets.count, "parity to forget");
    }
    for (size_t i = 0; i < f->sets.count; i++) {
        removed[i] = useless(&f->outlooks[i]);
        any = any || removed[i];
    }
    ckd_status status = protect_again(f, err);
    if (status == CKD_OK && any) {
        status = parity_sets_remove(&f->sets, removed, f->store, err);
    }
    free(removed);
    return status;
}

ckd_status parity_remove_useless(const ckd_store *store, const parity_files *removed,
                                 const parity_files *remaining, const parity_files *ending, bool force,
                                 ckd_error *err) {
    parity_removal f = {
        .store = store, .removed = removed, .remaining = remaining, .ending = ending, .force = force};
    if (!removed->count || !file_exists(path_in(store->path, DIR_PARITY).text)) {
        return CKD_OK;
    }
    damage_list ignored = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = store->path};
    ckd_status status =
        ignored.result ? CKD_OK : err_nomem(err, sizeof(ckd_verify_result), "parity to forget");
    THEN(status, parity_sets_read(&f.sets, store, &ignored, err));
    THEN(status, assess_groups(&f, err));
    THEN(status, check_wanted(&f, err));
    THEN(status, remove_groups(&f, err));
    lock_release(f.lock);
    free(f.outlooks);
    bytes_free(&f.payload);
    parity_sets_free(&f.sets);
    ckd_verify_result_free(ignored.result);
    return status;
}
