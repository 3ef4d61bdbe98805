/*
 * Temporary names beside outputs. Their writers lock them, so that others know which ones belong to killed processes.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli/files/files.h"

#define NAME_ROOM 200 /* bytes of NAME in the temporary name; names have at most 255 */
#define ATTEMPTS  100

/* Splits a path without trailing slashes: returns its last name, and the length of what precedes it. */
static const char *split(int *above, const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    *above = (int)(name - path);
    return name;
}

/*
 * Locks an open file or folder, without waiting. Returns 0 or an errno. EWOULDBLOCK: another process holds the lock, or
 * held it before and has removed or renamed the file.
 */
static int lock_named(int fd, const char *path) {
    struct stat held, named;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        return errno;
    }
    if (fstat(fd, &held) != 0 || lstat(path, &named) != 0) {
        return errno == ENOENT ? EWOULDBLOCK : errno;
    }
    return held.st_dev == named.st_dev && held.st_ino == named.st_ino ? 0 : EWOULDBLOCK;
}

/* Returns 0, or an errno. EEXIST: the name is taken. */
static int create_locked(int *fd, const char *path, mode_t mode) {
    bool folder = S_ISDIR(mode);
    mode &= 0777;
    if (folder && mkdir(path, mode) != 0) {
        return errno;
    }
    *fd =
        open(path,
             folder ? O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC : O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC,
             mode);
    if (*fd < 0) {
        int failed = errno;
        if (folder) {
            rmdir(path);
        }
        return failed;
    }
    /* If this file system has no locks, nobody else will take the file for abandoned either. */
    if (lock_named(*fd, path) != EWOULDBLOCK) {
        return 0;
    }
    close(*fd);
    *fd = -1;
    return EEXIST; /* between its creation and the lock, another process took it for abandoned */
}

ckd_status cli_temporary_create(char **name, int *fd, const char *path, const char *kind, mode_t mode,
                                ckd_error *err) {
    int above, failed = EEXIST;
    const char *last = split(&above, path);
    size_t size = (size_t)above + NAME_ROOM + 64;
    *fd = -1;
    *name = malloc(size);
    if (!*name) {
        return cli_error_nomem(err);
    }
    /* A process in another container may have the same number, so try several names. */
    for (int attempt = 0; attempt < ATTEMPTS && failed == EEXIST; attempt++) {
        snprintf(*name, size, "%.*s.%.*s.%s-%ld-%d", above, path, NAME_ROOM, last, kind, (long)getpid(),
                 attempt);
        failed = create_locked(fd, *name, mode);
    }
    if (failed) {
        cli_error_sys(err, failed, *name, "cannot create a %s for the output",
                      S_ISDIR(mode) ? "folder" : "file");
        free(*name);
        *name = NULL;
        return err->status;
    }
    return CKD_OK;
}

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *place) {
    (void)st;
    (void)kind;
    (void)place;
    remove(path);
    return 0;
}

void cli_remove_folder(const char *path) {
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* Removes a file or folder unless its writer has locked it, or it changed less than min_age seconds ago. */
static void remove_if_abandoned(const char *path, bool folder, int min_age) {
    int fd = open(path, (folder ? O_RDONLY | O_DIRECTORY : O_RDWR | O_NONBLOCK) | O_NOFOLLOW | O_CLOEXEC);
    struct stat st;
    if (fd < 0) {
        return;
    }
    if (lock_named(fd, path) == 0 && fstat(fd, &st) == 0 && (folder || S_ISREG(st.st_mode)) &&
        (min_age == 0 || time(NULL) - st.st_mtime > min_age)) {
        if (folder) {
            cli_remove_folder(path);
        } else {
            unlink(path);
        }
    }
    close(fd);
}

void cli_temporaries_remove(const char *path, bool folders, int min_age) {
    int above;
    const char *last = split(&above, path);
    char prefix[NAME_ROOM + 16], *found;
    int length = snprintf(prefix, sizeof(prefix), ".%.*s.tmp-", NAME_ROOM, last);
    char *folder = above ? strndup(path, (size_t)above) : strdup("./");
    DIR *dir = folder ? opendir(folder) : NULL;
    const struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        const char *number = entry->d_name + length;
        if (strncmp(entry->d_name, prefix, (size_t)length) != 0 || !*number ||
            number[strspn(number, "0123456789-")] || asprintf(&found, "%s%s", folder, entry->d_name) < 0) {
            continue;
        }
        remove_if_abandoned(found, folders, min_age);
        free(found);
    }
    if (dir) {
        closedir(dir);
    }
    free(folder);
}
