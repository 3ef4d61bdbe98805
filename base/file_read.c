/* Reading: pread, never mmap, since a mapped file that is truncated kills the process. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_op.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

struct file_reader {
    pool_handle handle;
    uint64_t size;
    /* bytes that identify the file when it is opened again; identity_size 0: its descriptor stays open */
    uint8_t identity[FILE_IDENTITY_MAX];
    size_t identity_size;
    uint64_t identity_at;
    uint8_t *cached; /* the whole file in memory, or NULL */
    /* NULL, or a buffer of ahead_capacity bytes, with ahead_size bytes of the file from ahead_at on */
    uint8_t *ahead;
    uint64_t ahead_at;
    size_t ahead_size, ahead_capacity;
    const file_mount *mount; /* which has the file, or NULL: the descriptor has */
    const char *name;        /* in the mount; the end of the path */
    char path[];
};

/* A file without read permission does not make the store read-only: report IO with the errno. */
static ckd_status read_failed(ckd_error *err, int errnum, const char *path, const char *what) {
    ckd_status status = err_sys(err, errnum, path, "cannot %s %s", what, path);
    if (status != CKD_E_READ_ONLY) {
        return status;
    }
    if (err != NULL) {
        err->status = CKD_E_IO;
    }
    return CKD_E_IO;
}

bool file_is_unreadable(int errnum) {
    switch (errnum) {
    case EIO: /* the disk, or a layer above it, failed to read this file */
    case EUCLEAN:
    case EBADMSG:
    case ENODATA:
    case EREMOTEIO:
    case EILSEQ:
    case ESTALE: /* a network file system lost it */
    case EACCES: /* it was copied here with permissions that exclude this user */
    case EPERM:
        return true;
    default:
        return false;
    }
}

static ckd_status not_regular(ckd_error *err, const char *path, const char *what) {
    return err_corrupt(err, path, CKD_NO_OFFSET,
                       "%s is %s, where a regular file is expected: put the file itself there", path, what);
}

/* Someone who can write to a store must not make its readers wait for a pipe or read files elsewhere. */
static ckd_status open_failed(ckd_error *err, int errnum, const char *path) {
    switch (errnum) {
    case ELOOP:
        return not_regular(err, path, "a symbolic link");
    case ENXIO:
    case ENODEV:
        return not_regular(err, path, "a socket or a device");
    default:
        return read_failed(err, errnum, path, "open");
    }
}

/* O_NONBLOCK: opening a pipe does not wait for a writer. It has no effect on regular files. */
static ckd_status open_regular(int *fd, uint64_t *size, const char *path, ckd_error *err) {
    struct stat st;
    int fault = file_op_check(FILE_OP_OPEN, path);
    if (fault != 0) {
        return open_failed(err, fault, path);
    }
    *fd = file_open_descriptor(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW, 0);
    if (*fd < 0) {
        return open_failed(err, errno, path);
    }
    ckd_status status = CKD_OK;
    if (fstat(*fd, &st) != 0) {
        status = read_failed(err, errno, path, "stat");
    } else if (!S_ISREG(st.st_mode)) {
        status = not_regular(err, path, S_ISDIR(st.st_mode) ? "a directory" : "a pipe or a device");
    }
    if (status != CKD_OK) {
        close(*fd);
        return status;
    }
    *size = (uint64_t)st.st_size;
    return CKD_OK;
}

/* The place names its object in the message. Callers know the file by its path, for example to repair it. */
static ckd_status mount_failed(ckd_error *err, ckd_status status, const char *path) {
    if (err != NULL && status != CKD_OK) {
        err->file[0] = '\0';
    }
    return err_in_file(err, status, path);
}

static ckd_status size_mounted(uint64_t *out, const mounted *m, bool ask, const char *path, ckd_error *err) {
    int fault = file_op_check(FILE_OP_OPEN, path);
    if (fault != 0) {
        return open_failed(err, fault, path);
    }
    return mount_failed(err, m->mount->size(m->mount->context, m->name, out, ask, err), path);
}

static ckd_status open_reader(file_reader *f, ckd_error *err) {
    mounted m = mount_of(f->path);
    f->handle.fd = -1;
    if (m.kind == MOUNT_REMOTE) {
        f->mount = m.mount;
        f->name = m.name;
        return size_mounted(&f->size, &m, false, f->path, err);
    }
    int fd;
    ckd_status status = open_regular(&fd, &f->size, f->path, err);
    if (status == CKD_OK) {
        pool_handle_set(&f->handle, fd); /* stays in use until file_let_close */
    }
    return status;
}

ckd_status file_open_read(file_reader **out, const char *path, ckd_error *err) {
    *out = NULL;
    size_t length = strlen(path) + 1;
    file_reader *f = calloc(1, sizeof(*f) + length);
    if (f == NULL) {
        return err_nomem(err, sizeof(*f) + length, "a file reader");
    }
    memcpy(f->path, path, length);
    ckd_status status = open_reader(f, err);
    if (status != CKD_OK) {
        free(f);
        return status;
    }
    *out = f;
    return CKD_OK;
}

ckd_status file_open_size(uint64_t *out, const char *path, ckd_error *err) {
    int fd;
    mounted m = mount_of(path);
    if (m.kind == MOUNT_REMOTE) {
        return size_mounted(out, &m, true, path, err);
    }
    ckd_status status = open_regular(&fd, out, path, err);
    if (status == CKD_OK) {
        (void)close(fd);
    }
    return status;
}

uint64_t file_size(const file_reader *f) {
    return f->size;
}

const char *file_path(const file_reader *f) {
    return f->path;
}

static ckd_status too_short(const file_reader *f, uint64_t end, uint64_t offset, size_t size,
                            ckd_error *err) {
    return err_corrupt(err, f->path, offset, "%s ends at byte %llu, inside the %zu bytes at offset %llu",
                       f->path, (unsigned long long)end, size, (unsigned long long)offset);
}

/* Reads from a descriptor of the file. */
static ckd_status read_fd(const file_reader *f, int fd, uint64_t offset, void *to, size_t size,
                          ckd_error *err) {
    for (size_t done = 0; done < size;) {
        size_t part = size - done < FILE_IO_MAX ? size - done : FILE_IO_MAX;
        ssize_t n = pread(fd, (uint8_t *)to + done, part, (off_t)(offset + done));
        if (n == 0) {
            return too_short(f, offset + done, offset, size, err);
        }
        if (n < 0 && errno != EINTR) {
            return read_failed(err, errno, f->path, "read");
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return CKD_OK;
}

/* A repaired file has the same bytes but another inode, so the inode is not compared. */
static ckd_status check_identity(const file_reader *f, int fd, uint64_t size, ckd_error *err) {
    uint8_t found[FILE_IDENTITY_MAX];
    ckd_status status =
        size == f->size ? read_fd(f, fd, f->identity_at, found, f->identity_size, err) : CKD_E_CORRUPT;
    bool same = status == CKD_OK && memcmp(found, f->identity, f->identity_size) == 0;
    return same || (status != CKD_OK && status != CKD_E_CORRUPT)
               ? status
               : err_corrupt(err, f->path, CKD_NO_OFFSET, "%s was replaced while it was in use", f->path);
}

static ckd_status open_again(file_reader *f, ckd_error *err) {
    int fd;
    uint64_t size;
    ckd_status status = open_regular(&fd, &size, f->path, err);
    if (status != CKD_OK) {
        return status != CKD_E_NOT_FOUND
                   ? status
                   : err_corrupt(err, f->path, CKD_NO_OFFSET, "%s was removed while it was in use", f->path);
    }
    status = check_identity(f, fd, size, err);
    if (status != CKD_OK) {
        close(fd);
        return status;
    }
    pool_handle_set(&f->handle, fd);
    return CKD_OK;
}

static ckd_status read_from_file(file_reader *f, uint64_t offset, void *to, size_t size, ckd_error *err) {
    if (f->cached != NULL) { /* the whole file is cached, so the range is beyond its end */
        return too_short(f, f->size, offset, size, err);
    }
    int fault = file_op_check(FILE_OP_READ, f->path);
    if (fault != 0) {
        return read_failed(err, fault, f->path, "read");
    }
    if (f->mount != NULL) {
        ckd_status status = f->mount->read(f->mount->context, f->name, offset, to, size, err);
        /* No damage: readers of other machines do not keep a file from being removed. */
        return status != CKD_E_NOT_FOUND
                   ? mount_failed(err, status, f->path)
                   : err_set(
                         err, CKD_E_BUSY,
                         "%s was removed while it was in use, by a compaction or a deletion on another machine: try "
                         "again",
                         f->path);
    }
    ckd_status status = pool_handle_take(&f->handle) ? CKD_OK : open_again(f, err);
    if (status == CKD_OK) {
        status = read_fd(f, f->handle.fd, offset, to, size, err);
        pool_handle_release(&f->handle);
    }
    return status;
}

/* Fills the buffer from `offset` on. A failure is no error yet: the caller may not want the unreadable bytes. */
static bool fill_buffer(file_reader *f, uint64_t offset) {
    uint64_t rest = f->size - offset;
    size_t fill = rest < f->ahead_capacity ? (size_t)rest : f->ahead_capacity;
    bool good = read_from_file(f, offset, f->ahead, fill, NULL) == CKD_OK;
    f->ahead_at = offset;
    f->ahead_size = good ? fill : 0;
    return good;
}

/* Copies at most `size` buffered bytes from `offset` on. Returns their number. */
static size_t take_buffered(const file_reader *f, uint64_t offset, void *to, size_t size) {
    uint64_t end = f->ahead_at + f->ahead_size;
    if (offset < f->ahead_at || offset >= end) {
        return 0;
    }
    size_t count = end - offset < size ? (size_t)(end - offset) : size;
    memcpy(to, f->ahead + (offset - f->ahead_at), count);
    return count;
}

/* Reads through the buffer. If the file is read in order, no byte is read twice. */
static ckd_status read_buffered(file_reader *f, uint64_t offset, void *to, size_t size, ckd_error *err) {
    size_t done = take_buffered(f, offset, to, size);
    bool small = size - done < f->ahead_capacity && offset + size <= f->size;
    if (done < size && small && fill_buffer(f, offset + done)) {
        done += take_buffered(f, offset + done, (uint8_t *)to + done, size - done);
    }
    return done == size ? CKD_OK : read_from_file(f, offset + done, (uint8_t *)to + done, size - done, err);
}

ckd_status file_read_at(file_reader *f, uint64_t offset, void *to, size_t size, ckd_error *err) {
    uint64_t end;
    if (!size_add(&end, offset, size) || end > INT64_MAX) {
        return err_corrupt(err, f->path, offset, "%zu bytes at offset %llu lie beyond the end of %s", size,
                           (unsigned long long)offset, f->path);
    }
    const void *cached = file_cached(f, offset, size);
    if (cached != NULL) {
        memcpy(to, cached, size);
        return CKD_OK;
    }
    return f->ahead != NULL ? read_buffered(f, offset, to, size, err)
                            : read_from_file(f, offset, to, size, err);
}

void file_will_read(const file_reader *f, const file_range *ranges, size_t count) {
    if (f->mount != NULL && f->cached == NULL) {
        f->mount->will_read(f->mount->context, f->name, ranges, count);
    }
}

ckd_status file_read_ahead(file_reader *f, size_t size, ckd_error *err) {
    free(f->ahead);
    f->ahead_at = 0;
    f->ahead_size = 0;
    f->ahead_capacity = size;
    f->ahead = malloc(size);
    return f->ahead != NULL ? CKD_OK : err_nomem(err, size, "a file's buffer");
}

ckd_status file_cache(file_reader *f, size_t cap, ckd_error *err) {
    if (f->size > cap || f->cached != NULL) {
        return CKD_OK;
    }
    size_t size = (size_t)f->size;
    uint8_t *data = malloc(size + 1);
    if (data == NULL) {
        return err_nomem(err, size, "a file's content");
    }
    ckd_status status = file_read_at(f, 0, data, size, err);
    if (status != CKD_OK) {
        free(data);
        return status;
    }
    f->cached = data;
    pool_handle_close(&f->handle);
    return CKD_OK;
}

void file_let_close(file_reader *f, uint64_t offset, const void *identity, size_t size) {
    if (f->mount == NULL && f->cached == NULL && f->identity_size == 0 && size <= sizeof(f->identity)) {
        memcpy(f->identity, identity, size);
        f->identity_at = offset;
        f->identity_size = size;
        pool_handle_release(&f->handle);
    }
}

const void *file_cached(const file_reader *f, uint64_t offset, size_t size) {
    return f->cached != NULL && offset <= f->size && size <= f->size - offset ? f->cached + offset : NULL;
}

void file_close_read(file_reader *f) {
    if (f != NULL) {
        pool_handle_close(&f->handle);
        free(f->cached);
        free(f->ahead);
        free(f);
    }
}

ckd_status file_read_all(bytes *out, const char *path, size_t cap, ckd_error *err) {
    file_reader *f;
    bytes_clear(out);
    ckd_status status = file_open_read(&f, path, err);
    if (status != CKD_OK) {
        return status;
    }
    if (f->size > cap) {
        status = err_corrupt(err, path, CKD_NO_OFFSET, "%s has %llu bytes; at most %zu are expected here",
                             path, (unsigned long long)f->size, cap);
    } else {
        size_t size = (size_t)f->size;
        void *to = bytes_extend(out, size);
        status = to == NULL ? err_nomem(err, size, "a file's content") : file_read_at(f, 0, to, size, err);
    }
    if (status != CKD_OK) {
        bytes_clear(out);
    }
    file_close_read(f);
    return status;
}
