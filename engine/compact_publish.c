/*
 * Rewriting one checkpoint, as safe as a save: intent -> new files durable -> read back -> publish lock, and everything is as it was planned -> manifest of the
 * next generation, the commit point -> catalog. The generation before stays until nobody reads it (compact_old.c).
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/compact.h"

#define SLACK (UINT64_C(4) << 20) /* buffers, manifest, intent, catalog */

/* ---- what must still be so ---- */

/* Under the publish lock, the catalog in step: is the checkpoint the generation that was looked at? */
static ckd_status check_unchanged(const rewrite *r, ckd_error *err) {
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

static ckd_status check_all_there(const rewrite *r, const ckd_id *ids, size_t count, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        ckd_checkpoint found;
        ckd_status status = catalog_find_id(&found, r->c->store->catalog, &ids[i], err);
        if (status == CKD_E_NOT_FOUND) {
            return err_set(err, status, "what it is to build on was deleted meanwhile");
        }
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

/* ---- the intent ---- */

/* It names the checkpoint itself, and all that it builds on or may build on: none of them can be deleted meanwhile. */
static ckd_status needed(ckd_id **out, size_t *count, const rewrite *r, ckd_error *err) {
    const rewrite_plan *p = r->plan;
    const manifest *m = &p->view->manifest;
    size_t room = 1 + m->dependency_count + p->recoded;
    ckd_id *ids = calloc(room, sizeof(*ids));
    if (!ids) {
        return err_nomem(err, room * sizeof(*ids), "an intent");
    }
    ids[0] = m->checkpoint.id;
    *count = 1;
    if (m->dependency_count) {
        memcpy(ids + 1, m->dependencies, m->dependency_count * sizeof(*ids));
        *count += m->dependency_count;
    }
    for (size_t i = 0; i < p->view->block_count; i++) {
        const view *onto = p->fates[i].onto;
        bool known = !onto;
        for (size_t k = 0; k < *count && !known; k++) {
            known = id_equal(&ids[k], &onto->manifest.checkpoint.id);
        }
        if (!known) {
            ids[(*count)++] = onto->manifest.checkpoint.id;
        }
    }
    *out = ids;
    return CKD_OK;
}

static ckd_status write_intent(rewrite *r, const ckd_id *ids, size_t count, ckd_error *err) {
    const ckd_store *store = r->c->store;
    const ckd_checkpoint *c = &r->m.checkpoint;
    intent note = {.id = r->writer,
                   .step = c->step,
                   .rank = 0,
                   .world = 1,
                   .files = r->m.files,
                   .file_count = r->m.file_count,
                   .dependencies = (ckd_id *)ids,
                   .dependency_count = count};
    memcpy(note.run, c->run, sizeof(note.run));
    bytes data = {0};
    intent_encode(&data, &store->id, &note);
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &r->writer);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname p = path_intent(store->path, &r->writer), temporary = path_of(store->path, DIR_INTENTS, temp);
    ckd_status status = data.failed ? err_nomem(err, NOTE_MAX, "an intent") : CKD_OK;
    if (status == CKD_OK) {
        status = file_publish_bytes(p.text, temporary.text, data.data, data.size, err);
    }
    if (status == CKD_OK) {
        status = lock_acquire(&r->intent, p.text, LOCK_SHARED, false, 0, err);
    } else {
        file_remove(temporary.text, true, NULL);
    }
    if (status != CKD_OK) {
        file_remove(p.text, true, NULL);
    }
    bytes_free(&data);
    return status;
}

static ckd_status begin_locked(rewrite *r, const ckd_id *ids, size_t count, ckd_error *err) {
    ckd_store *store = r->c->store;
    pthread_mutex_lock(&store->mutex);
    ckd_status status = store_refresh(store, err);
    if (status == CKD_OK) {
        status = check_unchanged(r, err);
    }
    if (status == CKD_OK) {
        status = check_all_there(r, ids, count, err);
    }
    pthread_mutex_unlock(&store->mutex);
    return status == CKD_OK ? write_intent(r, ids, count, err) : status;
}

static ckd_status begin(rewrite *r, ckd_error *err) {
    file_lock *lock;
    ckd_id *ids = NULL;
    size_t count = 0;
    ckd_status status = needed(&ids, &count, r, err);
    if (status == CKD_OK) {
        status = store_lock_publish(&lock, r->c->store, err);
    }
    if (status == CKD_OK) {
        status = begin_locked(r, ids, count, err);
        lock_release(lock);
    }
    free(ids);
    return status;
}

/* ---- the next generation ---- */

/* What the checkpoint is, with files and dependencies that are still to be found. */
static ckd_status describe(rewrite *r, ckd_error *err) {
    const manifest *old = &r->plan->view->manifest;
    r->m = (manifest){.checkpoint = old->checkpoint, .branch_origin = old->branch_origin};
    r->coded = calloc(r->plan->view->block_count + 1, sizeof(*r->coded));
    r->m.files = calloc(old->file_count + 1, sizeof(*r->m.files));
    if (!r->m.files || !r->coded) {
        return err_nomem(err, old->file_count * sizeof(*r->m.files), "a manifest's files");
    }
    ckd_status status = ckd_id_new(&r->writer, err);
    for (size_t i = 0; i < old->file_count && status == CKD_OK; i++) {
        r->m.files[i].rank = old->files[i].rank;
        status = ckd_id_new(&r->m.files[i].id, err);
        r->m.file_count++;
    }
    return r->m.checkpoint.generation < UINT32_MAX
               ? status
               : err_set(err, CKD_E_UNSUPPORTED, "it has the last generation that there is");
}

/* The nearest that it came from and that stays. */
static ckd_status find_parent(rewrite *r, ckd_error *err) {
    ckd_id *parent = &r->m.checkpoint.parent;
    for (size_t steps = 0; !id_is_zero(parent) && compact_is_unwanted(r->c, parent); steps++) {
        const view *v;
        ckd_status status = views_get(&v, &r->c->views, parent, err);
        if (status != CKD_OK) {
            return status;
        }
        *parent = v->manifest.checkpoint.parent;
    }
    if (id_is_zero(parent)) {
        *parent = r->m.dependencies[0];
    }
    return CKD_OK;
}

static ckd_status complete(rewrite *r, ckd_error *err) {
    ckd_checkpoint *c = &r->m.checkpoint;
    c->generation++;
    c->kind = r->m.dependency_count ? CKD_DELTA : c->fidelity != CKD_EXACT ? CKD_KEYFRAME : CKD_BASE;
    if (r->m.dependency_count) {
        return find_parent(r, err);
    }
    memset(&c->parent, 0, sizeof(c->parent));
    return CKD_OK;
}

/* Named but perhaps not durable is not committed. If it cannot be taken back durably, recovery decides. */
static void take_back(rewrite *r, const pathname *p) {
    ckd_status status = file_remove(p->text, true, NULL);
    if (status == CKD_OK) {
        status = dir_sync(path_in(r->c->store->path, DIR_MANIFESTS).text, NULL);
    }
    r->undecided = status != CKD_OK;
}

static ckd_status publish_manifest(rewrite *r, ckd_error *err) {
    const ckd_store *store = r->c->store;
    const ckd_checkpoint *c = &r->m.checkpoint;
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &r->writer);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname p = path_manifest(store->path, c->run, c->step, c->generation);
    pathname temporary = path_of(store->path, DIR_MANIFESTS, temp);
    ckd_status status = file_publish_bytes(p.text, temporary.text, r->encoded.data, r->encoded.size, err);
    if (status != CKD_OK) {
        file_remove(temporary.text, true, NULL);
    }
    if (status != CKD_OK && status != CKD_E_EXISTS) {
        take_back(r, &p);
    }
    return status;
}

/*
 * Behind the commit point: the catalog follows now, or with the next save or open. A manifest that could not be read just now would be passed over for the generation before,
 * which soon has no files.
 */
static void update_catalog(rewrite *r) {
    ckd_store *store = r->c->store;
    ckd_checkpoint now = {.generation = 0};
    ckd_error why = {0};
    ckd_status status = store_refresh(store, &why);
    if (status == CKD_OK) {
        status = catalog_find_id(&now, store->catalog, &r->m.checkpoint.id, &why);
    }
    if (status != CKD_OK || now.generation != r->m.checkpoint.generation) {
        store_use_memory(store, NULL);
        store_message(store, "the catalog is behind the manifests%s%s", why.message[0] ? ": " : "",
                      why.message);
    }
}

static ckd_status publish_locked(rewrite *r, ckd_error *err) {
    ckd_store *store = r->c->store;
    pthread_mutex_lock(&store->mutex);
    ckd_status status = store_refresh(store, err);
    if (status == CKD_OK) {
        status = check_unchanged(r, err);
    }
    if (status == CKD_OK) {
        status = check_all_there(r, r->m.dependencies, r->m.dependency_count, err);
    }
    if (status == CKD_OK) {
        status = publish_manifest(r, err);
    }
    if (status == CKD_OK) {
        update_catalog(r);
    }
    pthread_mutex_unlock(&store->mutex);
    return status;
}

static ckd_status publish(rewrite *r, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, r->c->store, err);
    if (status == CKD_OK) {
        status = publish_locked(r, err);
        lock_release(lock);
    }
    return status;
}

/* ---- all of it ---- */

/* What was written for nothing goes, then the intent; if some may be left, the intent stays, for recovery. */
static void clean_up(rewrite *r, bool committed) {
    const char *root = r->c->store->path;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->m.file_count && r->intent && status == CKD_OK; i++) {
        status = file_remove(path_chunk(root, &r->m.files[i].id, ".tmp").text, true, NULL);
        if (status == CKD_OK && !committed && !r->undecided) {
            status = file_remove(path_chunk(root, &r->m.files[i].id, "").text, true, NULL);
        }
    }
    if (status == CKD_OK && r->intent && !committed) {
        status = dir_sync(path_in(root, DIR_CHUNKS).text, NULL);
    }
    if (status == CKD_OK && r->intent && !r->undecided) {
        file_remove(path_intent(root, &r->writer).text, true, NULL);
    }
    lock_release(r->intent);
    manifest_free(&r->m);
    bytes_free(&r->encoded);
    compact_written_free(&r->written);
    bytes_free(&r->room);
    free(r->coded);
}

static ckd_status check_room(const rewrite *r, ckd_error *err) {
    uint64_t wanted = r->plan->about + SLACK, room = dir_room(path_in(r->c->store->path, DIR_CHUNKS).text);
    return room >= wanted
               ? CKD_OK
               : err_set(
                     err, CKD_E_NOSPACE,
                     "about %llu bytes must be free while %s@%llu is rewritten, there are %llu; nothing was changed by this attempt",
                     (unsigned long long)wanted, r->m.checkpoint.run,
                     (unsigned long long)r->m.checkpoint.step, (unsigned long long)room);
}

/* What became of its blocks, for those that build on them. */
static ckd_status note_loads(rewrite *r, ckd_error *err) {
    size_t count = r->plan->view->block_count;
    block_load *blocks = calloc(count + 1, sizeof(*blocks));
    if (!blocks) {
        return err_nomem(err, count * sizeof(*blocks), "the blocks of a checkpoint");
    }
    for (size_t i = 0; i < count; i++) {
        blocks[i] = r->plan->fates[i].load;
    }
    r->plan->depth = r->m.checkpoint.depth;
    return compact_note(r->c, &r->m.checkpoint.id, blocks, count, err);
}

static ckd_status rewrite_it(rewrite *r, ckd_error *err) {
    ckd_status status = describe(r, err);
    if (status == CKD_OK) {
        status = check_room(r, err);
    }
    if (status == CKD_OK) {
        status = begin(r, err);
    }
    if (status == CKD_OK) {
        status = compact_write_files(r, err);
    }
    if (status == CKD_OK) {
        status = compact_verify(r, err);
    }
    if (status == CKD_OK) {
        status = complete(r, err);
    }
    if (status == CKD_OK) {
        manifest_encode(&r->encoded, &r->c->store->id, &r->m);
        status = r->encoded.failed ? err_nomem(err, r->encoded.size, "a manifest") : CKD_OK;
    }
    return status == CKD_OK ? note_loads(r, err) : status;
}

/* What failed, and how much room it takes. */
static void tell_need(const rewrite_plan *p, ckd_error *err) {
    size_t used = err ? strlen(err->message) : 0;
    if (err && !strstr(err->message, "must be free")) {
        snprintf(err->message + used, sizeof(err->message) - used,
                 "; to rewrite %s@%llu takes about %llu bytes, and what was written of it is removed",
                 p->view->manifest.checkpoint.run, (unsigned long long)p->view->manifest.checkpoint.step,
                 (unsigned long long)(p->about + SLACK));
    }
}

ckd_status compact_rewrite(uint64_t *stored, compaction *c, rewrite_plan *p, ckd_error *err) {
    rewrite r = {.c = c, .plan = p};
    ckd_status status = rewrite_it(&r, err);
    bool committed = false;
    if (status == CKD_OK && !c->options.dry_run) {
        status = publish(&r, err);
        committed = status == CKD_OK;
    }
    if (status == CKD_E_NOSPACE) {
        tell_need(p, err);
    }
    *stored = r.m.checkpoint.stored_bytes + r.encoded.size;
    clean_up(&r, committed);
    return status;
}
