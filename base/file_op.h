/* Private to base/file_*.c. */
#ifndef BASE_FILE_OP_H
#define BASE_FILE_OP_H

#include <sys/types.h>

#include "base/file.h"

#define FILE_IO_MAX \
    ((size_t)1 << 30) /* bytes per system call; Linux stops at 2 GiB - 4 KiB, other systems earlier */

/*
 * Asks the fault hook. Returns 0 or the errno to fail with; a negative value of the hook becomes EIO, so this function
 * does not simulate short writes.
 */
int file_op_check(file_op step, const char *path);

/* ---- file_mount.c ---- */
/* The mount that serves a path. NULL: none does, as for all paths that are not below a mount. */
typedef struct mounted {
    const file_mount *mount;
    const char *name; /* the end of the path, relative to the mount's root */
    mount_kind kind;  /* MOUNT_LOCAL without a mount */
} mounted;
mounted mount_of(const char *path);
/* Syncs the directory of a path. */
ckd_status file_sync_parent(const char *path, ckd_error *err);
/* Moves or links between names of which at least one is not local. */
ckd_status mount_rename(const char *from, const char *to, bool replaces, ckd_error *err);
ckd_status mount_link(const char *from, const char *to, ckd_error *err);

/* ---- file_pool.c: descriptors of files that are read occasionally; thread-safe ---- */
/*
 * open(2), repeated after EINTR. If the process or the system has too many files open, closes the idle descriptors of
 * the pool first. Returns -1 and sets errno.
 */
int file_open_descriptor(const char *path, int flags, mode_t mode);
/* A handle is in use, and keeps its descriptor, from take or set until release. Initialise with fd = -1. */
typedef struct pool_handle {
    int fd;         /* -1: closed for now */
    unsigned users; /* a handle without users may lose its descriptor at any time */
    struct pool_handle *older, *newer;
} pool_handle;
/* Begins to use a handle. Returns false if it is closed: the caller opens the file and calls pool_handle_set. */
bool pool_handle_take(pool_handle *h);
/* Gives the handle a descriptor and begins to use it. If another thread was first, closes fd. */
void pool_handle_set(pool_handle *h, int fd);
void pool_handle_release(pool_handle *h);
/* Closes the descriptor if there is one, even if the handle is in use. */
void pool_handle_close(pool_handle *h);

#endif
