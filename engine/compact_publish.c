/*
 * Rewriting checkpoints, as safe as a save: intent -> new files durable -> read back -> publish lock, and everything is as it was planned -> manifest of the
 * next generation, the commit point -> catalog. The generation before stays until nobody reads it (compact_old.c).
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/compact.h"

#define SLACK (UINT64_C(4) << 20) /* buffers, manifest, intent, catalog */

/* ---- the next generation ---- */

/* What the checkpoint is, with the files that the intent names, and dependencies that are still to be found. */
static ckd_status describe(rewrite *r, compact_intent *i, ckd_error *err) {
    const manifest *old = &r->plan->view->manifest;
    r->m = (manifest){.checkpoint = old->checkpoint, .branch_origin = old->branch_origin};
    r->intent = i;
    r->coded = calloc(r->plan->view->block_count + 1, sizeof(*r->coded));
    r->m.files = calloc(i->file_count + 1, sizeof(*r->m.files));
    if (!r->m.files || !r->coded) {
        return err_nomem(err, i->file_count * sizeof(*r->m.files), "a manifest's files");
    }
    memcpy(r->m.files, i->files, i->file_count * sizeof(*r->m.files));
    r->m.file_count = i->file_count;
    return r->m.checkpoint.generation < UINT32_MAX
               ? CKD_OK
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
    r->intent->undecided = r->intent->undecided || status != CKD_OK;
}

static ckd_status publish_manifest(rewrite *r, ckd_error *err) {
    const ckd_store *store = r->c->store;
    const ckd_checkpoint *c = &r->m.checkpoint;
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &r->intent->writer);
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
        status = compact_check_unchanged(r, err);
    }
    if (status == CKD_OK) {
        status = compact_check_there(store, r->m.dependencies, r->m.dependency_count, err);
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

static ckd_status check_room(const rewrite *members, size_t count, ckd_error *err) {
    const rewrite *r = &members[0];
    uint64_t wanted = SLACK, room = dir_room(path_in(r->c->store->path, DIR_CHUNKS).text);
    for (size_t k = 0; k < count; k++) {
        wanted += members[k].plan->about;
    }
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

static ckd_status finish(rewrite *r, view **last, ckd_error *err) {
    ckd_status status = compact_verify(r, last, err);
    if (status == CKD_OK) {
        status = complete(r, err);
    }
    if (status == CKD_OK) {
        manifest_encode(&r->encoded, &r->c->store->id, &r->m);
        status = r->encoded.failed ? err_nomem(err, r->encoded.size, "a manifest") : CKD_OK;
    }
    return status == CKD_OK ? note_loads(r, err) : status;
}

static ckd_status write_all(compact_intent *i, rewrite *members, size_t count, ckd_error *err) {
    ckd_status status = compact_intent_name(i, &members[0].plan->view->manifest, err);
    for (size_t k = 0; k < count && status == CKD_OK; k++) {
        status = describe(&members[k], i, err);
    }
    if (status == CKD_OK) {
        status = check_room(members, count, err);
    }
    if (status == CKD_OK) {
        status = compact_intent_begin(i, members, count, err);
    }
    if (status == CKD_OK) {
        status = compact_write_files(members, count, err);
    }
    view *last = NULL;
    for (size_t k = 0; k < count && status == CKD_OK; k++) {
        status = finish(&members[k], &last, err);
    }
    view_close(last);
    return status;
}

/* One after the other: each is a checkpoint by itself. What another process was quicker with stays as that left it. */
static ckd_status publish_all(compact_done *out, bool *committed, rewrite *members, size_t count,
                              ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t k = 0; k < count && status == CKD_OK; k++) {
        out[k].left = (ckd_error){.offset = CKD_NO_OFFSET};
        out[k].left.status = publish(&members[k], &out[k].left);
        *committed = *committed || out[k].left.status == CKD_OK;
        bool mine = out[k].left.status == CKD_E_NOT_FOUND || out[k].left.status == CKD_E_EXISTS;
        status = mine ? CKD_OK : err_from(err, out[k].left.status, &out[k].left);
    }
    return status;
}

/* What failed, and how much room it takes. */
static void tell_need(const rewrite *members, size_t count, ckd_error *err) {
    const ckd_checkpoint *c = &members[0].plan->view->manifest.checkpoint;
    size_t used = err ? strlen(err->message) : 0;
    uint64_t wanted = SLACK;
    for (size_t k = 0; k < count; k++) {
        wanted += members[k].plan->about;
    }
    if (err && !strstr(err->message, "must be free")) {
        snprintf(err->message + used, sizeof(err->message) - used,
                 "; to rewrite %s@%llu takes about %llu bytes, and what was written of it is removed", c->run,
                 (unsigned long long)c->step, (unsigned long long)wanted);
    }
}

/* Those that come after it may build on them. */
static ckd_status know_links(compaction *c, const bytes *written, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i + sizeof(known_link) <= written->size && status == CKD_OK; i += sizeof(known_link)) {
        known_link link;
        memcpy(&link, written->data + i, sizeof(link));
        status = compact_know_link(c, &link, err);
    }
    return status;
}

static void rewrite_free(rewrite *r) {
    manifest_free(&r->m);
    bytes_free(&r->encoded);
    compact_written_free(&r->written);
    bytes_free(&r->room);
    bytes_free(&r->links);
    free(r->coded);
}

/* What is only old, and no smaller than before, need not be written anew: it would be each time. */
static bool gains(const rewrite *r) {
    bool any = r->plan->why != CKD_COMPACT_COLD;
    for (size_t i = 0; i < r->plan->view->block_count && !any; i++) {
        any = r->coded[i];
    }
    return any;
}

ckd_status compact_rewrite(compact_done *out, compaction *c, rewrite_plan *plans, size_t count,
                           ckd_error *err) {
    compact_intent i = {.lock = NULL};
    rewrite *members = calloc(count, sizeof(*members));
    if (!members) {
        return err_nomem(err, count * sizeof(*members), "checkpoints to be rewritten");
    }
    for (size_t k = 0; k < count; k++) {
        members[k] = (rewrite){.c = c, .plan = &plans[k]};
        out[k] = (compact_done){.left.status = CKD_OK};
    }
    bool committed = false;
    ckd_status status = write_all(&i, members, count, err);
    if (status == CKD_OK && count == 1 && !gains(&members[0])) {
        plans[0].why = 0;
    } else if (status == CKD_OK && !c->options.dry_run) {
        status = publish_all(out, &committed, members, count, err);
    }
    if (status == CKD_E_NOSPACE) {
        tell_need(members, count, err);
    }
    for (size_t k = 0; k < count && status == CKD_OK; k++) {
        status = know_links(c, &members[k].links, err);
    }
    compact_intent_end(&i, c->store, committed);
    for (size_t k = 0; k < count; k++) {
        out[k].stored = members[k].m.checkpoint.stored_bytes + members[k].encoded.size;
        out[k].failed = members[k].failed;
        rewrite_free(&members[k]);
    }
    free(members);
    return status;
}
