/* Checks where outputs may go: not over files that must stay, not into the store, and not two to one path. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/files/files.h"

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

/* ---- folders ---- */

ckd_status cli_output_sync_folder(const char *path, ckd_error *err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* EINVAL: this file system cannot sync a directory. */
    int failed = fd < 0 || (fsync(fd) != 0 && errno != EINVAL) ? errno : 0;
    if (fd >= 0) {
        close(fd);
    }
    return failed ? cli_error_sys(err, failed, path, "cannot make the output's name durable") : CKD_OK;
}

/* Creates a folder, and makes its name durable. */
static ckd_status make_folder(const char *path, ckd_error *err) {
    if (mkdir(path, 0777) != 0) {
        return errno == EEXIST ? CKD_OK
                               : cli_error_sys(err, errno, path, "cannot create a folder for the output");
    }
    char *inside;
    if (asprintf(&inside, "%s/..", path) < 0) {
        return cli_error_nomem(err);
    }
    ckd_status status = cli_output_sync_folder(inside, err);
    free(inside);
    return status;
}

ckd_status cli_output_make_folders(const char *path, ckd_error *err) {
    char *copy = strdup(path);
    if (!copy) {
        return cli_error_nomem(err);
    }
    ckd_status status = CKD_OK;
    for (char *slash = strchr(copy + 1, '/'); slash && status == CKD_OK; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        status = make_folder(copy, err);
        *slash = '/';
    }
    free(copy);
    return status;
}

/* ---- the real path ---- */

/* Appends names that do not exist yet to a real path, as they will be when their folders exist. */
static void append_names(char real[2 * PATH_MAX], const char *names) {
    while (*names) {
        size_t length = strcspn(names, "/"), used = strlen(real);
        if (length == 2 && strncmp(names, "..", 2) == 0) {
            char *last = strrchr(real, '/');
            last[last == real] = '\0';
        } else if (length > 0 && !(length == 1 && *names == '.') && used + length + 2 < 2 * PATH_MAX) {
            sprintf(real + used, "%s%.*s", used > 1 ? "/" : "", (int)length, names);
        }
        names += length + (names[length] == '/');
    }
}

/*
 * Finds the absolute path of the folder that has, or will have, this path in it, without symbolic links. Then appends
 * the path's last name, which may itself be a link. False: no folder on the way can be read.
 */
static bool real_path(char real[2 * PATH_MAX], const char *path) {
    char folder[PATH_MAX];
    size_t length = strlen(path);
    if (length >= sizeof(folder)) {
        return false;
    }
    memcpy(folder, path, length + 1);
    for (;;) {
        char *slash = strrchr(folder, '/');
        const char *names = path + (slash ? slash + 1 - folder : 0);
        if (slash) {
            slash[slash == folder] = '\0';
        }
        if (realpath(slash ? folder : ".", real)) {
            append_names(real, names);
            return true;
        }
        if (!slash || slash == folder || errno != ENOENT) {
            return false;
        }
    }
}

ckd_status cli_output_check_outside(const char *path, const char *store, ckd_error *err) {
    char inside[PATH_MAX], real[2 * PATH_MAX];
    if (cli_output_is_standard(path) || !realpath(store, inside) || !real_path(real, path)) {
        return CKD_OK; /* such a path cannot be written, and the command will say why */
    }
    size_t length = strlen(inside);
    bool below = strncmp(real, inside, length) == 0 && (real[length] == '/' || length == 1);
    return below ? cli_error_at(err, CKD_E_INVALID, path, CKD_NO_OFFSET,
                                "the output would be inside the store; choose a path outside it")
                 : CKD_OK;
}

/* ---- several outputs ---- */

typedef struct real_output {
    const char *path;
    char *real;
    bool exists;
    dev_t device;
    ino_t inode;
} real_output;

static int by_real_path(const void *left, const void *right) {
    const real_output *a = left, *b = right;
    return strcmp(a->real, b->real);
}

/* Files that do not exist are last. */
static int by_inode(const void *left, const void *right) {
    const real_output *a = left, *b = right;
    if (a->exists != b->exists) {
        return a->exists ? -1 : 1;
    }
    return a->device != b->device ? (a->device > b->device) - (a->device < b->device)
                                  : (a->inode > b->inode) - (a->inode < b->inode);
}

static ckd_status find_real(real_output *out, const char *path, ckd_error *err) {
    char real[2 * PATH_MAX];
    struct stat st;
    *out = (real_output){.path = path, .real = strdup(real_path(real, path) ? real : path)};
    if (stat(path, &st) == 0) {
        out->exists = true;
        out->device = st.st_dev;
        out->inode = st.st_ino;
    }
    return out->real ? CKD_OK : cli_error_nomem(err);
}

static ckd_status same_file(const real_output *a, const real_output *b, ckd_error *err) {
    return cli_error(err, CKD_E_INVALID, "%.200s and %.200s are the same file; give each its own name",
                     a->path, b->path);
}

ckd_status cli_outputs_check_distinct(const char *const *paths, size_t count, ckd_error *err) {
    real_output *items = calloc(count + 1, sizeof(*items));
    ckd_status status = items ? CKD_OK : cli_error_nomem(err);
    size_t used = 0;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        if (!cli_output_is_standard(paths[i])) {
            status = find_real(&items[used++], paths[i], err);
        }
    }
    if (status == CKD_OK) {
        qsort(items, used, sizeof(*items), by_real_path);
    }
    for (size_t i = 1; i < used && status == CKD_OK; i++) {
        if (by_real_path(&items[i - 1], &items[i]) == 0) {
            status = same_file(&items[i - 1], &items[i], err);
        }
    }
    if (status == CKD_OK) {
        qsort(items, used, sizeof(*items), by_inode);
    }
    for (size_t i = 1; i < used && status == CKD_OK; i++) {
        if (items[i].exists && by_inode(&items[i - 1], &items[i]) == 0) {
            status = same_file(&items[i - 1], &items[i], err);
        }
    }
    for (size_t i = 0; i < used; i++) {
        free(items[i].real);
    }
    free(items);
    return status;
}
