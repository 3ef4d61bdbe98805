#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "tests/support/tempdir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

#define PREFIX  "ckptdelta-test-"
#define DEEPEST 200

static _Noreturn void give_up(const char *what, const char *path) {
    fprintf(stderr, "tempdir: cannot %s %s: %s\n", what, path, strerror(errno));
    abort();
}

char *tempdir_create(void) {
    const char *root = getenv("TMPDIR");
    char *whole = realpath(root != NULL && root[0] != '\0' ? root : "/tmp", NULL);
    if (whole == NULL) {
        give_up("find", root != NULL ? root : "/tmp");
    }
    char *path = NULL;
    if (asprintf(&path, "%s/" PREFIX "XXXXXX", whole) < 0) {
        give_up("make a path below", whole);
    }
    free(whole);
    if (mkdtemp(path) == NULL) {
        give_up("create", path);
    }
    return path;
}

/*
 * A lock that nobody released would stop the next process that writes to the store. The teardown then fails, beside the
 * test itself if that failed.
 */
static _Thread_local bool still_locked;

static void check_unlocked(int dir, const char *name) {
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    bool is_lock = strcmp(name, "lock") == 0 || strcmp(name, "readers") == 0;
    int fd = is_lock ? openat(dir, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC) : -1;
    if (fd >= 0 && fcntl(fd, F_OFD_SETLK, &range) != 0 && (errno == EAGAIN || errno == EACCES)) {
        fprintf(stderr, "tempdir: %s is still locked\n", name);
        still_locked = true;
    }
    if (fd >= 0) {
        close(fd);
    }
}

static void empty_directory(int fd, dev_t device, int depth);

static void remove_entry(int dir, const char *name, dev_t device, int depth) {
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        give_up("look at", name);
    }
    if (!S_ISDIR(st.st_mode)) {
        if (S_ISREG(st.st_mode)) {
            check_unlocked(dir, name);
        }
        if (unlinkat(dir, name, 0) != 0) {
            give_up("remove", name);
        }
        return;
    }
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        give_up("open", name);
    }
    if (st.st_dev != device || depth >= DEEPEST) {
        errno = st.st_dev != device ? EXDEV : ELOOP;
        give_up("clear", name);
    }
    empty_directory(fd, device, depth + 1);
    if (unlinkat(dir, name, AT_REMOVEDIR) != 0) {
        give_up("remove", name);
    }
}

/* Removes the contents of a directory, and closes its descriptor. */
static void empty_directory(int fd, dev_t device, int depth) {
    (void)fchmod(fd, 0700); /* a test may have removed the write permission */
    DIR *stream = fdopendir(fd);
    if (stream == NULL) {
        give_up("read", "a directory");
    }
    struct dirent *entry;
    while ((entry = readdir(stream)) != NULL) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            remove_entry(fd, entry->d_name, device, depth);
        }
    }
    closedir(stream);
}

void tempdir_remove(char *path) {
    if (path == NULL) {
        return;
    }
    const char *slash = strrchr(path, '/');
    if (path[0] != '/' || strncmp(slash + 1, PREFIX, strlen(PREFIX)) != 0 ||
        strlen(slash + 1) != strlen(PREFIX) + 6) {
        errno = EINVAL;
        give_up("remove what is no temporary directory,", path);
    }
    struct stat st;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        give_up("open", path);
    }
    empty_directory(fd, st.st_dev, 0);
    if (rmdir(path) != 0) {
        give_up("remove", path);
    }
    free(path);
}

int tempdir_setup(void **state) {
    *state = tempdir_create();
    return 0;
}

int tempdir_teardown(void **state) {
    file_set_fault_hook(NULL, NULL);
    still_locked = false;
    tempdir_remove(*state);
    return still_locked ? -1 : 0;
}
