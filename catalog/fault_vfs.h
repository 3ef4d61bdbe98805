/*
 * SQLite's access to the disk: a thin shim around the default VFS. It
 *
 * - asks file_fault_check before every step, so tests can fail or kill a process inside a catalog commit (this costs
 *   nothing if no hook is set);
 * - keeps the errno of the last failure, which distinguishes a full disk from a broken one;
 * - offers neither shared memory nor memory mapping, so a database in WAL mode does not open, and a truncated file is
 *   an error, not a SIGBUS.
 *
 * Each handle has its own VFS under its own name (never the default one), which is freed with the handle: nothing is
 * global. One thread uses a VFS at a time, like its handle. Creating and freeing them is thread-safe.
 */
#ifndef CATALOG_FAULT_VFS_H
#define CATALOG_FAULT_VFS_H

#include "base/error.h"

typedef struct fault_vfs fault_vfs;

/* Errors: NOMEM, IO (SQLite has no VFS). */
ckd_status fault_vfs_new(fault_vfs **out, ckd_error *err);
/* Name for sqlite3_open_v2; valid as long as the VFS. */
const char *fault_vfs_name(const fault_vfs *vfs);
/* Frees the VFS. Its database must be closed. Accepts NULL. */
void fault_vfs_free(fault_vfs *vfs);

/* Returns errno of the last failed step since fault_vfs_forget, 0 if none. */
int fault_vfs_errno(const fault_vfs *vfs);
void fault_vfs_forget(fault_vfs *vfs);

#endif
