#include "cli/files/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAME_ROOM 200 /* bytes of FILE in the temporary name; names have at most 255 */
#define ATTEMPTS  100

struct cli_output {
    char *path, *directory, *temporary;
    bool force, is_standard;
    int fd;
};

bool cli_output_is_standard(const char *path) {
    return strcmp(path, "-") == 0;
}

ckd_status cli_output_check(const char *path, bool force, ckd_error *err) {
    struct stat st;
    if (cli_output_is_standard(path)) {
        return isatty(STDOUT_FILENO) && !force
                   ? cli_error(err, CKD_E_INVALID,
                               "standard output is a terminal; --force writes to it anyway")
                   : CKD_OK;
    }
    if (lstat(path, &st) != 0) {
        return errno == ENOENT ? CKD_OK
                               : cli_error_sys(err, errno, path, "cannot read the status of the output file");
    }
    if (!S_ISREG(st.st_mode)) {
        return cli_error_at(err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
                            "the output exists and is not a regular file; choose another name");
    }
    if (!force) {
        return cli_error_at(err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
                            "the output file exists; choose another name, or replace it with --force");
    }
    return CKD_OK;
}

ckd_status cli_output_make_folders(const char *path, ckd_error *err) {
    char *copy = strdup(path);
    if (!copy) {
        return cli_error_nomem(err);
    }
    ckd_status status = CKD_OK;
    for (char *slash = strchr(copy + 1, '/'); slash && status == CKD_OK; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(copy, 0777) != 0 && errno != EEXIST) {
            status = cli_error_sys(err, errno, copy, "cannot create a folder for the output");
        }
        *slash = '/';
    }
    free(copy);
    return status;
}

/* Sets the directory with its final slash, "./" if the path has none. */
static ckd_status set_paths(cli_output *o, const char *path, ckd_error *err) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (!*name) {
        return cli_error(err, CKD_E_INVALID, "the output '%s' is not a file name", path);
    }
    o->path = strdup(path);
    o->directory = slash ? strndup(path, (size_t)(name - path)) : strdup("./");
    if (!o->path || !o->directory) {
        return cli_error_nomem(err);
    }
    o->temporary = malloc(strlen(o->directory) + NAME_ROOM + 64);
    return o->temporary ? CKD_OK : cli_error_nomem(err);
}

/* A process in another container may have the same number, so try several names. */
static ckd_status create_temporary(cli_output *o, ckd_error *err) {
    const char *name = o->path + (strrchr(o->path, '/') ? strlen(o->directory) : 0);
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        int length = sprintf(o->temporary, "%s.%.*s.tmp-%ld", o->directory, NAME_ROOM, name, (long)getpid());
        if (attempt > 0) {
            sprintf(o->temporary + length, "-%d", attempt);
        }
        o->fd = open(o->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (o->fd >= 0 || errno != EEXIST) {
            break;
        }
    }
    return o->fd >= 0 ? CKD_OK
                      : cli_error_sys(err, errno, o->temporary, "cannot create a file for the output");
}

static ckd_status open_standard(cli_output *o, ckd_error *err) {
    strcpy(o->temporary, "standard output");
    o->fd = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    return o->fd >= 0 ? CKD_OK : cli_error_sys(err, errno, o->temporary, "cannot open");
}

ckd_status cli_output_open(cli_output **out, const char *path, bool force, uint64_t size, ckd_error *err) {
    *out = NULL;
    cli_output *o = calloc(1, sizeof(*o));
    if (!o) {
        return cli_error_nomem(err);
    }
    o->fd = -1;
    o->force = force;
    o->is_standard = cli_output_is_standard(path);
    ckd_status status = set_paths(o, path, err);
    THEN(status, o->is_standard ? open_standard(o, err) : create_temporary(o, err));
    if (status == CKD_OK && size > 0 && !o->is_standard && fallocate(o->fd, 0, 0, (off_t)size) != 0 &&
        (errno == ENOSPC || errno == EDQUOT)) {
        status = cli_error_sys(err, errno, path, "there is no space for the output of %llu bytes",
                               (unsigned long long)size);
    }
    if (status != CKD_OK) {
        cli_output_drop(o);
        return status;
    }
    *out = o;
    return CKD_OK;
}

ckd_status cli_output_write(cli_output *o, const void *data, size_t size, ckd_error *err) {
    const char *at = data;
    while (size > 0) {
        ssize_t written = write(o->fd, at, size);
        if (written < 0 && errno != EINTR) {
            return cli_error_sys(err, errno, o->temporary, "cannot write the output");
        }
        if (written > 0) {
            at += written;
            size -= (size_t)written;
        }
    }
    return CKD_OK;
}

/*
 * Renames without overwriting: in one step if the file system can, else by linking the new name and unlinking the old
 * one.
 */
static int give_name(const cli_output *o) {
    if (o->force) {
        return rename(o->temporary, o->path);
    }
    if (renameat2(AT_FDCWD, o->temporary, AT_FDCWD, o->path, RENAME_NOREPLACE) == 0) {
        return 0;
    }
    if (errno != EINVAL && errno != ENOSYS) {
        return -1;
    }
    return link(o->temporary, o->path) == 0 ? unlink(o->temporary) : -1;
}

ckd_status cli_output_sync_folder(const char *path, ckd_error *err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* EINVAL: this file system cannot sync a directory. */
    int failed = fd < 0 || (fsync(fd) != 0 && errno != EINVAL) ? errno : 0;
    if (fd >= 0) {
        close(fd);
    }
    return failed ? cli_error_sys(err, failed, path, "cannot make the output's name durable") : CKD_OK;
}

static ckd_status commit_standard(cli_output *o, ckd_error *err) {
    int fd = o->fd;
    o->fd = -1;
    ckd_status status =
        close(fd) == 0 ? CKD_OK : cli_error_sys(err, errno, o->temporary, "cannot write the output");
    cli_output_drop(o);
    return status;
}

ckd_status cli_output_commit(cli_output *o, ckd_error *err) {
    if (o->is_standard) {
        return commit_standard(o, err);
    }
    ckd_status status = CKD_OK;
    if (fsync(o->fd) != 0) {
        status = cli_error_sys(err, errno, o->temporary, "cannot make the output durable");
    }
    int fd = o->fd;
    o->fd = -1;
    if (close(fd) != 0 && status == CKD_OK) {
        status = cli_error_sys(err, errno, o->temporary, "cannot make the output durable");
    }
    /* rename() would replace a device, too. */
    if (status == CKD_OK && o->force) {
        status = cli_output_check(o->path, true, err);
    }
    if (status == CKD_OK && give_name(o) != 0) {
        status = cli_error_sys(err, errno, o->path, "cannot give the output its name");
    }
    if (status != CKD_OK) {
        cli_output_drop(o);
        return status;
    }
    status = cli_output_sync_folder(o->directory, err);
    if (status != CKD_OK && !o->force) {
        unlink(o->path);
    }
    o->temporary[0] = '\0'; /* it was renamed */
    cli_output_drop(o);
    return status;
}

void cli_output_drop(cli_output *o) {
    if (!o) {
        return;
    }
    if (o->fd >= 0) {
        close(o->fd);
    }
    if (o->temporary && o->temporary[0] && !o->is_standard) {
        unlink(o->temporary);
    }
    free(o->path);
    free(o->directory);
    free(o->temporary);
    free(o);
}

ckd_status cli_output_bytes(const char *path, bool force, const void *data, size_t size, ckd_error *err) {
    cli_output *output;
    ckd_status status = cli_output_open(&output, path, force, size, err);
    if (status != CKD_OK) {
        return status;
    }
    status = cli_output_write(output, data, size, err);
    if (status == CKD_OK) {
        return cli_output_commit(output, err);
    }
    cli_output_drop(output);
    return status;
}
