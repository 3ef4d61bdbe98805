/*
 * The live files of a store: chunk files that a manifest names, whose checkpoint is listed or can still be restored
 * from the trash. Internal to engine/.
 */
#ifndef ENGINE_STORE_LIVE_FILES_H
#define ENGINE_STORE_LIVE_FILES_H

#include "engine/store/damage.h"

typedef struct live_file {
    file_ref file;
    manifest_name name;  /* a checkpoint that needs it: the oldest listed one, if there is one */
    uint64_t created_ns; /* of that checkpoint */
    bool in_trash;       /* no listed checkpoint needs it */
} live_file;

typedef struct live_files {
    live_file *items; /* sorted by id, without duplicates */
    size_t count, capacity;
    dependency_info *dependency_infos;
    size_t dependency_info_count;
    uint64_t bytes;
    bool incomplete; /* a manifest cannot be read, so the files it names are unknown */
} live_files;
/*
 * Lists the live files. Adds unreadable manifests and tombstones to the damage. Release with live_files_free, also
 * after failures. Errors: IO, NOMEM.
 */
ckd_status live_files_read(live_files *out, const ckd_store *store, damage_list *damage, ckd_error *err);
void live_files_free(live_files *f);
/* NULL: the file is not live. */
const live_file *live_files_find(const live_files *f, const ckd_id *id);
/* Names the checkpoint f->name for damage reports. */
void live_file_checkpoint(char out[CHECKPOINT_TEXT], const live_file *f);
/* Whether the file exists and has this size. */
bool live_file_exists(const ckd_store *store, const ckd_id *id, uint64_t size);

#endif
