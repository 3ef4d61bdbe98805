/*
 * Checks that a load of a checkpoint would find all its records, without reading payloads. A checkpoint that is deleted
 * meanwhile is not damage.
 */
#include "engine/integrity/checkpoint_check.h"

#include "engine/store/store.h"

void checkpoint_views_begin(view_cache *views, ckd_store *store) {
    views_init(views, store);
    views->use_materialized = false;
}

void checkpoint_views_limit(view_cache *views) {
    if (views_are_many(views, CHECKPOINT_VIEWS_MAX)) {
        ckd_store *store = views->store;
        views_free(views);
        checkpoint_views_begin(views, store);
    }
}

/*
 * Was the checkpoint deleted since the manifests were listed? A deletion is no damage. The reader lock keeps its
 * files, so its manifest and tombstone still exist.
 */
static ckd_status was_deleted(bool *out, const ckd_store *store, const ckd_checkpoint *c, ckd_error *err) {
    manifest_list tombstones = {0};
    manifest_name name = {.step = c->step, .generation = c->generation};
    memcpy(name.run, c->run, sizeof(name.run));
    ckd_status status = manifests_tombstones(&tombstones, store, err);
    *out = status == CKD_OK && manifests_covering_tombstone(&tombstones, &name);
    manifests_free(&tombstones);
    return status;
}

/* A writer's catalog gets other processes' saves only when it is refreshed. A reader has looked at the manifests. */
static ckd_status get_view(const view **out, view_cache *views, const ckd_id *id, ckd_error *err) {
    ckd_status status = views_get(out, views, id, err);
    if (status != CKD_E_NOT_FOUND || views->store->mode == CKD_OPEN_READ) {
        return status;
    }
    status = store_refresh_catalog(views->store, err);
    return status == CKD_OK ? views_get(out, views, id, err) : status;
}

/*
 * Gets a view of a listed checkpoint; none if it was deleted meanwhile. A deletion may be undone between the look at
 * the catalog and the look at the tombstones. The catalog then has the checkpoint again, so it is queried again.
 */
static ckd_status get_listed(const view **out, view_cache *views, const ckd_checkpoint *c, ckd_error *why) {
    enum { TRIES = 3 };
    ckd_status status = get_view(out, views, &c->id, why);
    for (int i = 1; i < TRIES && status == CKD_E_NOT_FOUND; i++) {
        bool deleted;
        ckd_status looked = was_deleted(&deleted, views->store, c, why);
        if (looked != CKD_OK || deleted) {
            *out = NULL;
            return looked;
        }
        status = get_view(out, views, &c->id, why);
    }
    return status;
}

ckd_status checkpoint_open(const view **out, view_cache *views, const ckd_checkpoint *c, damage_list *damage,
                           ckd_error *err) {
    char checkpoint[CHECKPOINT_TEXT];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = get_listed(out, views, c, &why);
    if (status == CKD_OK) {
        return CKD_OK;
    }
    *out = NULL;
    if (status == CKD_E_NOT_FOUND) {
        status = err_corrupt(&why, path_manifest(views->store->path, c->run, c->step, c->generation).text,
                             CKD_NO_OFFSET,
                             "it cannot be listed: it is inconsistent, or another checkpoint has its id");
    }
    checkpoint_text(checkpoint, c->run, c->step, false);
    return damage_record(damage, status, &why, CKD_NO_OFFSET, checkpoint, err);
}

ckd_status checkpoint_check_closure(view_cache *views, const view *v, damage_list *damage, ckd_error *err) {
    const ckd_checkpoint *c = &v->manifest.checkpoint;
    char checkpoint[CHECKPOINT_TEXT];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = closure_visit(views, v, NULL, NULL, &why);
    checkpoint_text(checkpoint, c->run, c->step, false);
    return damage_record(damage, status, &why, CKD_NO_OFFSET, checkpoint, err);
}

static ckd_status check_one(view_cache *views, const manifest_name *name, damage_list *damage,
                            ckd_error *err) {
    manifest m;
    const view *v = NULL;
    ckd_error why = {0};
    ckd_status status = store_read_manifest(&m, views->store, name->run, name->step, name->generation, &why);
    if (status != CKD_OK) {
        return status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
    }
    status = checkpoint_open(&v, views, &m.checkpoint, damage, err);
    manifest_free(&m);
    return status == CKD_OK && v ? checkpoint_check_closure(views, v, damage, err) : status;
}

ckd_status checkpoints_check_all(ckd_store *store, damage_list *damage, ckd_error *err) {
    manifest_list list = {0};
    view_cache views;
    file_lock *lock;
    ckd_status status = store_lock_reader(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    checkpoint_views_begin(&views, store);
    status = manifests_read(&list, store, err);
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        if (i == 0 || !same_checkpoint_name(&list.items[i - 1], &list.items[i])) {
            checkpoint_views_limit(&views);
            status = check_one(&views, &list.items[i], damage, err);
        }
    }
    manifests_free(&list);
    views_free(&views);
    lock_release(lock);
    return status;
}
