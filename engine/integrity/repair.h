/* Rebuilding files. Internal to engine/. */
#ifndef ENGINE_REPAIR_H
#define ENGINE_REPAIR_H

#include "engine/integrity/parity.h"
#include "engine/store/vanished.h"

/* Path at which a chunk file is rebuilt: STORE/data/p/HEX.ckd.tmp */
pathname path_rebuilt(const char *store, const ckd_id *file);

/* A chunk file to rebuild from parity. */
typedef struct rebuild_request {
    const parity_set *set;
    size_t member;            /* its index in the group */
    const file_ref *expected; /* as its manifest names it */
    bool write;               /* false: only looks whether it is possible */
    rate_limiter *limiter;
} rebuild_request;
/*
 * repair_rebuild.c: Rebuilds a member of a group from the other members, and from what is left of it. *possible: the
 * result is the expected file; with `write` it is durable at path_rebuilt. Otherwise *why says what is missing, and
 * there is no file. Errors: those of the rate limiter, NOSPACE, IO, NOMEM.
 */
ckd_status repair_rebuild(bool *possible, const ckd_store *store, const rebuild_request *q, ckd_error *why,
                          ckd_error *err);

/* A vanished checkpoint to list again. */
typedef struct manifest_request {
    const ckd_checkpoint *known; /* what a catalog knew of it */
    const vanished *gone;        /* has the files that no manifest names */
    const live_files *live;
    bool write; /* false: only looks whether it is possible */
} manifest_request;
/*
 * repair_manifest.c: Writes the manifest of a vanished checkpoint again, as its next generation. *possible: every
 * value of it could be rebuilt; with `write` the checkpoint is listed again. Otherwise *why says what is missing.
 * Errors: BUSY, NOSPACE, IO, NOMEM.
 */
ckd_status repair_manifest(bool *possible, ckd_store *store, const manifest_request *q, ckd_error *why,
                           ckd_error *err);

/* repair.c: Returns CORRUPT and names the file if the catalog of this store is damaged, otherwise CKD_OK. */
ckd_status catalog_condition(const ckd_store *store, ckd_error *why);

/*
 * repair_publish.c: Gives a rebuilt file (at `from`, durable) its name. A file that has this name is kept as *aside
 * (data/q/NAME.TIME; "" if there was none). The caller holds the publish lock. Errors: IO, NOSPACE and others of
 * files.
 */
ckd_status repair_publish(pathname *aside, const ckd_store *store, const char *from, const char *dir,
                          const char *name, ckd_error *err);
/* Moves an unusable file to data/q. Locks and errors as repair_publish. */
ckd_status repair_put_aside(pathname *aside, const ckd_store *store, const char *dir, const char *name,
                            ckd_error *err);
/*
 * Removes a file that is no longer of use. A directory of that name is moved to data/q instead: only its maker knows
 * what it is for. Locks and errors as repair_publish.
 */
ckd_status repair_remove(const ckd_store *store, const char *dir, const char *name, ckd_error *err);
/*
 * Removes everything from data/q, except records by which a checkpoint may still come back. Errors: IO (a directory
 * is not empty), those of files.
 */
ckd_status repair_purge(uint64_t *files, uint64_t *file_bytes, const ckd_store *store, ckd_error *err);

#endif
