/*
 * Deletes checkpoints by giving them tombstones, and restores them by removing these (codec/FORMAT.md, "Commit,
 * deletion and recovery"). No chunk file and no manifest is removed here, because other checkpoints may build on a
 * deleted one, and it may come back. trash.c removes files later. Begin with delete_chosen and undelete_chosen.
 *
 * Before a deletion, manifests of early versions that depend on the checkpoint are completed.
 */
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/retain/retain.h"

/* Updates the catalog and evicts materialized copies. If this fails, the deletion still counts. */
static void update_derived(ckd_store *store) {
    ckd_error why = {0};
    if (store_refresh_catalog_locked(store, &why) != CKD_OK) {
        store_message(
            store, "the catalog could not be updated; the next save or open for writing will update it: %s",
            why.message);
    }
    materialized_evict(store);
}

/* A failed attempt may have given the tombstone its name. The next attempt then replaces it. */
static ckd_status bury(const ckd_store *store, const tombstone *t, ckd_error *err) {
    ckd_error why;
    ckd_status status;
    bool again = false;
    do {
        why = (ckd_error){0};
        status = tombstone_write(store, t, again, &why);
        again = true;
    } while (status == CKD_E_NOSPACE && deletion_make_room(store));
    return err_from(err, status, &why);
}

static ckd_status delete_chosen(ckd_store *store, manifest_set *n, uint64_t undo_s, ckd_error *err) {
    ckd_status status = settings_check_chosen(store, n, err);
    THEN(status, manifest_set_upgrade_dependents(n, store, err));
    /* This comes first: a catalog that still has the row must not seem current. */
    THEN(status, deletion_mark_renew(store, err));
    uint64_t now = clock_wall_ns();
    uint64_t longest = (UINT64_MAX - now) / UINT64_C(1000000000);
    uint64_t until = now + (undo_s < longest ? undo_s : longest) * UINT64_C(1000000000);
    /*
     * A tombstone covers the lower generations of its name. During a rename, there may be two names. The older name
     * comes first: until both are covered, the checkpoint is listed by the newer one.
     */
    for (size_t i = n->count; i-- > 0 && status == CKD_OK;) {
        const ckd_checkpoint *c = &n->items[i].m.checkpoint;
        bool covered = n->items[i].superseded && strcmp(n->items[i - 1].m.checkpoint.run, c->run) == 0;
        if (!n->items[i].chosen || n->items[i].in_trash || covered) {
            continue;
        }
        tombstone t = {.checkpoint = c->id,
                       .step = c->step,
                       .generation = c->generation,
                       .deleted_ns = now,
                       .until_ns = until};
        memcpy(t.run, c->run, sizeof(t.run));
        vanished_forget(store, &c->id); /* first, so that after a crash in between no repair brings it back */
        status = bury(store, &t, err);
    }
    return status;
}

/* Checkpoints to delete, or to restore. */
typedef struct selection {
    const ckd_id *ids;
    size_t count;
    bool in_trash; /* now */
    uint32_t timeout_ms;
    uint64_t undo_s;
    /*
     * By id: why a checkpoint cannot be restored; the others are restored. NULL: a checkpoint that cannot be restored
     * is an error.
     */
    ckd_error *left;
} selection;

static ckd_status choose_possible(manifest_set *n, const ckd_store *store, const selection *s,
                                  ckd_error *err);

/*
 * A change of the manifests. The caller holds the publish lock and the mutex. The catalog is in step before and
 * after.
 */
typedef ckd_status (*change_fn)(ckd_store *store, manifest_set *n, uint64_t undo_s, ckd_error *err);
static ckd_status change_locked(ckd_store *store, const selection *s, change_fn make, ckd_error *err) {
    manifest_set n = {0};
    pthread_mutex_lock(&store->mutex);
    ckd_status status = manifest_set_read(&n, store, err);
    THEN(status, s->left ? choose_possible(&n, store, s, err)
                         : manifest_set_choose(&n, s->ids, s->count, s->in_trash, err));
    if (status == CKD_OK) {
        status = make(store, &n, s->undo_s, err);
        update_derived(store);
    }
    manifest_set_free(&n);
    pthread_mutex_unlock(&store->mutex);
    return status;
}

/*
 * The catalog, by which policies choose, may lack what other processes published. It may also list a checkpoint whose
 * manifest is lost. A deletion makes such a row doubtful, so the loss is recorded first. *in_step: false if the file
 * may still have such rows.
 */
static ckd_status refresh_catalog(bool *in_step, ckd_store *store, ckd_error *err) {
    pthread_mutex_lock(&store->mutex);
    ckd_status status = store_refresh_catalog_locked(store, err);
    *in_step = status == CKD_OK && !store->catalog_in_memory;
    pthread_mutex_unlock(&store->mutex);
    return status;
}

/* A full disk must not keep anybody from deleting. */
static ckd_status record_losses(ckd_store *store, ckd_error *err) {
    bool in_step;
    ckd_error why = {0};
    (void)refresh_catalog(&in_step, store, NULL);
    ckd_status status = in_step ? CKD_OK : vanished_save_found(store, &why);
    if (status == CKD_E_NOMEM) {
        return err_from(err, status, &why);
    }
    if (status != CKD_OK) {
        store_message(store, "lost checkpoints could not be recorded before the deletion: %s", why.message);
    }
    return CKD_OK;
}

static ckd_status change(ckd_store *store, const selection *s, change_fn make, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_check_writable(store, err);
    THEN(status, store_lock_publish_within(&lock, store, s->timeout_ms, err));
    if (status != CKD_OK) {
        return status;
    }
    status = record_losses(store, err);
    THEN(status, change_locked(store, s, make, err));
    lock_release(lock);
    return status;
}

/* Writes nothing. */
static ckd_status check(ckd_store *store, const selection *s, ckd_error *err) {
    file_lock *lock;
    manifest_set n = {0};
    ckd_status status = store_check_writable(store, err);
    THEN(status, store_lock_publish_within(&lock, store, s->timeout_ms, err));
    if (status != CKD_OK) {
        return status;
    }
    pthread_mutex_lock(&store->mutex);
    status = manifest_set_read(&n, store, err);
    THEN(status, manifest_set_choose(&n, s->ids, s->count, s->in_trash, err));
    THEN(status, settings_check_chosen(store, &n, err));
    manifest_set_free(&n);
    pthread_mutex_unlock(&store->mutex);
    lock_release(lock);
    return status;
}

ckd_status delete_checkpoints(ckd_store *store, deletion_choose_fn choose, void *context, uint32_t timeout_ms,
                              ckd_error *err) {
    file_lock *lock;
    deletion_choice c = {.ids = NULL};
    bool in_step;
    ckd_status status = store_lock_publish_within(&lock, store, timeout_ms, err);
    if (status != CKD_OK) {
        return status;
    }
    status = refresh_catalog(&in_step, store, err);
    if (status == CKD_OK && !in_step) {
        status = vanished_save_found(store, err);
    }
    THEN(status, choose(context, &c, err));
    if (status == CKD_OK && c.count) {
        selection s = {.ids = c.ids, .count = c.count, .undo_s = c.undo_s};
        status = change_locked(store, &s, delete_chosen, err);
    }
    free(c.ids);
    lock_release(lock);
    return status;
}

ckd_status ckd_store_delete(ckd_store *store, const ckd_id *checkpoints, size_t count,
                            const ckd_delete_options *options, ckd_error *err) {
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_delete_options", err);
    selection s = {
        .ids = checkpoints, .count = count, .timeout_ms = store->options.lock_timeout_ms, .undo_s = o.undo_s};
    THEN(status, o.dry_run ? check(store, &s, err) : change(store, &s, delete_chosen, err));
    return status;
}

/* ---- restoring ---- */

/* A checkpoint cannot come back once a collection has begun to remove its files. */
static ckd_status check_files(const ckd_store *store, const manifest *m, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < m->file_count && status == CKD_OK; i++) {
        status = live_file_check(store, &m->files[i], err);
        if (status == CKD_E_NOT_FOUND || status == CKD_E_CORRUPT) {
            status = err_set(err, CKD_E_NOT_FOUND,
                             "files of %s@%llu have been removed already; it cannot be restored",
                             m->checkpoint.run, (unsigned long long)m->checkpoint.step);
            err_in_file(err, status, path_chunk(store->path, &m->files[i].id, "").text);
        }
    }
    return status;
}

/* A checkpoint that was saved later under the same name takes precedence, even if it was deleted since. */
static ckd_status check_name(const manifest_set *n, const manifest_entry *x, ckd_error *err) {
    const ckd_checkpoint *c = &x->m.checkpoint;
    for (size_t i = 0; i < n->count; i++) {
        const ckd_checkpoint *other = &n->items[i].m.checkpoint;
        if (other->step == c->step && other->generation > c->generation && strcmp(other->run, c->run) == 0 &&
            !id_equal(&other->id, &c->id)) {
            return err_set(err, CKD_E_EXISTS,
                           "%s@%llu was saved again%s; the earlier checkpoint cannot be restored", c->run,
                           (unsigned long long)c->step, n->items[i].in_trash ? ", and deleted again" : "");
        }
    }
    return CKD_OK;
}

static ckd_status check_manifest(const manifest_set *n, const manifest_entry *x, ckd_error *err) {
    if (x->is_incomplete) {
        return err_set(err, CKD_E_NOT_FOUND,
                       "a checkpoint that %s@%llu depends on has been removed; it cannot be restored",
                       x->m.checkpoint.run, (unsigned long long)x->m.checkpoint.step);
    }
    return check_name(n, x, err);
}

static ckd_status check_return(const ckd_store *store, const manifest_set *n, const manifest_entry *x,
                               ckd_error *err) {
    ckd_status status = check_manifest(n, x, err);
    return status == CKD_OK ? check_files(store, &x->m, err) : status;
}

/* Records a failure that concerns one checkpoint alone, and returns any other failure. */
static ckd_status keep_why(ckd_error *left, ckd_status status, const ckd_error *why, ckd_error *err) {
    bool alone = status == CKD_E_EXISTS || status == CKD_E_NOT_FOUND;
    *left = alone ? *why : (ckd_error){.offset = CKD_NO_OFFSET};
    return alone ? CKD_OK : err_from(err, status, why);
}

/* Chooses the checkpoints that can be restored. */
static ckd_status choose_possible(manifest_set *n, const ckd_store *store, const selection *s,
                                  ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < s->count && status == CKD_OK; i++) {
        const manifest_entry *x = manifest_set_find(n, &s->ids[i]);
        ckd_error why = {.offset = CKD_NO_OFFSET};
        status = x && x->in_trash ? check_return(store, n, x, &why) : CKD_OK;
        THEN(status, manifest_set_choose(n, &s->ids[i], 1, s->in_trash, &why));
        status = keep_why(&s->left[i], status, &why, err);
    }
    return status;
}

static ckd_status undelete_chosen(ckd_store *store, manifest_set *n, uint64_t unused, ckd_error *err) {
    (void)unused;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        const manifest_entry *x = &n->items[i];
        status = x->chosen && !x->superseded ? check_return(store, n, x, err) : CKD_OK;
    }
    /* Its dependencies may stay in the trash, so its manifest must name their files. */
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        manifest_entry *x = &n->items[i];
        bool own_only = x->chosen && !x->superseded && x->was_own_only;
        status = own_only ? manifest_entry_upgrade(x, store, err) : CKD_OK;
    }
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        const tombstone *t = &n->items[i].tombstone;
        if (n->items[i].chosen && !n->items[i].superseded) {
            status = file_remove(path_tombstone(store->path, t->run, t->step, t->generation).text, true, err);
        }
    }
    return status == CKD_OK ? dir_sync(path_in(store->path, DIR_TOMBSTONES).text, err) : status;
}

ckd_status ckd_store_undelete(ckd_store *store, const ckd_id *checkpoints, size_t count, ckd_error *err) {
    selection s = {
        .ids = checkpoints, .count = count, .in_trash = true, .timeout_ms = store->options.lock_timeout_ms};
    return change(store, &s, undelete_chosen, err);
}

ckd_status ckd_store_undelete_each(ckd_error *left, ckd_store *store, const ckd_id *checkpoints, size_t count,
                                   ckd_error *err) {
    selection s = {.ids = checkpoints,
                   .count = count,
                   .in_trash = true,
                   .timeout_ms = store->options.lock_timeout_ms,
                   .left = left};
    return change(store, &s, undelete_chosen, err);
}

ckd_status undelete_check(ckd_error *left, const ckd_store *store, const ckd_id *ids, size_t count,
                          ckd_error *err) {
    manifest_set n = {0};
    ckd_status status = manifest_set_read(&n, store, err);
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        const manifest_entry *x = manifest_set_find(&n, &ids[i]);
        ckd_error why = {.offset = CKD_NO_OFFSET};
        status = x && x->in_trash ? check_manifest(&n, x, &why) : CKD_OK;
        status = keep_why(&left[i], status, &why, err);
    }
    manifest_set_free(&n);
    return status;
}
