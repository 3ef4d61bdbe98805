/* Copies checkpoints to another store. Each is committed by itself; several small ones share a publish lock. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/decode/decode.h"
#include "engine/transfer/internal.h"

/* ---- the intent ---- */

/* The intent names all files to come, and the checkpoints. */
static ckd_status describe_intent(intent *out, const transfer *t, ckd_error *err) {
    const ckd_checkpoint *first = &t->items[0].m.checkpoint;
    *out = (intent){.id = t->writer, .step = first->step, .world = 1};
    memcpy(out->run, first->run, sizeof(out->run));
    out->files = calloc(t->file_count + 1, sizeof(*out->files));
    out->dependencies = calloc(t->count + 1, sizeof(*out->dependencies));
    if (!out->files || !out->dependencies) {
        return err_nomem(err, t->count * sizeof(ckd_id), "an intent");
    }
    for (size_t i = 0; i < t->file_count; i++) {
        if (!t->files[i].in_place) {
            out->files[out->file_count++] = t->files[i].file;
        }
    }
    for (size_t i = 0; i < t->count; i++) {
        out->dependencies[out->dependency_count++] = t->items[i].m.checkpoint.id;
    }
    return CKD_OK;
}

/* Makes the intent durable and locks it, before any of its files gets its name. The caller holds the publish lock. */
static ckd_status hold_intent(transfer *t, ckd_error *err) {
    intent written;
    bytes data = {0};
    ckd_status status = transfer_check_runs(t, err);
    THEN(status, ckd_id_new(&t->writer, err));
    if (status != CKD_OK) {
        return status;
    }
    status = describe_intent(&written, t, err);
    if (status == CKD_OK) {
        intent_encode(&data, &t->to->id, &written);
        status =
            data.failed ? err_nomem(err, METADATA_MAX, "an intent; copy fewer checkpoints at once") : CKD_OK;
    }
    intent_free(&written);
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &t->writer);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname p = path_intent(t->to->path, &t->writer);
    if (status == CKD_OK) {
        status = file_create_durable(p.text, path_of(t->to->path, DIR_INTENTS, temp).text, data.data,
                                     data.size, err);
        t->has_intent = true;
    }
    THEN(status, lock_acquire(&t->intent_lock, p.text, LOCK_SHARED, false, INTENT_LOCK_MS, err));
    bytes_free(&data);
    return status;
}

/* ---- committing ---- */

/* Items first ... end - 1. All files to be moved for them have arrived. */
typedef struct batch {
    size_t first, end;
    manifest_list manifests, tombstones; /* of the destination */
} batch;

/* A batch ends at this many items or bytes. Each batch has work that takes longer the more the destination holds. */
enum { BATCH_ITEMS = 64, BATCH_BYTES = 64 << 20 };

/* Skips items that a copy from another store has brought meanwhile. */
static ckd_status skip_present(transfer *t, const batch *b, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = b->first; i < b->end && status == CKD_OK; i++) {
        transfer_item *item = &t->items[i];
        ckd_checkpoint found;
        status = transfer_moves(item) ? catalog_find_id(&found, t->to->catalog, &item->m.checkpoint.id, err)
                                      : CKD_E_NOT_FOUND;
        if (status == CKD_OK) {
            status = transfer_check_present(t, item->source, &found, err);
            item->m.checkpoint = found; /* perhaps under another name */
            item->state = CKD_COPY_PRESENT;
        }
        status = status == CKD_E_NOT_FOUND ? CKD_OK : status;
    }
    return status;
}

/*
 * Removes files that arrived for items that another copy brought meanwhile, after all others of the batch have their
 * files. The file in data/c counts as unread: it may be damaged where ours was intact, and an item of a later batch may
 * need just that.
 */
static ckd_status drop_unneeded(transfer *t, const batch *b, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = b->first; i < b->end; i++) {
        const transfer_item *item = &t->items[i];
        for (size_t k = 0; k < item->m.file_count && item->state == CKD_COPY_PRESENT; k++) {
            transfer_file *f = transfer_find_file(t, &item->m.files[k].id);
            if (f->arrived && !f->in_place && file_exists(path_chunk(t->to->path, &f->file.id, "").text)) {
                f->arrived = f->to_move = f->is_intact = f->checked = false;
                f->in_place = true;
                THEN(status, file_remove(transfer_path(t, &f->file.id).text, true, err));
            }
        }
    }
    return status;
}

/*
 * Uses the file in data/c if it is intact, or replaces it. It was damaged when this copy began, or another copy,
 * perhaps from a third store, brought it meanwhile. It may be damaged where ours is intact.
 */
static ckd_status use_existing(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = transfer_check_destination(t, f, true, &why);
    if (is_damage(status, &why) && f->damaged) {
        return err_set(err, CKD_E_STATE,
                       "a chunk file of %s that another copy brought is damaged; copy again", item->source);
    }
    if (is_damage(status, &why)) {
        status = transfer_replace(t, f, err);
    } else {
        err_from(err, status, &why);
        THEN(status, file_remove(transfer_path(t, &f->file.id).text, true, err));
        f->to_move = false;
    }
    if (status == CKD_OK) {
        f->arrived = false;
        f->in_place = true;
        f->checked = f->is_intact; /* all of it was read: ours before, or the other one now */
        transfer_damage_free(&f->damaged_in_place);
    }
    return status;
}

/* Gives the files of an item their names. */
static ckd_status name_files(transfer *t, const transfer_item *item, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < item->m.file_count && status == CKD_OK; i++) {
        transfer_file *f = transfer_find_file(t, &item->m.files[i].id);
        pathname p = path_chunk(t->to->path, &f->file.id, ""), arrived = transfer_path(t, &f->file.id);
        if (!f->in_place && file_exists(p.text)) {
            status = use_existing(t, f, item, err);
        } else if (!f->in_place) {
            status = file_rename_noreplace(arrived.text, p.text, err);
            f->in_place = status == CKD_OK;
        } else {
            status = live_file_check(t->to, &f->file, err);
            if (status == CKD_E_NOT_FOUND) { /* recovery may have removed it, under this same lock */
                status = err_set(err, CKD_E_STATE, "a chunk file of %s was removed meanwhile; copy again",
                                 item->source);
                err_in_file(err, status, p.text);
            }
        }
    }
    return status;
}

/*
 * Moves files that no published manifest names back to data/x for another attempt. They belong to checkpoints that were
 * not committed, or `prove` dropped them. A file that cannot be moved back is left to recovery: the intent names it.
 */
static void return_files(transfer *t) {
    bool any = false;
    for (size_t i = 0; i < t->file_count; i++) {
        transfer_file *f = &t->files[i];
        if (f->in_place && f->arrived) {
            pathname p = path_chunk(t->to->path, &f->file.id, "");
            bool returned = file_rename_noreplace(p.text, transfer_path(t, &f->file.id).text, NULL) == CKD_OK;
            t->undecided = t->undecided || !returned;
            f->in_place = !returned;
            any = true;
        }
    }
    if (any) {
        t->undecided = dir_sync(path_in(t->to->path, DIR_CHUNKS).text, NULL) != CKD_OK || t->undecided;
    }
}

/*
 * Proves the manifest of an item with parts; their sizes and roots are known now. Its files must hold everything that a
 * load reads, with as many tensors and bytes as in the source. Older files that a load does not read are dropped.
 */
static ckd_status prove(transfer *t, transfer_item *item, ckd_error *err) {
    manifest *m = &item->m, draft = {.files = NULL};
    const ckd_checkpoint expected = m->checkpoint;
    const view *v;
    view_cache views;
    for (size_t i = 0; i < m->file_count; i++) {
        m->files[i] = transfer_find_file(t, &m->files[i].id)->file;
    }
    views_init(&views, t->to);
    ckd_status status = manifest_add_files(&draft, m->files, m->file_count, err);
    draft.checkpoint = m->checkpoint;
    draft.own_count = m->own_count;
    if (status == CKD_OK) {
        status = views_add(&v, &views, &draft, err);
    } else {
        manifest_free(&draft);
    }
    THEN(status, closure_prove_files(m, &views, v, err));
    THEN(status, totals_set(m, v, err));
    if (status == CKD_OK &&
        (m->checkpoint.tensors != expected.tensors || m->checkpoint.raw_bytes != expected.raw_bytes)) {
        status = err_set(err, CKD_E_CORRUPT, "the copied files lack blocks of the checkpoint");
    }
    views_free(&views);
    return status;
}

/* The commit point. A manifest that has its name, but may not be durable, is not committed. */
static ckd_status publish_manifest(transfer *t, const batch *b, transfer_item *item, ckd_error *err) {
    const char *root = t->to->path;
    ckd_checkpoint *c = &item->m.checkpoint;
    manifest_name name = {.step = c->step};
    snprintf(name.run, sizeof(name.run), "%s", c->run);
    ckd_status status =
        manifests_pick_generation(&c->generation, t->to, &b->manifests, &b->tombstones, &name, err);
    if (status != CKD_OK) {
        return status;
    }
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &t->writer);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname p = path_manifest(root, c->run, c->step, c->generation);
    bytes data = {0};
    manifest_encode(&data, &t->to->id, &item->m);
    status = data.failed ? err_nomem(err, data.size, "a manifest") : CKD_OK;
    if (status == CKD_OK) {
        status = file_publish_durable(&t->undecided, p.text, path_of(root, DIR_MANIFESTS, temp).text,
                                      data.data, data.size, err);
    }
    bytes_free(&data);
    return status;
}

static ckd_status publish_item(transfer *t, const batch *b, transfer_item *item, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = item->has_parts ? prove(t, item, &why) : CKD_OK;
    if (is_damage(status, &why)) {
        transfer_skip(t, item, status, &why);
        return CKD_OK;
    }
    status = status == CKD_OK ? publish_manifest(t, b, item, err) : err_from(err, status, &why);
    if (status != CKD_OK) {
        return status;
    }
    item->committed = true;
    for (size_t i = 0; i < item->m.file_count; i++) {
        transfer_file *f = transfer_find_file(t, &item->m.files[i].id);
        manifest single = {.files = &f->file, .file_count = 1};
        f->arrived = false; /* no longer in data/x: return_files would take it away from the manifest */
        if (f->is_intact) { /* without its scrub time, the file is read again early */
            scrub_times_add(&t->scrubbed, &single, NULL);
        }
    }
    return CKD_OK;
}

/* Gives all files their names, durably, and then publishes the manifests one by one. */
static ckd_status publish_batch(transfer *t, const batch *b, ckd_error *err) {
    ckd_status status = skip_present(t, b, err);
    for (size_t i = b->first; i < b->end && status == CKD_OK; i++) {
        status = transfer_moves(&t->items[i]) ? name_files(t, &t->items[i], err) : CKD_OK;
    }
    THEN(status, dir_sync(path_in(t->to->path, DIR_CHUNKS).text, err));
    for (size_t i = b->first; i < b->end && status == CKD_OK; i++) {
        status = transfer_moves(&t->items[i]) ? publish_item(t, b, &t->items[i], err) : CKD_OK;
    }
    if (!t->undecided) {
        return_files(t);
    }
    return status == CKD_OK ? drop_unneeded(t, b, err) : status;
}

static ckd_status commit_locked(transfer *t, batch *b, ckd_error *err) {
    ckd_status status = store_refresh_catalog_locked(t->to, err);
    THEN(status, manifests_read(&b->manifests, t->to, err));
    THEN(status, manifests_tombstones(&b->tombstones, t->to, err));
    THEN(status, publish_batch(t, b, err));
    manifests_free(&b->manifests);
    manifests_free(&b->tombstones);
    return status;
}

/* Uploads to a bucket what has arrived, before other machines have to wait. The intent names it. */
static ckd_status upload(transfer *t, const batch *b, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = b->first; i < b->end && store_is_remote(t->to) && status == CKD_OK; i++) {
        const transfer_item *item = &t->items[i];
        for (size_t k = 0; k < item->m.file_count && transfer_moves(item) && status == CKD_OK; k++) {
            transfer_file *f = transfer_find_file(t, &item->m.files[k].id);
            pathname p = path_chunk(t->to->path, &f->file.id, ""), arrived = transfer_path(t, &f->file.id);
            if (!f->in_place && f->arrived && !file_exists(p.text)) {
                status = file_rename_noreplace(arrived.text, p.text, err);
                f->in_place = status == CKD_OK;
            }
        }
    }
    return status;
}

static ckd_status commit(transfer *t, batch *b, ckd_error *err) {
    file_lock *lock;
    ckd_status status = upload(t, b, err);
    if (status != CKD_OK) {
        return_files(t);
        return status;
    }
    status = store_lock_publish(&lock, t->to, err);
    if (status == CKD_OK) {
        pthread_mutex_lock(&t->to->mutex);
        status = commit_locked(t, b, err);
        pthread_mutex_unlock(&t->to->mutex);
        lock_release(lock);
    } else if (store_is_remote(t->to)) {
        return_files(t);
    }
    return status;
}

static ckd_status fetch_item(transfer *t, transfer_item *item, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < item->m.file_count && status == CKD_OK; i++) {
        status = transfer_fetch_file(t, transfer_find_file(t, &item->m.files[i].id), item, err);
    }
    return status;
}

void transfer_skip(transfer *t, transfer_item *item, ckd_status status, const ckd_error *why) {
    item->left = *why;
    item->left.status = status;
    item->state = CKD_COPY_LEFT;
    t->any_left = true;
}

/* Damage concerns only this checkpoint; the others are still copied. */
static ckd_status fetch_or_skip(transfer *t, transfer_item *item, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = fetch_item(t, item, &why);
    if (!is_damage(status, &why) && status != CKD_E_UNSUPPORTED && status != CKD_E_STATE) {
        return err_from(err, status, &why);
    }
    transfer_skip(t, item, status, &why);
    return CKD_OK;
}

/* Items that arrived completely are committed even if the next one fails. */
static ckd_status move_items(transfer *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    batch b = {0};
    size_t items = 0;
    uint64_t size = 0;
    for (size_t i = 0; i < t->count && status == CKD_OK; i++) {
        transfer_item *item = &t->items[i];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        bool moves = transfer_moves(item);
        status = moves ? fetch_or_skip(t, item, &why) : CKD_OK;
        moves = transfer_moves(item);
        items += moves && status == CKD_OK;
        size += moves ? item->bytes : 0;
        b.end = status == CKD_OK ? i + 1 : i;
        bool full = items >= BATCH_ITEMS || size >= BATCH_BYTES || i + 1 == t->count || status != CKD_OK;
        if (full && items) {
            ckd_status committed = commit(t, &b, status == CKD_OK ? &why : NULL);
            THEN(status, committed);
            b = (batch){.first = b.end};
            items = 0;
            size = 0;
        }
        err_from(err, status, &why);
    }
    return status;
}

/* ---- before files are moved ---- */

static ckd_status check_room(const transfer *t, ckd_error *err) {
    uint64_t needed = t->total, available = dir_free_space(path_in(t->to->path, "data").text);
    for (size_t i = 0; i < t->count; i++) {
        needed += t->items[i].manifest_bytes;
    }
    for (size_t i = 0; i < t->file_count; i++) { /* files that an earlier copy left */
        uint64_t present = t->files[i].in_place ? 0 : file_bytes(transfer_path(t, &t->files[i].file.id).text);
        needed -= present < needed ? present : needed;
    }
    return needed <= available
               ? CKD_OK
               : err_set(err, CKD_E_NOSPACE,
                         "the copy takes %llu bytes in '%s', and %llu are left there; nothing was "
                         "copied",
                         (unsigned long long)needed, t->to->path, (unsigned long long)available);
}

typedef ckd_status (*locked_fn)(transfer *t, ckd_error *err);

/* Calls a function under the destination's publish lock and mutex, with its catalog in step. */
static ckd_status with_locks(transfer *t, locked_fn call, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, t->to, err);
    if (status == CKD_OK) {
        pthread_mutex_lock(&t->to->mutex);
        status = store_refresh_catalog_locked(t->to, err);
        THEN(status, call(t, err));
        pthread_mutex_unlock(&t->to->mutex);
        lock_release(lock);
    }
    return status;
}

/* Refuses what it can before the destination changes. Then restores checkpoints from its trash. */
static ckd_status begin_copy(transfer *t, ckd_error *err) {
    ckd_status status = transfer_lock_incoming(t, err);
    THEN(status, store_lock_reader(&t->to_reader, t->to, err));
    THEN(status, with_locks(t, transfer_read_destination, err));
    THEN(status, transfer_plan(t, err));
    THEN(status, transfer_plan_files(t, err));
    if (status == CKD_OK && t->file_count) {
        status = check_room(t, err);
    }
    bool any = false;
    for (size_t i = 0; i < t->count; i++) {
        any = any || transfer_moves(&t->items[i]);
    }
    if (status == CKD_OK && any) {
        status = with_locks(t, hold_intent, err);
    }
    THEN(status, transfer_restore(t, err));
    return status == CKD_OK ? transfer_repair_destination(t, CKD_COPY_PRESENT, err) : status;
}

static ckd_status set_tags(const transfer *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; t->tags && i < t->tags->count && status == CKD_OK; i++) {
        const ckd_tag *tag = &t->tags->items[i];
        const transfer_item *item = transfer_find_item(t, &tag->checkpoint);
        if (item && item->state == CKD_COPY_LEFT) {
            continue;
        }
        status = ckd_store_set_tag(t->to, tag->tag, &tag->checkpoint, 0, err);
    }
    return status;
}

static bool any_committed(const transfer *t) {
    bool any = false;
    for (size_t i = 0; i < t->count && !any; i++) {
        any = t->items[i].committed;
    }
    return any;
}

/*
 * Brings the catalog in step with the last commits. A failure is reported but does not fail the copy: this handle then
 * does without the catalog file.
 */
static void finish_catalog(transfer *t) {
    ckd_store *store = t->to;
    file_lock *lock = NULL;
    ckd_error why = {0};
    if (!any_committed(t)) {
        return;
    }
    ckd_status status = store_lock_publish(&lock, store, &why);
    scrub_times_queue(store, &t->scrubbed);
    pthread_mutex_lock(&store->mutex);
    THEN(status, store_refresh_catalog_locked(store, &why));
    if (status != CKD_OK) {
        store_use_memory_catalog(store, NULL);
        store_message(
            store,
            "the copied checkpoints are committed, but the catalog could not be updated (%s); the next save "
            "or open for writing will update it",
            why.message);
    }
    pthread_mutex_unlock(&store->mutex);
    lock_release(lock);
}

/*
 * After a failure, whole files in data/x stay for another attempt; end_file in fetch.c decides which incomplete ones
 * do. They are removed if nothing is left to try, or if a checkpoint does not fit or cannot be completed.
 */
static void drop_arrived(const transfer *t, ckd_status status) {
    bool permanent = status == CKD_E_NOSPACE || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED ||
                     status == CKD_E_EXISTS;
    bool waits = status != CKD_OK && !permanent && !t->any_left;
    for (size_t i = 0; i < t->file_count && !waits; i++) {
        if (!t->files[i].in_place || t->files[i].arrived) {
            file_remove(transfer_path(t, &t->files[i].file.id).text, true, NULL);
        }
    }
}

/* Whether a file has its name although its checkpoint was not committed. Recovery removes it, by the intent. */
static bool skipped_named(const transfer *t) {
    bool found = false;
    for (size_t i = 0; i < t->file_count; i++) {
        found = found || (t->files[i].in_place && t->files[i].arrived);
    }
    return found;
}

static void end_copy(transfer *t, ckd_status status) {
    if (t->incoming) {
        drop_arrived(t, status);
    }
    finish_catalog(t);
    if (t->has_intent && !t->undecided && !(status != CKD_OK && skipped_named(t))) {
        file_remove(path_intent(t->to->path, &t->writer).text, true, NULL);
    }
    lock_release(t->intent_lock);
    lock_release(t->to_reader);
    if (t->to && !t->options->dry_run) {
        transfer_unlock_incoming(t);
    }
    lock_release(t->from_reader);
}

static ckd_status plan_only(transfer *t, ckd_error *err) {
    ckd_status status = transfer_read_destination(t, err);
    THEN(status, transfer_plan(t, err));
    THEN(status, transfer_plan_files(t, err));
    THEN(status, transfer_repair_destination(t, CKD_COPY_RESTORED, err));
    return status == CKD_OK ? transfer_repair_destination(t, CKD_COPY_PRESENT, err) : status;
}

static ckd_status run(transfer *t, ckd_error *err) {
    ckd_status status = store_lock_reader(&t->from_reader, t->from, err);
    THEN(status, store_list(&t->source, t->from, NULL, err));
    THEN(status, t->options->dry_run ? plan_only(t, err) : begin_copy(t, err));
    return status == CKD_OK && !t->options->dry_run ? move_items(t, err) : status;
}

/* ---- the call ---- */

static ckd_status check(const ckd_store *to, const ckd_store *from, const ckd_copy_options *o,
                        ckd_error *err) {
    if (!to) {
        return o->dry_run ? CKD_OK
                          : err_set(err, CKD_E_INVALID,
                                    "a copy needs a destination store; only with dry_run may it be missing");
    }
    if (file_same(path_in(to->path, FILE_IDENTITY).text, path_in(from->path, FILE_IDENTITY).text)) {
        return err_set(err, CKD_E_INVALID, "'%s' and '%s' are the same store", from->path, to->path);
    }
    return o->dry_run ? CKD_OK : store_check_writable(to, err);
}

/* Before the copy: while it reads the destination, no rename can be completed there. */
static void complete_renames(ckd_store *to) {
    file_lock *lock;
    if (store_lock_publish(&lock, to, NULL) == CKD_OK) {
        (void)store_complete_renames(to);
        lock_release(lock);
    }
}

ckd_status ckd_copy(ckd_copy_result **out, ckd_store *to, ckd_store *from, const ckd_copy_options *options,
                    ckd_error *err) {
    ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
    ckd_copy_result *result = NULL;
    if (out) {
        *out = NULL;
    }
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_copy_options", err);
    THEN(status, check(to, from, &o, err));
    if (status != CKD_OK) {
        return status;
    }
    if (to && !o.dry_run) {
        complete_renames(to);
    }
    transfer t = {.to = to,
                  .from = from,
                  .options = &o,
                  .selected = o.checkpoints,
                  .selected_count = o.checkpoints ? o.count : 0,
                  .begun_ns = clock_monotonic_ns(),
                  .scrubbed.at_ns = clock_wall_ns()};
    status = run(&t, err);
    end_copy(&t, status);
    if (status == CKD_OK && !o.dry_run) {
        status = set_tags(&t, err);
    }
    if (status == CKD_OK && out) {
        status = transfer_result(&result, &t, err);
        *out = result;
    }
    THEN(status, transfer_skipped(&t, err));
    transfer_plan_free(&t);
    catalog_list_free(&t.source);
    free(t.scrubbed.ids);
    bytes_free(&t.payload);
    bytes_free(&t.header);
    return status;
}
