/*
 * The chunk files that are to be kept whole: those that a manifest names, of checkpoints that are listed, or that can still be taken back from the trash. Internal to
 * engine/.
 */
#ifndef ENGINE_STORE_LIVE_FILES_H
#define ENGINE_STORE_LIVE_FILES_H

#include "engine/store/damage.h"

typedef struct live_file {
    file_ref file;
    manifest_name name;  /* of a checkpoint that needs it: the oldest of those that are listed, if any is */
    uint64_t created_ns; /* of that */
    bool in_trash;       /* no listed checkpoint needs it */
} live_file;

typedef struct live_files {
    live_file *items; /* each once, by id */
    size_t count, capacity;
    dependency_info *dependency_infos;
    size_t dependency_info_count;
    uint64_t bytes;
    bool incomplete; /* a manifest cannot be read: what it needs is not known */
} live_files;
/* Manifests and tombstones that cannot be read are added to the damage. Release with live_files_free, also after failures. Errors: IO, NOMEM. */
ckd_status live_files_read(live_files *out, const ckd_store *store, damage_list *damage, ckd_error *err);
void live_files_free(live_files *f);
/* NULL: no manifest names it. */
const live_file *live_files_find(const live_files *f, const ckd_id *id);
/* How damage names the checkpoint that f->name says. */
void live_file_checkpoint(char out[CHECKPOINT_TEXT], const live_file *f);
/* Its size is right as far as its name tells. */
bool live_file_exists(const ckd_store *store, const ckd_id *id, uint64_t size);

#endif
