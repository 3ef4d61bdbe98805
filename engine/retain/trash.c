/*
 * Empties the trash: removes files of checkpoints whose grace period has ended, and what a compaction replaced. Also
 * lists the trash. deletion.c fills it. Begin with try_collect and collect. A collection may be interrupted anywhere.
 * Parity groups go first. Then tombstones record that the grace period is over: a checkpoint that lacks a file must not
 * seem restorable. Then chunk files go, then manifests, then tombstones, each directory synced before the next. As long
 * as its tombstone exists, no checkpoint comes back by itself.
 */
#include "engine/retain/retain.h"
#include "engine/store/store.h"

#include <stdlib.h>

#include "engine/integrity/integrity.h"
#include "engine/retain/replaced.h"

/* ---- chunk files ---- */

typedef struct file_use {
    ckd_id id;
    uint64_t size;
    bool stays;  /* a remaining manifest names it */
    bool needed; /* that manifest belongs to a listed checkpoint, or to one that can be restored */
} file_use;

typedef struct file_uses {
    file_use *items; /* one for each file, sorted by id */
    size_t count;
} file_uses;

static int by_file(const void *a, const void *b) {
    const file_use *x = a, *y = b;
    int order = memcmp(&x->id, &y->id, sizeof(ckd_id));
    order = order ? order : (int)y->needed - (int)x->needed;
    return order ? order : (int)y->stays - (int)x->stays;
}

/*
 * Whether it is a deleted checkpoint whose grace period is over, which no living writer reads (in_use) and on which no
 * incomplete manifest depends (is_protected).
 */
static bool may_be_collected(const manifest_entry *x, uint64_t now) {
    return x->in_trash && !x->in_use && !x->is_protected && !tombstone_in_grace(&x->tombstone, now);
}

/* Collects the files of all manifests. The manifests of chosen entries count as removed. */
static ckd_status uses_of(file_uses *out, const manifest_set *n, ckd_error *err) {
    uint64_t now = clock_wall_ns();
    size_t total = 0, used = 0;
    for (size_t i = 0; i < n->count; i++) {
        total += n->items[i].m.file_count;
    }
    *out = (file_uses){.items = calloc(total + 1, sizeof(file_use))};
    if (!out->items) {
        return err_nomem(err, total * sizeof(file_use), "chunk file names");
    }
    for (size_t i = 0; i < n->count; i++) {
        const manifest_entry *x = &n->items[i];
        for (size_t k = 0; k < x->m.file_count; k++) {
            bool stays = !x->chosen, needed = stays && !may_be_collected(x, now);
            out->items[used++] = (file_use){x->m.files[k].id, x->m.files[k].size, stays, needed};
        }
    }
    qsort(out->items, used, sizeof(file_use), by_file);
    /* Among entries of one file, a needed one comes first, then one that stays. */
    for (size_t i = 0; i < used; i++) {
        if (out->count == 0 || !id_equal(&out->items[out->count - 1].id, &out->items[i].id)) {
            out->items[out->count++] = out->items[i];
        }
    }
    return CKD_OK;
}

/* ---- checkpoints that may go ---- */

/* Chooses the checkpoints that may be collected. all: even if their grace period has not ended. */
static ckd_status choose_expired(manifest_set *n, const ckd_store *store, bool all, ckd_error *err) {
    uint64_t now = clock_wall_ns();
    ckd_status status = manifest_set_mark_in_use(n, store, err);
    for (size_t i = 0; i < n->count; i++) {
        manifest_entry *x = &n->items[i];
        x->chosen = may_be_collected(x, all ? UINT64_MAX : now);
    }
    return status;
}

/* ---- removing ---- */

/* Removes parity groups that could otherwise bring removed files back, or rebuild others from them. */
static ckd_status forget_parity(const ckd_store *store, const file_uses *files, bool force, ckd_error *err) {
    ckd_id *ids = calloc(files->count + 1, sizeof(*ids));
    parity_files removed = {.items = ids}, remaining = {0}, ending = {0};
    if (!ids) {
        return err_nomem(err, files->count * sizeof(*ids), "chunk file names");
    }
    /* Files that go come first, then files that are needed, then the others, each sorted by id. */
    for (size_t i = 0; i < files->count; i++) {
        removed.count += !files->items[i].stays;
        remaining.count += files->items[i].needed;
    }
    remaining.items = ids + removed.count;
    ending.items = remaining.items + remaining.count;
    size_t gone = 0, needed = removed.count, others = needed + remaining.count;
    for (size_t i = 0; i < files->count; i++) {
        const file_use *f = &files->items[i];
        ids[f->needed ? needed++ : f->stays ? others++ : gone++] = f->id;
    }
    ending.count = files->count - removed.count - remaining.count;
    ckd_status status = parity_remove_useless(store, &removed, &remaining, &ending, force, err);
    free(ids);
    return status;
}

/* Removes one chunk file that no remaining manifest names. Returns false if there is none. */
static bool remove_one(const ckd_store *store, const file_uses *files) {
    bool removed = false;
    for (size_t i = 0; i < files->count && !removed; i++) {
        pathname p = path_chunk(store->path, &files->items[i].id, "");
        removed = !files->items[i].stays && file_exists(p.text) && file_remove(p.text, false, NULL) == CKD_OK;
    }
    return removed && dir_sync(path_in(store->path, DIR_CHUNKS).text, NULL) == CKD_OK;
}

/*
 * On a full disk, something must be removed before a tombstone can be written. If nothing else can go, a chunk file of
 * the trash is removed. A crash then leaves an entry that lacks a file, which verify reports until the trash is
 * emptied. If there is no file to remove either, the old tombstone stays for now. That is safe, because no file is left
 * that only its checkpoint names. *late: the tombstone must be replaced once the removal of manifests has made room.
 */
static ckd_status replace_tombstone(bool *late, const ckd_store *store, const tombstone *t,
                                    const file_uses *files, ckd_error *err) {
    ckd_error why;
    ckd_status status;
    do {
        why = (ckd_error){0};
        status = tombstone_write(store, t, true, &why);
    } while (status == CKD_E_NOSPACE && (deletion_make_room(store) || remove_one(store, files)));
    *late |= status == CKD_E_NOSPACE;
    return err_from(err, status == CKD_E_NOSPACE ? CKD_OK : status, &why);
}

/*
 * Ends the grace periods in the tombstones, also periods that are over: by the clock of another process one may go on,
 * and its manifest would seem lost. After the clock was set back, the time of deletion may lie in the future, too.
 */
static ckd_status end_grace_periods(bool *late, const ckd_store *store, const manifest_set *n,
                                    const file_uses *files, ckd_error *err) {
    uint64_t now = clock_wall_ns();
    *late = false;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        tombstone t = n->items[i].tombstone;
        if (n->items[i].chosen && tombstone_in_grace(&t, 0)) {
            t.until_ns = t.deleted_ns < now ? t.deleted_ns : now;
            status = replace_tombstone(late, store, &t, files, err);
        }
    }
    return status;
}

static ckd_status remove_files(bool *late, const ckd_store *store, const manifest_set *n,
                               const file_uses *files, bool force, ckd_error *err) {
    /* A deletion may have died before its tombstone was durable. */
    ckd_status status = dir_sync(path_in(store->path, DIR_TOMBSTONES).text, err);
    THEN(status, forget_parity(store, files, force, err));
    /* Parity may forbid the removal. The grace period then goes on. */
    THEN(status, end_grace_periods(late, store, n, files, err));
    for (size_t i = 0; i < files->count && status == CKD_OK; i++) {
        if (!files->items[i].stays) {
            pathname p = path_chunk(store->path, &files->items[i].id, "");
            status = damage_remove_or_put_aside(store, DIR_CHUNKS, strrchr(p.text, '/') + 1, err);
        }
    }
    return status == CKD_OK ? dir_sync(path_in(store->path, DIR_CHUNKS).text, err) : status;
}

static ckd_status remove_manifests(const ckd_store *store, const manifest_set *n, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &n->items[i].m.checkpoint;
        if (n->items[i].chosen) {
            status = file_remove(path_manifest(store->path, c->run, c->step, c->generation).text, true, err);
        }
    }
    return status == CKD_OK ? dir_sync(path_in(store->path, DIR_MANIFESTS).text, err) : status;
}

/* Removes what is chosen: files first, then manifests. */
static ckd_status remove_chosen(const ckd_store *store, const manifest_set *n, const file_uses *files,
                                bool force, ckd_error *err) {
    bool late = false;
    ckd_status status = remove_files(&late, store, n, files, force, err);
    THEN(status, remove_manifests(store, n, err));
    if (status == CKD_OK && late) { /* otherwise they would make the manifests look lost */
        status = end_grace_periods(&late, store, n, files, err);
    }
    return status;
}

/*
 * Whether a tombstone without a manifest stays. Unless `all`, it stays if its checkpoint could still be restored: the
 * manifest was not collected but lost, and verify reports it. A tombstone of another version, or one that the disk
 * cannot read now, always stays, because it may say the same. A damaged one goes.
 */
static ckd_status check_tombstone(bool *stays, const ckd_store *store, const manifest_name *name, bool all,
                                  ckd_error *err) {
    tombstone t;
    ckd_error why = {0};
    ckd_status status = tombstone_read(&t, store, name, &why);
    bool unread = status != CKD_OK && status != CKD_E_CORRUPT && status != CKD_E_NOT_FOUND;
    *stays = unread || (status == CKD_OK && !all && tombstone_in_grace(&t, clock_wall_ns()));
    if (status == CKD_E_NOMEM) {
        return err_from(err, status, &why);
    }
    if (unread) {
        store_message(store,
                      "the record of a deleted checkpoint cannot be read and stays: %s (%s); once it can be, "
                      "ckptdelta trash --empty removes it",
                      why.message, why.file);
    }
    return CKD_OK;
}

/*
 * Removes tombstones without a manifest, also those whose manifests an earlier collection removed. all: also those of
 * lost manifests.
 */
static ckd_status remove_tombstones(const ckd_store *store, bool all, ckd_error *err) {
    manifest_list names = {0}, tombstones = {0};
    ckd_status status = manifests_read_all(&names, store, err);
    THEN(status, manifests_tombstones(&tombstones, store, err));
    bool *needed = NULL;
    THEN(status, manifests_mark_covering(&needed, &tombstones, &names, err));
    for (size_t i = 0; i < tombstones.count && status == CKD_OK; i++) {
        const manifest_name *t = &tombstones.items[i];
        bool stays = needed[i];
        status = stays ? CKD_OK : check_tombstone(&stays, store, t, all, err);
        if (status == CKD_OK && !stays) {
            status = file_remove(path_tombstone(store->path, t->run, t->step, t->generation).text, true, err);
        }
    }
    if (status == CKD_OK && tombstones.count) {
        status = dir_sync(path_in(store->path, DIR_TOMBSTONES).text, err);
    }
    free(needed);
    manifests_free(&names);
    manifests_free(&tombstones);
    return status;
}

static void count_up(ckd_collected *out, const manifest_set *n, const file_uses *files) {
    for (size_t i = 0; i < n->count; i++) {
        const manifest_entry *x = &n->items[i];
        out->checkpoints += x->chosen && !x->superseded;
        out->waiting += x->in_trash && !x->chosen && !x->superseded;
        out->bytes += x->chosen ? x->m.file_bytes : 0;
    }
    for (size_t i = 0; i < files->count; i++) {
        out->files += !files->items[i].stays;
        out->bytes += files->items[i].stays ? 0 : files->items[i].size;
    }
}

typedef struct collection {
    bool all;             /* also what could still be restored */
    bool dry;             /* only counts */
    bool force;           /* whatever needs a repair */
    bool keep_tombstones; /* because the catalog is not in step; a later collection removes them */
} collection;

/* Removes expired checkpoints. The caller holds the publish lock and, unless `dry`, the exclusive reader lock. */
static ckd_status collect(ckd_collected *out, const ckd_store *store, const collection *how, ckd_error *err) {
    bool dry = how->dry, force = how->force;
    manifest_set n = {0};
    setting_list settings = {0};
    file_uses files = {0};
    ckd_status status = settings_read(&settings, store, err);
    if (status == CKD_OK) { /* an unreadable setting may protect what is in the trash */
        status = settings_check(&settings, store, err);
    }
    settings_free(&settings);
    THEN(status, manifest_set_read(&n, store, err));
    THEN(status, choose_expired(&n, store, how->all, err));
    THEN(status, uses_of(&files, &n, err));
    if (status == CKD_OK) {
        count_up(out, &n, &files);
    }
    if (status == CKD_OK && !dry && !force && out->checkpoints) {
        status = vanished_check_removal(store, err);
    }
    /* Manifests that stay must not need manifests that go. */
    if (status == CKD_OK && !dry) {
        status = out->checkpoints ? manifest_set_upgrade_dependents(&n, store, err) : CKD_OK;
        if (status == CKD_OK && out->checkpoints) {
            status = remove_chosen(store, &n, &files, force, err);
        }
        if (status == CKD_OK && !how->keep_tombstones) {
            status = remove_tombstones(store, how->all, err);
        }
        if (status == CKD_OK && out->checkpoints) {
            deletion_mark_restore(store); /* now there is space */
        }
    }
    free(files.items);
    manifest_set_free(&n);
    return status;
}

/* ---- replaced generations ---- */

/*
 * Removes generations of listed checkpoints that newer ones have replaced. Chunk files go first, then manifests: an old
 * manifest without files does no harm below a newer one, and a file that no manifest names would stay forever. The
 * caller holds the publish lock and the exclusive reader lock. checked: NULL: only counts, and needs no lock.
 * Errors: as manifest_set_read; STATE, IO.
 */
static ckd_status remove_replaced(ckd_collected *out, const ckd_store *store, checked_files *checked,
                                  bool force, ckd_error *err) {
    manifest_set n = {0};
    file_uses files = {0};
    size_t count = 0;
    bool dry = !checked;
    ckd_status status = manifest_set_read(&n, store, err);
    THEN(status, manifest_set_mark_in_use(&n, store, err));
    THEN(status, replaced_choose(&count, &n, store, NULL, err));
    if (count && !dry && !force) {
        status = vanished_check_removal(store, err);
    }
    if (status == CKD_OK && count && !dry) {
        status = replaced_choose(&count, &n, store, checked, err);
    }
    if (status == CKD_OK && count) {
        status = uses_of(&files, &n, err);
    }
    if (status == CKD_OK && count) {
        count_up(out, &n, &files);
    }
    if (status == CKD_OK && count && !dry) {
        /* The writer of a newer generation may have died before its manifest was durable. */
        status = dir_sync(path_in(store->path, DIR_MANIFESTS).text, err);
        THEN(status, remove_chosen(store, &n, &files, force, err));
    }
    free(files.items);
    manifest_set_free(&n);
    return status;
}

ckd_status trash_would_free(ckd_collected *out, const manifest_set *chosen, ckd_error *err) {
    file_uses files = {0};
    ckd_status status = uses_of(&files, chosen, err);
    if (status == CKD_OK) {
        count_up(out, chosen, &files);
    }
    free(files.items);
    return status;
}

/* ---- locks ---- */

typedef struct attempt {
    ckd_store *store;
    uint32_t lock_ms; /* for the publish lock */
    bool all, force;
    bool only_replaced; /* leaves the trash alone */
    ckd_collected *out;
    checked_files *checked;
    unlinker_wait wait;
} attempt;

/*
 * A saver holds the reader lock and waits for the publish lock. So the holder of the publish lock must not wait for
 * the reader lock: it releases both and tries again.
 */
static ckd_status try_collect(void *context, ckd_error *err) {
    attempt *a = context;
    file_lock *publish, *readers;
    ckd_status status = store_lock_publish_within(&publish, a->store, a->lock_ms, err);
    if (status != CKD_OK) {
        return status;
    }
    status = store_lock_unlinker(&readers, &a->wait, a->store, err);
    if (status == CKD_OK) {
        /* After BUSY the next attempt counts again, so this attempt's counts must not add up. */
        ckd_collected replaced = {0}, trash = {0};
        collection how = {.all = a->all, .force = a->force};
        /* This comes first, because it rolls back a failed update of the catalog, whose rows the removals read. */
        how.keep_tombstones = !store_refresh_usable_catalog(a->store);
        a->checked->more = false;
        a->checked->read = 0;
        status =
            replaced_any(a->store) ? remove_replaced(&replaced, a->store, a->checked, a->force, err) : CKD_OK;
        if (status == CKD_OK && !a->only_replaced) {
            a->out->files += replaced.files;
            a->out->bytes += replaced.bytes;
            status = a->checked->more ? CKD_OK : collect(&trash, a->store, &how, err);
        }
        if (status == CKD_OK) {
            a->out->checkpoints += trash.checkpoints;
            a->out->waiting += trash.waiting;
            a->out->files += trash.files;
            a->out->bytes += trash.bytes;
        }
        lock_release(readers);
    }
    lock_release(publish);
    return status;
}

/* Files of newer generations are read under the locks, in parts. Between two parts, others get the locks. */
static ckd_status collect_in_parts(attempt *a, uint32_t timeout_ms, ckd_error *err) {
    ckd_status status = CKD_OK;
    do {
        a->wait = (unlinker_wait){0};
        status = retry_while_busy(try_collect, a, timeout_ms, err);
    } while (status == CKD_OK && a->checked->more);
    return status;
}

static ckd_status count_only(const attempt *a, ckd_error *err) {
    file_lock *publish;
    ckd_status status = store_lock_publish_within(&publish, a->store, a->lock_ms, err);
    if (status == CKD_OK) {
        status = collect(a->out, a->store, &(collection){.all = a->all, .dry = true}, err);
        lock_release(publish);
    }
    return status;
}

ckd_status ckd_store_collect(ckd_collected *out, ckd_store *store, const ckd_collect_options *options,
                             ckd_error *err) {
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    ckd_collected result = {0};
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_collect_options", err);
    if (out) {
        *out = result;
    }
    THEN(status, store_check_writable(store, err));
    if (status == CKD_OK) {
        uint32_t timeout = store->options.lock_timeout_ms;
        checked_files checked = {0};
        attempt a = {.store = store,
                     .lock_ms = timeout,
                     .all = o.all,
                     .force = o.force,
                     .out = &result,
                     .checked = &checked};
        status = o.dry_run ? count_only(&a, err) : collect_in_parts(&a, timeout, err);
        checked_files_free(&checked);
    }
    if (out && status == CKD_OK) {
        *out = result;
    }
    return status;
}

ckd_status trash_remove_replaced(uint64_t *left, ckd_store *store, checked_files *checked, uint32_t lock_ms,
                                 uint32_t timeout_ms, ckd_error *err) {
    ckd_collected result = {0};
    attempt a = {
        .store = store, .lock_ms = lock_ms, .only_replaced = true, .out = &result, .checked = checked};
    *left = 0;
    if (!replaced_any(store)) {
        return CKD_OK;
    }
    ckd_error why = {0};
    ckd_status status = collect_in_parts(&a, timeout_ms, &why);
    if (status == CKD_E_STATE) { /* a repair needs them */
        store_message(store, "replaced files are kept for now: %s (%s)", why.message, why.file);
        status = CKD_E_BUSY;
    }
    if (status != CKD_E_BUSY) {
        return err_from(err, status, &why);
    }
    /*
     * Counts without a lock, so that a lock's holder cannot make a finished compaction fail. Nothing depends on the
     * number.
     */
    status = remove_replaced(&result, store, NULL, false, &why);
    *left = result.files;
    return err_from(err, status == CKD_E_NOMEM ? status : CKD_OK, &why);
}

/* Is there a tombstone whose grace period has ended? Reads no manifest. */
static bool any_expired(const ckd_store *store) {
    manifest_list tombstones = {0};
    bool any = false;
    if (manifests_tombstones(&tombstones, store, NULL) != CKD_OK) {
        return false;
    }
    for (size_t i = 0; i < tombstones.count && !any; i++) {
        tombstone t;
        any = tombstone_read(&t, store, &tombstones.items[i], NULL) == CKD_OK &&
              !tombstone_in_grace(&t, clock_wall_ns());
    }
    manifests_free(&tombstones);
    return any;
}

ckd_status trash_collect_if_no_readers(ckd_store *store, ckd_error *err) {
    file_lock *readers;
    ckd_collected result = {0};
    bool expired = any_expired(store), replaced = replaced_any(store);
    if ((!expired && !replaced) || lock_acquire(&readers, path_in(store->path, FILE_READER_LOCK).text,
                                                LOCK_EXCLUSIVE, true, 0, NULL) != CKD_OK) {
        /* Somebody reads; the work is left for another time. */
        return CKD_OK;
    }
    ckd_error why = {0};
    checked_files checked = {0};
    /*
     * A deletion may have died before it updated the catalog, or the update may have failed, and its tombstone is about
     * to go.
     */
    collection how = {.keep_tombstones = !store_refresh_usable_catalog(store)};
    ckd_status status =
        replaced ? remove_replaced(&(ckd_collected){0}, store, &checked, false, &why) : CKD_OK;
    checked_files_free(&checked);
    if (status == CKD_OK && expired) {
        status = collect(&result, store, &how, &why);
    }
    lock_release(readers);
    if (status == CKD_E_NOMEM) {
        return err_from(err, status, &why);
    }
    if (status != CKD_OK) {
        store_message(store, "the trash is not emptied: %s%s%s", why.message, why.file[0] ? ": " : "",
                      why.file);
    } else if (result.checkpoints) {
        store_info(store, "removed %llu deleted checkpoint%s whose time in the trash was over",
                   (unsigned long long)result.checkpoints, result.checkpoints == 1 ? "" : "s");
    }
    return CKD_OK;
}

/* ---- listing ---- */

static int by_run_and_step(const void *a, const void *b) {
    const ckd_trashed *x = a, *y = b;
    int order = strcmp(x->checkpoint.run, y->checkpoint.run);
    if (order) {
        return order;
    }
    if (x->checkpoint.step != y->checkpoint.step) {
        return x->checkpoint.step < y->checkpoint.step ? -1 : 1;
    }
    return x->deleted_ns < y->deleted_ns ? -1 : x->deleted_ns > y->deleted_ns;
}

static ckd_status list_trash(ckd_trash *out, const ckd_store *store, manifest_set *n, ckd_error *err) {
    ckd_collected all = {0};
    file_uses files = {0};
    ckd_status status = choose_expired(n, store, true, err);
    THEN(status, uses_of(&files, n, err));
    if (status == CKD_OK) {
        count_up(&all, n, &files);
        out->items = calloc(all.checkpoints + 1, sizeof(*out->items));
        status = out->items ? CKD_OK : err_nomem(err, n->count * sizeof(*out->items), "a list of the trash");
    }
    free(files.items);
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        const manifest_entry *x = &n->items[i];
        if (x->chosen && !x->superseded) {
            out->items[out->count++] =
                (ckd_trashed){x->m.checkpoint, x->tombstone.deleted_ns, x->tombstone.until_ns};
        }
    }
    if (out->count) {
        qsort(out->items, out->count, sizeof(*out->items), by_run_and_step);
    }
    out->file_bytes = all.bytes;
    return status;
}

ckd_status ckd_store_trash(ckd_trash **out, ckd_store *store, ckd_error *err) {
    manifest_set n = {0};
    *out = NULL;
    ckd_trash *trash = calloc(1, sizeof(*trash));
    manifest_list tombstones = {0};
    ckd_status status = trash ? manifests_tombstones(&tombstones, store, err)
                              : err_nomem(err, sizeof(*trash), "a list of the trash");
    bool any = tombstones.count > 0;
    manifests_free(&tombstones);
    if (status == CKD_OK && any) { /* otherwise no manifest need be read */
        status = manifest_set_read(&n, store, err);
    }
    THEN(status, list_trash(trash, store, &n, err));
    manifest_set_free(&n);
    if (status != CKD_OK) {
        ckd_trash_free(trash);
        return status;
    }
    *out = trash;
    return CKD_OK;
}

void ckd_trash_free(ckd_trash *trash) {
    if (trash) {
        free(trash->items);
        free(trash);
    }
}
