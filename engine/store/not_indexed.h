/*
 * Tensors that the catalog does not have: those of checkpoints that it ingested from their manifests alone, as there were many. Whoever asks for them has
 * them read from the chunk files, and gets what the catalog would say. Internal to engine/.
 */
#ifndef ENGINE_STORE_NOT_INDEXED_H
#define ENGINE_STORE_NOT_INDEXED_H

#include "engine/store/view.h"

/* catalog_ingest.c: what catalog_tensors would tell of this checkpoint. INVALID, NOMEM. */
ckd_status view_fold(ckd_tensor_list *out, const view *v, ckd_error *err);

/* Opens one for asking what it holds, not for loading. views_free must follow, also on failure; under the reader lock. */
ckd_status not_indexed_open(view_cache *cache, const view **out, ckd_store *store, const ckd_id *id,
                            ckd_error *err);
/* Its files are damaged, or the system does not let us read them: nothing is told of its tensors, and nothing fails. */
bool not_indexed_tolerable(ckd_status status);

/*
 * What catalog_tensors would tell if it had been ingested with its tensors. Empty, with a message, if its chunk files cannot be read. Takes the mutex.
 * NOT_FOUND: there is no such checkpoint any more.
 */
ckd_status not_indexed_tensors(ckd_tensor_list *out, ckd_store *store, const ckd_id *id, ckd_error *err);

/* The largest updates of lossy moments, which no catalog has, so that those of before stay as they are. NaN: not known, or the files cannot be read. */
void not_indexed_updates(ckd_tensor_list *list, ckd_store *store, const ckd_id *id);

/* Adds, at most INT64_MAX, which is what a catalog can hold. */
void add_capped(uint64_t *sum, uint64_t value);
/*
 * Adds to roles and by_tensor of a report what `count` of its checkpoints take, by their places in by_checkpoint, ascending. by_run must name all runs. Reads their
 * chunk files with all threads of the store. Takes the mutex.
 */
ckd_status not_indexed_report(ckd_report *r, ckd_store *store, const size_t *places, size_t count,
                              ckd_error *err);

#endif
