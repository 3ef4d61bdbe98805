/* Rebuilding files. Internal to engine/. */
#ifndef ENGINE_REPAIR_H
#define ENGINE_REPAIR_H

#include "engine/integrity/parity.h"
#include "engine/store/vanished.h"

/* Where a chunk file is rebuilt: STORE/data/p/HEX.ckd.tmp */
pathname path_rebuilt(const char *store, const ckd_id *file);

/*
 * repair_rebuild.c: rebuilds a member of a group, whatever is left of it, from the others. *possible: it came out as its manifest (`expected`) says, and, if `write`, stands durable at
 * path_rebuilt; else `why` says what is missing, and nothing stands there. Without `write` only what is there is looked at. Errors: those of the pace, NOSPACE, IO, NOMEM.
 */
ckd_status repair_rebuild(bool *possible, const ckd_store *store, const parity_set *s, size_t member,
                          const file_ref *expected, bool write, rate_limiter *p, ckd_error *why,
                          ckd_error *err);

/*
 * repair_manifest.c: writes the manifest of a vanished checkpoint again, as its next generation. *possible: every value of it could be rebuilt, and, if `write`, it is listed again; else `why`
 * says what is missing. Errors: BUSY, NOSPACE, IO, NOMEM.
 */
ckd_status repair_manifest(bool *possible, ckd_store *store, const ckd_checkpoint *known, const vanished *v,
                           const live_files *live, bool write, ckd_error *why, ckd_error *err);

/* repair_catalog.c: CORRUPT, naming the file, if the catalog of this store is damaged; else CKD_OK. */
ckd_status catalog_condition(const ckd_store *store, ckd_error *why);
/* Puts it aside as catalog.db.old, and makes a new one. Errors: as store_rebuild_catalog; BUSY. */
ckd_status repair_catalog(ckd_store *store, ckd_error *err);

/*
 * repair_publish.c: gives a rebuilt file (at `from`, durable) its name; what stands there is kept as *aside (data/q/NAME.TIME, "" if there was nothing). Under the publish
 * lock. Errors: IO, NOSPACE and others of files.
 */
ckd_status repair_publish(pathname *aside, const ckd_store *store, const char *from, const char *dir,
                          const char *name, ckd_error *err);
/* Puts a file aside that nothing can be made of. Likewise. */
ckd_status repair_put_aside(pathname *aside, const ckd_store *store, const char *dir, const char *name,
                            ckd_error *err);
/*
 * Removes a file that is of no use any more. A directory that stands there, which nobody but its maker knows the use of, is put aside. Likewise.
 */
ckd_status repair_remove(const ckd_store *store, const char *dir, const char *name, ckd_error *err);
/* Removes all that was put aside, but for directories that are not empty: IO. */
ckd_status repair_purge(uint64_t *files, uint64_t *file_bytes, const ckd_store *store, ckd_error *err);

#endif
