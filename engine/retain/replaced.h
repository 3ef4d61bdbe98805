/* Which generations of listed checkpoints may go because newer ones have replaced them. Internal to engine/retain/. */
#ifndef ENGINE_RETAIN_REPLACED_H
#define ENGINE_RETAIN_REPLACED_H

#include "engine/retain/retain.h"

/* Is there a newest generation with another one below it? Looks at file names alone. */
bool replaced_any(const ckd_store *store);

/*
 * Chooses generations that have been replaced. The files of the newer one must exist. Files that the older generation
 * does not name are read through first, since a compaction may have written them long ago. All files are read if the
 * newer generation names fewer and no new one, or others first. If one is damaged, what it replaced stays, and a
 * message says so. checked NULL: files are not read, and count as intact. The caller holds the publish lock. Errors:
 * IO, NOMEM.
 */
ckd_status replaced_choose(size_t *count, manifest_set *n, const ckd_store *store, checked_files *checked,
                           ckd_error *err);

#endif
