/* What a compaction writes and needs while it is at work, as a save's intent says it: new files, and what must not be deleted meanwhile. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/compact.h"

/* ---- what must still be so ---- */

/* Under the publish lock, the catalog in step: is the checkpoint the generation that was looked at? */
ckd_status compact_check_unchanged(const rewrite *r, ckd_error *err) {
    const ckd_checkpoint *was = &r->plan->view->manifest.checkpoint;
    ckd_checkpoint now;
    ckd_status status = catalog_find_id(&now, r->c->store->catalog, &was->id, err);
    if (status == CKD_E_NOT_FOUND) {
        return err_set(err, status, "it was deleted meanwhile");
    }
    return status == CKD_OK && now.generation != was->generation
               ? err_set(err, CKD_E_EXISTS, "it was rewritten by another process meanwhile")
               : status;
}

ckd_status compact_check_there(const ckd_store *store, const ckd_id *ids, size_t count, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        ckd_checkpoint found;
        ckd_status status = catalog_find_id(&found, store->catalog, &ids[i], err);
        if (status == CKD_E_NOT_FOUND) {
            return err_set(err, status, "what it is to build on was deleted meanwhile");
        }
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

/* ---- what is needed ---- */

typedef struct id_set {
    ckd_id *ids;
    size_t count, room;
} id_set;

static void add_id(id_set *s, const ckd_id *id) {
    bool known = false;
    for (size_t k = s->count; k-- > 0 && !known;) {
        known = id_equal(&s->ids[k], id);
    }
    if (!known) {
        s->ids[s->count++] = *id;
    }
}

static size_t room_for(const rewrite *r) {
    return 1 + r->plan->view->manifest.dependency_count + r->plan->recoded;
}

/* The checkpoint itself, and all that it builds on or may build on. */
static void add_needed(id_set *s, const rewrite *r) {
    const rewrite_plan *p = r->plan;
    const manifest *m = &p->view->manifest;
    add_id(s, &m->checkpoint.id);
    for (size_t i = 0; i < m->dependency_count; i++) {
        add_id(s, &m->dependencies[i]);
    }
    for (size_t i = 0; i < p->view->block_count; i++) {
        if (p->fates[i].onto) {
            add_id(s, &p->fates[i].onto->manifest.checkpoint.id);
        }
    }
}

/* ---- the intent ---- */

static ckd_status write_intent(compact_intent *i, const rewrite *r, const id_set *needed, ckd_error *err) {
    const ckd_store *store = r->c->store;
    const ckd_checkpoint *c = &r->m.checkpoint;
    intent note = {.id = i->writer,
                   .step = c->step,
                   .rank = 0,
                   .world = 1,
                   .files = i->files,
                   .file_count = i->file_count,
                   .dependencies = needed->ids,
                   .dependency_count = needed->count};
    memcpy(note.run, c->run, sizeof(note.run));
    bytes data = {0};
    intent_encode(&data, &store->id, &note);
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &i->writer);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname p = path_intent(store->path, &i->writer), temporary = path_of(store->path, DIR_INTENTS, temp);
    ckd_status status = data.failed ? err_nomem(err, NOTE_MAX, "an intent") : CKD_OK;
    if (status == CKD_OK) {
        status = file_publish_bytes(p.text, temporary.text, data.data, data.size, err);
    }
    if (status == CKD_OK) {
        status = lock_acquire(&i->lock, p.text, LOCK_SHARED, false, 0, err);
    } else {
        file_remove(temporary.text, true, NULL);
    }
    if (status != CKD_OK) {
        file_remove(p.text, true, NULL);
    }
    bytes_free(&data);
    return status;
}

/* What was looked at to build on is still what counts: another generation may lack the links. */
static ckd_status check_looked_at(const compaction *c, const id_set *needed, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->views.count && status == CKD_OK; i++) {
        const ckd_checkpoint *was = &c->views.views[i]->manifest.checkpoint;
        bool wanted = false;
        for (size_t k = 0; k < needed->count && !wanted; k++) {
            wanted = id_equal(&needed->ids[k], &was->id);
        }
        ckd_checkpoint now = *was;
        if (wanted) {
            status = catalog_find_id(&now, c->store->catalog, &was->id, err);
        }
        if (status == CKD_OK && now.generation != was->generation) {
            status =
                err_set(err, CKD_E_EXISTS, "what it builds on was rewritten by another process meanwhile");
        }
    }
    return status;
}

static ckd_status begin_locked(compact_intent *i, const rewrite *members, size_t count, const id_set *needed,
                               ckd_error *err) {
    ckd_store *store = members[0].c->store;
    pthread_mutex_lock(&store->mutex);
    ckd_status status = store_refresh(store, err);
    for (size_t k = 0; k < count && status == CKD_OK; k++) {
        status = compact_check_unchanged(&members[k], err);
    }
    if (status == CKD_OK) {
        status = compact_check_there(store, needed->ids, needed->count, err);
    }
    if (status == CKD_OK) {
        status = check_looked_at(members[0].c, needed, err);
    }
    pthread_mutex_unlock(&store->mutex);
    return status == CKD_OK ? write_intent(i, &members[0], needed, err) : status;
}

ckd_status compact_intent_begin(compact_intent *i, const rewrite *members, size_t count, ckd_error *err) {
    id_set needed = {0};
    file_lock *lock;
    for (size_t k = 0; k < count; k++) {
        needed.room += room_for(&members[k]);
    }
    needed.ids = calloc(needed.room, sizeof(*needed.ids));
    if (!needed.ids) {
        return err_nomem(err, needed.room * sizeof(*needed.ids), "an intent");
    }
    for (size_t k = 0; k < count; k++) {
        add_needed(&needed, &members[k]);
    }
    ckd_status status = store_lock_publish(&lock, members[0].c->store, err);
    if (status == CKD_OK) {
        status = begin_locked(i, members, count, &needed, err);
        lock_release(lock);
    }
    free(needed.ids);
    return status;
}

ckd_status compact_intent_name(compact_intent *i, const manifest *like, ckd_error *err) {
    i->files = calloc(like->file_count + 1, sizeof(*i->files));
    if (!i->files) {
        return err_nomem(err, like->file_count * sizeof(*i->files), "a manifest's files");
    }
    ckd_status status = ckd_id_new(&i->writer, err);
    for (size_t k = 0; k < like->file_count && status == CKD_OK; k++) {
        i->files[k].rank = like->files[k].rank;
        status = ckd_id_new(&i->files[k].id, err);
        i->file_count++;
    }
    return status;
}

void compact_intent_end(compact_intent *i, const ckd_store *store, bool committed) {
    const char *root = store->path;
    ckd_status status = CKD_OK;
    for (size_t k = 0; k < i->file_count && i->lock && status == CKD_OK; k++) {
        status = file_remove(path_chunk(root, &i->files[k].id, ".tmp").text, true, NULL);
        if (status == CKD_OK && !committed && !i->undecided) {
            status = file_remove(path_chunk(root, &i->files[k].id, "").text, true, NULL);
        }
    }
    if (status == CKD_OK && i->lock && !committed) {
        status = dir_sync(path_in(root, DIR_CHUNKS).text, NULL);
    }
    if (status == CKD_OK && i->lock && !i->undecided) {
        file_remove(path_intent(root, &i->writer).text, true, NULL);
    }
    lock_release(i->lock);
    free(i->files);
}
