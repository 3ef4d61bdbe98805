#include "engine/save/save_kit.h"

#include <stdlib.h>
#include <unistd.h>

#include "engine/save/save_lossy.h"

void save_kit_free(save_kit *kit, bool in_child) {
    if (!kit) {
        return;
    }
    for (uint32_t i = 0; i < kit->slots; i++) {
        if (kit->jobs) {
            block_job_free(&kit->jobs[i]);
        }
        if (kit->places) {
            save_append_free(&kit->places[i].append);
        }
    }
    free(kit->jobs);
    free(kit->places);
    save_tiles_free(kit->tiles);
    chunk_room_free(kit->writing);
    chunk_room_free(kit->copying);
    content_index_free(&kit->known);
    arena_free(&kit->arena);
    if (kit->columns) {
        columns_cache_free(kit->columns, in_child);
    }
    free(kit->columns);
    free(kit);
}

static ckd_status make(save_kit **out, uint32_t slots, ckd_error *err) {
    save_kit *kit = *out = calloc(1, sizeof(*kit));
    if (!kit) {
        return err_nomem(err, sizeof(*kit), "block jobs");
    }
    kit->columns = calloc(1, sizeof(*kit->columns));
    if (kit->columns) {
        columns_cache_init(kit->columns);
    }
    kit->jobs = calloc(slots, sizeof(*kit->jobs));
    kit->places = calloc(slots, sizeof(*kit->places));
    kit->writing = chunk_room_create();
    kit->copying = chunk_room_create();
    if (!kit->columns || !kit->jobs || !kit->places || !kit->writing || !kit->copying) {
        return err_nomem(err, slots * sizeof(*kit->jobs), "block jobs");
    }
    ckd_status status = CKD_OK;
    while (kit->slots < slots && status == CKD_OK) {
        status = block_job_init(&kit->jobs[kit->slots++], kit->columns, err);
    }
    return status;
}

ckd_status save_kit_take(ckd_save *save, ckd_error *err) {
    ckd_store *store = save->store;
    save->job_count = pool_threads(store->pool);
    pthread_mutex_lock(&store->mutex);
    save_kit *kit = store->kit;
    store->kit = NULL;
    pthread_mutex_unlock(&store->mutex);
    ckd_status status = kit ? CKD_OK : make(&kit, pipeline_slots(save->job_count), err);
    save->kit = kit;
    if (status != CKD_OK) {
        return status;
    }
    save->jobs = kit->jobs;
    content_index_clear(&kit->known);
    arena_clear(&kit->arena);
    save->known = kit->known;
    save->arena = kit->arena;
    kit->known = (content_index){0};
    kit->arena = (record_arena){0};
    return pipeline_init(&save->pipeline, kit->places, kit->slots, err);
}

void save_kit_leave(ckd_save *save, bool well) {
    ckd_store *store = save->store;
    save_kit *kit = save->kit;
    bool in_child = save->process != getpid();
    pipeline_free(&save->pipeline, in_child);
    save_lossy_free(save);
    save->kit = NULL;
    save->jobs = NULL;
    if (!kit || !well || !store->keeps_kit) {
        save_kit_free(kit, in_child);
        return;
    }
    kit->known = save->known;
    kit->arena = save->arena;
    save->known = (content_index){0};
    save->arena = (record_arena){0};
    pthread_mutex_lock(&store->mutex);
    save_kit *other = store->kit;
    store->kit = kit;
    pthread_mutex_unlock(&store->mutex);
    save_kit_free(other, false);
}
