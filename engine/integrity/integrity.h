/* The interface of engine/integrity/ for other rooms. README.md has an overview. */
#ifndef ENGINE_INTEGRITY_INTEGRITY_H
#define ENGINE_INTEGRITY_INTEGRITY_H

#include "codec/parity/parity.h"
#include "engine/common/common.h"
#include "engine/store/store.h"

/*
 * Parity groups of a store.
 *
 * Invariants:
 *  1. A process that makes, rebuilds or removes parity files holds the parity lock. So a temporary file in data/p
 *     belongs to the lock's holder, or to a process that died. Only parity_remove_useless removes groups without this
 *     lock, if all their members go, or on a full disk; its caller holds the publish lock.
 *  2. Names in data/p change under the publish lock.
 *  3. Nothing depends on a parity file. A rebuilt chunk file is published only if it is the one that its manifest
 *     names, or if that is lost, its group.
 */

/*
 * parity_sets.c: Removes temporary files of processes that died, unless somebody has the parity lock. A file that
 * cannot be removed is left to the next writer that opens the store.
 */
void parity_recover(const ckd_store *store);

/* ---- parity_removal.c ---- */

/* Chunk files of a store, sorted by id. */
typedef struct parity_files {
    const ckd_id *items;
    size_t count;
} parity_files;

/*
 * Removes groups that become useless when the files `removed` are removed on purpose. Members among `remaining` are
 * read first, and get new groups unless their runs are to have no parity. If that is not possible, a message says so.
 * Files that are `ending` stay for now, but only checkpoints name them that nobody can restore; they need no cover.
 * Each list is sorted by id. Unreadable parity files stay. The caller holds the publish lock.
 *
 * Errors: BUSY (members stay that may need new groups, and another process makes parity or repairs; nothing was read or
 * changed), STATE (a file that stays is missing or damaged, and only a group that would go can rebuild it; nothing
 * was changed), IO, NOMEM. With force the file is given up instead of STATE, and a message says so.
 */
ckd_status parity_remove_useless(const ckd_store *store, const parity_files *removed,
                                 const parity_files *remaining, const parity_files *ending, bool force,
                                 ckd_error *err);

/* Rebuilding files. */

/*
 * repair_publish.c: Gives a rebuilt file (at `from`, durable) its name. A file that has this name is kept as *aside
 * (data/q/NAME.TIME; "" if there was none). The caller holds the publish lock. Errors: IO, NOSPACE and others of
 * files.
 */
ckd_status repair_publish(pathname *aside, const ckd_store *store, const char *from, const char *dir,
                          const char *name, ckd_error *err);

#endif
