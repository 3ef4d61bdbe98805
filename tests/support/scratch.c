#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "tests/support/scratch.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "tests/support/tempdir.h"

#define TMPFS_MAGIC   0x01021994
#define SCRATCH_BYTES (1ul << 30)

static char *mounted;

static bool private_mounts(void) {
    static bool done;
    done = done || (unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
    return done;
}

bool scratch_mount(const char *directory, unsigned long bytes) {
    char options[64];
    snprintf(options, sizeof(options), "size=%lu,mode=0700", bytes);
    return private_mounts() && mount("tmpfs", directory, "tmpfs", MS_NODEV | MS_NOSUID, options) == 0;
}

bool scratch_remount(const char *directory, bool read_only) {
    return mount(NULL, directory, NULL, MS_REMOUNT | MS_NODEV | MS_NOSUID | (read_only ? MS_RDONLY : 0ul),
                 NULL) == 0;
}

bool scratch_limit_files(const char *directory, unsigned long files) {
    char options[64];
    snprintf(options, sizeof(options), "nr_inodes=%lu", files);
    return mount(NULL, directory, NULL, MS_REMOUNT | MS_NODEV | MS_NOSUID, options) == 0;
}

void scratch_unmount(const char *directory) {
    (void)umount2(directory, MNT_DETACH);
}

static bool memory_is_writable(const char *directory) {
    struct statfs fs;
    return statfs(directory, &fs) == 0 && fs.f_type == TMPFS_MAGIC && access(directory, W_OK | X_OK) == 0;
}

void scratch_begin(void) {
    mounted = tempdir_create();
    if (scratch_mount(mounted, SCRATCH_BYTES)) {
        setenv("TMPDIR", mounted, 1);
        return;
    }
    tempdir_remove(mounted);
    mounted = NULL;
    if (memory_is_writable("/dev/shm")) {
        setenv("TMPDIR", "/dev/shm", 1);
    }
}

void scratch_end(void) {
    if (mounted) {
        scratch_unmount(mounted);
        tempdir_remove(mounted);
        mounted = NULL;
    }
}
