/* Copies whole files. A copy shares the blocks of the original where the file system can. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_op.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define COPY_BYTES ((size_t)1 << 20)

/* Copies through memory, from `done` on. Returns 0 or an errno. */
static int copy_through_memory(int from, int to, off_t done) {
    uint8_t *buffer = malloc(COPY_BYTES);
    if (buffer == NULL) {
        return ENOMEM;
    }
    int errnum = 0;
    while (errnum == 0) {
        ssize_t got = pread(from, buffer, COPY_BYTES, done);
        if (got == 0) {
            break;
        }
        for (ssize_t put = 0; got > 0 && put < got && errnum == 0;) {
            ssize_t n = pwrite(to, buffer + put, (size_t)(got - put), done + put);
            errnum = n < 0 && errno != EINTR ? errno : n == 0 ? EIO : 0;
            put += n > 0 ? n : 0;
        }
        errnum = got < 0 && errno != EINTR ? errno : errnum;
        done += got > 0 ? got : 0;
    }
    free(buffer);
    return errnum;
}

/* Returns 0 or an errno. */
static int copy_content(int from, int to) {
    if (ioctl(to, FICLONE, from) == 0) {
        return 0;
    }
    off_t done = 0;
    for (;;) {
        ssize_t got = copy_file_range(from, NULL, to, NULL, FILE_IO_MAX, 0);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            /* The system cannot copy between these files. The bytes copied so far stay. */
            return copy_through_memory(from, to, done);
        }
        if (got == 0) {
            /* The end of the file. But some file systems return 0 at once instead of an error. */
            return done == 0 ? copy_through_memory(from, to, 0) : 0;
        }
        done += got;
    }
}

static int open_original(const char *path) {
    int fd = file_open_descriptor(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
    struct stat st;
    if (fd >= 0 && (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))) {
        close(fd);
        errno = EINVAL;
        return -1;
    }
    return fd;
}

ckd_status file_clone(const char *from, const char *to, ckd_error *err) {
    int errnum = file_op_check(FILE_OP_OPEN, from);
    int in = errnum == 0 ? open_original(from) : -1;
    if (in < 0) {
        return err_sys(err, errnum != 0 ? errnum : errno, from, "cannot copy %s", from);
    }
    errnum = file_op_check(FILE_OP_CREATE, to);
    int out = errnum == 0 ? file_open_descriptor(to, O_WRONLY | O_CLOEXEC | O_CREAT | O_EXCL, 0666) : -1;
    errnum = errnum != 0 ? errnum : out < 0 ? errno : 0;
    bool created = out >= 0;
    errnum = errnum != 0 ? errnum : file_op_check(FILE_OP_WRITE, to);
    errnum = errnum != 0 ? errnum : copy_content(in, out);
    if (created && close(out) != 0 && errnum == 0) {
        errnum = errno;
    }
    close(in);
    if (errnum == 0) {
        return CKD_OK;
    }
    if (created) {
        unlink(to);
    }
    return err_sys(err, errnum < 0 ? ENOSPC : errnum, to, "cannot copy %s to %s", from, to);
}
