/*
 * Temporary directories in memory, for programs that make thousands of small files durable. On a disk that
 * would take minutes.
 */
#ifndef TESTS_SUPPORT_SCRATCH_H
#define TESTS_SUPPORT_SCRATCH_H

#include <stdbool.h>

/*
 * Sets TMPDIR to a tmpfs. If the process may mount, the tmpfs is its own, and disappears with it; otherwise
 * it is /dev/shm. If there is neither, TMPDIR is unchanged. Call it from main, before starting threads.
 * scratch_end undoes it.
 */
void scratch_begin(void);
void scratch_end(void);

/*
 * Mounts a tmpfs of `bytes` on the directory, visible only to this process and its children. Returns false if
 * that is not allowed. The process must have no other threads. scratch_unmount or the end of the process
 * undoes it.
 */
bool scratch_mount(const char *directory, unsigned long bytes);
/* Makes it read-only, or writable again. Returns false if that fails. */
bool scratch_remount(const char *directory, bool read_only);
/* Lets it have this many files, those that exist included. Returns false if that fails. */
bool scratch_limit_files(const char *directory, unsigned long files);
void scratch_unmount(const char *directory);

#endif
