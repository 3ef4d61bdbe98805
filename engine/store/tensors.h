/* The tensors of checkpoints, read from the indexes of their chunk files. Internal to engine/store. */
#ifndef ENGINE_STORE_TENSORS_H
#define ENGINE_STORE_TENSORS_H

#include "engine/store/view.h"

/*
 * Opens a checkpoint to list its contents, not to load it. The caller must call views_free, also on failure. Under the
 * reader lock.
 */
ckd_status tensors_open(view_cache *cache, const view **out, ckd_store *store, const ckd_id *id,
                        ckd_error *err);
/* Whether its files are damaged or unreadable. Then its tensors are left out, and the query does not fail. */
bool tensors_may_skip(ckd_status status);
/* Sends the message for that. */
void tensors_skip(const ckd_store *store, const ckd_checkpoint *c, const ckd_error *why);

/* Adds, but at most to INT64_MAX. */
void add_capped(uint64_t *sum, uint64_t value);
/*
 * Sets roles and by_tensor of a report, whose by_run must name the runs of by_checkpoint, in the same order. Reads the
 * chunk files with all threads of the store. Takes the mutex.
 */
ckd_status tensors_report(ckd_report *r, ckd_store *store, ckd_error *err);

#endif
