/*
 * Hands the memory of a save to the next one, in sessions. The store holds one workspace; a save that finds it taken
 * makes its own.
 */
#include <stdlib.h>
#include <unistd.h>

#include "engine/save/lossy.h"

void save_workspace_free(save_workspace *workspace, bool in_child) {
    if (!workspace) {
        return;
    }
    for (uint32_t i = 0; i < workspace->slots; i++) {
        if (workspace->jobs) {
            block_job_free(&workspace->jobs[i]);
        }
        if (workspace->places) {
            save_append_free(&workspace->places[i].append);
        }
    }
    free(workspace->jobs);
    free(workspace->places);
    save_tiles_free(workspace->tiles);
    chunk_scratch_free(workspace->writing);
    chunk_scratch_free(workspace->copying);
    content_index_free(&workspace->dedup_index);
    arena_free(&workspace->arena);
    if (workspace->columns) {
        columns_cache_free(workspace->columns, in_child);
    }
    free(workspace->columns);
    free(workspace);
}

static ckd_status make(save_workspace **out, uint32_t slots, ckd_error *err) {
    save_workspace *workspace = *out = calloc(1, sizeof(*workspace));
    if (!workspace) {
        return err_nomem(err, sizeof(*workspace), "block jobs");
    }
    workspace->columns = calloc(1, sizeof(*workspace->columns));
    if (workspace->columns) {
        columns_cache_init(workspace->columns);
    }
    workspace->jobs = calloc(slots, sizeof(*workspace->jobs));
    workspace->places = calloc(slots, sizeof(*workspace->places));
    workspace->writing = chunk_scratch_create();
    workspace->copying = chunk_scratch_create();
    if (!workspace->columns || !workspace->jobs || !workspace->places || !workspace->writing ||
        !workspace->copying) {
        return err_nomem(err, slots * sizeof(*workspace->jobs), "block jobs");
    }
    ckd_status status = CKD_OK;
    while (workspace->slots < slots && status == CKD_OK) {
        status = block_job_init(&workspace->jobs[workspace->slots++], workspace->columns, err);
    }
    return status;
}

ckd_status save_workspace_take(ckd_save *save, ckd_error *err) {
    ckd_store *store = save->store;
    save->pipeline.threads = pool_threads(store->pool);
    pthread_mutex_lock(&store->mutex);
    save_workspace *workspace = store->workspace;
    store->workspace = NULL;
    pthread_mutex_unlock(&store->mutex);
    ckd_status status = workspace ? CKD_OK : make(&workspace, pipeline_slots(save->pipeline.threads), err);
    save->pipeline.workspace = workspace;
    if (status != CKD_OK) {
        return status;
    }
    save->pipeline.jobs = workspace->jobs;
    for (uint32_t i = 0; i < workspace->slots; i++) {
        workspace->jobs[i].decoder.views = &save->sources.views;
    }
    content_index_clear(&workspace->dedup_index);
    arena_clear(&workspace->arena);
    save->registry.dedup_index = workspace->dedup_index;
    save->registry.arena = workspace->arena;
    workspace->dedup_index = (content_index){0};
    workspace->arena = (record_arena){0};
    return pipeline_init(&save->pipeline, workspace->places, workspace->slots, err);
}

void save_workspace_return(ckd_save *save, bool reusable) {
    ckd_store *store = save->store;
    save_workspace *workspace = save->pipeline.workspace;
    bool in_child = save->output.process != getpid();
    pipeline_free(&save->pipeline, in_child);
    save_lossy_free(save);
    save->pipeline.workspace = NULL;
    save->pipeline.jobs = NULL;
    if (!workspace || !reusable || !store->keeps_workspace) {
        save_workspace_free(workspace, in_child);
        return;
    }
    workspace->dedup_index = save->registry.dedup_index;
    workspace->arena = save->registry.arena;
    save->registry.dedup_index = (content_index){0};
    save->registry.arena = (record_arena){0};
    pthread_mutex_lock(&store->mutex);
    save_workspace *old = store->workspace;
    store->workspace = workspace;
    pthread_mutex_unlock(&store->mutex);
    save_workspace_free(old, false);
}
