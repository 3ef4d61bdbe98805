/*
 * The way SQLite reaches the disk: the default VFS behind a thin shim that
 *
 * - asks file_fault_check before every step, so that tests can fail or kill a process inside a catalog commit (which
 *   costs nothing when no hook is set);
 * - keeps the errno of the last failure, which tells a full disk from a broken one;
 * - offers neither shared memory nor memory mapping, so that a database in WAL mode does not open and a truncated file
 *   is an error, not a SIGBUS.
 *
 * One VFS for each handle, registered under a name of its own (never as the default) and gone with it: nothing global.
 * A VFS is used by one thread at a time, as its handle is; making and freeing them is thread-safe.
 */
#ifndef CATALOG_FAULT_VFS_H
#define CATALOG_FAULT_VFS_H

#include "base/error.h"

typedef struct fault_vfs fault_vfs;

/* Errors: NOMEM, IO (SQLite has no VFS). */
ckd_status fault_vfs_new(fault_vfs **out, ckd_error *err);
/* For sqlite3_open_v2; valid as long as the VFS. */
const char *fault_vfs_name(const fault_vfs *vfs);
/* The database that was opened with it must be closed. Accepts NULL. */
void fault_vfs_free(fault_vfs *vfs);

/* errno of the last failed step since fault_vfs_forget, 0 if none. */
int fault_vfs_errno(const fault_vfs *vfs);
void fault_vfs_forget(fault_vfs *vfs);

#endif
