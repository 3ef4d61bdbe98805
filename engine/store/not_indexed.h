/*
 * Checkpoints whose tensors the catalog does not hold, because it ingested them from their manifests alone. Their
 * tensors are read from the chunk files on request, in the form that the catalog would give. Internal to engine/.
 */
#ifndef ENGINE_STORE_NOT_INDEXED_H
#define ENGINE_STORE_NOT_INDEXED_H

#include "engine/store/view.h"

/* catalog_ingest.c: makes the list that catalog_tensors would give for this checkpoint. Errors: INVALID, NOMEM. */
ckd_status view_tensor_list(ckd_tensor_list *out, const view *v, ckd_error *err);

/*
 * Opens a checkpoint to list its contents, not to load it. The caller must call views_free, also on failure. Under the
 * reader lock.
 */
ckd_status not_indexed_open(view_cache *cache, const view **out, ckd_store *store, const ckd_id *id,
                            ckd_error *err);
/* Whether its files are damaged or unreadable. Then its tensors are left out, and the query does not fail. */
bool not_indexed_may_skip(ckd_status status);

/*
 * Makes the list that catalog_tensors would give if the checkpoint were indexed. Empty, with a message, if its chunk
 * files cannot be read. Takes the mutex. Errors: NOT_FOUND (the checkpoint no longer exists), those of reading.
 */
ckd_status not_indexed_tensors(ckd_tensor_list *out, ckd_store *store, const ckd_id *id, ckd_error *err);

/*
 * Sets the largest updates of lossy moments, which no catalog holds, so that old catalogs stay valid. NaN: unknown, or
 * the files cannot be read.
 */
void not_indexed_updates(ckd_tensor_list *list, ckd_store *store, const ckd_id *id);

/* Adds, but at most to INT64_MAX, the catalog's maximum. */
void add_capped(uint64_t *sum, uint64_t value);
/*
 * Adds `count` checkpoints to roles and by_tensor of a report. places: their indexes in by_checkpoint, ascending.
 * by_run must name all runs. Reads their chunk files with all threads of the store. Takes the mutex.
 */
ckd_status not_indexed_report(ckd_report *r, ckd_store *store, const size_t *places, size_t count,
                              ckd_error *err);

#endif
