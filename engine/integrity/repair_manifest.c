/*
 * Writes a vanished manifest again. The records in its chunk files have everything except run, step and lineage; a
 * catalog knew these. The manifest is published only if every value of the checkpoint could be rebuilt.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/float_mode.h"
#include "codec/chunk/chunk.h"
#include "engine/common/common.h"
#include "engine/store/store.h"
#include "engine/integrity/internal.h"
#include "engine/decode/decode.h"

/* Where to look for files; each value looks further than the one before. */
typedef enum search {
    UNNAMED,     /* own files: those that no manifest names */
    LIVE,        /* own files: the live ones, too */
    ALL_DELETED, /* also files named only by deleted checkpoints whose grace period is over */
    SEARCHES
} search;

typedef struct rewriting {
    ckd_store *store;
    const manifest_request *q;
    const ckd_checkpoint *known; /* q->known */
    manifest m;
    view_cache views;
    bytes values;
    bytes writers;   /* ids of the writers of its own files */
    search where;    /* which files are tried now */
    bool live_first; /* and in which order */
} rewriting;

/* Which files with records of the checkpoint are its own: all, those of one writer, or those of all others. */
typedef struct selection {
    const ckd_id *writer; /* NULL: all */
    bool others;
} selection;

#define WRITERS_MAX 16u /* if there are more writers, their files are not tried separately */

/* ---- its files ---- */

static bool is_selected(const selection *s, const ckd_id *writer) {
    return !s->writer || id_equal(s->writer, writer) != s->others;
}

static ckd_status add_writer(rewriting *w, const ckd_id *writer, ckd_error *err) {
    for (size_t at = 0; at < w->writers.size; at += sizeof(ckd_id)) {
        if (memcmp(w->writers.data + at, writer, sizeof(ckd_id)) == 0) {
            return CKD_OK;
        }
    }
    bytes_put(&w->writers, writer, sizeof(ckd_id));
    return w->writers.failed ? err_nomem(err, w->writers.size, "the writers of chunk files") : CKD_OK;
}

/*
 * Adds the file if it has records of the checkpoint and is selected. older: adds all other files instead, which the
 * checkpoint may build on.
 */
static ckd_status add_file(rewriting *w, const ckd_id *id, const selection *s, bool older, ckd_error *err) {
    chunk *c;
    bool is_own = false;
    if (chunk_open_bundled(&c, path_chunk(w->store->path, id, "").text, NULL) != CKD_OK) {
        return CKD_OK; /* its records will be missing */
    }
    if (c->outer_count == 0) { /* a file of an empty checkpoint, or of a rank without tensors */
        is_own = w->known->tensors == 0 && w->known->raw_bytes == 0;
    }
    for (size_t i = 0; i < c->outer_count && !is_own; i++) {
        is_own = id_equal(&c->outer[i].tensor->checkpoint, &w->known->id);
    }
    ckd_status status = is_own && !older ? add_writer(w, &c->identity.writer, err) : CKD_OK;
    is_own = is_own && is_selected(s, &c->identity.writer);
    file_ref file = {.id = *id, .size = c->size, .root = c->root};
    chunk_close(c);
    if (is_own == older || status != CKD_OK) {
        return status;
    }
    status = manifest_add_files(&w->m, &file, 1, err);
    if (is_own) {
        w->m.own_count = w->m.file_count;
    }
    return status;
}

/* Adds the files of all manifests, those of deleted checkpoints included. older: as add_file. */
static ckd_status add_of_all(rewriting *w, const manifest_set *all, const selection *s, bool older,
                             ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < all->count && status == CKD_OK; i++) {
        const manifest *m = &all->items[i].m;
        for (size_t k = 0; k < m->file_count && status == CKD_OK; k++) {
            if (live_file_exists(w->store, &m->files[k].id, m->files[k].size)) {
                status = add_file(w, &m->files[k].id, s, older, err);
            }
        }
    }
    return status;
}

static ckd_status add_strays(rewriting *w, const selection *s, bool older, ckd_error *err) {
    const vanished *v = w->q->vanished;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->stray_count && status == CKD_OK; i++) {
        status = add_file(w, &v->strays[i].id, s, older, err);
    }
    return status;
}

/* Adds the checkpoint's own files, and numbers them. */
static ckd_status find_own(rewriting *w, const manifest_set *all, const selection *s, ckd_error *err) {
    const live_files *live = w->q->live;
    ckd_status status = add_strays(w, s, false, err);
    for (size_t i = 0; w->where >= LIVE && i < live->count && status == CKD_OK; i++) {
        status = add_file(w, &live->items[i].file.id, s, false, err);
    }
    if (status == CKD_OK && w->where == ALL_DELETED) {
        status = add_of_all(w, all, s, false, err);
    }
    if (w->m.own_count) {
        qsort(w->m.files, w->m.own_count, sizeof(*w->m.files), id_compare);
    }
    for (size_t i = 0; i < w->m.own_count; i++) {
        w->m.files[i].rank = (uint32_t)i;
    }
    return status;
}

/*
 * Own files are files with records of the checkpoint that no manifest names. Compaction may have put some records into
 * files that other manifests name: with LIVE, these count, too. A deleted child may be the only checkpoint that names
 * such a file: ALL_DELETED. The checkpoint may build on records of any file, even of one without a manifest, which only
 * this manifest or another lost one named. If two records are equal, the first counts. So files without a manifest come
 * before live ones at first; otherwise a copy that only this manifest named would be left over. With live_first they
 * come last, because their copy may be the damaged one. The proof drops files that are not read.
 */
static ckd_status find_files(rewriting *w, const selection *s, ckd_error *err) {
    const live_files *live = w->q->live;
    manifest_set all = {0};
    ckd_status status = w->where == ALL_DELETED ? manifest_set_read(&all, w->store, err) : CKD_OK;
    THEN(status, find_own(w, &all, s, err));
    if (status == CKD_OK && !w->live_first) {
        status = add_strays(w, s, true, err);
    }
    for (size_t i = 0; i < live->count && status == CKD_OK; i++) {
        status = manifest_add_files(&w->m, &live->items[i].file, 1, err);
    }
    if (status == CKD_OK && w->where == ALL_DELETED) {
        status = add_of_all(w, &all, s, true, err);
    }
    if (status == CKD_OK && w->live_first) {
        status = add_strays(w, s, true, err);
    }
    manifest_set_free(&all);
    return status;
}

/* ---- dependencies ---- */

static ckd_status depend(rewriting *w, const record *r, ckd_error *err) {
    for (uint32_t i = 0; i < r->dependency_count; i++) {
        const ckd_id *id = &r->dependencies[i].checkpoint;
        bool exists = id_equal(id, &w->known->id) || id_is_zero(id);
        for (size_t k = 0; k < w->m.dependency_count && !exists; k++) {
            exists = id_equal(&w->m.dependencies[k], id);
        }
        if (exists) {
            continue;
        }
        ckd_id *grown = realloc(w->m.dependencies, (w->m.dependency_count + 1) * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, (w->m.dependency_count + 1) * sizeof(*grown), "a manifest's dependencies");
        }
        w->m.dependencies = grown;
        w->m.dependencies[w->m.dependency_count++] = *id;
    }
    return CKD_OK;
}

static ckd_status find_dependencies(rewriting *w, const view *v, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->block_count && status == CKD_OK; i++) {
        status = depend(w, v->blocks[i].record, err);
    }
    for (size_t i = 0; i < v->shared_count && status == CKD_OK; i++) {
        status = depend(w, v->shared[i].record, err);
    }
    return status;
}

/* ---- proof ---- */

static ckd_status copy_manifest(manifest *out, const manifest *m, ckd_error *err) {
    *out = (manifest){.checkpoint = m->checkpoint, .own_count = m->own_count};
    ckd_status status = manifest_add_files(out, m->files, m->file_count, err);
    if (status != CKD_OK) {
        manifest_free(out);
    }
    return status;
}

/* The totals must be those that the catalog knew. */
static ckd_status describe(rewriting *w, const view *v, ckd_error *err) {
    const ckd_checkpoint *c = &w->m.checkpoint, *known = w->known;
    ckd_status status = find_dependencies(w, v, err);
    THEN(status, totals_set(&w->m, v, err));
    if (status == CKD_OK && (c->tensors != known->tensors || c->raw_bytes != known->raw_bytes)) {
        status =
            err_set(err, CKD_E_CORRUPT,
                    "its chunk files hold %llu tensors with %llu bytes of values, but it had %llu with %llu",
                    (unsigned long long)c->tensors, (unsigned long long)c->raw_bytes,
                    (unsigned long long)known->tensors, (unsigned long long)known->raw_bytes);
    }
    return status;
}

static ckd_status load_block(rewriting *w, decoder *d, const view *v, const view_block *b, bool blob,
                             ckd_error *err) {
    bytes_clear(&w->values);
    void *to = bytes_extend(&w->values, b->record->raw_size + 1);
    if (!to) {
        return err_nomem(err, b->record->raw_size, "a block's values");
    }
    return blob ? blob_bytes(d, b, to, err) : block_values(d, v, b, to, err);
}

static ckd_status load_all(rewriting *w, const view *v, ckd_error *err) {
    decoder d;
    ckd_status status = decoder_init(&d, &w->views, NULL, err);
    if (status != CKD_OK) {
        return status;
    }
    float_mode callers = float_mode_enter();
    for (size_t i = 0; i < v->block_count && status == CKD_OK; i++) {
        status = load_block(w, &d, v, &v->blocks[i], false, err);
    }
    for (size_t i = 0; i < v->blob_count && status == CKD_OK; i++) {
        status = load_block(w, &d, v, &v->blobs[i], true, err);
    }
    float_mode_leave(callers);
    decoder_free(&d);
    return status;
}

static ckd_status prove(rewriting *w, ckd_error *err) {
    manifest draft;
    view *v;
    ckd_status status = copy_manifest(&draft, &w->m, err);
    THEN(status, view_open(&v, w->store, &draft, NULL, CKD_E_CORRUPT, err));
    if (status != CKD_OK) {
        return status;
    }
    status = view_attach_measures(v, CKD_E_CORRUPT, err);
    THEN(status, describe(w, v, err));
    THEN(status, closure_prove_files(&w->m, &w->views, v, err));
    THEN(status, load_all(w, v, err));
    view_close(v);
    return status;
}

/* ---- publishing ---- */

/*
 * Somebody may have published the checkpoint since it was found missing: another repair, or a rename under another
 * name.
 */
static ckd_status check_not_listed(const rewriting *w, ckd_error *err) {
    ckd_checkpoint listed;
    ckd_error why = {0};
    pthread_mutex_lock(&w->store->mutex);
    ckd_status status = store_refresh_catalog_locked(w->store, err);
    pthread_mutex_unlock(&w->store->mutex);
    if (status != CKD_OK) {
        return status;
    }
    status = store_find_id(&listed, w->store, &w->known->id, &why);
    if (status == CKD_OK) {
        return err_set(err, CKD_E_EXISTS, "the checkpoint is listed again, as %s@%llu", listed.run,
                       (unsigned long long)listed.step);
    }
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

#define OTHER_NAMES 100 /* of a run, for lost checkpoints of the same step */

/*
 * Chooses the name and the next generation. If the step was saved again since, the later checkpoint keeps the name, and
 * this one goes to the run RUN.lost. It does not become a branch, because a resumed run goes on with its newest branch.
 */
static ckd_status choose_name(uint32_t *next, rewriting *w, ckd_error *err) {
    ckd_checkpoint *c = &w->m.checkpoint;
    const char *run = w->known->run;
    ckd_error why = {0};
    ckd_status status = manifests_new_generation(next, w->store, c->run, c->step, err);
    for (unsigned i = 1; i < OTHER_NAMES && status == CKD_E_EXISTS; i++) {
        if (returned_name(c->run, run, i, NULL) != CKD_OK) {
            return status;
        }
        status = manifests_new_generation(next, w->store, c->run, c->step, &why);
        if (status == CKD_OK) {
            store_message(w->store, "%s@%llu was saved again; the lost checkpoint comes back as %s@%llu", run,
                          (unsigned long long)c->step, c->run, (unsigned long long)c->step);
        }
    }
    return status == CKD_OK || status == CKD_E_EXISTS ? status : err_from(err, status, &why);
}

static ckd_status publish_locked(rewriting *w, ckd_error *err) {
    const char *root = w->store->path;
    ckd_checkpoint *c = &w->m.checkpoint;
    uint32_t next;
    bytes data = {0};
    ckd_status status = check_not_listed(w, err);
    THEN(status, choose_name(&next, w, err));
    /* It gets a new generation, because the old manifest may be restored from elsewhere. */
    if (status == CKD_OK && next <= c->generation && c->generation == UINT32_MAX) {
        status = err_set(err, CKD_E_UNSUPPORTED, "%s@%llu already has the largest possible generation number",
                         c->run, (unsigned long long)c->step);
    }
    if (status == CKD_OK) {
        c->generation = next > c->generation ? next : c->generation + 1;
        manifest_encode(&data, &w->store->id, &w->m);
        status = data.failed ? err_nomem(err, data.size, "a manifest") : CKD_OK;
    }
    if (status == CKD_OK) {
        pathname temp = path_of(root, DIR_MANIFESTS, ".tmp-repair");
        status = file_remove(temp.text, true, err); /* perhaps left by a repair that died */
        THEN(status, file_publish_durable(NULL, path_manifest(root, c->run, c->step, c->generation).text,
                                          temp.text, data.data, data.size, err));
    }
    bytes_free(&data);
    if (status == CKD_OK) {
        vanished_forget(w->store, &w->known->id);
        pthread_mutex_lock(&w->store->mutex);
        status = store_refresh_catalog_locked(w->store, err);
        pthread_mutex_unlock(&w->store->mutex);
    }
    return status;
}

static ckd_status publish(rewriting *w, ckd_error *err) {
    file_lock *lock;
    ckd_status status = store_lock_publish(&lock, w->store, err);
    if (status == CKD_OK) {
        status = publish_locked(w, err);
        lock_release(lock);
    }
    return status;
}

static void fill(rewriting *w) {
    ckd_checkpoint *c = &w->m.checkpoint;
    *c = *w->known;
    c->stored_bytes = 0;
}

static ckd_status try_files(rewriting *w, const selection *s, ckd_error *err) {
    manifest_free(&w->m);
    ckd_status status = find_files(w, s, err);
    if (status == CKD_OK) {
        fill(w);
        status = prove(w, err);
    }
    return status;
}

/* Whether a manifest names this checkpoint, or a repair may still write one. */
static bool may_be_listed(const rewriting *w, const ckd_id *checkpoint) {
    const live_files *live = w->q->live;
    const vanished *v = w->q->vanished;
    bool found = false;
    for (size_t i = 0; i < live->dependency_info_count && !found; i++) {
        found = id_equal(&live->dependency_infos[i].id, checkpoint);
    }
    for (size_t i = 0; i < v->count && !found; i++) {
        found = id_equal(&v->items[i].id, checkpoint);
    }
    return found;
}

static bool names_file(const manifest *m, const ckd_id *file) {
    bool found = false;
    for (size_t i = 0; i < m->file_count && !found; i++) {
        found = id_equal(&m->files[i].id, file);
    }
    return found;
}

/* Counts strays that the manifest does not name, and that look like the rest of another lost checkpoint. */
static size_t count_left(const rewriting *w) {
    const vanished *v = w->q->vanished;
    size_t left = 0;
    for (size_t i = 0; i < v->stray_count; i++) {
        const stray_file *s = &v->strays[i];
        bool spare = true;
        for (size_t k = 0; k < s->checkpoint_count && spare; k++) {
            spare = may_be_listed(w, &s->checkpoints[k]);
        }
        left += !spare && !names_file(&w->m, &s->id);
    }
    return left;
}

/* Selections of own files: all, then those of each writer, and those of all others. */
static selection selection_at(size_t i, ckd_id *writer, const bytes *writers) {
    if (!i) {
        return (selection){.writer = NULL};
    }
    memcpy(writer, writers->data + (i - 1) / 2 * sizeof(*writer), sizeof(*writer));
    return (selection){.writer = writer, .others = (i - 1) % 2};
}

/*
 * A compaction that was cut off may have left the files of two generations, each of which holds the whole checkpoint.
 * One writer wrote all files of its generation. So the files of each writer are tried separately, and so are the files
 * of all others. The older generation may build on files of deleted checkpoints. If nothing named these, they would
 * seem to be the rest of lost checkpoints. So the selection that leaves the fewest such files wins. If none succeeds,
 * reports the error of all files together.
 */
static ckd_status try_generations(rewriting *w, ckd_error *err) {
    ckd_id writer;
    selection s = selection_at(0, &writer, &w->writers);
    w->writers.size = 0;
    ckd_status status = try_files(w, &s, err);
    size_t count = w->writers.size / sizeof(ckd_id), end = count > 1 && count <= WRITERS_MAX ? 2 * count : 0;
    size_t best = 0, min = SIZE_MAX, last = 0;
    for (size_t i = 1; i <= end && min && status == CKD_E_CORRUPT; i++) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        s = selection_at(i, &writer, &w->writers);
        ckd_status tried = try_files(w, &s, &why);
        size_t left = tried == CKD_OK ? count_left(w) : SIZE_MAX;
        last = i;
        best = left < min ? i : best;
        min = left < min ? left : min;
        status = tried == CKD_OK || tried == CKD_E_CORRUPT ? status : err_from(err, tried, &why);
    }
    if (!best) {
        return status;
    }
    s = selection_at(best, &writer, &w->writers);
    return best == last ? CKD_OK : try_files(w, &s, err);
}

static ckd_status rewrite(rewriting *w, ckd_error *err) {
    ckd_status status = CKD_E_CORRUPT;
    if (!w->known->created_ns) {
        return err_set(
            err, status,
            "what data/q keeps of it is damaged, so it is unknown whether its chunk files are complete");
    }
    for (int i = 0; i < 2 * SEARCHES && status == CKD_E_CORRUPT; i++) {
        w->where = (search)(i / 2);
        w->live_first = i % 2;
        status = try_generations(w, err);
    }
    return status == CKD_OK && w->q->write ? publish(w, err) : status;
}

/* The manifest also names files of deleted checkpoints that it builds on. No other manifest may have named these. */
static void explain_strays(const rewriting *w) {
    const vanished *v = w->q->vanished;
    for (size_t i = 0; i < w->m.file_count && v->stray_count; i++) {
        const ckd_id *id = &w->m.files[i].id;
        if (bsearch(id, v->strays, v->stray_count, sizeof(*v->strays), id_compare)) {
            pathname p = path_chunk(w->store->path, id, "");
            damage_drop_file(w->q->damage, p.text + strlen(w->store->path) + 1);
        }
    }
}

ckd_status repair_manifest(bool *possible, ckd_store *store, const manifest_request *q, ckd_error *why,
                           ckd_error *err) {
    rewriting w = {.store = store, .q = q, .known = q->known};
    file_lock *lock;
    *possible = false;
    ckd_status status = store_lock_reader(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    views_init(&w.views, store);
    w.views.use_materialized = false;
    status = rewrite(&w, why);
    if (status == CKD_OK) {
        explain_strays(&w);
    }
    views_free(&w.views);
    manifest_free(&w.m);
    bytes_free(&w.values);
    bytes_free(&w.writers);
    lock_release(lock);
    *possible = status == CKD_OK;
    bool refused = status == CKD_E_EXISTS || is_damage(status, why);
    return *possible || refused ? CKD_OK : err_from(err, status, why);
}
