/*
 * Renames a run. Manifests never change, so each checkpoint gets a manifest of the next generation under the new name,
 * and then its manifest under the old name is removed. Readers may be about to open the old manifest, so the removal
 * needs the exclusive reader lock. A setting in data/n records the rename before all that, and is removed last. The
 * next process that opens the store for writing completes an interrupted rename.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/vocabulary.h"
#include "engine/retain/retain.h"
#include "engine/store/store.h"

typedef struct renaming {
    ckd_store *store;
    const char *from, *to;
    manifest_set set;
    manifest_list names, tombstones; /* of manifests that count */
    manifest_name *old;              /* manifests to remove in the end */
    manifest_entry **moved;          /* checkpoints that have the new name */
    size_t old_count, moved_count;
} renaming;

static ckd_status open_renaming(renaming *r, ckd_error *err) {
    ckd_status status = manifest_set_read(&r->set, r->store, err);
    r->set.run = r->from;
    THEN(status, manifest_set_mark_in_use(&r->set, r->store, err));
    THEN(status, manifests_read(&r->names, r->store, err));
    THEN(status, manifests_tombstones(&r->tombstones, r->store, err));
    if (status != CKD_OK) {
        return status;
    }
    r->old = calloc(r->set.count + 1, sizeof(*r->old));
    r->moved = calloc(r->set.count + 1, sizeof(*r->moved));
    return r->old && r->moved ? CKD_OK : err_nomem(err, r->set.count * sizeof(*r->old), "manifest names");
}

static void close_renaming(renaming *r) {
    manifest_set_free(&r->set);
    manifests_free(&r->names);
    manifests_free(&r->tombstones);
    free(r->old);
    free(r->moved);
    *r = (renaming){.store = r->store, .from = r->from, .to = r->to};
}

static bool is_of(const manifest_entry *x, const char *run) {
    return !x->in_trash && strcmp(x->m.checkpoint.run, run) == 0;
}

/* ---- checks ---- */

static ckd_status check_entry(const manifest_entry *x, const char *run, ckd_error *err) {
    const ckd_checkpoint *c = &x->m.checkpoint;
    unsigned long long step = c->step;
    if (x->superseded && is_of(x - 1, run)) {
        return err_set(
            err, CKD_E_BUSY,
            "%s@%llu was compacted, and its old files are not removed yet; rename the run when all "
            "loads have ended, or after ckptdelta compact",
            run, step);
    }
    if (x->is_incomplete || x->is_protected) {
        return err_set(err, CKD_E_STATE,
                       "%s@%llu belongs to a chain that has lost a manifest; run ckptdelta repair first", run,
                       step);
    }
    return c->generation < UINT32_MAX
               ? CKD_OK
               : err_set(err, CKD_E_UNSUPPORTED, "%s@%llu already has the largest possible generation number",
                         run, step);
}

static ckd_status check_entries(const renaming *r, ckd_error *err) {
    bool in_use = r->set.run_in_use;
    for (size_t i = 0; i < r->set.count && !in_use; i++) {
        in_use = r->set.items[i].in_use && is_of(&r->set.items[i], r->from);
    }
    ckd_status status =
        in_use ? err_set(err, CKD_E_BUSY,
                         "a save, a compaction or a copy is using run '%s'; rename it when that has ended",
                         r->from)
               : CKD_OK;
    for (size_t i = 0; i < r->set.count && status == CKD_OK; i++) {
        const manifest_entry *x = &r->set.items[i];
        status = is_of(x, r->from) ? check_entry(x, r->from, err) : CKD_OK;
    }
    return status;
}

/*
 * Checks that the new name is free, so that no checkpoint has it. If an interrupted rename left an unreadable record,
 * checkpoints of the run itself may have the name already. own: as for check_found.
 */
static ckd_status check_free(const renaming *r, const stored_setting *own, ckd_error *err) {
    for (size_t i = 0; i < r->set.count; i++) {
        const manifest_entry *x = &r->set.items[i], *before = x + 1;
        bool has_new_name = i + 1 < r->set.count && before->superseded && is_of(before, r->from);
        if (is_of(x, r->to) && x->superseded) {
            return err_set(err, CKD_E_BUSY,
                           "manifests of an earlier run '%s' are not removed yet; try again when all loads "
                           "have ended",
                           r->to);
        }
        if (is_of(x, r->to) && !has_new_name && own && own->status == CKD_OK) {
            return settings_refuse_renamed(own, err);
        }
        if (is_of(x, r->to) && !has_new_name) {
            return err_set(err, CKD_E_EXISTS, "the store has a run '%s' already; choose another name", r->to);
        }
    }
    return CKD_OK;
}

/* When the setting was made; a copy under the new name keeps it. 0: it cannot be read. */
static uint64_t time_set(const stored_setting *setting) {
    return setting->name.kind == METADATA_POLICY ? setting->policy.set_ns : setting->parity.set_ns;
}

/* An interrupted rename may have given the setting the new name already. */
static ckd_status check_setting(const renaming *r, const setting_list *all, metadata_kind kind,
                                ckd_error *err) {
    const stored_setting *own = settings_find(all, METADATA_RENAME, r->from);
    const stored_setting *setting = settings_find(all, kind, r->from),
                         *there = settings_find(all, kind, r->to);
    bool began = own && own->status == CKD_OK;
    bool is_copy = setting && there && (began || time_set(there) == time_set(setting));
    if (setting && there && !is_copy) {
        return err_set(err, CKD_E_EXISTS, "'%s' and '%s' both have a %s setting; remove one of them first",
                       r->from, r->to, setting_word(kind));
    }
    return setting ? settings_why(setting, r->store, err) : CKD_OK;
}

/* A save that has begun knows the new name only from its intent. */
static ckd_status check_no_writer(renaming *r, ckd_error *err) {
    r->set.run = r->to;
    ckd_status status = manifest_set_mark_in_use(&r->set, r->store, err);
    return status == CKD_OK && r->set.run_in_use
               ? err_set(err, CKD_E_BUSY,
                         "a save or a copy to run '%s' has begun; choose another name, or end that first",
                         r->to)
               : status;
}

static uint64_t count_listed(const renaming *r) {
    uint64_t count = 0;
    for (size_t i = 0; i < r->set.count; i++) {
        count += is_of(&r->set.items[i], r->from) && !r->set.items[i].superseded;
    }
    return count;
}

/* earlier: the record of an earlier rename of the run, which recovery could not complete; NULL: there is none. */
static ckd_status check_found(const renaming *r, const stored_setting *earlier, ckd_error *err) {
    if (earlier && earlier->status == CKD_OK && strcmp(earlier->rename.to, r->to) != 0) {
        return err_set(err, CKD_E_STATE,
                       "the run '%s' is being renamed to '%s'; rename it to that name first", r->from,
                       earlier->rename.to);
    }
    return earlier || count_listed(r) ? CKD_OK
                                      : err_set(err, CKD_E_NOT_FOUND, "the store has no run '%s'", r->from);
}

/* Half of the run may have this name until another rename is completed. */
static ckd_status check_no_other(const renaming *r, const setting_list *all, const stored_setting *own,
                                 ckd_error *err) {
    const stored_setting *other = settings_rename(all, r->from, own);
    other = other ? other : settings_rename(all, r->to, own);
    return other ? settings_refuse_renamed(other, err) : CKD_OK;
}

static ckd_status check_request(renaming *r, ckd_error *err) {
    setting_list all = {0};
    ckd_status status = settings_read(&all, r->store, err);
    const stored_setting *own = status == CKD_OK ? settings_find(&all, METADATA_RENAME, r->from) : NULL;
    THEN(status, check_no_other(r, &all, own, err));
    THEN(status, check_found(r, own, err));
    THEN(status, check_free(r, own, err));
    THEN(status, check_setting(r, &all, METADATA_POLICY, err));
    THEN(status, check_setting(r, &all, METADATA_PARITY, err));
    THEN(status, check_entries(r, err));
    THEN(status, check_no_writer(r, err));
    settings_free(&all);
    return status;
}

/* ---- steps ---- */

static void to_remove(renaming *r, const ckd_checkpoint *c) {
    manifest_name *old = &r->old[r->old_count++];
    *old = (manifest_name){.step = c->step, .generation = c->generation};
    memcpy(old->run, c->run, sizeof(old->run));
}

/* Publishes one checkpoint under the new name, unless another one took that name after an interruption. */
static ckd_status publish(renaming *r, manifest_entry *x, ckd_error *err) {
    ckd_checkpoint *c = &x->m.checkpoint;
    uint32_t generation;
    ckd_error why = {0};
    manifest_name name = {.step = c->step};
    snprintf(name.run, sizeof(name.run), "%s", r->to);
    ckd_status status =
        manifests_pick_generation(&generation, r->store, &r->names, &r->tombstones, &name, &why);
    if (status == CKD_E_EXISTS) {
        store_message(r->store, "%s@%llu keeps its name: there is another %s@%llu", c->run,
                      (unsigned long long)c->step, r->to, (unsigned long long)c->step);
        return CKD_OK;
    }
    if (status != CKD_OK) {
        return err_from(err, status, &why);
    }
    to_remove(r, c);
    snprintf(c->run, sizeof(c->run), "%s", r->to);
    c->generation = generation > c->generation ? generation : c->generation + 1;
    r->moved[r->moved_count++] = x;
    return manifest_entry_publish(x, r->store, err);
}

static ckd_status publish_all(renaming *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->set.count && status == CKD_OK; i++) {
        manifest_entry *x = &r->set.items[i];
        if (is_of(x, r->from) && x->superseded) { /* published before an interruption */
            to_remove(r, &x->m.checkpoint);
        } else if (is_of(x, r->from)) {
            status = publish(r, x, err);
        }
    }
    return status;
}

/*
 * Moves the catalog's rows, which alone have the timings. After a failure, a later refresh makes the catalog agree with
 * the manifests. The caller holds the mutex. Recovery may not hold it, and skips this step.
 */
static void move_rows(const renaming *r) {
    catalog *c = r->store->catalog;
    if (!c || catalog_begin(c, NULL) != CKD_OK) {
        return;
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->moved_count && status == CKD_OK; i++) {
        status = catalog_move(c, &r->moved[i]->m.checkpoint, r->moved[i]->m.file_bytes, NULL);
    }
    if (status != CKD_OK || catalog_commit(c, NULL) != CKD_OK) {
        catalog_rollback(c);
    }
}

/* The caller holds the exclusive reader lock. */
static ckd_status remove_old(const renaming *r, ckd_error *err) {
    pathname folder = path_in(r->store->path, DIR_MANIFESTS);
    /* Manifests that a dead writer published may not be durable. */
    ckd_status status = dir_sync(folder.text, err);
    for (size_t i = 0; i < r->old_count && status == CKD_OK; i++) {
        const manifest_name *n = &r->old[i];
        status = file_remove(path_manifest(r->store->path, n->run, n->step, n->generation).text, true, err);
    }
    return status == CKD_OK ? dir_sync(folder.text, err) : status;
}

static ckd_status publish_setting(const renaming *r, const stored_setting *setting, ckd_error *err) {
    setting_name next;
    stored_setting before;
    bytes encoded = {0};
    ckd_status status = settings_next(&next, &before, r->store, setting->name.kind, r->to, err);
    if (status != CKD_OK) {
        return status;
    }
    if (setting->name.kind == METADATA_POLICY) {
        policy_setting p = setting->policy;
        p.generation = next.generation;
        snprintf(p.run, sizeof(p.run), "%s", r->to);
        policy_encode(&encoded, &r->store->id, &p);
    } else {
        parity_setting p = setting->parity;
        p.generation = next.generation;
        snprintf(p.run, sizeof(p.run), "%s", r->to);
        parity_encode(&encoded, &r->store->id, &p);
    }
    status = settings_publish(r->store, &next, &encoded, err);
    bytes_free(&encoded);
    return status;
}

/*
 * Copies the run's setting to the new name, and keeps the old one. An interruption may have left such a copy; the later
 * of the two settings counts.
 */
static ckd_status copy_setting(const renaming *r, metadata_kind kind, ckd_error *err) {
    setting_list all = {0};
    ckd_status status = settings_read_kind(&all, r->store, kind, err);
    const stored_setting *setting = status == CKD_OK ? settings_find(&all, kind, r->from) : NULL;
    if (setting) {
        const stored_setting *there = settings_find(&all, kind, r->to);
        status = settings_why(setting, r->store, err);
        if (status == CKD_OK && (!there || time_set(there) < time_set(setting))) {
            status = publish_setting(r, setting, err);
        }
    }
    settings_free(&all);
    return status;
}

static ckd_status remove_setting(const renaming *r, metadata_kind kind, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = settings_remove(r->store, kind, r->from, &why);
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

/* Makes the record durable, in place of an earlier one. */
static ckd_status publish_record(const renaming *r, ckd_error *err) {
    setting_name next;
    stored_setting before;
    bytes encoded = {0};
    ckd_status status = settings_next(&next, &before, r->store, METADATA_RENAME, r->from, err);
    if (status != CKD_OK) {
        return status;
    }
    rename_setting s = {.generation = next.generation, .renamed_ns = clock_wall_ns()};
    snprintf(s.run, sizeof(s.run), "%s", r->from);
    snprintf(s.to, sizeof(s.to), "%s", r->to);
    rename_encode(&encoded, &r->store->id, &s);
    status = settings_publish(r->store, &next, &encoded, err);
    bytes_free(&encoded);
    return status;
}

/*
 * Does everything that follows once the record is durable. May be repeated. The caller holds the exclusive reader lock.
 * Until it is done, the settings have both names, so that a policy finds its rules whichever name a checkpoint has.
 */
static ckd_status complete(renaming *r, bool with_catalog, ckd_error *err) {
    ckd_status status = copy_setting(r, METADATA_POLICY, err);
    THEN(status, copy_setting(r, METADATA_PARITY, err));
    THEN(status, publish_all(r, err));
    if (status == CKD_OK && with_catalog) {
        move_rows(r);
    }
    THEN(status, remove_old(r, err));
    THEN(status, remove_setting(r, METADATA_POLICY, err));
    THEN(status, remove_setting(r, METADATA_PARITY, err));
    return status == CKD_OK ? settings_remove(r->store, METADATA_RENAME, r->from, err) : status;
}

/* ---- recovery ---- */

static ckd_status complete_interrupted(ckd_store *store, const stored_setting *s, ckd_error *err) {
    renaming r = {.store = store, .from = s->rename.run, .to = s->rename.to};
    ckd_status status = settings_why(s, store, err);
    THEN(status, open_renaming(&r, err));
    THEN(status, check_entries(&r, err));
    THEN(status, complete(&r, false, err));
    close_renaming(&r);
    return status;
}

static ckd_status complete_all(ckd_store *store, const setting_list *all, ckd_error *err) {
    /* A record whose writer died may not be durable. If it were lost, half a run would have the new name. */
    ckd_status status = dir_sync(path_in(store->path, DIR_SETTINGS).text, err);
    for (size_t i = 0; i < all->count && status == CKD_OK; i++) {
        ckd_error why = {0};
        ckd_status done = complete_interrupted(store, &all->items[i], &why);
        if (done == CKD_E_NOMEM) {
            status = err_from(err, done, &why);
        } else if (done != CKD_OK) {
            store_message(store, "the rename of run '%s' cannot be completed now: %s",
                          all->items[i].name.name, why.message);
        }
    }
    return status;
}

ckd_status rename_recover(ckd_store *store, ckd_error *err) {
    setting_list all = {0};
    file_lock *readers;
    ckd_status status = settings_read_kind(&all, store, METADATA_RENAME, err);
    /* While somebody reads, the work is left for another time. */
    if (status == CKD_OK && all.count &&
        store_lock_unlinker(&readers, &(unlinker_wait){0}, store, NULL) == CKD_OK) {
        status = complete_all(store, &all, err);
        lock_release(readers);
    }
    settings_free(&all);
    return status;
}

/* ---- on request ---- */

static ckd_status carry_out(renaming *r, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = publish_record(r, err);
    if (status != CKD_OK) {
        return status;
    }
    status = complete(r, true, &why);
    if (status != CKD_OK) {
        char text[sizeof(why.message)];
        snprintf(text, sizeof(text), "%.300s; the next command that writes to the store completes the rename",
                 why.message);
        memcpy(why.message, text, sizeof(text));
    }
    if (store_refresh_catalog_locked(r->store, NULL) != CKD_OK) {
        store_message(r->store,
                      "the catalog could not be updated; the next save or open for writing will update it");
    }
    return err_from(err, status, &why);
}

typedef struct rename_request {
    renaming r;
    bool dry_run;
    unlinker_wait wait;
    uint64_t count;
    ckd_status status; /* of everything but the locks, with its error */
    ckd_error why;
} rename_request;

/* The caller holds the publish lock and the mutex. */
static ckd_status prepare(rename_request *q, ckd_error *err) {
    renaming *r = &q->r;
    ckd_status status = store_refresh_catalog_locked(r->store, err);
    THEN(status, store_recover(r->store, err)); /* also removes what compactions replaced */
    THEN(status, store_refresh_catalog_locked(r->store, err));
    THEN(status, open_renaming(r, err));
    THEN(status, check_request(r, err));
    q->count = count_listed(r);
    return status;
}

/* While somebody reads, it releases the publish lock, as trash.c does, and is called again. */
static ckd_status try_rename(void *context, ckd_error *err) {
    rename_request *q = context;
    ckd_store *store = q->r.store;
    file_lock *publish, *readers;
    ckd_status status = store_lock_publish(&publish, store, err);
    if (status != CKD_OK) {
        return status;
    }
    pthread_mutex_lock(&store->mutex);
    q->status = prepare(q, &q->why);
    if (q->status == CKD_OK && !q->dry_run) {
        status = store_lock_unlinker(&readers, &q->wait, store, err);
        if (status == CKD_OK) {
            q->status = carry_out(&q->r, &q->why);
            lock_release(readers);
        }
    }
    close_renaming(&q->r);
    pthread_mutex_unlock(&store->mutex);
    lock_release(publish);
    return status;
}

static ckd_status check_names(const char *from, const char *to, ckd_error *err) {
    const char *invalid = !run_name_valid(from) ? from : !run_name_valid(to) ? to : NULL;
    if (invalid) {
        return err_set(
            err, CKD_E_INVALID,
            "'%.*s' is not a valid run name: use 1 to %d of A-Z a-z 0-9 . _ - ~, not starting with a dot "
            "or dash",
            CKD_RUN_MAX, invalid, CKD_RUN_MAX);
    }
    return strcmp(from, to) != 0 ? CKD_OK
                                 : err_set(err, CKD_E_INVALID, "the run has the name '%s' already", to);
}

ckd_status ckd_store_rename_run(uint64_t *checkpoints, ckd_store *store, const char *from, const char *to,
                                const ckd_rename_options *options, ckd_error *err) {
    ckd_rename_options o = CKD_RENAME_OPTIONS_INIT;
    rename_request q = {.r = {.store = store, .from = from, .to = to}};
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_rename_options", err);
    THEN(status, check_names(from, to, err));
    THEN(status, store_check_writable(store, err));
    if (status == CKD_OK) {
        q.dry_run = o.dry_run != 0;
        status = retry_while_busy(try_rename, &q, store->options.lock_timeout_ms, err);
    }
    if (status == CKD_OK) {
        status = err_from(err, q.status, &q.why);
    }
    if (status == CKD_E_NOT_FOUND) {
        ckd_checkpoint unused;
        store_find(&unused, store, from, CKD_LATEST, err); /* its message lists the runs */
    }
    if (checkpoints) {
        *checkpoints = status == CKD_OK ? q.count : 0;
    }
    return status;
}
