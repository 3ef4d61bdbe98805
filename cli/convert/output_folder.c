#include "cli/convert/convert.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "cli/files/files.h"

#define NAME_ROOM 200 /* bytes of FOLDER in the temporary name; names have at most 255 */
#define ATTEMPTS  100
#define ABANDONED \
    60 /* seconds: a temporary folder that nobody has locked for so long belongs to a dead process */

struct cli_folder {
    char *path, *above, *temporary; /* above: includes its final slash */
    cli_replaceable_fn replaceable;
    int held; /* the temporary folder, locked while its writer lives; -1: none */
};

/* ---- the existing folder ---- */

/* Returns the path without trailing slashes; NULL if out of memory. */
static char *plain_path(const char *path) {
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') {
        length--;
    }
    return strndup(path, length);
}

static bool is_dots(const char *name) {
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/* Returns the parent folder; "./" if the path has no slash. */
static char *folder_above(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? strndup(path, (size_t)(slash + 1 - path)) : strdup("./");
}

/*
 * Finds the first entry that may not be replaced; false if there is none. errno is 0 unless the folder could not be
 * read.
 */
static bool find_foreign(char name[NAME_MAX + 1], const char *path, cli_replaceable_fn replaceable) {
    DIR *dir = opendir(path);
    const struct dirent *entry = NULL;
    bool found = false;
    while (dir && !found && (errno = 0, entry = readdir(dir))) {
        struct stat st;
        bool exists = fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0;
        bool folder = exists && S_ISDIR(st.st_mode), file = exists && S_ISREG(st.st_mode);
        found = !is_dots(entry->d_name) &&
                !(replaceable && (folder || file) && replaceable(entry->d_name, folder));
        if (found) {
            snprintf(name, NAME_MAX + 1, "%s", entry->d_name);
        }
    }
    int failed = dir && (entry || found) ? 0 : errno;
    if (dir) {
        closedir(dir);
    }
    errno = failed;
    return found;
}

static ckd_status check_entries(const char *path, cli_replaceable_fn replaceable, ckd_error *err) {
    char name[NAME_MAX + 1];
    bool found = find_foreign(name, path, replaceable);
    if (errno) {
        return cli_error_sys(err, errno, path, "cannot read the output folder");
    }
    if (found && !replaceable) {
        return cli_error_at(
            err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
            "the output folder is not empty; choose another one, or replace it with --overwrite");
    }
    return found ? cli_error_at(err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
                                "the output folder has '%.200s', which no export has written: it is not "
                                "replaced, not even with --overwrite; choose another one",
                                name)
                 : CKD_OK;
}

ckd_status cli_folder_check(const char *path, cli_replaceable_fn replaceable, ckd_error *err) {
    char *plain = plain_path(path), *above = plain ? folder_above(plain) : NULL;
    struct stat st, outside;
    ckd_status status = above ? CKD_OK : cli_error_nomem(err);
    const char *name = above ? plain + (strrchr(plain, '/') ? strlen(above) : 0) : "";
    if (status == CKD_OK && (!*name || is_dots(name))) {
        status = cli_error(err, CKD_E_INVALID, "the output '%s' is not a name for a folder", path);
    } else if (status == CKD_OK && lstat(plain, &st) != 0) {
        status =
            errno == ENOENT ? CKD_OK : cli_error_sys(err, errno, path, "cannot look at the output folder");
    } else if (status == CKD_OK && !S_ISDIR(st.st_mode)) {
        status = cli_error_at(err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
                              "the output exists and is not a folder; choose another name");
    } else if (status == CKD_OK && (stat(above, &outside) != 0 || outside.st_dev != st.st_dev)) {
        status = cli_error_at(err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
                              "a file system is mounted on the output folder, so it cannot be replaced; name "
                              "a folder inside it");
    } else if (status == CKD_OK) {
        status = check_entries(plain, replaceable, err);
    }
    free(above);
    free(plain);
    return status;
}

/* ---- the temporary folder ---- */

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *place) {
    (void)st;
    (void)kind;
    (void)place;
    remove(path);
    return 0;
}

static void remove_folder(const char *path) {
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* Returns the folder's descriptor if it could be locked; else -1. */
static int hold_folder(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static const char *last_name(const cli_folder *f) {
    return f->path + (strrchr(f->path, '/') ? strlen(f->above) : 0);
}

/* Removes temporary folders of killed processes that wrote to the same path: they are as large as their output. */
static void remove_abandoned(const cli_folder *f) {
    char prefix[NAME_ROOM + 16], *path;
    snprintf(prefix, sizeof(prefix), ".%.*s.tmp-", NAME_ROOM, last_name(f));
    DIR *dir = opendir(f->above);
    const struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        struct stat st;
        if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0 ||
            asprintf(&path, "%s%s", f->above, entry->d_name) < 0) {
            continue;
        }
        int lock = hold_folder(path);
        if (lock >= 0 && fstat(lock, &st) == 0 && time(NULL) - st.st_mtime > ABANDONED) {
            remove_folder(path);
        }
        if (lock >= 0) {
            close(lock);
        }
        free(path);
    }
    if (dir) {
        closedir(dir);
    }
}

/* A process in another container may have the same number, so try several names. */
static ckd_status create_temporary(cli_folder *f, const char *what, ckd_error *err) {
    const char *name = last_name(f);
    size_t size = strlen(f->above) + NAME_ROOM + 64;
    char *temporary = malloc(size);
    if (!temporary) {
        return cli_error_nomem(err);
    }
    int failed = EEXIST;
    for (int attempt = 0; attempt < ATTEMPTS && failed == EEXIST; attempt++) {
        snprintf(temporary, size, "%s.%.*s.%s-%ld-%d", f->above, NAME_ROOM, name, what, (long)getpid(),
                 attempt);
        failed = mkdir(temporary, 0777) == 0 ? 0 : errno;
    }
    if (failed) {
        ckd_status status = cli_error_sys(err, failed, temporary, "cannot create a folder for the output");
        free(temporary);
        return status;
    }
    f->temporary = temporary;
    return CKD_OK;
}

static ckd_status check_room(const cli_folder *f, uint64_t size, ckd_error *err) {
    struct statvfs v;
    if (statvfs(f->above, &v) != 0 || size / v.f_frsize < v.f_bavail) {
        return CKD_OK; /* if unknown, writing will tell */
    }
    return cli_error_at(err, CKD_E_NOSPACE, f->path, CKD_NO_OFFSET,
                        "there is no space for the output of %llu bytes: %llu are free on the file system",
                        (unsigned long long)size, (unsigned long long)v.f_bavail * v.f_frsize);
}

ckd_status cli_folder_open(cli_folder **out, const char *path, cli_replaceable_fn replaceable, uint64_t size,
                           ckd_error *err) {
    *out = NULL;
    cli_folder *f = calloc(1, sizeof(*f));
    if (!f) {
        return cli_error_nomem(err);
    }
    f->replaceable = replaceable;
    f->held = -1;
    f->path = plain_path(path);
    f->above = f->path ? folder_above(f->path) : NULL;
    ckd_status status = f->above ? cli_output_make_folders(f->path, err) : cli_error_nomem(err);
    if (status == CKD_OK) {
        remove_abandoned(f);
        status = check_room(f, size, err);
    }
    THEN(status, create_temporary(f, "tmp", err));
    if (status == CKD_OK) {
        f->held = hold_folder(f->temporary);
    }
    if (status != CKD_OK) {
        cli_folder_drop(f);
        return status;
    }
    *out = f;
    return CKD_OK;
}

char *cli_folder_inside(const cli_folder *f, const char *name, ckd_error *err) {
    char *path;
    if (asprintf(&path, "%s/%s", f->temporary, name) < 0) {
        cli_error_nomem(err);
        return NULL;
    }
    if (cli_output_make_folders(path, err) != CKD_OK) {
        free(path);
        return NULL;
    }
    return path;
}

/* ---- the final name ---- */

/*
 * Moves the folder into place: in one step if the file system can exchange two names. Otherwise the old folder is moved
 * aside first, and back again if the new one cannot take its place. Afterwards `temporary` names the old folder.
 */
static int take_place(cli_folder *f, ckd_error *err) {
    if (renameat2(AT_FDCWD, f->temporary, AT_FDCWD, f->path, RENAME_EXCHANGE) == 0) {
        return 0;
    }
    if (errno != EINVAL && errno != ENOSYS) {
        return errno;
    }
    char *temporary = f->temporary;
    if (create_temporary(f, "old", err) != CKD_OK) {
        return err->sys_errno ? err->sys_errno : ENOMEM;
    }
    int failed = rename(f->path, f->temporary) == 0 ? 0 : errno;
    if (!failed && rename(temporary, f->path) != 0) {
        failed = errno;
        if (rename(f->temporary, f->path) != 0) {
            f->temporary[0] = '\0'; /* leave it aside rather than remove it */
        }
    }
    if (failed) {
        remove_folder(temporary);
    }
    free(temporary);
    return failed;
}

/*
 * rename() replaces only an empty folder. So a folder that another process has just created stays, unless it may be
 * replaced.
 */
static int give_name(cli_folder *f, ckd_error *err) {
    if (rename(f->temporary, f->path) == 0) {
        free(f->temporary);
        f->temporary = NULL;
        return 0;
    }
    if (!f->replaceable || (errno != ENOTEMPTY && errno != EEXIST)) {
        return errno;
    }
    return take_place(f, err);
}

ckd_status cli_folder_commit(cli_folder *f, ckd_error *err) {
    ckd_status status = cli_output_sync_folder(f->temporary, err);
    /* Another process may have created something there meanwhile. */
    THEN(status, cli_folder_check(f->path, f->replaceable, err));
    int failed = status == CKD_OK ? give_name(f, err) : 0;
    if (failed) {
        status = cli_error_sys(err, failed, f->path, "cannot give the output folder its name");
    }
    THEN(status, cli_output_sync_folder(f->above, err));
    cli_folder_drop(f);
    return status;
}

void cli_folder_drop(cli_folder *f) {
    if (!f) {
        return;
    }
    if (f->temporary && f->temporary[0]) {
        remove_folder(f->temporary);
    }
    if (f->held >= 0) {
        close(f->held);
    }
    free(f->path);
    free(f->above);
    free(f->temporary);
    free(f);
}
