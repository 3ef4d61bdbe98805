/* Writing new files: append through a buffer, make durable once, close or discard. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_op.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define WRITE_BACK_BYTES (UINT64_C(8) << 20)

struct file_writer {
    int fd;
    pid_t process;
    ckd_status failed; /* the first failure; the state on disk is unknown from then on */
    bool synced;       /* everything appended is durable */
    uint64_t flushed;  /* bytes passed to the system; the buffer holds what follows */
    uint64_t started;  /* bytes for which write-back was started */
    size_t used, capacity;
    uint8_t *buffer;
    bytes own;  /* the buffer's memory, unless the caller provides it */
    char *path; /* allocated together with this struct */
};

static void free_writer(file_writer *f) {
    bytes_free(&f->own);
    free(f);
}

/* Makes the struct without opening the file. */
static ckd_status new_writer(file_writer **out, const char *path, size_t buffer, bytes *memory,
                             ckd_error *err) {
    *out = NULL;
    size_t length = strlen(path) + 1;
    file_writer *f = malloc(sizeof(*f) + length);
    if (f == NULL) {
        return err_nomem(err, sizeof(*f), "a file writer");
    }
    *f = (file_writer){.process = getpid(), .capacity = buffer, .path = (char *)(f + 1)};
    memcpy(f->path, path, length);
    f->buffer = bytes_scratch(memory ? memory : &f->own, buffer, "a file writer's buffer", err);
    if (f->buffer == NULL) {
        free(f);
        return CKD_E_NOMEM;
    }
    *out = f;
    return CKD_OK;
}

/* Returns 0 or an errno. */
static int open_writer(file_writer *f, int flags) {
    int errnum = file_op_check(FILE_OP_CREATE, f->path);
    if (errnum == 0 && mount_of(f->path).kind != MOUNT_LOCAL) {
        errnum = EOPNOTSUPP; /* it begins as a local file, and gets its name when it is complete */
    }
    if (errnum == 0) {
        f->fd = file_open_descriptor(f->path, O_WRONLY | O_CLOEXEC | flags, 0666);
        errnum = f->fd < 0 ? errno : 0;
    }
    return errnum;
}

ckd_status file_create_in(file_writer **out, const char *path, size_t buffer, bytes *memory, ckd_error *err) {
    ckd_status status = new_writer(out, path, buffer, memory, err);
    if (status != CKD_OK) {
        return status;
    }
    int errnum = open_writer(*out, O_CREAT | O_EXCL);
    if (errnum != 0) {
        free_writer(*out);
        *out = NULL;
        return err_sys(err, errnum, path, "cannot create %s", path);
    }
    return CKD_OK;
}

ckd_status file_create(file_writer **out, const char *path, size_t buffer, ckd_error *err) {
    return file_create_in(out, path, buffer, NULL, err);
}

ckd_status file_continue(file_writer **out, const char *path, uint64_t keep, size_t buffer, ckd_error *err) {
    ckd_status status = new_writer(out, path, buffer, NULL, err);
    if (status != CKD_OK) {
        return status;
    }
    struct stat st;
    int errnum = open_writer(*out, O_NOFOLLOW);
    bool open = errnum == 0;
    if (open && fstat((*out)->fd, &st) != 0) {
        errnum = errno;
    }
    if (errnum == 0 && (uint64_t)st.st_size < keep) {
        errnum = EINVAL;
    }
    if (errnum == 0 && ftruncate((*out)->fd, (off_t)keep) != 0) {
        errnum = errno;
    }
    if (errnum != 0) {
        if (open) {
            close((*out)->fd);
        }
        free_writer(*out);
        *out = NULL;
        return err_sys(err, errnum, path, "cannot continue %s after %llu bytes", path,
                       (unsigned long long)keep);
    }
    (*out)->flushed = (*out)->started = keep;
    return CKD_OK;
}

static ckd_status fail(file_writer *f, ckd_error *err, int errnum, const char *what) {
    f->failed = err_sys(err, errnum, f->path, "cannot %s %s", what, f->path);
    return f->failed;
}

/* After a failure only file_discard and file_close are allowed. */
static ckd_status refuse_failed(const file_writer *f, ckd_error *err) {
    err_set(err, f->failed, "an earlier write or sync of %s failed: drop it and write a new file", f->path);
    return err_in_file(err, f->failed, f->path);
}

/* Writes all bytes. Returns 0 or an errno. */
static int put_bytes(const file_writer *f, uint64_t offset, const uint8_t *data, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t put = pwrite(f->fd, data + done, size - done, (off_t)(offset + done));
        if (put == 0) {
            return EIO; /* write returned 0: never seen, but retrying might loop forever */
        }
        if (put < 0 && errno != EINTR) {
            return errno;
        }
        done += put > 0 ? (size_t)put : 0;
    }
    return 0;
}

/* Writes at most FILE_IO_MAX bytes as one step. Returns 0 when all is written, else an errno. */
static int write_step(file_writer *f, uint64_t offset, const uint8_t *data, size_t size) {
    int fault = file_fault_check(FILE_OP_WRITE, f->path);
    if (fault > 0) {
        return fault;
    }
    if (fault < 0) { /* simulates a full disk: only a part is written */
        uint64_t part = (uint64_t)(-(int64_t)fault) - 1;
        size = part < size ? (size_t)part : size;
    }
    int errnum = put_bytes(f, offset, data, size);
    return errnum == 0 && fault < 0 ? ENOSPC : errnum;
}

/*
 * Starts write-back early, so the disk is busy while more data is produced and the final sync has less to do. It is
 * only a hint: it does not wait and ignores errors, so fdatasync reports them all.
 */
static void start_writing_back(file_writer *f, uint64_t end) {
    if (f->capacity > 0 && end >= f->started + WRITE_BACK_BYTES) {
        (void)sync_file_range(f->fd, (off_t)f->started, (off_t)(end - f->started), SYNC_FILE_RANGE_WRITE);
        f->started = end;
    }
}

static ckd_status write_out(file_writer *f, uint64_t offset, const void *data, size_t size, ckd_error *err) {
    f->synced = false;
    for (size_t done = 0; done < size;) {
        size_t part = size - done < FILE_IO_MAX ? size - done : FILE_IO_MAX;
        int errnum = write_step(f, offset + done, (const uint8_t *)data + done, part);
        if (errnum != 0) {
            return fail(f, err, errnum, "write");
        }
        done += part;
    }
    start_writing_back(f, offset + size);
    return CKD_OK;
}

ckd_status file_flush(file_writer *f, ckd_error *err) {
    if (f->failed != CKD_OK) {
        return refuse_failed(f, err);
    }
    if (f->used == 0) {
        return CKD_OK;
    }
    ckd_status status = write_out(f, f->flushed, f->buffer, f->used, err);
    if (status == CKD_OK) {
        f->flushed += f->used;
        f->used = 0;
    }
    return status;
}

ckd_status file_append(file_writer *f, const void *data, size_t size, ckd_error *err) {
    uint64_t end;
    if (f->failed != CKD_OK) {
        return refuse_failed(f, err);
    }
    if (size == 0) {
        return CKD_OK;
    }
    if (!size_add(&end, file_written(f), size) || end > INT64_MAX) {
        return fail(f, err, EFBIG, "append to");
    }
    if (size > f->capacity - f->used) {
        ckd_status status = file_flush(f, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    if (size > f->capacity - f->used) { /* larger than the whole buffer: not worth a copy */
        ckd_status status = write_out(f, f->flushed, data, size, err);
        f->flushed += status == CKD_OK ? size : 0;
        return status;
    }
    memcpy(f->buffer + f->used, data, size);
    f->used += size;
    f->synced = false;
    return CKD_OK;
}

uint64_t file_written(const file_writer *f) {
    return f->flushed + f->used;
}

ckd_status file_write_at(file_writer *f, uint64_t offset, const void *data, size_t size, ckd_error *err) {
    uint64_t end;
    if (f->failed != CKD_OK) {
        return refuse_failed(f, err);
    }
    if (!size_add(&end, offset, size) || end > file_written(f)) {
        err_set(err, CKD_E_INVALID, "%zu bytes at offset %llu of %s were never appended", size,
                (unsigned long long)offset, f->path);
        return err_in_file(err, CKD_E_INVALID, f->path);
    }
    ckd_status status = file_flush(f, err);
    return status != CKD_OK ? status : write_out(f, offset, data, size, err);
}

ckd_status file_sync(file_writer *f, ckd_error *err) {
    ckd_status status = file_flush(f, err);
    if (status != CKD_OK) {
        return status;
    }
    int errnum = file_op_check(FILE_OP_SYNC, f->path);
    if (errnum == 0 && fdatasync(f->fd) != 0) {
        /* EINTR counts as a failure, too: Linux reports a write-back error once, and a second call would succeed. */
        errnum = errno;
    }
    if (errnum != 0) {
        return fail(f, err, errnum, "make durable");
    }
    f->synced = true;
    return CKD_OK;
}

ckd_status file_close(file_writer *f, ckd_error *err) {
    ckd_status status = file_flush(f, err);
    int errnum = file_op_check(FILE_OP_CLOSE, f->path);
    if (close(f->fd) != 0 && errnum == 0 && !(errno == EINTR && f->synced)) {
        errnum = errno; /* the descriptor is closed anyway; NFS reports a full disk here */
    }
    if (status == CKD_OK && errnum != 0) {
        status = fail(f, err, errnum, "close");
    }
    free_writer(f);
    return status;
}

/* Does the path still name the open file? After publishing or removal the name may belong to another file. */
static bool still_named(const file_writer *f) {
    struct stat open_file, named;
    return fstat(f->fd, &open_file) == 0 && lstat(f->path, &named) == 0 && open_file.st_dev == named.st_dev &&
           open_file.st_ino == named.st_ino;
}

void file_discard(file_writer *f) {
    if (f == NULL) {
        return;
    }
    /* Remove it before closing: while it is open, no other file can have its inode number. */
    if (f->process == getpid() && still_named(f) && file_op_check(FILE_OP_REMOVE, f->path) == 0) {
        unlink(f->path);
    }
    (void)file_op_check(FILE_OP_CLOSE, f->path);
    close(f->fd);
    free_writer(f);
}
