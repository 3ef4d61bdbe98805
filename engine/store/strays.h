/* Private to vanished.c, strays.c and recovery.c: chunk files that nothing names, as evidence of lost checkpoints. */
#ifndef ENGINE_STORE_STRAYS_H
#define ENGINE_STORE_STRAYS_H

#include "engine/store/damage.h"

/* `ids`: an array of ckd_id. ids_contain needs it sorted. */
bool ids_contain(const bytes *ids, const ckd_id *id);
void ids_sort(bytes *ids);

/*
 * Adds the ids of the chunk files in data/c. settled: not of young ones in a bucket, which an intent of another machine
 * may name. Errors: IO, NOMEM.
 */
ckd_status strays_list_chunks(bytes *ids, const ckd_store *store, bool settled, ckd_error *err);
/* Adds the checkpoints that a chunk file has records of. Returns false if it exists and cannot be read: then none. */
bool strays_add_recorded(bytes *ids, const ckd_store *store, const ckd_id *file);
/*
 * The same for all chunk files in data/q that can be read: a repair may take them back. False if it cannot be listed.
 */
bool strays_add_aside(bytes *ids, const ckd_store *store);
/*
 * Whether parity covers a chunk file that is missing: a repair may rebuild it, and it may have records of any
 * checkpoint. True if that cannot be told now.
 */
bool strays_may_be_rebuilt(const ckd_store *store);
/*
 * Adds the files and the checkpoints of all manifests: of all generations, and of deleted checkpoints. *complete:
 * cleared if a manifest is unreadable. Errors: IO, NOMEM.
 */
ckd_status strays_add_manifests(bytes *files, bytes *checkpoints, bool *complete, const ckd_store *store,
                                ckd_error *err);

/*
 * Removes chunk files without their final names that no intent names: their writer died, and its intent is gone. Does
 * nothing if an intent is unreadable. Under the publish lock. Errors: IO, NOMEM.
 */
ckd_status strays_remove_unfinished(const ckd_store *store, ckd_error *err);

/* Sets v->strays and v->incomplete, and adds the checkpoints of all manifests, sorted. Errors: IO, NOMEM. */
ckd_status strays_find(vanished *v, bytes *checkpoints, const ckd_store *store, ckd_error *err);
/*
 * Sets `spare` of strays that no checkpoint can need, as long as nothing is lost. Each of their records is of a
 * checkpoint that has a manifest, or is also in a file that a manifest names. checkpoints: as strays_find gave them.
 * Errors: IO, NOMEM.
 */
ckd_status strays_find_spare(vanished *v, const bytes *checkpoints, const ckd_store *store, ckd_error *err);

#endif
