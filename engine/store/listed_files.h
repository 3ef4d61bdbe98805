/*
 * The chunk files that are to be kept whole: those that a manifest names, of checkpoints that are listed, or that can still be taken back from the trash. Internal to
 * engine/.
 */
#ifndef ENGINE_LISTED_FILES_H
#define ENGINE_LISTED_FILES_H

#include "engine/store/damage.h"

typedef struct listed_file {
    note_file file;
    manifest_name name;  /* of a checkpoint that needs it: the oldest of those that are listed, if any is */
    uint64_t created_ns; /* of that */
    bool in_trash;       /* no listed checkpoint needs it */
} listed_file;

typedef struct listed_files {
    listed_file *items; /* each once, by id */
    size_t count, capacity;
    lineage *lineages;
    size_t lineage_count;
    uint64_t bytes;
    bool incomplete; /* a manifest cannot be read: what it needs is not known */
} listed_files;
/* Manifests and tombstones that cannot be read are added to the damage. Release with listed_files_free, also after failures. Errors: IO, NOMEM. */
ckd_status listed_files_read(listed_files *out, const ckd_store *store, damage_list *damage, ckd_error *err);
void listed_files_free(listed_files *f);
/* NULL: no manifest names it. */
const listed_file *listed_files_find(const listed_files *f, const ckd_id *id);
/* How damage names the checkpoint that f->name says. */
void listed_file_checkpoint(char out[CHECKPOINT_TEXT], const listed_file *f);
/* Its size is right as far as its name tells. */
bool listed_file_there(const ckd_store *store, const ckd_id *id, uint64_t size);

#endif
