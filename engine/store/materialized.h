/*
 * Materialized copies: blocks of a run's newest checkpoint once more, coded on their own, so that a restart and the next save
 * need not walk their chains. Evictable: in data/k, named by the checkpoint, written without syncing, removed when the next
 * checkpoint of the run has its own, or when a save needs their room. Nothing depends on them, any of them may be missing or damaged, and a reader uses a copy only if
 * its content hash is that of the block it stands for. Internal to engine/.
 */
#ifndef ENGINE_STORE_MATERIALIZED_H
#define ENGINE_STORE_MATERIALIZED_H

#include "engine/store/view.h"

/* STORE/data/k/CHECKPOINT.RANK.ckd, or its temporary name while `writer` writes it (NULL: the final one). */
pathname path_materialized(const char *store, const ckd_id *checkpoint, uint32_t rank, const ckd_id *writer);

/* Lets the view's blocks know their materialized copies, as far as there are any. Errors: NOMEM. */
ckd_status materialized_attach(view *v, const char *store_path, ckd_error *err);

/*
 * Removes the copies of checkpoints that are no longer the newest of their run or not in the catalog, and what dead
 * writers left. Under the publish lock and the store's mutex.
 */
void materialized_evict(ckd_store *store);

/*
 * Removes all copies, also those being made: whoever makes or reads one can do without. No lock is needed. Returns whether
 * there were any. The room of those that a view has open is only free once that is told: views_drop_materialized.
 */
bool materialized_drop_all(ckd_store *store);

#endif
