/*
 * The intent of a compaction, like that of a save: the new files, and the checkpoints whose files must stay
 * meanwhile.
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/compact/compact.h"

/* ---- what is needed ---- */

typedef struct id_set {
    ckd_id *ids;
    size_t count, capacity;
} id_set;

static void add_id(id_set *s, const ckd_id *id) {
    bool exists = false;
    for (size_t k = s->count; k-- > 0 && !exists;) {
        exists = id_equal(&s->ids[k], id);
    }
    if (!exists) {
        s->ids[s->count++] = *id;
    }
}

/* The checkpoints whose manifests name the files that are read: the checkpoint itself, and the new bases. */
static void add_needed(id_set *s, const rewrite *r) {
    const rewrite_plan *p = r->plan;
    add_id(s, &r->m.checkpoint.id);
    for (size_t i = 0; i < p->view->block_count; i++) {
        if (p->rewrites[i].new_base) {
            add_id(s, &p->rewrites[i].new_base->manifest.checkpoint.id);
        }
    }
}

/* ---- the intent ---- */

static ckd_status write_intent(compact_intent *i, const compaction *compact, const ckd_checkpoint *c,
                               const id_set *needed, ckd_error *err) {
    const ckd_store *store = compact->store;
    intent written = {.id = i->writer,
                      .step = c->step,
                      .rank = 0,
                      .world = 1,
                      .files = i->files,
                      .file_count = i->file_count,
                      .dependencies = needed->ids,
                      .dependency_count = needed->count};
    memcpy(written.run, c->run, sizeof(written.run));
    bytes data = {0};
    intent_encode(&data, &store->id, &written);
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &i->writer);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname p = path_intent(store->path, &i->writer), temporary = path_of(store->path, DIR_INTENTS, temp);
    ckd_status status = data.failed ? err_nomem(err, METADATA_MAX, "an intent") : CKD_OK;
    THEN(status, file_create_durable(p.text, temporary.text, data.data, data.size, err));
    if (status == CKD_OK) {
        status = lock_acquire(&i->lock, p.text, LOCK_SHARED, false, INTENT_LOCK_MS, err);
    } else {
        file_remove(temporary.text, true, NULL);
    }
    if (status != CKD_OK) {
        file_remove(p.text, true, NULL);
    }
    bytes_free(&data);
    return status;
}

/*
 * Checks that the checkpoints still exist. The caller holds the publish lock until the intent is written, so nobody
 * removes their files from now on.
 */
static ckd_status check_still_listed(ckd_store *store, const id_set *needed, ckd_error *err) {
    pthread_mutex_lock(&store->mutex);
    ckd_status status = store_refresh_catalog_locked(store, err);
    for (size_t i = 0; i < needed->count && status == CKD_OK; i++) {
        ckd_checkpoint found;
        status = catalog_find_id(&found, store->catalog, &needed->ids[i], err);
        if (status == CKD_E_NOT_FOUND) {
            status = err_set(err, status, "%s",
                             i ? "a checkpoint that it depends on was deleted meanwhile"
                               : "it was deleted meanwhile");
        }
    }
    pthread_mutex_unlock(&store->mutex);
    return status;
}

ckd_status compact_intent_begin_for(compact_intent *i, const compaction *c, const ckd_checkpoint *about,
                                    const ckd_id *ids, size_t count, ckd_error *err) {
    id_set needed = {.ids = calloc(count + 1, sizeof(*ids)), .capacity = count};
    file_lock *lock;
    if (!needed.ids) {
        return err_nomem(err, count * sizeof(*ids), "an intent");
    }
    for (size_t k = 0; k < count; k++) {
        add_id(&needed, &ids[k]);
    }
    ckd_status status = store_lock_publish_within(&lock, c->store, c->limits.timeout_ms, err);
    if (status == CKD_OK) {
        status = check_still_listed(c->store, &needed, err);
        THEN(status, write_intent(i, c, about, &needed, err));
        lock_release(lock);
    }
    free(needed.ids);
    return status;
}

ckd_status compact_intent_begin(compact_intent *i, const rewrite *r, ckd_error *err) {
    id_set needed = {.capacity = 1 + r->plan->recoded};
    needed.ids = calloc(needed.capacity, sizeof(*needed.ids));
    if (!needed.ids) {
        return err_nomem(err, needed.capacity * sizeof(*needed.ids), "an intent");
    }
    add_needed(&needed, r);
    ckd_status status = compact_intent_begin_for(i, r->c, &r->m.checkpoint, needed.ids, needed.count, err);
    free(needed.ids);
    return status;
}

ckd_status compact_intent_make_ids(compact_intent *i, const manifest *like, ckd_error *err) {
    i->files = calloc(like->own_count + 1, sizeof(*i->files));
    i->named = calloc(like->own_count + 1, sizeof(*i->named));
    if (!i->files || !i->named) {
        return err_nomem(err, like->own_count * sizeof(*i->files), "a manifest's files");
    }
    ckd_status status = ckd_id_new(&i->writer, err);
    for (size_t k = 0; k < like->own_count && status == CKD_OK; k++) {
        i->files[k].rank = like->files[k].rank;
        status = ckd_id_new(&i->files[k].id, err);
        i->file_count++;
    }
    return status;
}

void compact_intent_end(compact_intent *i, const ckd_store *store) {
    const char *root = store->path;
    ckd_status status = CKD_OK;
    bool all_named = true;
    for (size_t k = 0; k < i->file_count && i->lock && status == CKD_OK; k++) {
        status = file_remove(path_chunk(root, &i->files[k].id, ".tmp").text, true, NULL);
        all_named = all_named && i->named[k];
        if (status == CKD_OK && !i->named[k] && !i->undecided) {
            status = file_remove(path_chunk(root, &i->files[k].id, "").text, true, NULL);
        }
    }
    if (status == CKD_OK && i->lock && !all_named) {
        status = dir_sync(path_in(root, DIR_CHUNKS).text, NULL);
    }
    if (status == CKD_OK && i->lock && !i->undecided) {
        file_remove(path_intent(root, &i->writer).text, true, NULL);
    }
    lock_release(i->lock);
    free(i->files);
    free(i->named);
}
