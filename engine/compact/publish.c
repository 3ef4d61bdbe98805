/*
 * Rewrites a checkpoint as safely as a save:
 * 1. The intent is made durable.
 * 2. The new files are written, and made durable.
 * 3. They are read back, and the closure is proven.
 * 4. The publish lock is taken. The checkpoint must still be of the generation that was read.
 * 5. The manifest of the next generation is published. This is the commit point.
 * 6. The catalog follows.
 * The generation before stays until nobody reads it (retain/trash.c).
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/compact/internal.h"

#define SLACK (UINT64_C(4) << 20) /* for buffers, manifest, intent, catalog */

/* ---- the next generation ---- */

/* Begins the next manifest, with the files that the intent names. Its dependencies are found later. */
static ckd_status describe(rewrite *r, compact_intent *i, ckd_error *err) {
    const manifest *old = r->plan->published;
    r->m = (manifest){.checkpoint = old->checkpoint, .branch_origin = old->branch_origin};
    r->intent = i;
    r->coded = calloc(r->plan->view->block_count + 1, sizeof(*r->coded));
    if (!r->coded) {
        return err_nomem(err, r->plan->view->block_count, "the blocks of a checkpoint");
    }
    ckd_status status = manifest_add_files(&r->m, i->files, i->file_count, err);
    r->m.own_count = r->m.file_count;
    return status != CKD_OK || r->m.checkpoint.generation < UINT32_MAX
               ? status
               : err_set(err, CKD_E_UNSUPPORTED, "its generation number is already the largest possible");
}

/* Completes the next manifest. The parent is the nearest ancestor that stays. */
static void complete(rewrite *r) {
    ckd_checkpoint *c = &r->m.checkpoint;
    c->generation++;
    c->kind = r->m.dependency_count ? CKD_DELTA : c->fidelity != CKD_EXACT ? CKD_LOSSY_BASE : CKD_BASE;
    c->parent = !r->m.dependency_count    ? (ckd_id){{0}}
                : r->plan->ancestor_count ? r->plan->ancestors[0]
                                          : r->m.dependencies[0];
}

/* ---- publishing ---- */

/*
 * A manifest that has its name but may not be durable does not count as committed. If it cannot be removed durably,
 * recovery decides.
 */
static ckd_status publish_bytes(bool *undecided, const ckd_store *store, const ckd_checkpoint *c,
                                const bytes *encoded, ckd_error *err) {
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &c->id);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname p = path_manifest(store->path, c->run, c->step, c->generation);
    pathname temporary = path_of(store->path, DIR_MANIFESTS, temp);
    ckd_status status =
        file_publish_durable(undecided, p.text, temporary.text, encoded->data, encoded->size, err);
    if (status != CKD_OK) {
        file_remove(temporary.text, true, NULL);
    }
    return status;
}

/* The caller holds the publish lock, and the catalog is in step. */
static ckd_status check_unchanged(const ckd_store *store, const manifest *m, ckd_error *err) {
    ckd_checkpoint now;
    ckd_status status = catalog_find_id(&now, store->catalog, &m->checkpoint.id, err);
    if (status == CKD_E_NOT_FOUND) {
        return err_set(err, status, "it was deleted meanwhile");
    }
    if (status == CKD_OK && now.generation + 1 != m->checkpoint.generation) {
        return err_set(err, CKD_E_EXISTS, "it was rewritten by another process meanwhile");
    }
    for (size_t i = 0; i < m->file_count && status == CKD_OK; i++) {
        status = live_file_check(store, &m->files[i], err);
        if (status == CKD_E_NOT_FOUND || status == CKD_E_CORRUPT) {
            status = err_set(err, CKD_E_EXISTS, "a file that its new manifest names was removed meanwhile");
            err_in_file(err, status, path_chunk(store->path, &m->files[i].id, "").text);
        }
    }
    return status;
}

/*
 * Called after the commit point. The catalog follows now, or with the next save or open. If the update fails, the
 * catalog still lists the previous generation, whose files will soon be removed. So this handle then does without the
 * catalog file.
 */
static void update_catalog(ckd_store *store, const ckd_checkpoint *c) {
    ckd_checkpoint now = {.generation = 0};
    ckd_error why = {0};
    ckd_status status = store_refresh_catalog_locked(store, &why);
    THEN(status, catalog_find_id(&now, store->catalog, &c->id, &why));
    if (status != CKD_OK || now.generation != c->generation) {
        store_use_memory_catalog(store, NULL);
        store_message(
            store, "the catalog could not be updated; the next save or open for writing will update it%s%s",
            why.message[0] ? ": " : "", why.message);
    }
}

static ckd_status publish_locked(bool *undecided, ckd_store *store, const manifest *m, const bytes *encoded,
                                 ckd_error *err) {
    pthread_mutex_lock(&store->mutex);
    ckd_status status = store_refresh_catalog_locked(store, err);
    THEN(status, check_unchanged(store, m, err));
    THEN(status, publish_bytes(undecided, store, &m->checkpoint, encoded, err));
    if (status == CKD_OK) {
        update_catalog(store, &m->checkpoint);
    }
    pthread_mutex_unlock(&store->mutex);
    return status;
}

ckd_status compact_publish_manifest(uint64_t *stored, bool *undecided, compaction *c, const manifest *m,
                                    ckd_error *err) {
    file_lock *lock;
    bytes encoded = {0};
    manifest_encode(&encoded, &c->store->id, m);
    ckd_status status = encoded.failed ? err_nomem(err, encoded.size, "a manifest") : CKD_OK;
    *stored = m->checkpoint.stored_bytes + encoded.size;
    if (status == CKD_OK && !c->options.dry_run) {
        status = store_lock_publish_within(&lock, c->store, c->limits.timeout_ms, err);
        if (status == CKD_OK) {
            status = publish_locked(undecided, c->store, m, &encoded, err);
            lock_release(lock);
        }
    }
    bytes_free(&encoded);
    return status;
}

/* ---- the whole rewrite ---- */

static ckd_status check_room(const rewrite *r, ckd_error *err) {
    uint64_t needed = SLACK + r->plan->estimated_bytes,
             available = dir_free_space(path_in(r->c->store->path, DIR_CHUNKS).text);
    return available >= needed
               ? CKD_OK
               : err_set(err, CKD_E_NOSPACE,
                         "about %llu bytes must be free to rewrite %s@%llu, but only %llu are; this attempt "
                         "changed nothing",
                         (unsigned long long)needed, r->m.checkpoint.run,
                         (unsigned long long)r->m.checkpoint.step, (unsigned long long)available);
}

/* In a dry run, records the loads that the blocks would have, for checkpoints that build on them. */
static ckd_status record_loads(rewrite *r, ckd_error *err) {
    size_t count = r->plan->view->block_count;
    r->plan->depth = r->m.checkpoint.depth;
    if (!r->c->options.dry_run) {
        return CKD_OK;
    }
    block_load *blocks = calloc(count + 1, sizeof(*blocks));
    if (!blocks) {
        return err_nomem(err, count * sizeof(*blocks), "the blocks of a checkpoint");
    }
    for (size_t i = 0; i < count; i++) {
        blocks[i] = r->plan->rewrites[i].load;
    }
    return compact_record_loads(r->c, &r->m.checkpoint.id, blocks, count, err);
}

static ckd_status write_and_verify(compact_intent *i, rewrite *r, ckd_error *err) {
    ckd_status status = compact_intent_make_ids(i, r->plan->published, err);
    THEN(status, describe(r, i, err));
    THEN(status, check_room(r, err));
    THEN(status, compact_intent_begin(i, r, err));
    THEN(status, compact_write_files(r, err));
    THEN(status, compact_verify(r, err));
    if (status == CKD_OK) {
        complete(r);
        status = record_loads(r, err);
    }
    return status;
}

/* Adds the space that the rewrite needs to the message. */
static void report_space_needed(const rewrite *r, ckd_error *err) {
    const ckd_checkpoint *c = &r->plan->published->checkpoint;
    size_t used = err ? strlen(err->message) : 0;
    if (err && !strstr(err->message, "must be free")) {
        snprintf(err->message + used, sizeof(err->message) - used,
                 "; rewriting %s@%llu takes about %llu bytes, and what was written of it is removed", c->run,
                 (unsigned long long)c->step, (unsigned long long)(SLACK + r->plan->estimated_bytes));
    }
}

static void rewrite_free(rewrite *r) {
    manifest_free(&r->m);
    compact_written_free(&r->written);
    free(r->coded);
}

/* Does the rewrite make something smaller? Otherwise it is dropped, because each compaction would repeat it. */
static bool gains(const rewrite *r) {
    bool any = r->plan->why & ~(unsigned)(CKD_COMPACT_COLD | CKD_COMPACT_FOLD);
    for (size_t i = 0; i < r->plan->view->block_count && !any; i++) {
        any = r->coded[i];
    }
    return any;
}

static ckd_status record_replaced(compaction *c, const manifest *m, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < m->own_count && status == CKD_OK; i++) {
        status = hash_set_add(&c->replaced, hash64(&m->files[i].id, sizeof(ckd_id)), err);
    }
    return status;
}

ckd_status compact_rewrite(uint64_t *stored, compaction *c, rewrite_plan *plan, ckd_error *err) {
    compact_intent i = {.lock = NULL};
    rewrite r = {.c = c, .plan = plan};
    bool committed = false;
    ckd_status status = write_and_verify(&i, &r, err);
    if (status == CKD_OK && !gains(&r)) {
        plan->why = 0;
    } else if (status == CKD_OK) {
        status = compact_publish_manifest(stored, &i.undecided, c, &r.m, err);
        committed = status == CKD_OK && !c->options.dry_run;
    }
    if (status == CKD_E_NOSPACE) {
        report_space_needed(&r, err);
    }
    for (size_t k = 0; k < i.file_count; k++) {
        i.named[k] = committed;
    }
    compact_intent_end(&i, c->store);
    if (committed) {
        status = record_replaced(c, plan->published, err);
        THEN(status, compact_record_proven(c, r.m.files, r.m.own_count, err));
    }
    rewrite_free(&r);
    return status;
}
