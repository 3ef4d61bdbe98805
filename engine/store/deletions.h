/*
 * The store's deletion mark: a random id in data/deletions that every deletion replaces before it makes a tombstone.
 * Internal to engine/.
 *
 * A catalog records the mark when it is in step with the manifests. While both are equal, no deletion has begun since.
 * Then a row without a manifest and a tombstone means a loss. If they differ, the catalog is older than some deletion
 * and the row proves nothing, as its checkpoint may have been deleted.
 */
#ifndef ENGINE_DELETIONS_H
#define ENGINE_DELETIONS_H

#include "engine/store/store.h"

#define DELETIONS_META "deletions" /* key in the catalog's table meta */

/*
 * Reads the mark, in the form that the catalog records. "": it is missing or unreadable, and then no catalog counts as
 * current.
 */
void deletions_mark(char out[CATALOG_META], const ckd_store *store);

/* Replaces the mark durably. Under the publish lock. Errors: IO, NOSPACE, NOMEM. */
ckd_status deletions_begin(const ckd_store *store, ckd_error *err);

/*
 * Whether no deletion has begun since a catalog recorded `noted`. The caller has read, in this order: the mark, the
 * rows, the names of manifests and tombstones.
 */
bool deletions_none_since(const char noted[CATALOG_META], const ckd_store *store);

#endif
