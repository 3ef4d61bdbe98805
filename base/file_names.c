/*
 * Names: publish a file with its contents, replace, remove, make directories. A name is durable once its directory is
 * synced.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_op.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_mounted(const char *path) {
    return mount_of(path).kind != MOUNT_LOCAL;
}

static bool same_file(const char *a, const char *b) {
    struct stat sa, sb;
    return lstat(a, &sa) == 0 && lstat(b, &sb) == 0 && sa.st_dev == sb.st_dev && sa.st_ino == sb.st_ino;
}

/*
 * For file systems without RENAME_NOREPLACE, such as NFS. Over NFS a successful link may return EEXIST if the reply was
 * lost and the request resent; then both names are the same file.
 */
static int publish_by_link(const char *from, const char *to) {
    if (link(from, to) != 0 && !(errno == EEXIST && same_file(from, to))) {
        return errno;
    }
    /* The file is published. If the old name cannot be removed, it stays as a leftover; this is not a failure. */
    (void)unlink(from);
    return 0;
}

/* Explains errors whose system message is unclear. */
static const char *hint_of(int errnum) {
    return errnum == EXDEV ? ", which is on another file system: all folders of a store must be on one" : "";
}

ckd_status file_rename_noreplace(const char *from, const char *to, ckd_error *err) {
    int errnum = file_op_check(FILE_OP_RENAME_NOREPLACE, to);
    if (errnum == 0 && (is_mounted(from) || is_mounted(to))) {
        return mount_rename(from, to, false, err);
    }
    if (errnum == 0 && renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) != 0) {
        errnum = errno == EINVAL || errno == ENOSYS ? publish_by_link(from, to) : errno;
    }
    return errnum == 0 ? CKD_OK
                       : err_sys(err, errnum, to, "cannot publish %s as %s%s", from, to, hint_of(errnum));
}

ckd_status file_link(const char *from, const char *to, ckd_error *err) {
    int errnum = file_op_check(FILE_OP_RENAME_NOREPLACE, to);
    if (errnum == 0 && (is_mounted(from) || is_mounted(to))) {
        return mount_link(from, to, err);
    }
    if (errnum == 0 && link(from, to) != 0) {
        errnum = errno;
    }
    return errnum == 0
               ? CKD_OK
               : err_sys(err, errnum, to, "cannot give %s the name %s as well%s", from, to, hint_of(errnum));
}

ckd_status file_rename(const char *from, const char *to, ckd_error *err) {
    int errnum = file_op_check(FILE_OP_RENAME, to);
    if (errnum == 0 && (is_mounted(from) || is_mounted(to))) {
        return mount_rename(from, to, true, err);
    }
    if (errnum == 0 && rename(from, to) != 0) {
        errnum = errno;
    }
    return errnum == 0 ? CKD_OK
                       : err_sys(err, errnum, to, "cannot replace %s by %s%s", to, from, hint_of(errnum));
}

static ckd_status remove_mounted(const mounted *m, const char *path, bool missing_ok, ckd_error *err) {
    if (!missing_ok && !file_exists(path)) {
        return err_sys(err, ENOENT, path, "cannot remove %s", path);
    }
    return m->mount->remove(m->mount->context, m->name, err);
}

ckd_status file_remove(const char *path, bool missing_ok, ckd_error *err) {
    int errnum = file_op_check(FILE_OP_REMOVE, path);
    mounted m = mount_of(path);
    if (errnum == 0 && m.kind != MOUNT_LOCAL) {
        return remove_mounted(&m, path, missing_ok, err);
    }
    if (errnum == 0 && unlink(path) != 0) {
        errnum = errno == ENOENT && missing_ok ? 0 : errno;
    }
    return errnum == 0 ? CKD_OK : err_sys(err, errnum, path, "cannot remove %s", path);
}

ckd_status dir_remove(const char *path, ckd_error *err) {
    int errnum = file_op_check(FILE_OP_REMOVE, path);
    if (errnum == 0 && rmdir(path) != 0) {
        errnum = errno;
    }
    return errnum == 0 ? CKD_OK : err_sys(err, errnum, path, "cannot remove the directory %s", path);
}

#define VANISHED_MAX 1000 /* attempts to make a directory that others remove again and again */

ckd_status dir_create(const char *path, bool exists_ok, ckd_error *err) {
    int errnum = file_op_check(FILE_OP_MKDIR, path);
    for (unsigned tries = 1; errnum == 0 && mkdir(path, 0777) != 0; tries++) {
        struct stat st;
        int why = errno;
        bool found = stat(path, &st) == 0;
        /* Check after any error, not only EEXIST: on a read-only file system an existing directory may give EROFS. */
        if (exists_ok && found && S_ISDIR(st.st_mode)) {
            break;
        }
        /* The directory may be gone by now: somebody empties a cache, for example. A dangling link stays. */
        bool vanished = exists_ok && why == EEXIST && !found;
        errnum = vanished && tries < VANISHED_MAX ? 0 : why;
    }
    return errnum == 0 ? CKD_OK : err_sys(err, errnum, path, "cannot create the directory %s", path);
}

static int sync_directory(const char *path) {
    int fd = file_open_descriptor(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0) {
        return errno;
    }
    /* EINVAL: the file system cannot sync directories. */
    int errnum = fsync(fd) != 0 && errno != EINVAL ? errno : 0;
    close(fd);
    return errnum;
}

ckd_status dir_sync(const char *path, ckd_error *err) {
    int errnum = file_op_check(FILE_OP_DIR_SYNC, path);
    if (errnum == 0) {
        errnum = sync_directory(path);
    }
    return errnum == 0 ? CKD_OK : err_sys(err, errnum, path, "cannot make the directory %s durable", path);
}

ckd_status file_sync_parent(const char *path, ckd_error *err) {
    const char *slash = strrchr(path, '/');
    if (slash == NULL) {
        return dir_sync(".", err);
    }
    size_t length = slash == path ? 1 : (size_t)(slash - path);
    char *parent = malloc(length + 1);
    if (parent == NULL) {
        return err_nomem(err, length + 1, "a path");
    }
    memcpy(parent, path, length);
    parent[length] = '\0';
    ckd_status status = dir_sync(parent, err);
    free(parent);
    return status;
}

/* Writes a whole file under a temporary name. After a failure the file is removed. */
static ckd_status write_temporary(const char *temp, const void *data, size_t size, ckd_error *err) {
    file_writer *f;
    ckd_status status = file_create(&f, temp, 0, err);
    if (status != CKD_OK) {
        return status;
    }
    status = file_append(f, data, size, err);
    THEN(status, file_sync(f, err));
    if (status != CKD_OK) {
        file_discard(f);
        return status;
    }
    status = file_close(f, err);
    if (status != CKD_OK) {
        (void)file_remove(temp, true, NULL);
    }
    return status;
}

typedef ckd_status (*give_name_fn)(const char *from, const char *to, ckd_error *err);

/* Gives the temporary file its final name, durably. */
static ckd_status name_temporary(const char *path, const char *temp, give_name_fn give_name, ckd_error *err) {
    ckd_status status = give_name(temp, path, err);
    if (status != CKD_OK) {
        (void)file_remove(temp, true, NULL);
        return status;
    }
    return file_sync_parent(path, err);
}

ckd_status file_create_durable(const char *path, const char *temp, const void *data, size_t size,
                               ckd_error *err) {
    ckd_status status = write_temporary(temp, data, size, err);
    return status == CKD_OK ? name_temporary(path, temp, file_rename_noreplace, err) : status;
}

/* Removes a new name durably. If that fails, the error says so as well. */
static bool withdraw(const char *path, ckd_error *err) {
    if (file_remove(path, true, NULL) == CKD_OK && file_sync_parent(path, NULL) == CKD_OK) {
        return true;
    }
    if (err != NULL) {
        ckd_error was = *err;
        err_set(err, was.status,
                "%s; it is unknown whether the change takes effect, as %s could not be removed durably",
                was.message, path);
        memcpy(was.message, err->message, sizeof(was.message));
        *err = was;
    }
    return false;
}

ckd_status file_publish_durable(bool *undecided, const char *path, const char *temp, const void *data,
                                size_t size, ckd_error *err) {
    ckd_status status = write_temporary(temp, data, size, err);
    if (status != CKD_OK) {
        return status; /* a file at `path` would belong to another process */
    }
    status = name_temporary(path, temp, file_rename_noreplace, err);
    /* A network file system may report an error although it renamed the file; a mount may do it even later. */
    if (status != CKD_OK && status != CKD_E_EXISTS) {
        bool withdrawn = withdraw(path, err);
        if (undecided != NULL && (!withdrawn || is_mounted(path))) {
            *undecided = true;
        }
    }
    return status;
}

ckd_status file_replace_durable(const char *path, const char *temp, const void *data, size_t size,
                                ckd_error *err) {
    ckd_status status = write_temporary(temp, data, size, err);
    return status == CKD_OK ? name_temporary(path, temp, file_rename, err) : status;
}

bool file_exists(const char *path) {
    struct stat st;
    mounted m = mount_of(path);
    if (m.kind == MOUNT_REMOTE && !dir_exists(path)) {
        uint64_t size;
        return m.mount->size(m.mount->context, m.name, &size, false, NULL) != CKD_E_NOT_FOUND;
    }
    return lstat(path, &st) == 0 || (errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG);
}

bool dir_exists(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool file_bars_directory(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 ? !S_ISDIR(st.st_mode) : errno == ENOTDIR;
}

uint64_t file_inode(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 ? (uint64_t)info.st_ino : 0;
}

bool file_same(const char *a, const char *b) {
    struct stat sa, sb;
    return stat(a, &sa) == 0 && stat(b, &sb) == 0 && sa.st_dev == sb.st_dev && sa.st_ino == sb.st_ino;
}

/*
 * Some file systems count whole seconds, some two. Others use the kernel's time, which advances every few milliseconds;
 * a second change within one of its ticks is not noticed.
 */
#define COARSE_NS (UINT64_C(3) * 1000000000)

void file_fingerprint(char out[FILE_FINGERPRINT], const char *path) {
    struct stat st;
    mounted m = mount_of(path);
    out[0] = '\0';
    if (m.kind == MOUNT_COPIED && m.mount->refresh(m.mount->context, NULL) != CKD_OK) {
        return; /* whether it has changed is unknown */
    }
    if (stat(path, &st) != 0) {
        return;
    }
    uint64_t changed = (uint64_t)st.st_ctim.tv_sec * 1000000000u + (uint64_t)st.st_ctim.tv_nsec;
    bool coarse = st.st_ctim.tv_nsec == 0 || st.st_mtim.tv_nsec == 0;
    if (!coarse || changed + COARSE_NS < clock_wall_ns()) {
        snprintf(out, FILE_FINGERPRINT, "%llu %lld.%09ld %lld.%09ld", (unsigned long long)st.st_ino,
                 (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec, (long long)st.st_ctim.tv_sec,
                 st.st_ctim.tv_nsec);
    }
}

uint64_t file_modified_ns(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 ? (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec
                                : 0;
}

uint64_t file_bytes(const char *path) {
    struct stat st;
    mounted m = mount_of(path);
    if (m.kind == MOUNT_REMOTE) {
        uint64_t size;
        return m.mount->size(m.mount->context, m.name, &size, false, NULL) == CKD_OK ? size : 0;
    }
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0;
}
