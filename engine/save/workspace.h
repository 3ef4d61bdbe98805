/*
 * What a save works with, and the next one of the same store can have: scratch as large as blocks and tiles are. A session's store keeps it from save to save; others
 * release it with the save. Internal to engine/.
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
    struct save_slot *places;                /* of it */
    struct save_tiles *tiles;                /* of lossy tensors; NULL: none were saved yet */
    struct chunk_scratch *writing, *copying; /* of the chunk file, and of materialized copies */
    content_index dedup_index;               /* the save's own while it has the workspace, as is: */
    record_arena arena;
} save_workspace;

/* The save's jobs and pipeline, from the store's workspace if it has one that is free. Errors: NOMEM. */
ckd_status save_workspace_take(struct ckd_save *save, ckd_error *err);
/* Back to the store, if that keeps it and the save has gone well; else released. Nobody is at work on the save. */
void save_workspace_return(struct ckd_save *save, bool well);
/* in_child: see columns_cache_free. Accepts NULL. */
void save_workspace_free(save_workspace *workspace, bool in_child);

#endif
