/* The chunk files that listed checkpoints need, and what depends on what. Internal to engine/. */
#ifndef ENGINE_LISTED_FILES_H
#define ENGINE_LISTED_FILES_H

#include "engine/damage.h"

typedef struct listed_file {
    note_file file;
    manifest_name name;  /* of a checkpoint that needs it: the oldest of them */
    uint64_t created_ns; /* of that */
} listed_file;

typedef struct listed_files {
    listed_file *items; /* each once, by id */
    size_t count, capacity;
    lineage *lineages;
    size_t lineage_count;
    uint64_t bytes;
    bool incomplete; /* a manifest cannot be read: what it needs is not known */
} listed_files;
/* Manifests that cannot be read are added to the damage. Release with listed_files_free, also after failures. Errors: IO, NOMEM. */
ckd_status listed_files_read(listed_files *out, const ckd_store *store, damage_list *damage, ckd_error *err);
void listed_files_free(listed_files *f);
/* NULL: no listed checkpoint needs it. */
const listed_file *listed_files_find(const listed_files *f, const ckd_id *id);
/* Its size is right as far as its name tells. */
bool listed_file_there(const ckd_store *store, const ckd_id *id, uint64_t size);

#endif
