#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE  4096u
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

static ckd_status map(shared_memory *m, bool write, ckd_error *err) {
    int protection = PROT_READ | (write ? PROT_WRITE : 0), flags = MAP_SHARED | (write ? MAP_POPULATE : 0);
    void *at = mmap(NULL, m->size, protection, flags, m->fd, 0);
    if (at == MAP_FAILED) {
        return err_sys(err, errno, NULL, "cannot map %zu bytes of shared memory", m->size);
    }
    if (write) {
        (void)madvise(at, m->size, MADV_DONTFORK);
    }
    m->at = at;
    return CKD_OK;
}

/* Reserves the pages now: a page that is missing later would kill the process that touches it. */
static ckd_status reserve(const shared_memory *m, ckd_error *err) {
    if (ftruncate(m->fd, (off_t)m->size) != 0 || fallocate(m->fd, 0, 0, (off_t)m->size) != 0) {
        int errnum = errno == ENOSPC ? ENOMEM : errno;
        return err_sys(err, errnum, NULL, "cannot reserve %zu bytes of shared memory", m->size);
    }
    return fcntl(m->fd, F_ADD_SEALS, SEALS) == 0
               ? CKD_OK
               : err_sys(err, errno, NULL, "cannot seal the size of shared memory");
}

static ckd_status fail(shared_memory *m, ckd_status status) {
    close(m->fd);
    *m = (shared_memory){.fd = -1};
    return status;
}

ckd_status shared_memory_make(shared_memory *out, uint64_t size, ckd_error *err) {
    *out = (shared_memory){.fd = -1};
    if (size > INT64_MAX - PAGE) {
        return err_set(err, CKD_E_NOMEM, "no memory has %llu bytes", (unsigned long long)size);
    }
    int fd = memfd_create("ckptdelta", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return err_sys(err, errno, NULL, "cannot make shared memory");
    }
    *out = (shared_memory){.fd = fd, .size = (size_t)(size + PAGE - 1) & ~(size_t)(PAGE - 1)};
    ckd_status status = reserve(out, err);
    THEN(status, map(out, false, err));
    return status == CKD_OK ? CKD_OK : fail(out, status);
}

ckd_status shared_memory_map(shared_memory *out, int fd, uint64_t size, bool write, ckd_error *err) {
    struct stat st;
    *out = (shared_memory){.fd = fd};
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) != 0 || st.st_size <= 0 ||
        (uint64_t)st.st_size < size) {
        return fail(out, err_set(err, CKD_E_INVALID, "this is no shared memory of a sealed size"));
    }
    out->size = (size_t)st.st_size;
    ckd_status status = map(out, write, err);
    return status == CKD_OK ? CKD_OK : fail(out, status);
}

void shared_memory_release(shared_memory *m, bool in_child) {
    if (m->at) {
        if (!in_child) {
            munmap(m->at, m->size);
        }
        close(m->fd);
    }
    *m = (shared_memory){.fd = -1};
}
