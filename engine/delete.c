/* Deleting and bringing back: both only make or remove tombstones (codec/FORMAT.md, "Commit, deletion and recovery"). */
#include <stdio.h>
#include <stdlib.h>

#include "engine/notes.h"
#include "engine/ready.h"
#include "engine/trash.h"

static ckd_status publish_tombstone(const ckd_store *store, const tombstone *t, ckd_error *err) {
    pathname p = path_tombstone(store->path, t->run, t->step, t->generation);
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &t->checkpoint);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname temporary = path_of(store->path, DIR_TOMBSTONES, temp);
    bytes data = {0};
    tombstone_encode(&data, &store->id, t);
    ckd_status status = data.failed ? err_nomem(err, data.size, "a tombstone") : CKD_OK;
    if (status == CKD_OK) {
        status = file_publish_bytes(p.text, temporary.text, data.data, data.size, err);
        if (status != CKD_OK) {
            file_remove(temporary.text, true, NULL);
        }
    }
    bytes_free(&data);
    return status;
}

/* What stays must not be a delta on what goes. */
static ckd_status check_dependents(const needs *n, ckd_error *err) {
    for (size_t i = 0; i < n->count; i++) {
        const need *x = &n->items[i];
        bool stays =
            !x->is_dead && !x->chosen && !x->superseded; /* a replaced generation only waits to be removed */
        for (size_t k = 0; k < x->m.dependency_count && stays; k++) {
            const need *d = needs_find(n, &x->m.dependencies[k]);
            if (d && d->chosen) {
                return err_set(err, CKD_E_STATE,
                               "%s@%llu is a delta on %s@%llu: delete it as well, or keep both",
                               x->m.checkpoint.run, (unsigned long long)x->m.checkpoint.step,
                               d->m.checkpoint.run, (unsigned long long)d->m.checkpoint.step);
            }
        }
    }
    return CKD_OK;
}

static ckd_status check_in_use(void *context, need *used, bool named, const intent *live, ckd_error *err) {
    (void)context;
    (void)named;
    if (!used->chosen) {
        return CKD_OK;
    }
    return err_set(err, CKD_E_BUSY, "a save of %s@%llu in progress builds on %s@%llu", live->run,
                   (unsigned long long)live->step, used->m.checkpoint.run,
                   (unsigned long long)used->m.checkpoint.step);
}

/* The catalog and the copies of what was newest follow; that they do not is no failure of what was done. */
static void follow(ckd_store *store) {
    ckd_error why = {0};
    if (store_refresh(store, &why) != CKD_OK) {
        store_message(store, "the catalog is behind the manifests: %s", why.message);
    }
    ready_evict(store);
}

static ckd_status delete_chosen(ckd_store *store, needs *n, uint64_t undo_s, ckd_error *err) {
    need **order = NULL;
    size_t count = 0;
    ckd_status status = notes_check_chosen(store, n, err);
    if (status == CKD_OK) {
        status = check_dependents(n, err);
    }
    if (status == CKD_OK) {
        status = needs_visit_in_use(n, store, check_in_use, NULL, err);
    }
    if (status == CKD_OK) {
        status = needs_order(&order, &count, n, err);
    }
    uint64_t now = clock_wall_ns();
    uint64_t longest = (UINT64_MAX - now) / UINT64_C(1000000000);
    uint64_t until = now + (undo_s < longest ? undo_s : longest) * UINT64_C(1000000000);
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        const ckd_checkpoint *c = &order[i]->m.checkpoint;
        tombstone t = {.checkpoint = c->id,
                       .step = c->step,
                       .generation = c->generation,
                       .deleted_ns = now,
                       .until_ns = until};
        memcpy(t.run, c->run, sizeof(t.run));
        status = publish_tombstone(store, &t, err);
    }
    free(order);
    return status;
}

/* What is to be deleted, or brought back. */
typedef struct selection {
    const ckd_id *ids;
    size_t count;
    bool dead; /* where they are now */
    uint32_t patience_ms;
    uint64_t undo_s;
} selection;

/* Under the publish lock and the mutex, with the catalog in step before and after. */
typedef ckd_status (*change_fn)(ckd_store *store, needs *n, uint64_t undo_s, ckd_error *err);
static ckd_status change(ckd_store *store, const selection *s, change_fn make, ckd_error *err) {
    file_lock *lock;
    needs n = {0};
    ckd_status status = store_check_writable(store, err);
    if (status == CKD_OK) {
        status = store_lock_publish_within(&lock, store, s->patience_ms, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    pthread_mutex_lock(&store->mutex);
    status = needs_read(&n, store, err);
    if (status == CKD_OK) {
        status = needs_choose(&n, s->ids, s->count, s->dead, err);
    }
    if (status == CKD_OK) {
        status = make(store, &n, s->undo_s, err);
        follow(store);
    }
    needs_free(&n);
    pthread_mutex_unlock(&store->mutex);
    lock_release(lock);
    return status;
}

ckd_status trash_put(ckd_store *store, const ckd_id *checkpoints, size_t count, uint64_t undo_s,
                     uint32_t patience_ms, ckd_error *err) {
    selection s = {.ids = checkpoints, .count = count, .patience_ms = patience_ms, .undo_s = undo_s};
    return change(store, &s, delete_chosen, err);
}

ckd_status ckd_store_delete(ckd_store *store, const ckd_id *checkpoints, size_t count,
                            const ckd_delete_options *options, ckd_error *err) {
    ckd_delete_options defaults = CKD_DELETE_OPTIONS_INIT;
    const ckd_delete_options *o = options ? options : &defaults;
    return trash_put(store, checkpoints, count, o->undo_s, store->options.lock_timeout_ms, err);
}

/* ---- bringing back ---- */

/* Once a collection has begun to remove its files, it cannot come back. */
static ckd_status check_files(const ckd_store *store, const manifest *m, ckd_error *err) {
    for (size_t i = 0; i < m->file_count; i++) {
        pathname p = path_chunk(store->path, &m->files[i].id, "");
        if (file_bytes(p.text) != m->files[i].size) {
            ckd_status status = err_set(err, CKD_E_NOT_FOUND,
                                        "files of %s@%llu have been removed already; it cannot come back",
                                        m->checkpoint.run, (unsigned long long)m->checkpoint.step);
            return err_in_file(err, status, p.text);
        }
    }
    return CKD_OK;
}

/* A checkpoint that was saved later under the same name counts, or was deleted later. */
static ckd_status check_name(const needs *n, const need *x, ckd_error *err) {
    const ckd_checkpoint *c = &x->m.checkpoint;
    for (size_t i = 0; i < n->count; i++) {
        const ckd_checkpoint *other = &n->items[i].m.checkpoint;
        if (other->step == c->step && other->generation > c->generation && strcmp(other->run, c->run) == 0 &&
            !id_equal(&other->id, &c->id)) {
            return err_set(err, CKD_E_EXISTS, "%s@%llu was saved anew%s; what it was before cannot come back",
                           c->run, (unsigned long long)c->step,
                           n->items[i].is_dead ? ", and deleted again" : "");
        }
    }
    return CKD_OK;
}

static ckd_status check_return(const ckd_store *store, const needs *n, const need *x, ckd_error *err) {
    const ckd_checkpoint *c = &x->m.checkpoint;
    for (size_t k = 0; k < x->m.dependency_count; k++) {
        const need *d = needs_find(n, &x->m.dependencies[k]);
        if (!d) {
            return err_set(err, CKD_E_NOT_FOUND, "what %s@%llu is a delta on has been removed", c->run,
                           (unsigned long long)c->step);
        }
        if (d->is_dead && !d->chosen) {
            return err_set(err, CKD_E_STATE, "%s@%llu is a delta on %s@%llu: bring that back as well", c->run,
                           (unsigned long long)c->step, d->m.checkpoint.run,
                           (unsigned long long)d->m.checkpoint.step);
        }
    }
    ckd_status status = check_name(n, x, err);
    return status == CKD_OK ? check_files(store, &x->m, err) : status;
}

static ckd_status undelete_chosen(ckd_store *store, needs *n, uint64_t unused, ckd_error *err) {
    (void)unused;
    need **order = NULL;
    size_t count = 0;
    ckd_status status = needs_order(&order, &count, n, err);
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = check_return(store, n, order[i], err);
    }
    for (size_t i = count; i-- > 0 && status == CKD_OK;) { /* what others are deltas on comes first */
        const tombstone *t = &order[i]->dead;
        status = file_remove(path_tombstone(store->path, t->run, t->step, t->generation).text, true, err);
        if (status ==
            CKD_OK) { /* each before the next: no crash may leave a delta without what it is one on */
            status = dir_sync(path_in(store->path, DIR_TOMBSTONES).text, err);
        }
    }
    free(order);
    return status;
}

ckd_status ckd_store_undelete(ckd_store *store, const ckd_id *checkpoints, size_t count, ckd_error *err) {
    selection s = {
        .ids = checkpoints, .count = count, .dead = true, .patience_ms = store->options.lock_timeout_ms};
    return change(store, &s, undelete_chosen, err);
}
