/* Bytes of chunk files that are no part of any listed checkpoint. Internal to engine/. */
#ifndef ENGINE_WASTE_H
#define ENGINE_WASTE_H

#include "engine/store/manifest_set.h"

typedef struct chunk_waste {
    uint64_t bytes; /* of the files that listed checkpoints name */
    uint64_t dead;  /* of these bytes, those of checkpoints that are not listed */
} chunk_waste;

/*
 * Counts the files of a run's checkpoints (NULL: of all), from manifests alone. Chosen checkpoints are taken as gone. A file stays whole while a listed checkpoint reads anything in it; a compaction can free
 * dead bytes, unless a checkpoint in the trash names the file, too: then they are not counted. Errors: NOMEM.
 */
ckd_status waste_of(chunk_waste *out, const manifest_set *n, const char *run, ckd_error *err);

/* The bytes of a checkpoint in one of its own files, about: all of it, unless its stored bytes tell that others have a part in its files. */
uint64_t waste_own_part(const manifest *m, size_t file);

#endif
