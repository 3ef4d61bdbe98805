/*
 * Publishes an output folder by one rename, as cli/files/output_file.c does for files. An existing folder is replaced
 * only if its files are of a kind that the caller may replace.
 */
#include "cli/convert/convert.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "cli/files/files.h"

#define ABANDONED \
    60 /* seconds; a temporary folder that has been without a lock for this long belongs to a dead process */

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

/* The contents of a folder that may be replaced. */
typedef struct entry_search {
    const char *path;
    cli_replaceable_fn replaceable;
    char found[2 * NAME_MAX + 2]; /* the first entry that may not be replaced; "" if there is none */
} entry_search;

/* Looks at the entries of the folder itself, or of one inside it. Returns an errno if it cannot be read. */
static int search_folder(entry_search *s, const char *inside) {
    char *path, name[sizeof(s->found)];
    if (asprintf(&path, "%s/%s", s->path, inside) < 0) {
        return ENOMEM;
    }
    DIR *dir = opendir(path);
    int failed = dir ? 0 : errno;
    const struct dirent *entry;
    while (!failed && !s->found[0] && (errno = 0, entry = readdir(dir))) {
        struct stat st;
        if (is_dots(entry->d_name)) {
            continue;
        }
        bool exists = fstatat(dirfd(dir), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0;
        bool folder = exists && S_ISDIR(st.st_mode), file = exists && S_ISREG(st.st_mode);
        snprintf(name, sizeof(name), "%s%s%s", inside, *inside ? "/" : "", entry->d_name);
        if (!s->replaceable || !(folder || file) || !s->replaceable(s->path, name, folder)) {
            memcpy(s->found, name, sizeof(name));
        } else if (folder) {
            failed = search_folder(s, name);
        }
        errno = 0;
    }
    failed = failed || s->found[0] ? failed : errno;
    if (dir) {
        closedir(dir);
    }
    free(path);
    return failed;
}

static ckd_status check_entries(const char *path, cli_replaceable_fn replaceable, ckd_error *err) {
    entry_search search = {.path = path, .replaceable = replaceable};
    int failed = search_folder(&search, "");
    if (failed) {
        return cli_error_sys(err, failed, path, "cannot read the output folder");
    }
    if (search.found[0] && !replaceable) {
        return cli_error_at(
            err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
            "the output folder is not empty; choose another one, or replace it with --overwrite");
    }
    return search.found[0]
               ? cli_error_at(
                     err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
                     "the output folder has '%.200s', which no export wrote: it is not replaced, not even "
                     "with --overwrite; choose another one",
                     search.found)
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
        status = errno == ENOENT
                     ? CKD_OK
                     : cli_error_sys(err, errno, path, "cannot read the status of the output folder");
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
        cli_temporaries_remove(f->path, true, ABANDONED);
        status = check_room(f, size, err);
    }
    THEN(status, cli_temporary_create(&f->temporary, &f->held, f->path, "tmp", S_IFDIR | 0777, err));
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
 * Moves the folder into place: in one step if the file system can exchange two names. Otherwise it first moves the old
 * folder aside, and moves it back if the new one cannot take its place. Afterwards `temporary` names the old folder.
 */
static int take_place(cli_folder *f, ckd_error *err) {
    if (renameat2(AT_FDCWD, f->temporary, AT_FDCWD, f->path, RENAME_EXCHANGE) == 0) {
        return 0;
    }
    if (errno != EINVAL && errno != ENOSYS) {
        return errno;
    }
    char *temporary = f->temporary;
    int aside;
    if (cli_temporary_create(&f->temporary, &aside, f->path, "old", S_IFDIR | 0777, err) != CKD_OK) {
        f->temporary = temporary;
        return err->sys_errno ? err->sys_errno : ENOMEM;
    }
    close(aside);
    int failed = rename(f->path, f->temporary) == 0 ? 0 : errno;
    if (!failed && rename(temporary, f->path) != 0) {
        failed = errno;
        if (rename(f->temporary, f->path) != 0) {
            f->temporary[0] = '\0'; /* leave it aside rather than remove it */
        }
    }
    if (failed) {
        cli_remove_folder(temporary);
    }
    free(temporary);
    return failed;
}

/*
 * rename() replaces only an empty folder. So a non-empty folder that another process has just created stays, unless it
 * may be replaced.
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

/* After a power cut the folder may have its old name or none, so the old folder has to stay. */
static ckd_status cannot_sync(cli_folder *f, ckd_error *err) {
    char *old = f->temporary;
    f->temporary = NULL;
    cli_error_sys(err, err->sys_errno, f->path,
                  "the new folder is in place, but after a power cut the old one may be back%s%.200s: cannot "
                  "make the output's name durable",
                  old ? "; it is kept as " : "", old ? old : "");
    free(old);
    return err->status;
}

ckd_status cli_folder_commit(cli_folder *f, ckd_error *err) {
    ckd_status status = cli_output_sync_folder(f->temporary, err);
    /* Another process may have created something there meanwhile. */
    THEN(status, cli_folder_check(f->path, f->replaceable, err));
    int failed = status == CKD_OK ? give_name(f, err) : 0;
    if (failed) {
        status = cli_error_sys(err, failed, f->path, "cannot give the output folder its name");
    }
    if (status == CKD_OK && cli_output_sync_folder(f->above, err) != CKD_OK) {
        status = cannot_sync(f, err);
    }
    cli_folder_drop(f);
    return status;
}

void cli_folder_drop(cli_folder *f) {
    if (!f) {
        return;
    }
    if (f->temporary && f->temporary[0]) {
        cli_remove_folder(f->temporary);
    }
    if (f->held >= 0) {
        close(f->held);
    }
    free(f->path);
    free(f->above);
    free(f->temporary);
    free(f);
}
