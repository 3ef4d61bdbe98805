/* Checks whether checkpoints are complete, by manifests and indexes alone. Internal to engine/. */
#ifndef ENGINE_CHECKPOINT_CHECK_H
#define ENGINE_CHECKPOINT_CHECK_H

#include "engine/store/store.h"

/*
 * Opens the view of a checkpoint (c, as its manifest says). *out is NULL if the checkpoint was deleted meanwhile, or
 * is damaged; damage is recorded. The caller holds the reader lock, and not the publish lock. Errors: BUSY, IO,
 * NOMEM.
 */
ckd_status checkpoint_open(const view **out, view_cache *views, const ckd_checkpoint *c, damage_list *damage,
                           ckd_error *err);
/*
 * Records what a load of the checkpoint would miss (view.h). Reads no payload. Locks and errors as
 * checkpoint_open.
 */
ckd_status checkpoint_check_closure(view_cache *views, const view *v, damage_list *damage, ckd_error *err);

/*
 * Does both for all listed checkpoints. The caller records manifests that cannot be read. Takes the reader lock.
 * Errors: BUSY, IO, NOMEM.
 */
ckd_status checkpoints_check_all(ckd_store *store, damage_list *damage, ckd_error *err);

/* Views hold files open. A cache with more views than this is emptied before the next checkpoint. */
#define CHECKPOINT_VIEWS_MAX 64
/* Initialises a cache that ignores materialized copies, as the blocks themselves must be checked. */
void checkpoint_views_begin(view_cache *views, ckd_store *store);
void checkpoint_views_limit(view_cache *views);

#endif
