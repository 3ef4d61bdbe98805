/* Views of several checkpoints, by their ids. */
#include <stdlib.h>

#include "engine/ready.h"
#include "engine/view.h"

void views_init(view_cache *cache, ckd_store *store) {
    memset(cache, 0, sizeof(*cache));
    cache->store = store;
    cache->use_ready = true;
    pthread_mutex_init(&cache->mutex, NULL);
}

/* Among all manifests, those of deleted checkpoints included. */
static ckd_status find_manifest(manifest *out, const ckd_store *store, const ckd_id *id, ckd_error *err) {
    manifest_list all;
    ckd_status status = manifests_read_all(&all, store, err);
    bool found = false;
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < all.count && !found && status != CKD_E_NOMEM;
         i++) { /* the highest generation first */
        const manifest_name *n = &all.items[i];
        status = store_read_manifest(out, store, n->run, n->step, n->generation, NULL);
        found = status == CKD_OK && id_equal(&out->checkpoint.id, id);
        if (status == CKD_OK && !found) {
            manifest_free(out);
        }
    }
    manifests_free(&all);
    if (found) {
        return CKD_OK;
    }
    return status == CKD_E_NOMEM ? err_nomem(err, NOTE_MAX, "a manifest")
                                 : err_set(err, CKD_E_NOT_FOUND, "there is no such checkpoint");
}

/* One in the same file, where compaction has put several checkpoints into one; else any. */
static const view *one_like(const view_cache *cache, const manifest *m) {
    for (size_t i = cache->count; i-- > 0 && m->file_count;) {
        const manifest *other = &cache->views[i]->manifest;
        if (other->file_count && id_equal(&other->files[0].id, &m->files[0].id)) {
            return cache->views[i];
        }
    }
    return cache->count ? cache->views[0] : NULL;
}

static ckd_status open_by_id(view **out, view_cache *cache, const ckd_id *id, ckd_error *err) {
    ckd_store *store = cache->store;
    ckd_checkpoint found;
    manifest m;
    ckd_status status = store_find_id(&found, store, id, err);
    if (status == CKD_OK) {
        status = store_read_manifest(&m, store, found.run, found.step, found.generation, err);
    } else if (status == CKD_E_NOT_FOUND && cache->deleted_too) {
        status = find_manifest(&m, store, id, err);
        found = status == CKD_OK ? m.checkpoint : found;
    }
    if (status == CKD_OK && !id_equal(&m.checkpoint.id, id)) {
        manifest_free(&m);
        return err_set(err, CKD_E_CORRUPT, "%s@%llu is now another checkpoint than the one looked for",
                       found.run, (unsigned long long)found.step);
    }
    if (status == CKD_OK) {
        status = view_open(out, store, &m, one_like(cache, &m), CKD_E_CORRUPT, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    if (!cache->values_only) {
        status = view_attach_measures(*out, CKD_E_CORRUPT, err);
    }
    if (status == CKD_OK && cache->use_ready) {
        status = ready_attach(*out, store->path, err);
    }
    if (status != CKD_OK) {
        view_close(*out);
    }
    return status;
}

static ckd_status views_append(view_cache *cache, view *v, ckd_error *err) {
    if (cache->count == cache->capacity) {
        size_t capacity = cache->capacity ? 2 * cache->capacity : 8;
        view **grown = realloc(cache->views, capacity * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "views");
        }
        cache->views = grown;
        cache->capacity = capacity;
    }
    cache->views[cache->count++] = v;
    return CKD_OK;
}

ckd_status views_get(const view **out, view_cache *cache, const ckd_id *checkpoint, ckd_error *err) {
    *out = NULL;
    pthread_mutex_lock(&cache->mutex);
    ckd_status status = CKD_OK;
    view *found = NULL;
    for (size_t i = 0; i < cache->count && !found; i++) {
        if (id_equal(&cache->views[i]->manifest.checkpoint.id, checkpoint)) {
            found = cache->views[i];
        }
    }
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

void views_drop_ready(view_cache *cache) {
    cache->use_ready = false;
    for (size_t i = 0; i < cache->count; i++) {
        view_drop_ready(cache->views[i]);
    }
}

void views_free(view_cache *cache) {
    for (size_t i = 0; i < cache->count; i++) {
        view_close(cache->views[i]);
    }
    free(cache->views);
    pthread_mutex_destroy(&cache->mutex);
    memset(cache, 0, sizeof(*cache));
}
