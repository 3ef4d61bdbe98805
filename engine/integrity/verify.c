/*
 * Verification: checks every manifest and setting, every byte of the chunk files that they name, and the rebuilt values
 * of every block. The catalog's description of a checkpoint is not checked, but a row without a manifest shows that the
 * manifest is lost (check_vanished). The verification goes on after damage, so that it finds all damage.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/integrity/checkpoint_check.h"
#include "engine/store/store.h"
#include "engine/integrity/internal.h"
#include "engine/integrity/verify_values.h"

#define WINDOW_CHECKPOINTS (CHECKPOINT_VIEWS_MAX / 2) /* decoded together */
#define WINDOW_BLOCKS      100000u /* a window with this many gets no further checkpoint; each takes about 1 KB */

/* A checkpoint of the window: its files are checked, its values are not decoded yet. */
typedef struct window_entry {
    char checkpoint[CHECKPOINT_TEXT];
    damage_list damage; /* of its files; added to the rest when its turn comes */
    value_target target;
} window_entry;

typedef struct verification {
    ckd_store *store;
    const ckd_verify_options *options;
    char run[CKD_RUN_MAX + 1]; /* of options, without a short form */
    ckd_verify_result *result;
    damage_list damage;
    view_cache views;
    view_cache closures;  /* for record_places_agree */
    record_places places; /* of the window's checkpoints */
    value_checker checker;
    bytes payload;
    live_files files;
    bool *seen, *damaged; /* by file: it was checked; it has damage */
    window_entry window[WINDOW_CHECKPOINTS];
    size_t window_count, window_blocks;
    uint64_t total; /* raw bytes to check */
    float_mode callers_mode;
} verification;

/* Records damage. Any other failure ends the verification. */
static ckd_status add_damage(verification *v, ckd_status status, const ckd_error *why, uint64_t block,
                             const char *checkpoint, ckd_error *err) {
    return damage_record(&v->damage, status, why, block, checkpoint, err);
}

static ckd_status progress(verification *v, uint64_t done, ckd_error *err) {
    v->result->bytes += done;
    const ckd_verify_options *o = v->options;
    uint64_t total = v->total > v->result->bytes ? v->total : v->result->bytes;
    if (!o->on_progress) {
        return CKD_OK;
    }
    float_mode_leave(v->callers_mode);
    int stop = o->on_progress(o->progress_context, v->result->bytes, total);
    v->callers_mode = float_mode_enter();
    return stop ? err_set(err, CKD_E_CANCELLED, "the verification was cancelled") : CKD_OK;
}

/* ---- chunk files: every record's header and payload ---- */

/*
 * Is damage in a file attributed to checkpoints by their dependencies? If all values are decoded, decoding shows which
 * checkpoints are affected.
 */
static bool by_dependencies(const verification *v) {
    return v->options->quick || v->options->sample > 0;
}

/* *intact becomes false if the file has damage, whether found now or before. */
static ckd_status check_file_once(verification *v, damage_list *damage, bool *intact, const file_ref *file,
                                  const char *checkpoint, ckd_error *err) {
    const live_file *listed = live_files_find(&v->files, &file->id);
    size_t number = listed ? (size_t)(listed - v->files.items) : v->files.count;
    if (listed && v->seen[number]) {
        *intact = *intact && !v->damaged[number];
        return CKD_OK;
    }
    v->seen[number] = true;
    file_check f = {.store = v->store,
                    .damage = damage,
                    .dependency_infos = v->files.dependency_infos,
                    .dependency_info_count = by_dependencies(v) ? v->files.dependency_info_count : 0,
                    .payload = &v->payload,
                    .pool = v->store->pool};
    v->result->files++;
    size_t before = damage->result->damage_count;
    ckd_status status = check_named_file(&f, file, checkpoint, err);
    v->damaged[number] = damage->result->damage_count > before;
    *intact = *intact && !v->damaged[number];
    return status;
}

static ckd_status check_files(verification *v, window_entry *e, const manifest *m, ckd_error *err) {
    ckd_status status = CKD_OK;
    e->target.shares = true;
    for (size_t i = 0; i < m->file_count && status == CKD_OK; i++) {
        status = check_file_once(v, &e->damage, &e->target.shares, &m->files[i], e->checkpoint, err);
    }
    return status;
}

/* ---- values ---- */

/*
 * Is the block in the sample? This depends only on the seed and on the block's identity. It does not depend on the
 * block's file, or on other checkpoints.
 */
static bool in_sample(const verification *v, const view *w, size_t number) {
    uint8_t key[sizeof(ckd_id) + 16];
    if (v->options->sample == 0) {
        return true;
    }
    memcpy(key, &w->manifest.checkpoint.id, sizeof(ckd_id));
    store_le64(key + sizeof(ckd_id), number);
    store_le64(key + sizeof(ckd_id) + 8, v->options->seed);
    return (double)(hash64(key, sizeof(key)) >> 11) < v->options->sample * 0x1p53;
}

/* Lists the values of a checkpoint to decode: all of them, or a sample. */
static ckd_status list_values(verification *v, window_entry *e, const view *w, ckd_error *err) {
    value_target *t = &e->target;
    size_t all = w->block_count + w->blob_count;
    t->findings = calloc(all + 1, sizeof(*t->findings));
    if (!t->findings) {
        return err_nomem(err, all * sizeof(*t->findings), "the blocks of a checkpoint");
    }
    t->view = w;
    for (size_t i = 0; i < all; i++) {
        bool blob = i >= w->block_count;
        if (in_sample(v, w, i)) {
            t->findings[t->count++].block = blob ? &w->blobs[i - w->block_count] : &w->blocks[i];
            t->block_count += !blob;
        }
    }
    v->window_blocks += all;
    return CKD_OK;
}

/* Whether its blocks may be decoded with those of the other checkpoints. */
static ckd_status decide_sharing(verification *v, window_entry *e, const ckd_id *id, ckd_error *err) {
    if (!e->target.shares || by_dependencies(v)) {
        e->target.shares = false;
        return CKD_OK;
    }
    ckd_status status = record_places_agree(&e->target.shares, &v->places, &v->closures, id, err);
    checkpoint_views_limit(&v->closures);
    return status;
}

static ckd_status check_contents(verification *v, window_entry *e, const manifest *m, ckd_error *err) {
    const view *w = NULL;
    ckd_status status = check_files(v, e, m, err);
    THEN(status, checkpoint_open(&w, &v->views, &m->checkpoint, &e->damage, err));
    if (status != CKD_OK || !w) {
        return status;
    }
    v->result->all_blocks += w->block_count + w->blob_count;
    if (by_dependencies(v)) {
        status = checkpoint_check_closure(&v->views, w, &e->damage, err);
    }
    if (status == CKD_OK && !v->options->quick) {
        status = decide_sharing(v, e, &m->checkpoint.id, err);
        THEN(status, list_values(v, e, w, err));
    }
    return status;
}

/*
 * Adds a checkpoint to the window. With `quick`, check_files finds damaged payloads, and dependencies tell which
 * checkpoints may need them. Indexes show what a load would miss.
 */
static ckd_status check_checkpoint(verification *v, const manifest_name *name, ckd_error *err) {
    window_entry *e = &v->window[v->window_count];
    *e = (window_entry){
        .damage = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = v->store->path}};
    if (!e->damage.result) {
        return err_nomem(err, sizeof(ckd_verify_result), "a verification");
    }
    v->window_count++;
    checkpoint_text(e->checkpoint, name->run, name->step, false);
    ckd_error why = {.offset = CKD_NO_OFFSET};
    manifest m;
    ckd_status status = store_read_manifest(&m, v->store, name->run, name->step, name->generation, &why);
    v->result->checkpoints++;
    if (status != CKD_OK) {
        err_in_file(&why, status,
                    path_manifest(v->store->path, name->run, name->step, name->generation).text);
        return damage_record(&e->damage, status, &why, CKD_NO_OFFSET, e->checkpoint, err);
    }
    status = check_contents(v, e, &m, err);
    manifest_free(&m);
    return status;
}

/* ---- the window ---- */

static ckd_status report_finding(verification *v, const window_entry *e, const value_finding *f,
                                 ckd_error *err) {
    const record *r = f->block->record;
    const chunk *c = f->block->chunk;
    v->result->blocks++;
    if (!f->why) {
        return CKD_OK;
    }
    bool in_own_file = f->why->offset == r->offset && strstr(f->why->file, file_path(c->file));
    return add_damage(v, f->status, f->why, in_own_file ? chunk_record_number(c, r) : CKD_NO_OFFSET,
                      e->checkpoint, err);
}

/* Reports damage in the order of the checkpoints, whatever the order in which it was found. */
static ckd_status report_window(verification *v, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->window_count && status == CKD_OK; i++) {
        const window_entry *e = &v->window[i];
        status = damage_add_all(&v->damage, &e->damage, err);
        for (size_t k = 0; k < e->target.count && status == CKD_OK; k++) {
            status = report_finding(v, e, &e->target.findings[k], err);
        }
    }
    return status;
}

static void clear_window(verification *v) {
    for (size_t i = 0; i < v->window_count; i++) {
        window_entry *e = &v->window[i];
        ckd_verify_result_free(e->damage.result);
        for (size_t k = 0; k < e->target.count; k++) {
            free(e->target.findings[k].why);
        }
        free(e->target.findings);
    }
    v->window_count = v->window_blocks = 0;
    record_places_free(&v->places);
    checkpoint_views_limit(&v->views);
}

static ckd_status report_progress(void *context, uint64_t done, ckd_error *err) {
    return progress(context, done, err);
}

/* Decodes the values of the window's checkpoints, and empties it. */
static ckd_status finish_window(verification *v, ckd_error *err) {
    value_target targets[WINDOW_CHECKPOINTS];
    for (size_t i = 0; i < v->window_count; i++) {
        targets[i] = v->window[i].target;
    }
    ckd_status status = value_check(&v->checker, targets, v->window_count, report_progress, v, err);
    THEN(status, report_window(v, err));
    clear_window(v);
    return status;
}

/*
 * Decoding whole chains opens a view of each ancestor. So such a checkpoint has a window of its own, after which the
 * views are closed.
 */
static bool window_is_full(const verification *v) {
    bool alone = by_dependencies(v) || !v->window[v->window_count - 1].target.shares;
    return alone || v->window_count == WINDOW_CHECKPOINTS || v->window_blocks >= WINDOW_BLOCKS ||
           views_are_many(&v->views, CHECKPOINT_VIEWS_MAX);
}

/* ---- which checkpoints ---- */

static bool wanted(const verification *v, const char *run, uint64_t step) {
    const ckd_verify_options *o = v->options;
    return (!o->run || strcmp(o->run, run) == 0) && (!o->one_step || o->step == step);
}

/* For one run, check_checkpoint reports the manifests that cannot be read. */
static ckd_status read_files(verification *v, ckd_error *err) {
    damage_list others = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = v->store->path};
    ckd_status status =
        others.result ? live_files_read(&v->files, v->store, v->options->run ? &others : &v->damage, err)
                      : err_nomem(err, sizeof(ckd_verify_result), "a verification");
    ckd_verify_result_free(others.result);
    if (status == CKD_OK) {
        v->seen = calloc(v->files.count + 1, sizeof(*v->seen));
        v->damaged = calloc(v->files.count + 1, sizeof(*v->damaged));
        status = v->seen && v->damaged ? CKD_OK : err_nomem(err, v->files.count, "the files looked at");
    }
    return status;
}

/* Checks that deleted checkpoints could come back whole. Their values are not decoded. */
static ckd_status check_trash(verification *v, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->files.count && !v->options->run && status == CKD_OK; i++) {
        const live_file *f = &v->files.items[i];
        char checkpoint[CHECKPOINT_TEXT];
        live_file_checkpoint(checkpoint, f);
        if (f->in_trash) {
            bool intact = true;
            status = check_file_once(v, &v->damage, &intact, &f->file, checkpoint, err);
        }
    }
    return status;
}

static ckd_status check_all(verification *v, ckd_error *err) {
    manifest_list list = {0};
    ckd_status status = read_files(v, err);
    THEN(status, manifests_read(&list, v->store, err));
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        bool newest = i == 0 || !same_checkpoint_name(&list.items[i - 1], &list.items[i]);
        if (newest && wanted(v, list.items[i].run, list.items[i].step)) {
            status = check_checkpoint(v, &list.items[i], err);
            THEN(status, window_is_full(v) ? finish_window(v, err) : CKD_OK);
        }
    }
    manifests_free(&list);
    THEN(status, finish_window(v, err));
    clear_window(v);
    THEN(status, check_trash(v, err));
    if (status != CKD_OK) {
        return status;
    }
    const dependency_info *all = v->files.dependency_infos;
    size_t count = v->options->run ? 0 : v->files.dependency_info_count;
    return by_dependencies(v) ? damage_add_dependents(&v->damage, all, v->files.dependency_info_count, err)
                              : damage_add_trash(&v->damage, all, count, err);
}

ckd_status catalog_condition(const ckd_store *store, ckd_error *why) {
    pathname p = path_in(store->path, FILE_CATALOG);
    catalog *c = NULL;
    ckd_status status = catalog_open(&c, p.text, CATALOG_READ, &store->id, 1000, why);
    THEN(status, catalog_check(c, why));
    catalog_close(c);
    bool journal = file_bytes(path_in(store->path, FILE_CATALOG "-journal").text) > 0;
    if (status != CKD_E_CORRUPT || journal) {
        /*
         * The catalog is fine, missing (the next writer makes it), in use by a writer, or has the journal of a dead
         * writer (the next writer rolls it back). Only the manifests count.
         */
        return CKD_OK;
    }
    return err_in_file(why, status, p.text);
}

static ckd_status check_catalog(verification *v, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = catalog_condition(v->store, &why);
    return add_damage(v, status, &why, CKD_NO_OFFSET, "", err);
}

static ckd_status check_identity(verification *v, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = identity_condition(v->store, &why);
    ckd_status added = add_damage(v, status, &why, CKD_NO_OFFSET, "", err);
    if (status != CKD_OK && added == CKD_OK) {
        damage_append_text(&v->damage, FILE_IDENTITY, "ckptdelta repair writes it again");
    }
    return added;
}

/* Parity files of the whole store. Damage harms no checkpoint, but the next damage might not be repairable. */
static ckd_status check_parity(verification *v, ckd_error *err) {
    parity_sets sets = {0};
    ckd_status status = v->options->run ? CKD_OK : parity_sets_read(&sets, v->store, &v->damage, err);
    for (size_t i = 0; i < sets.count && status == CKD_OK; i++) {
        const parity_set *s = sets.items[i];
        v->result->weak_groups += parity_set_redundancy(s, v->store) < (int)s->group.rows;
        for (uint32_t row = 0; row < s->group.rows && status == CKD_OK; row++) {
            status = parity_check_row(s, row, v->store, &v->damage, NULL, err);
            THEN(status, progress(v, 0, err));
        }
    }
    parity_sets_free(&sets);
    return status;
}

static void keep_wanted(const verification *v, ckd_checkpoint *items, size_t *count) {
    size_t kept = 0;
    for (size_t i = 0; i < *count; i++) {
        if (wanted(v, items[i].run, items[i].step)) {
            items[kept++] = items[i];
        }
    }
    *count = kept;
}

/*
 * Checkpoints whose manifests are gone, although nobody deleted them. A file that no manifest names may belong to any
 * run, so only a verification of the whole store reports it.
 */
static ckd_status check_vanished(verification *v, ckd_error *err) {
    vanished lost = {0};
    ckd_status status = vanished_find(&lost, v->store, err);
    vanished reported = lost;
    keep_wanted(v, reported.items, &reported.count);
    keep_wanted(v, reported.doubtful, &reported.doubtful_count);
    keep_wanted(v, reported.trashed, &reported.trashed_count);
    reported.stray_count = v->options->run ? 0 : lost.stray_count;
    THEN(status, vanished_add_damage(&reported, v->store, &v->damage, err));
    vanished_free(&lost);
    return status;
}

static ckd_status expect_total(verification *v, ckd_error *err) {
    ckd_checkpoint_list list = {0};
    ckd_status status = store_list(&list, v->store, v->options->run, err);
    for (size_t i = 0; i < list.count; i++) {
        if (!v->options->one_step || list.items[i].step == v->options->step) {
            v->total += list.items[i].raw_bytes;
        }
    }
    catalog_list_free(&list);
    v->total = v->options->sample > 0 ? (uint64_t)((double)v->total * v->options->sample) : v->total;
    return status;
}

static ckd_status check_sample(const ckd_verify_options *o, ckd_error *err) {
    bool valid = o->sample >= 0 && o->sample < 1 && !(o->sample > 0 && o->quick);
    return valid
               ? CKD_OK
               : err_set(
                     err, CKD_E_INVALID,
                     "sample is a fraction of the blocks, above 0 and below 1, and cannot be combined with quick");
}

static ckd_status resolve_step(ckd_verify_options *o, char run[CKD_RUN_MAX + 1], ckd_store *store,
                               ckd_error *err) {
    if (!o->run && !o->one_step) {
        return CKD_OK;
    }
    ckd_checkpoint found;
    ckd_status status = store_find(&found, store, o->run, o->one_step ? o->step : CKD_LATEST, err);
    if (status == CKD_OK) {
        snprintf(run, CKD_RUN_MAX + 1, "%s", found.run);
        o->run = run;
        o->step = found.step;
    }
    return status;
}

/*
 * Finding nothing damaged proves nothing if there was nothing to look at. The checkpoint may have been deleted, or saved
 * again after a deletion, since its name was resolved.
 */
static ckd_status check_found_any(const verification *v, ckd_error *err) {
    ckd_checkpoint found;
    const ckd_verify_options *o = v->options;
    if (!o->run || v->result->checkpoints || v->result->damage_count) {
        return CKD_OK;
    }
    ckd_status status = store_find(&found, v->store, o->run, o->one_step ? o->step : CKD_LATEST, err);
    return status == CKD_OK
               ? err_set(err, CKD_E_BUSY,
                         "the checkpoints of run '%s' changed while they were verified; try again", o->run)
               : status;
}

/* Names are resolved under the reader lock, during which no run gets another name. */
static ckd_status run_verification(verification *v, ckd_verify_options *o, ckd_error *err) {
    file_lock *lock = NULL;
    ckd_status status = store_lock_reader(&lock, v->store, err);
    THEN(status, resolve_step(o, v->run, v->store, err));
    THEN(status, value_checker_init(&v->checker, v->store, &v->views, err));
    THEN(status, expect_total(v, err));
    THEN(status, check_identity(v, err));
    THEN(status, check_catalog(v, err));
    THEN(status, v->options->run ? CKD_OK : settings_damage(&v->damage, v->store, err));
    THEN(status, v->options->run ? CKD_OK : intents_damage(&v->damage, v->store, err));
    THEN(status, check_vanished(v, err));
    THEN(status, check_all(v, err));
    THEN(status, check_found_any(v, err));
    THEN(status, check_parity(v, err));
    value_checker_free(&v->checker);
    lock_release(lock);
    return status;
}

ckd_status ckd_store_verify(ckd_verify_result **out, ckd_store *store, const ckd_verify_options *options,
                            ckd_error *err) {
    *out = NULL;
    ckd_verify_options o = {0};
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_verify_options", err);
    THEN(status, check_sample(&o, err));
    if (status != CKD_OK) {
        return status;
    }
    verification v = {.store = store, .options = &o, .result = calloc(1, sizeof(*v.result))};
    if (!v.result) {
        return err_nomem(err, sizeof(*v.result), "a verification");
    }
    v.damage = (damage_list){.result = v.result, .store_path = store->path};
    checkpoint_views_begin(&v.views, store);
    checkpoint_views_begin(&v.closures, store);
    v.callers_mode = float_mode_enter();
    status = run_verification(&v, &o, err);
    float_mode_leave(v.callers_mode);
    views_free(&v.views);
    views_free(&v.closures);
    bytes_free(&v.payload);
    free(v.seen);
    free(v.damaged);
    live_files_free(&v.files);
    if (status != CKD_OK) {
        ckd_verify_result_free(v.result);
        return status;
    }
    *out = v.result;
    return CKD_OK;
}
