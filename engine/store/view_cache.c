/* Views of several checkpoints by id: roots, and checkpoints within them. */
#include <stdlib.h>

#include "engine/store/view.h"

#define BLOCKS_MAX 400000u /* a block takes 1 to 1.5 KB, with its record in the chunk file's index */

void views_init(view_cache *cache, ckd_store *store) {
    memset(cache, 0, sizeof(*cache));
    cache->store = store;
    cache->use_materialized = true;
    pthread_mutexattr_t recursive; /* choosing between duplicates opens the views that they build on */
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&cache->mutex, &recursive);
    pthread_mutexattr_destroy(&recursive);
}

/*
 * Searches all manifests, those of deleted checkpoints included. An unreadable manifest may be the one sought. So its
 * error is returned, unless another manifest matches.
 */
static ckd_status find_any_manifest(manifest *out, const ckd_store *store, const ckd_id *id, ckd_error *err) {
    manifest_list all;
    ckd_status failed = CKD_OK, status = manifests_read_all(&all, store, err);
    bool found = false;
    if (status != CKD_OK) {
        return status;
    }
    /* The highest generation comes first. */
    for (size_t i = 0; i < all.count && !found && failed != CKD_E_NOMEM; i++) {
        const manifest_name *n = &all.items[i];
        ckd_error why = {.offset = CKD_NO_OFFSET};
        status = store_read_manifest(out, store, n->run, n->step, n->generation, &why);
        found = status == CKD_OK && id_equal(&out->checkpoint.id, id);
        if (status == CKD_OK && !found) {
            manifest_free(out);
        } else if (status == CKD_E_NOMEM || status == CKD_E_IO) {
            failed = err_from(err, status, &why);
        }
    }
    manifests_free(&all);
    return found              ? CKD_OK
           : failed != CKD_OK ? failed
                              : err_set(err, CKD_E_NOT_FOUND, "there is no such checkpoint");
}

/* A view that shares a file, if compaction has joined checkpoints in one; else any root. */
static const view *one_like(const view_cache *cache, const manifest *m) {
    const view *any = NULL;
    for (size_t i = cache->count; i-- > 0;) {
        const manifest *other = &cache->views[i]->manifest;
        any = cache->views[i]->root ? any : cache->views[i];
        if (other->own_count && m->own_count && id_equal(&other->files[0].id, &m->files[0].id)) {
            return cache->views[i];
        }
    }
    return any;
}

typedef struct present_query {
    ckd_checkpoint *out;
    const ckd_store *store;
    const ckd_id *id;
} present_query;

static ckd_status find_present(void *context, catalog *c, ckd_error *err) {
    const present_query *q = context;
    ckd_status status = catalog_find_id(q->out, c, q->id, err);
    if (status != CKD_OK) {
        return status;
    }
    pathname p = path_manifest(q->store->path, q->out->run, q->out->step, q->out->generation);
    return file_exists(p.text) ? CKD_OK : err_set(err, CKD_E_NOT_FOUND, "its manifest is gone");
}

/*
 * Reads the manifest that the catalog names. A writer that replaced it may have died before it updated the catalog. So
 * if the manifest is gone, the catalog is compared with the manifests, and queried again. A compaction may replace the
 * manifest again meanwhile.
 */
static ckd_status read_listed(manifest *out, ckd_checkpoint *found, ckd_store *store, ckd_error *err) {
    enum { TRIES = 20 };
    ckd_error why = {0};
    const ckd_id id = found->id;
    present_query q = {found, store, &id};
    ckd_status status;
    int tries = TRIES;
    do {
        status = store_read_manifest(out, store, found->run, found->step, found->generation, &why);
    } while (status == CKD_E_NOT_FOUND && --tries && store_query(store, find_present, &q, NULL) == CKD_OK);
    return err_from(err, status, &why);
}

static ckd_status find_manifest(manifest *out, ckd_store *store, const ckd_id *id, bool deleted_too,
                                ckd_error *err) {
    ckd_checkpoint found;
    ckd_error why = {0};
    ckd_status status = store_find_id(&found, store, id, &why);
    if (status == CKD_OK) {
        status = read_listed(out, &found, store, &why);
    } else if (status == CKD_E_NOT_FOUND && deleted_too) {
        status = find_any_manifest(out, store, id, &why);
        found = status == CKD_OK ? out->checkpoint : found;
    }
    err_from(err, status, &why);
    if (status == CKD_OK && !id_equal(&out->checkpoint.id, id)) {
        manifest_free(out);
        return err_set(err, CKD_E_CORRUPT, "%s@%llu is no longer the checkpoint that was looked for",
                       found.run, (unsigned long long)found.step);
    }
    return status;
}

/* Adds the ids that the list does not have yet. */
static ckd_status add_ids(bytes *list, const ckd_id *ids, size_t count, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        bool exists = false;
        for (size_t at = 0; at < list->size && !exists; at += sizeof(ckd_id)) {
            exists = memcmp(list->data + at, &ids[i], sizeof(ckd_id)) == 0;
        }
        if (!exists) {
            bytes_put(list, &ids[i], sizeof(ckd_id));
        }
    }
    return list->failed ? err_nomem(err, list->size, "what a checkpoint builds on") : CKD_OK;
}

ckd_status manifest_complete_early(manifest *m, ckd_store *store, ckd_error *err) {
    bytes ids = {0};
    if (!m->own_only) {
        return CKD_OK;
    }
    ckd_status status = add_ids(&ids, m->dependencies, m->dependency_count, err);
    for (size_t at = 0; at < ids.size && status == CKD_OK; at += sizeof(ckd_id)) {
        ckd_id id;
        manifest base;
        ckd_error why = {.offset = CKD_NO_OFFSET};
        memcpy(&id, ids.data + at, sizeof(id));
        ckd_status found = find_manifest(&base, store, &id, true, &why);
        if (found == CKD_E_NOMEM || found == CKD_E_IO) {
            status = err_from(err, found, &why);
        } else if (found == CKD_OK) { /* a missing one is reported by the block that builds on it */
            status = manifest_add_files(m, base.files, base.file_count, err);
            if (status == CKD_OK && base.own_only) {
                status = add_ids(&ids, base.dependencies, base.dependency_count, err);
            }
            manifest_free(&base);
        }
    }
    bytes_free(&ids);
    m->own_only = status != CKD_OK;
    return status;
}

ckd_status manifest_add_files_of(manifest *m, ckd_store *store, const ckd_id *id, ckd_error *err) {
    manifest base;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = find_manifest(&base, store, id, true, &why);
    if (status != CKD_OK) {
        return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
    }
    status = manifest_complete_early(&base, store, err);
    THEN(status, manifest_add_files(m, base.files, base.file_count, err));
    manifest_free(&base);
    return status;
}

static ckd_status open_by_id(view **out, view_cache *cache, const ckd_id *id, ckd_error *err) {
    ckd_store *store = cache->store;
    manifest m;
    ckd_status status = find_manifest(&m, store, id, cache->deleted_too, err);
    if (status != CKD_OK) {
        return status;
    }
    status = manifest_complete_early(&m, store, err);
    if (status != CKD_OK) {
        manifest_free(&m);
        return status;
    }
    status = view_open(out, store, &m, one_like(cache, &m), CKD_E_CORRUPT, err);
    if (status != CKD_OK) {
        return status;
    }
    if (!cache->values_only) {
        status = view_attach_measures(*out, CKD_E_CORRUPT, err);
    }
    if (status == CKD_OK && cache->use_materialized) {
        status = materialized_attach(*out, store->path, err);
    }
    if (status != CKD_OK) {
        view_close(*out);
    }
    return status;
}

static ckd_status views_append(view_cache *cache, view *v, ckd_error *err) {
    if (ARRAY_GROW(cache->views, cache->capacity, cache->count + 1, "views", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    cache->views[cache->count++] = v;
    cache->block_count += v->block_count + v->blob_count;
    return CKD_OK;
}

bool views_are_many(const view_cache *cache, size_t max) {
    return cache->count > max || cache->block_count > BLOCKS_MAX;
}

/* serial: of the root to search within; 0: the view is a root itself. */
static view *find_view(const view_cache *cache, uint64_t serial, const ckd_id *checkpoint) {
    for (size_t i = 0; i < cache->count; i++) {
        view *v = cache->views[i];
        if (id_equal(&v->manifest.checkpoint.id, checkpoint) && (v->root ? v->serial : 0) == serial &&
            !v->is_draft) {
            return v;
        }
    }
    return NULL;
}

/* ---- within a root ---- */

static const older_file *find_older(const view_cache *cache, const ckd_id *file) {
    for (size_t i = cache->older_count; i-- > 0;) {
        if (id_equal(&cache->older[i].id, file)) {
            return &cache->older[i];
        }
    }
    return NULL;
}

static ckd_status list_checkpoints(older_file *f, ckd_error *err) {
    bytes ids = {0};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < f->chunk->outer_count && status == CKD_OK; i++) {
        const ckd_id *id = &f->chunk->outer[i].tensor->checkpoint;
        if (i == 0 || !id_equal(id, &f->chunk->outer[i - 1].tensor->checkpoint)) {
            status = add_ids(&ids, id, 1, err);
        }
    }
    f->checkpoints = (ckd_id *)(void *)ids.data;
    f->count = ids.size / sizeof(ckd_id);
    return status;
}

/* The file, if a root of the cache has it open as its own: a record is then at the same address in all views. */
static chunk *opened_by_root(const view_cache *cache, const file_ref *file) {
    for (size_t i = cache->count; i-- > 0;) {
        const view *v = cache->views[i];
        for (size_t k = 0; !v->root && k < v->chunk_count; k++) {
            const file_ref *own = &v->manifest.files[k];
            if (id_equal(&own->id, &file->id) && hash128_equal(&own->root, &file->root) &&
                own->size == file->size) {
                return v->chunks[k];
            }
        }
    }
    return NULL;
}

static ckd_status open_older(const older_file **out, view_cache *cache, const view *root, size_t file,
                             ckd_error *err) {
    *out = find_older(cache, &root->manifest.files[file].id);
    if (*out) {
        return CKD_OK;
    }
    if (ARRAY_GROW(cache->older, cache->older_capacity, cache->older_count + 1, "chunk handles", err) !=
        CKD_OK) {
        return CKD_E_NOMEM;
    }
    older_file *f = &cache->older[cache->older_count];
    *f = (older_file){.id = root->manifest.files[file].id};
    ckd_status status = CKD_OK;
    chunk *opened =
        file < root->chunk_count ? root->chunks[file] : opened_by_root(cache, &root->manifest.files[file]);
    if (opened) {
        f->chunk = chunk_retain(opened);
    } else {
        status = view_open_chunk(&f->chunk, cache->store, &root->manifest.files[file],
                                 &root->manifest.checkpoint, err);
    }
    THEN(status, list_checkpoints(f, err));
    if (status != CKD_OK) {
        chunk_close(f->chunk);
        free(f->checkpoints);
        return status;
    }
    cache->older_count++;
    *out = f;
    return CKD_OK;
}

static bool has_checkpoint(const older_file *f, const ckd_id *id) {
    bool has = false;
    for (size_t i = 0; i < f->count && !has; i++) {
        has = id_equal(&f->checkpoints[i], id);
    }
    return has;
}

/*
 * Adds one file of the root's manifest, if it has records of the checkpoint. A file that cannot be read may have some,
 * but is left out.
 */
static ckd_status add_file_within(view_files *files, view_cache *cache, const view *root, const ckd_id *id,
                                  uint32_t file, ckd_error *err) {
    const older_file *f;
    const chunk_records *records;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    bool has = false;
    ckd_status status = open_older(&f, cache, root, file, &why);
    if (status == CKD_OK && has_checkpoint(f, id)) {
        has = true;
        status = chunk_records_of(&records, f->chunk, id, &why);
        err_in_file(&why, status, file_path(f->chunk->file));
    }
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED) {
        files->lost = files->lost.status == CKD_OK ? why : files->lost;
        return CKD_OK;
    }
    if (status == CKD_OK && has) {
        files->chunks[files->count] = f->chunk;
        files->numbers[files->count++] = file;
    }
    return err_from(err, status, &why);
}

static ckd_status open_within(view **out, view_cache *cache, const view *root, const ckd_id *id,
                              ckd_error *err) {
    size_t total = root->manifest.file_count;
    view_files files = {.chunks = calloc(total + 1, sizeof(chunk *) + sizeof(uint32_t))};
    files.numbers = files.chunks ? (uint32_t *)(void *)(files.chunks + total + 1) : NULL;
    ckd_status status = files.chunks ? CKD_OK : err_nomem(err, total * sizeof(chunk *), "chunk handles");
    for (size_t i = 0; i < total && status == CKD_OK; i++) {
        status = add_file_within(&files, cache, root, id, (uint32_t)i, err);
    }
    if (status == CKD_OK && files.count == 0 && files.lost.status != CKD_OK) {
        status = err_from(err, files.lost.status, &files.lost);
    } else if (status == CKD_OK && files.count == 0) {
        char hex[CKD_ID_TEXT];
        ckd_id_text(hex, id);
        status =
            err_set(err, CKD_E_NOT_FOUND, "no file of %s@%llu holds anything of checkpoint %s",
                    root->manifest.checkpoint.run, (unsigned long long)root->manifest.checkpoint.step, hex);
    }
    THEN(status, view_open_within(out, root, id, &files, err));
    free(files.chunks);
    return status;
}

/* Whether everything that the block builds on is in the files, without a cycle. */
static ckd_status resolves(bool *yes, view_cache *cache, const view *v, const view_block *b, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = closure_visit_block(cache, v, b, NULL, NULL, &why);
    *yes = status == CKD_OK;
    return status == CKD_E_NOMEM || status == CKD_E_IO ? err_from(err, status, &why) : CKD_OK;
}

static ckd_status choose_duplicate(bool *changed, view_cache *cache, const view *v, view_duplicate *o,
                                   ckd_error *err) {
    bool first, second = false;
    ckd_status status = resolves(&first, cache, v, o->block, err);
    if (status == CKD_OK && !first) {
        status = resolves(&second, cache, v, &o->other, err);
    }
    if (second) {
        view_block unresolved = *o->block;
        *o->block = o->other;
        o->other = unresolved;
        *changed = true;
    }
    return status;
}

/*
 * Chooses between duplicates. Files may hold a block's values in several records that build on different records. That
 * happens if compaction has rewritten a block while other checkpoints name the old file for something else in it. Takes
 * the first record whose dependencies all exist and form no cycle. This repeats until nothing changes, because a choice
 * may make others possible, but never impossible. So naming more files never makes less readable. Compaction relies on
 * this when it joins the files of two checkpoints.
 */
static ckd_status choose_blocks(view_cache *cache, view *v, ckd_error *err) {
    ckd_status status = CKD_OK;
    /* Set first, because blocks that build on each other in a circle come back here. */
    v->duplicates_resolved = true;
    for (bool changed = v->duplicate_count > 0; changed && status == CKD_OK;) {
        changed = false;
        for (size_t i = 0; i < v->duplicate_count && status == CKD_OK; i++) {
            status = choose_duplicate(&changed, cache, v, &v->duplicates[i], err);
        }
    }
    v->duplicates_resolved = status == CKD_OK;
    return status;
}

ckd_status views_within(const view **out, view_cache *cache, const view *own, const ckd_id *checkpoint,
                        ckd_error *err) {
    const view *root = own->root ? own->root : own;
    *out = root;
    if (id_equal(&root->manifest.checkpoint.id, checkpoint)) {
        return CKD_OK;
    }
    pthread_mutex_lock(&cache->mutex);
    ckd_status status = CKD_OK;
    view *found = find_view(cache, root->serial, checkpoint);
    if (!found) {
        status = open_within(&found, cache, root, checkpoint, err);
        if (status == CKD_OK && !cache->values_only &&
            view_attach_measures(found, CKD_E_CORRUPT, err) == CKD_E_NOMEM) {
            view_close(found);
            status = CKD_E_NOMEM;
        }
        if (status == CKD_OK) {
            status = views_append(cache, found, err);
            if (status != CKD_OK) {
                view_close(found);
            }
        }
    }
    if (status == CKD_OK && !found->duplicates_resolved) {
        status = choose_blocks(cache, found, err);
    }
    pthread_mutex_unlock(&cache->mutex);
    *out = status == CKD_OK ? found : NULL;
    return status;
}

/* ---- roots ---- */

ckd_status views_get(const view **out, view_cache *cache, const ckd_id *checkpoint, ckd_error *err) {
    *out = NULL;
    pthread_mutex_lock(&cache->mutex);
    ckd_status status = CKD_OK;
    view *found = find_view(cache, 0, checkpoint);
    if (!found) {
        status = open_by_id(&found, cache, checkpoint, err);
        if (status == CKD_OK) {
            status = views_append(cache, found, err);
            if (status != CKD_OK) {
                view_close(found);
            }
        }
    }
    pthread_mutex_unlock(&cache->mutex);
    *out = status == CKD_OK ? found : NULL;
    return status;
}

ckd_status views_add(const view **out, view_cache *cache, manifest *m, ckd_error *err) {
    view *v;
    *out = NULL;
    pthread_mutex_lock(&cache->mutex);
    ckd_status status = view_open(&v, cache->store, m, one_like(cache, m), CKD_E_CORRUPT, err);
    if (status == CKD_OK) {
        v->is_draft = true;
        status = view_attach_measures(v, CKD_E_CORRUPT, err);
        THEN(status, views_append(cache, v, err));
        if (status == CKD_OK) {
            *out = v;
        } else {
            view_close(v);
        }
    }
    pthread_mutex_unlock(&cache->mutex);
    return status;
}

void views_drop_materialized(view_cache *cache) {
    cache->use_materialized = false;
    for (size_t i = 0; i < cache->count; i++) {
        view_drop_materialized(cache->views[i]);
    }
}

void views_free(view_cache *cache) {
    for (size_t i = 0; i < cache->count; i++) {
        view_close(cache->views[i]);
    }
    for (size_t i = 0; i < cache->older_count; i++) {
        chunk_close(cache->older[i].chunk);
        free(cache->older[i].checkpoints);
    }
    free(cache->older);
    free(cache->views);
    pthread_mutex_destroy(&cache->mutex);
    memset(cache, 0, sizeof(*cache));
}
