/*
 * Verification: every manifest and note, every byte of the chunk files they name, every block's rebuilt values. It looks at the
 * files, not at the catalog, and goes on behind damage, so that all of it is named.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/file_check.h"
#include "engine/notes.h"
#include "engine/parity.h"
#include "engine/values.h"

typedef struct verification {
    ckd_store *store;
    const ckd_verify_options *options;
    ckd_verify_result *result;
    damage_list damage;
    view_cache views;
    decoder decoder;
    bytes values;
    ckd_id *files; /* chunk files looked at already */
    size_t file_count, file_capacity;
    uint64_t total;    /* raw bytes to look at */
    lineage *lineages; /* of all checkpoints; only if not all is decoded: else that shows who needs what */
    size_t lineage_count;
    float_mode callers_mode;
} verification;

/* Damage is noted, anything else ends the verification. */
static ckd_status note(verification *v, ckd_status status, const ckd_error *why, uint64_t block,
                       const char *checkpoint, ckd_error *err) {
    return damage_note(&v->damage, status, why, block, checkpoint, err);
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

static bool seen(const verification *v, const ckd_id *file) {
    for (size_t i = 0; i < v->file_count; i++) {
        if (id_equal(&v->files[i], file)) {
            return true;
        }
    }
    return false;
}

static ckd_status remember_file(verification *v, const ckd_id *file, ckd_error *err) {
    if (v->file_count == v->file_capacity) {
        size_t capacity = v->file_capacity ? 2 * v->file_capacity : 64;
        ckd_id *grown = realloc(v->files, capacity * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "the files looked at");
        }
        v->files = grown;
        v->file_capacity = capacity;
    }
    v->files[v->file_count++] = *file;
    return CKD_OK;
}

static ckd_status check_files(verification *v, const manifest *m, const char *checkpoint, ckd_error *err) {
    for (size_t i = 0; i < m->file_count; i++) {
        if (seen(v, &m->files[i].id)) {
            continue;
        }
        ckd_status status = remember_file(v, &m->files[i].id, err);
        if (status == CKD_OK) {
            file_check f = {.store = v->store,
                            .damage = &v->damage,
                            .lineages = v->lineages,
                            .lineage_count = v->lineage_count,
                            .payload = &v->values};
            status = check_file(&f, &m->files[i].id, checkpoint, err);
        }
        if (status != CKD_OK) {
            return status;
        }
        v->result->files++;
    }
    return CKD_OK;
}

/* ---- values ---- */

static ckd_status check_block(verification *v, const view *w, const view_block *b, bool blob,
                              const char *checkpoint, ckd_error *err) {
    bytes_clear(&v->values);
    void *to = bytes_extend(&v->values, b->record->raw_size + 1);
    if (!to) {
        v->values.failed = false;
        return err_nomem(err, b->record->raw_size, "a block's values");
    }
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status =
        blob ? blob_bytes(&v->decoder, b, to, &why) : block_values(&v->decoder, &v->views, w, b, to, &why);
    bool own = why.offset == b->record->offset && strstr(why.file, file_path(b->chunk->file));
    status = note(v, status, &why, own ? chunk_record_number(b->chunk, b->record) : CKD_NO_OFFSET, checkpoint,
                  err);
    v->result->blocks++;
    return status == CKD_OK ? progress(v, b->record->raw_size, err) : status;
}

/* Is the block in the sample? That follows from the seed and from what it is, wherever it stands and whatever else there is. */
static bool in_sample(const verification *v, const view *w, size_t number) {
    uint8_t what[sizeof(ckd_id) + 16];
    if (v->options->sample == 0) {
        return true;
    }
    memcpy(what, &w->manifest.checkpoint.id, sizeof(ckd_id));
    store_le64(what + sizeof(ckd_id), number);
    store_le64(what + sizeof(ckd_id) + 8, v->options->seed);
    return (double)(hash64(what, sizeof(what)) >> 11) < v->options->sample * 0x1p53;
}

static ckd_status check_values(verification *v, const view *w, const char *checkpoint, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < w->block_count && status == CKD_OK; i++) {
        if (in_sample(v, w, i)) {
            status = check_block(v, w, &w->blocks[i], false, checkpoint, err);
        }
    }
    for (size_t i = 0; i < w->blob_count && status == CKD_OK; i++) {
        if (in_sample(v, w, w->block_count + i)) {
            status = check_block(v, w, &w->blobs[i], true, checkpoint, err);
        }
    }
    return status;
}

static void checkpoint_text(char out[CKD_RUN_MAX + 32], const manifest_name *name) {
    snprintf(out, CKD_RUN_MAX + 32, "%s@%llu", name->run, (unsigned long long)name->step);
}

/* Since the manifests were listed: that is no damage. The reader lock keeps its files, so it is in the trash. */
static ckd_status was_deleted(bool *out, const verification *v, const manifest_name *name, ckd_error *err) {
    manifest_list tombstones = {0};
    ckd_status status = manifests_tombstones(&tombstones, v->store, err);
    *out = status == CKD_OK && manifests_killer(&tombstones, name);
    manifests_free(&tombstones);
    return status;
}

/* Quick: damage of a payload is found in check_files; which checkpoints may need it, from what they depend on. */
static ckd_status check_checkpoint(verification *v, const manifest_name *name, ckd_error *err) {
    char checkpoint[CKD_RUN_MAX + 32];
    checkpoint_text(checkpoint, name);
    ckd_error why = {.offset = CKD_NO_OFFSET};
    manifest m;
    ckd_status status = store_read_manifest(&m, v->store, name->run, name->step, name->generation, &why);
    v->result->checkpoints++;
    if (status != CKD_OK) {
        err_in_file(&why, status,
                    path_manifest(v->store->path, name->run, name->step, name->generation).text);
        return note(v, status, &why, CKD_NO_OFFSET, checkpoint, err);
    }
    ckd_id id = m.checkpoint.id;
    status = check_files(v, &m, checkpoint, err);
    manifest_free(&m);
    if (status != CKD_OK) {
        return status;
    }
    const view *w;
    status = views_get(&w, &v->views, &id, &why);
    if (status == CKD_E_NOT_FOUND) {
        bool gone;
        status = was_deleted(&gone, v, name, err);
        if (status != CKD_OK || gone) {
            return status;
        }
        status = err_corrupt(
            &why, path_manifest(v->store->path, name->run, name->step, name->generation).text, CKD_NO_OFFSET,
            "it cannot be listed: it contradicts itself, or another one has its id");
    }
    if (status != CKD_OK) {
        return note(v, status, &why, CKD_NO_OFFSET, checkpoint, err);
    }
    v->result->all_blocks += w->block_count + w->blob_count;
    return v->options->quick ? CKD_OK : check_values(v, w, checkpoint, err);
}

/* ---- which checkpoints ---- */

static bool wanted(const verification *v, const manifest_name *name) {
    const ckd_verify_options *o = v->options;
    return (!o->run || strcmp(o->run, name->run) == 0) && (!o->one_step || o->step == name->step);
}

/* Manifests that cannot be read are left out: check_checkpoint names them. */
static ckd_status read_lineages(verification *v, const manifest_list *list, ckd_error *err) {
    v->lineages = calloc(list->count + 1, sizeof(*v->lineages));
    if (!v->lineages) {
        return err_nomem(err, list->count * sizeof(*v->lineages), "what depends on what");
    }
    for (size_t i = 0; i < list->count; i++) {
        const manifest_name *name = &list->items[i];
        manifest m;
        if (store_read_manifest(&m, v->store, name->run, name->step, name->generation, NULL) == CKD_OK) {
            v->lineages[v->lineage_count++] = lineage_of(&m);
            manifest_free(&m);
        }
    }
    return CKD_OK;
}

static ckd_status check_all(verification *v, ckd_error *err) {
    manifest_list list;
    ckd_status status = manifests_read(&list, v->store, err);
    if (status == CKD_OK && (v->options->quick || v->options->sample > 0)) {
        status = read_lineages(v, &list, err);
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        bool newest = i == 0 || !same_checkpoint_name(&list.items[i - 1], &list.items[i]);
        if (newest && wanted(v, &list.items[i])) {
            status = check_checkpoint(v, &list.items[i], err);
            /* Views hold files open: those of finished checkpoints go when there are many. */
            if (v->views.count > 64) {
                views_free(&v->views);
                views_init(&v->views, v->store);
                v->views.use_ready = false;
            }
        }
    }
    manifests_free(&list);
    return status == CKD_OK ? damage_spread(&v->damage, v->lineages, v->lineage_count, err) : status;
}

static ckd_status check_catalog(verification *v, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pathname p = path_in(v->store->path, FILE_CATALOG);
    catalog *c = NULL;
    ckd_status status = catalog_open(&c, p.text, CATALOG_READ, &v->store->id, 1000, &why);
    if (status == CKD_OK) {
        status = catalog_check(c, &why);
    }
    catalog_close(c);
    if (status != CKD_E_CORRUPT) {
        return CKD_OK; /* fine, missing (the next writer makes it) or in use by a writer: the manifests are what counts */
    }
    err_in_file(&why, status, p.text);
    return note(v, status, &why, CKD_NO_OFFSET, "", err);
}

/* Pins, tags and policies. No checkpoint suffers, but none can be deleted. */
static ckd_status check_notes(verification *v, ckd_error *err) {
    notes n = {0};
    ckd_status status = v->options->run ? CKD_OK : notes_read(&n, v->store, err);
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status found = notes_why(&n.items[i], v->store, &why);
        if (found != CKD_OK) {
            err_in_file(&why, found, path_note(v->store->path, &n.items[i].name).text);
        }
        status = note(v, found, &why, CKD_NO_OFFSET, "", err);
    }
    notes_free(&n);
    return status;
}

/* Parity files, of the whole store. No checkpoint suffers; the next damage might not be repaired. */
static ckd_status check_parity(verification *v, ckd_error *err) {
    parity_sets sets = {0};
    ckd_status status = v->options->run ? CKD_OK : parity_sets_read(&sets, v->store, &v->damage, err);
    for (size_t i = 0; i < sets.count && status == CKD_OK; i++) {
        const parity_set *s = sets.items[i];
        v->result->weak_groups += parity_set_strength(s, v->store) < (int)s->group.rows;
        for (uint32_t row = 0; row < s->group.rows && status == CKD_OK; row++) {
            bool there = s->present >> row & 1;
            status = there ? parity_check_row(s, row, v->store, &v->damage, NULL, err)
                           : parity_note_missing(s, row, v->store, &v->damage, err);
            status = status == CKD_OK ? progress(v, 0, err) : status;
        }
    }
    parity_sets_free(&sets);
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
    return valid ? CKD_OK
                 : err_set(err, CKD_E_INVALID,
                           "a sample is a share of the blocks, above 0 and below 1, and not quick");
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

static ckd_status run_verification(verification *v, ckd_error *err) {
    file_lock *lock = NULL;
    ckd_status status = store_lock_reader(&lock, v->store, err);
    if (status == CKD_OK) {
        status = decoder_init(&v->decoder, NULL, err);
    }
    if (status == CKD_OK) {
        status = expect_total(v, err);
    }
    if (status == CKD_OK) {
        status = check_catalog(v, err);
    }
    if (status == CKD_OK) {
        status = check_notes(v, err);
    }
    if (status == CKD_OK) {
        status = check_all(v, err);
    }
    if (status == CKD_OK) {
        status = check_parity(v, err);
    }
    decoder_free(&v->decoder);
    lock_release(lock);
    return status;
}

ckd_status ckd_store_verify(ckd_verify_result **out, ckd_store *store, const ckd_verify_options *options,
                            ckd_error *err) {
    *out = NULL;
    ckd_verify_options o = {0};
    if (options) {
        memcpy(&o, options, options->struct_size < sizeof(o) ? options->struct_size : sizeof(o));
    }
    char run[CKD_RUN_MAX + 1];
    ckd_status status = check_sample(&o, err);
    if (status == CKD_OK) {
        status = resolve_step(&o, run, store, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    verification v = {.store = store, .options = &o, .result = calloc(1, sizeof(*v.result))};
    if (!v.result) {
        return err_nomem(err, sizeof(*v.result), "a verification");
    }
    v.damage = (damage_list){.result = v.result, .store_path = store->path};
    views_init(&v.views, store);
    v.views.use_ready = false; /* the blocks themselves are what counts */
    v.callers_mode = float_mode_enter();
    status = run_verification(&v, err);
    float_mode_leave(v.callers_mode);
    views_free(&v.views);
    bytes_free(&v.values);
    free(v.files);
    lineages_free(v.lineages, v.lineage_count);
    if (status != CKD_OK) {
        ckd_verify_result_free(v.result);
        return status;
    }
    *out = v.result;
    return CKD_OK;
}
