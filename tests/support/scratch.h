/* Temporary directories in memory, for programs that make thousands of small files durable: a disk would take minutes. */
#ifndef TESTS_SUPPORT_SCRATCH_H
#define TESTS_SUPPORT_SCRATCH_H

#include <stdbool.h>

/*
 * Sets TMPDIR to a tmpfs: one of this process alone if it may mount (it is gone with the process, whatever happens), else
 * /dev/shm. Where there is neither, TMPDIR stays. For main, before there are threads; scratch_end undoes it.
 */
void scratch_begin(void);
void scratch_end(void);

/*
 * Mounts a tmpfs of `bytes` on the directory, visible to this process and its children only. false where that is not
 * allowed. Not for a process with threads. Undone by scratch_unmount, or the end of the process.
 */
bool scratch_mount(const char *directory, unsigned long bytes);
/* From now on read-only, or writable again. false if that cannot be done. */
bool scratch_remount(const char *directory, bool read_only);
void scratch_unmount(const char *directory);

#endif
