/* Private to base/file_*.c. */
#ifndef BASE_FILE_OP_H
#define BASE_FILE_OP_H

#include <sys/types.h>

#include "base/file.h"

#define FILE_IO_MAX \
    ((size_t)1 << 30) /* bytes per system call; Linux stops at 2 GiB - 4 KiB, other systems earlier */

/*
 * Asks the fault hook. Returns 0 or the errno to fail with. Not for FILE_OP_WRITE, where a negative value is no error.
 */
int file_op_check(file_op step, const char *path);

/* ---- file_pool.c: descriptors of files that are read now and then; thread-safe ---- */
/*
 * open(2), repeated after EINTR. If the process or the system has too many files open, closes the idle descriptors of
 * the pool first. Returns -1 and sets errno.
 */
int file_open_descriptor(const char *path, int flags, mode_t mode);
/* A handle is in use between take or set and release, and keeps its descriptor meanwhile. Initialise with fd = -1. */
typedef struct pool_handle {
    int fd;         /* -1: closed for now */
    unsigned users; /* a handle without users may lose its descriptor any time */
    struct pool_handle *older, *newer;
} pool_handle;
/* Uses the handle's descriptor. Returns false if it has none: the caller opens the file, and calls pool_handle_set. */
bool pool_handle_take(pool_handle *h);
/* Gives the handle a descriptor, and uses it. Closes fd and uses the other if another thread was first. */
void pool_handle_set(pool_handle *h, int fd);
void pool_handle_release(pool_handle *h);
/* Closes the descriptor if there is one, even if somebody uses it. */
void pool_handle_close(pool_handle *h);

#endif
