/* Directories: their names and sizes. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_op.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define DEEPEST 64 /* nested directories that dir_bytes follows; each keeps a descriptor open */

static bool is_dot(const char *name) {
    return name[0] == '.' && (name[1] == '\0' || (name[1] == '.' && name[2] == '\0'));
}

/* Returns the next name except . and ..; NULL at the end (errno 0) or on failure. */
static const char *next_name(DIR *dir) {
    struct dirent *entry;
    do {
        errno = 0;
        entry = readdir(dir);
    } while (entry != NULL && is_dot(entry->d_name));
    return entry != NULL ? entry->d_name : NULL;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

void dir_list_free(dir_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        free(list->names[i]);
    }
    free(list->names);
    *list = (dir_list){0};
}

static bool add_name(dir_list *list, size_t *capacity, const char *name) {
    if (ARRAY_GROW(list->names, *capacity, list->count + 1, "names", NULL) != CKD_OK) {
        return false;
    }
    list->names[list->count] = strdup(name);
    return list->names[list->count] != NULL && ++list->count > 0;
}

ckd_status dir_list_add(dir_list *list, const char *name, ckd_error *err) {
    char **names = realloc(list->names, (list->count + 1) * sizeof(*names));
    list->names = names ? names : list->names;
    char *copy = names ? strdup(name) : NULL;
    if (!copy) {
        return err_nomem(err, strlen(name) + sizeof(*names), "names");
    }
    list->names[list->count++] = copy;
    return CKD_OK;
}

/* Sorts names. Network file systems may list an entry twice if the directory changes meanwhile. */
static void put_in_order(dir_list *list) {
    size_t kept = 0;
    if (list->count > 1) {
        qsort(list->names, list->count, sizeof(*list->names), by_name);
    }
    for (size_t i = 0; i < list->count; i++) {
        if (kept && strcmp(list->names[kept - 1], list->names[i]) == 0) {
            free(list->names[i]);
        } else {
            list->names[kept++] = list->names[i];
        }
    }
    list->count = kept;
}

ckd_status dir_list_local(dir_list *out, const char *path, ckd_error *err) {
    *out = (dir_list){0};
    size_t capacity = 0;
    const char *name;
    int errnum = file_op_check(FILE_OP_OPEN, path);
    DIR *dir = errnum == 0 ? opendir(path) : NULL;
    if (dir == NULL) {
        return err_sys(err, errnum != 0 ? errnum : errno, path, "cannot list %s", path);
    }
    while (errnum == 0 && (name = next_name(dir)) != NULL) {
        errnum = add_name(out, &capacity, name) ? 0 : ENOMEM;
    }
    errnum = errnum != 0 ? errnum : errno;
    closedir(dir);
    if (errnum != 0) {
        dir_list_free(out);
        return err_sys(err, errnum, path, "cannot list %s", path);
    }
    put_in_order(out);
    return CKD_OK;
}

ckd_status dir_list_read(dir_list *out, const char *path, ckd_error *err) {
    return dir_list_settled(out, path, 0, err);
}

ckd_status dir_list_settled(dir_list *out, const char *path, uint64_t older_than_s, ckd_error *err) {
    mounted m = mount_of(path);
    *out = (dir_list){0};
    ckd_status status = m.kind == MOUNT_COPIED ? m.mount->refresh(m.mount->context, err) : CKD_OK;
    THEN(status, dir_list_local(out, path, err));
    if (status == CKD_OK && m.kind == MOUNT_REMOTE) {
        status = m.mount->list(m.mount->context, m.name, older_than_s, out, err);
        put_in_order(out);
    }
    if (status != CKD_OK) {
        dir_list_free(out);
    }
    return status;
}

/* Folders to skip, by paths relative to the directory being visited. NULL ends the list; "" is a folder elsewhere. */
typedef struct excluded_dirs {
    const char *paths[DIR_EXCLUDED_MAX + 1];
} excluded_dirs;

static int add_directory(uint64_t *total, int parent, const char *name, const excluded_dirs *without,
                         int depth);

/* Makes the paths relative to the subdirectory `name`. Returns true if `name` itself is skipped. */
static bool step_into(excluded_dirs *inside, const excluded_dirs *without, const char *name) {
    size_t length = strlen(name), i;
    bool skip = false;
    for (i = 0; without->paths[i]; i++) {
        const char *path = without->paths[i];
        bool has_prefix = strncmp(path, name, length) == 0;
        skip = skip || (has_prefix && path[length] == '\0');
        inside->paths[i] = has_prefix && path[length] == '/' ? path + length + 1 : "";
    }
    inside->paths[i] = NULL;
    return skip;
}

/* An entry that has vanished counts as nothing: other processes may be saving and removing. */
static int add_entry(uint64_t *total, int dir, const char *name, const excluded_dirs *without, int depth) {
    struct stat st;
    excluded_dirs inside;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        return errno == ENOENT ? 0 : errno;
    }
    if (S_ISDIR(st.st_mode)) {
        int errnum =
            step_into(&inside, without, name) ? 0 : add_directory(total, dir, name, &inside, depth + 1);
        return errnum == ENOENT ? 0 : errnum;
    }
    if (S_ISREG(st.st_mode) && !size_add(total, *total, (uint64_t)st.st_size)) {
        return EOVERFLOW;
    }
    return 0;
}

static int add_directory(uint64_t *total, int parent, const char *name, const excluded_dirs *without,
                         int depth) {
    if (depth > DEEPEST) {
        return ELOOP;
    }
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | (depth > 0 ? O_NOFOLLOW : 0));
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        int errnum = errno;
        if (fd >= 0) {
            close(fd);
        }
        return errnum;
    }
    int errnum = 0;
    const char *entry;
    while (errnum == 0 && (entry = next_name(dir)) != NULL) {
        errnum = add_entry(total, fd, entry, without, depth);
    }
    errnum = errnum != 0 ? errnum : errno;
    closedir(dir);
    return errnum;
}

static ckd_status measure(uint64_t *out, const char *path, const excluded_dirs *without, ckd_error *err) {
    *out = 0;
    uint64_t total = 0;
    int errnum = file_op_check(FILE_OP_OPEN, path);
    if (errnum == 0) {
        errnum = add_directory(&total, AT_FDCWD, path, without, 0);
    }
    if (errnum != 0) {
        return err_sys(err, errnum, path, "cannot measure %s", path);
    }
    mounted m = mount_of(path);
    ckd_status status =
        m.kind == MOUNT_REMOTE ? m.mount->bytes(m.mount->context, m.name, &total, err) : CKD_OK;
    *out = status == CKD_OK ? total : 0;
    return status;
}

ckd_status dir_bytes(uint64_t *out, const char *path, ckd_error *err) {
    return measure(out, path, &(excluded_dirs){{NULL}}, err);
}

ckd_status dir_bytes_without(uint64_t *out, const char *path, const char *const *folders, size_t count,
                             ckd_error *err) {
    excluded_dirs without = {{NULL}};
    if (count > DIR_EXCLUDED_MAX) {
        return err_set(err, CKD_E_INVALID, "at most %d folders can be left out", DIR_EXCLUDED_MAX);
    }
    memcpy(without.paths, folders, count * sizeof(*folders));
    return measure(out, path, &without, err);
}

uint64_t dir_free_space(const char *path) {
    struct statvfs fs;
    uint64_t available;
    /* A tmpfs without a limit reports no blocks. */
    if (statvfs(path, &fs) != 0 || fs.f_blocks == 0 ||
        __builtin_mul_overflow(fs.f_bavail, fs.f_frsize, &available)) {
        return UINT64_MAX;
    }
    return available;
}
