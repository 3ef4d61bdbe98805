/*
 * Materialized copies: blocks of a run's newest checkpoint stored once more, coded on their own, so that a restart and
 * the next save need not walk their chains. They lie in data/k, named by the checkpoint, and are written without
 * syncing. They are removed when the run's next checkpoint has its own, or when a save needs their space. Nothing
 * depends on them, and any may be missing or damaged. A reader uses a copy only if its content hash is that of the
 * block. Internal to engine/.
 */
#ifndef ENGINE_STORE_MATERIALIZED_H
#define ENGINE_STORE_MATERIALIZED_H

#include "engine/store/view.h"

/* STORE/data/k/CHECKPOINT.RANK.ckd. writer: gives its temporary name instead; NULL: the final name. */
pathname path_materialized(const char *store, const ckd_id *checkpoint, uint32_t rank, const ckd_id *writer);

/* Attaches the materialized copies that exist to the view's blocks. Errors: NOMEM. */
ckd_status materialized_attach(view *v, const char *store_path, ckd_error *err);

/*
 * Removes copies of checkpoints that are no longer the newest of their run or not in the catalog, and leftovers of dead
 * writers. Under the publish lock and the store's mutex.
 */
void materialized_evict(ckd_store *store);

/*
 * Removes all copies, also those being written, as nobody depends on them. Needs no lock. Returns whether there were
 * any. Space of copies that a view has open is freed only after views_drop_materialized.
 */
bool materialized_drop_all(ckd_store *store);

#endif
