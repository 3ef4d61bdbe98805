/* Bytes of chunk files that belong to no listed checkpoint. Internal to engine/. */
#ifndef ENGINE_WASTE_H
#define ENGINE_WASTE_H

#include "engine/store/manifest_set.h"

typedef struct chunk_waste {
    uint64_t bytes; /* of the files that listed checkpoints name */
    uint64_t dead;  /* part of `bytes` that belongs to no listed checkpoint */
} chunk_waste;

/*
 * Counts the files of a run's checkpoints (NULL: of all), from manifests alone. Chosen checkpoints count as gone. A
 * file stays whole while a listed checkpoint reads anything in it. A compaction can free its dead bytes, unless a
 * checkpoint in the trash names the file too; then they do not count. Errors: NOMEM.
 */
ckd_status waste_of(chunk_waste *out, const manifest_set *n, const char *run, ckd_error *err);

/*
 * Estimates the bytes of a checkpoint in one of its own files: all of it, unless its stored bytes show that other
 * checkpoints share its files.
 */
uint64_t waste_own_part(const manifest *m, size_t file);

#endif
