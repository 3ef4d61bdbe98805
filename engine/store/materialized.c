/* Copies of blocks in data/k: attaches them to a view, and removes those that are out of date. */
#include "engine/store/view.h"

#include <stdio.h>
#include <stdlib.h>

pathname path_materialized(const char *store, const ckd_id *checkpoint, uint32_t rank, const ckd_id *writer) {
    char hex[CKD_ID_TEXT], owner[CKD_ID_TEXT] = "", name[128];
    ckd_id_text(hex, checkpoint);
    if (writer) {
        ckd_id_text(owner, writer);
    }
    snprintf(name, sizeof(name), "%s.%u.ckd%s%s", hex, (unsigned)rank, writer ? ".tmp-" : "", owner);
    return path_of(store, DIR_MATERIALIZED, name);
}

/* The block whose values a record of a copy has; NULL if the checkpoint has none. */
static view_block *block_of(const view *v, const record *r) {
    const view_tensor *t = view_find(v, r->tensor->name);
    region_span place = {r->region, r->first, r->count};
    for (size_t s = 0; t && s < t->shard_count; s++) {
        size_t first, end;
        if (!region_equal(t->shards[s].region, r->region, t->shape->ndim)) {
            continue;
        }
        view_shard_range(&first, &end, &t->shards[s], t->shape, &place);
        for (size_t i = first; i < end; i++) {
            const view_block *b = &t->shards[s].blocks[i];
            if (b->record->first == r->first && b->record->count == r->count) {
                return &v->blocks[b - v->blocks];
            }
        }
    }
    return NULL;
}

static bool usable(const view *v, const record *r) {
    return r->kind == RECORD_BLOCK && r->predictor == PREDICT_NONE &&
           id_equal(&r->tensor->checkpoint, &v->manifest.checkpoint.id);
}

ckd_status materialized_attach(view *v, const char *store_path, ckd_error *err) {
    v->materialized_chunks = calloc(v->chunk_count + 1, sizeof(chunk *));
    if (!v->materialized_chunks) {
        return err_nomem(err, v->chunk_count * sizeof(chunk *), "materialized copies");
    }
    for (size_t i = 0; i < v->manifest.own_count; i++) {
        pathname p =
            path_materialized(store_path, &v->manifest.checkpoint.id, v->manifest.files[i].rank, NULL);
        chunk *c;
        if (chunk_open(&c, p.text, NULL) != CKD_OK) {
            continue; /* missing, torn or damaged: the blocks themselves are used */
        }
        v->materialized_chunks[v->materialized_count++] = c;
        for (size_t k = 0; k < c->record_count; k++) {
            const record *r = &c->records[k];
            view_block *b = usable(v, r) ? block_of(v, r) : NULL;
            if (b && hash128_equal(&b->record->content, &r->content) && b->record->raw_size == r->raw_size) {
                b->materialized = r;
                b->materialized_chunk = c;
            }
        }
    }
    return CKD_OK;
}

/* A temporary copy belongs to a writer while the writer's intent exists. */
static bool abandoned(const ckd_store *store, const char *name) {
    const char *temporary = strstr(name, ".tmp-");
    ckd_id writer;
    return temporary && (strlen(temporary + 5) != CKD_ID_TEXT - 1 || !id_parse(&writer, temporary + 5) ||
                         !file_exists(path_intent(store->path, &writer).text));
}

static bool outdated(ckd_store *store, const ckd_id *id) {
    ckd_checkpoint own, newest;
    ckd_status status = catalog_find_id(&own, store->catalog, id, NULL);
    THEN(status, catalog_newest(&newest, store->catalog, own.run, UINT64_MAX, NULL));
    return status == CKD_E_NOT_FOUND || (status == CKD_OK && !id_equal(&newest.id, id));
}

void materialized_evict(ckd_store *store) {
    dir_list list;
    if (!store->catalog ||
        dir_list_read(&list, path_in(store->path, DIR_MATERIALIZED).text, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < list.count; i++) {
        ckd_id id;
        bool temporary = strstr(list.names[i], ".tmp-") != NULL;
        bool named_by_id = strlen(list.names[i]) >= CKD_ID_TEXT && id_parse(&id, list.names[i]);
        if (temporary ? abandoned(store, list.names[i]) : named_by_id && outdated(store, &id)) {
            file_remove(path_of(store->path, DIR_MATERIALIZED, list.names[i]).text, true, NULL);
        }
    }
    dir_list_free(&list);
}

bool materialized_drop_all(const ckd_store *store) {
    dir_list list;
    bool dropped = false;
    if (dir_list_read(&list, path_in(store->path, DIR_MATERIALIZED).text, NULL) != CKD_OK) {
        return false;
    }
    for (size_t i = 0; i < list.count; i++) {
        pathname p = path_of(store->path, DIR_MATERIALIZED, list.names[i]);
        dropped = file_remove(p.text, false, NULL) == CKD_OK || dropped;
    }
    dir_list_free(&list);
    return dropped;
}
