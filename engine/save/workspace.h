/*
 * Memory of a save that the next save of the same store uses again: scratch as large as its blocks and tiles. A
 * session's store keeps it from save to save; others release it with the save. Internal to engine/.
 */
#ifndef ENGINE_SAVE_WORKSPACE_H
#define ENGINE_SAVE_WORKSPACE_H

#include <stdbool.h>
#include <stdint.h>

#include "codec/chunk/record.h"
#include "engine/encode/content_index.h"

struct ckd_save;
struct ckd_store;

typedef struct save_workspace {
    struct columns_cache *columns; /* of lossy parents */
    uint32_t slots;
    struct block_job *jobs;                  /* one for each place in the pipeline */
    struct save_slot *places;                /* of the pipeline */
    struct save_tiles *tiles;                /* of lossy tensors; NULL: none were saved yet */
    struct chunk_scratch *writing, *copying; /* of the chunk file, and of materialized copies */
    content_index dedup_index; /* moves to the save while that has the workspace, as does `arena` */
    record_arena arena;
} save_workspace;

/* Sets the save's jobs and pipeline, with the store's workspace if that is free. Errors: NOMEM. */
ckd_status save_workspace_take(struct ckd_save *save, ckd_error *err);
/*
 * Returns the workspace to the store, if the store keeps one and the save succeeded; else frees it. Called when
 * nobody works on the save any more.
 */
void save_workspace_return(struct ckd_save *save, bool well);
/* in_child: see columns_cache_free. Accepts NULL. */
void save_workspace_free(save_workspace *workspace, bool in_child);

#endif
