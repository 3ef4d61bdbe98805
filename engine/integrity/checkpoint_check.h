/* Whether checkpoints are whole, by manifests and indexes alone. Internal to engine/. */
#ifndef ENGINE_CHECKPOINT_CHECK_H
#define ENGINE_CHECKPOINT_CHECK_H

#include "engine/store/damage.h"

/*
 * The view of a checkpoint that its manifest lists (c, as read from it). NULL: it was deleted meanwhile, or it is damaged, which is noted. The caller holds the
 * reader lock, and not the publish lock. Errors: BUSY, IO, NOMEM.
 */
ckd_status checkpoint_open(const view **out, view_cache *views, const ckd_checkpoint *c, damage_list *damage,
                           ckd_error *err);
/* Records what a load of it would miss (closure.h). No payload is read. Likewise. */
ckd_status checkpoint_check_closure(view_cache *views, const view *v, damage_list *damage, ckd_error *err);

/* Both, for all listed checkpoints. Manifests that cannot be read are the caller's to record. Takes the reader lock. Errors: BUSY, IO, NOMEM. */
ckd_status checkpoints_check_all(ckd_store *store, damage_list *damage, ckd_error *err);

/* Views hold files open: a cache of so many is emptied before the next checkpoint. */
#define CHECKPOINT_VIEWS_MAX 64
void checkpoint_views_begin(view_cache *views,
                            ckd_store *store); /* without materialized copies: the blocks themselves count */
void checkpoint_views_limit(view_cache *views);

#endif
