/* Files without a name, for temporary data that does not fit in memory. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_op.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct file_scratch {
    int fd;
    char directory[];
};

/* For file systems without O_TMPFILE: creates a file and unlinks it immediately. */
static int create_and_unlink(const char *directory) {
    uint8_t random[8];
    if (random_bytes(random, sizeof(random), NULL) != CKD_OK) {
        return -1;
    }
    size_t capacity = strlen(directory) + 64;
    char *path = malloc(capacity);
    if (path == NULL) {
        return -1;
    }
    snprintf(path, capacity, "%s/.tmp-scratch-%016llx", directory, (unsigned long long)load_le64(random));
    int fd = file_open_descriptor(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0) {
        unlink(path);
    }
    free(path);
    return fd;
}

ckd_status file_scratch_open(file_scratch **out, const char *directory, ckd_error *err) {
    *out = NULL;
    size_t length = strlen(directory) + 1;
    file_scratch *f = malloc(sizeof(*f) + length);
    if (f == NULL) {
        return err_nomem(err, sizeof(*f) + length, "a scratch file");
    }
    memcpy(f->directory, directory, length);
    int errnum = file_op_check(FILE_OP_CREATE, directory);
    if (errnum == 0) {
        f->fd = file_open_descriptor(directory, O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
        f->fd = f->fd >= 0 ? f->fd : create_and_unlink(directory);
        errnum = f->fd < 0 ? errno : 0;
    }
    if (errnum != 0) {
        free(f);
        return err_sys(err, errnum, directory, "cannot create a scratch file in %s", directory);
    }
    *out = f;
    return CKD_OK;
}

ckd_status file_scratch_write(file_scratch *f, uint64_t offset, const void *data, size_t size,
                              ckd_error *err) {
    int fault = file_fault_check(FILE_OP_WRITE, f->directory), errnum = fault < 0 ? ENOSPC : fault;
    for (size_t done = 0; done < size && errnum == 0;) {
        size_t part = size - done < FILE_IO_MAX ? size - done : FILE_IO_MAX;
        ssize_t put = pwrite(f->fd, (const uint8_t *)data + done, part, (off_t)(offset + done));
        errnum = put < 0 && errno != EINTR ? errno : put == 0 ? EIO : 0;
        done += put > 0 ? (size_t)put : 0;
    }
    return errnum ? err_sys(err, errnum, f->directory, "cannot write to a scratch file in %s", f->directory)
                  : CKD_OK;
}

ckd_status file_scratch_read(file_scratch *f, uint64_t offset, void *to, size_t size, ckd_error *err) {
    int errnum = file_op_check(FILE_OP_READ, f->directory);
    for (size_t done = 0; done < size && errnum == 0;) {
        size_t part = size - done < FILE_IO_MAX ? size - done : FILE_IO_MAX;
        ssize_t n = pread(f->fd, (uint8_t *)to + done, part, (off_t)(offset + done));
        errnum = n < 0 && errno != EINTR ? errno : n == 0 ? EIO : 0;
        done += n > 0 ? (size_t)n : 0;
    }
    return errnum ? err_sys(err, errnum, f->directory, "cannot read a scratch file in %s", f->directory)
                  : CKD_OK;
}

void file_scratch_close(file_scratch *f) {
    if (f != NULL) {
        close(f->fd);
        free(f);
    }
}
