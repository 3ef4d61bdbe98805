/*
 * Shared memory from memfd_create. Tries the kernel's pool of huge pages first where that is wanted, then joins
 * ordinary pages into huge ones.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE    4096u
#define JOINED  ((size_t)2 << 20) /* the kernel joins this much to a huge page */
#define AT_ONCE ((size_t)1 << 30)
#define SEALS   (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define FLAGS   (MFD_CLOEXEC | MFD_ALLOW_SEALING)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

/* The kernel maps a huge page as one only where the address is as well aligned. */
static void *map_aligned(const shared_memory *m, size_t page, int protection, int flags) {
    size_t align = page > JOINED ? page : JOINED, room = m->size + align;
    uint8_t *at = m->size < JOINED
                      ? MAP_FAILED
                      : mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        return mmap(NULL, m->size, protection, flags, m->fd, 0);
    }
    size_t before = (align - (uintptr_t)at % align) % align;
    void *mapped = mmap(at + before, m->size, protection, flags | MAP_FIXED, m->fd, 0);
    if (mapped == MAP_FAILED) {
        int errnum = errno;
        munmap(at, room);
        errno = errnum;
        return mapped;
    }
    if (before) {
        munmap(at, before);
    }
    if (before < align) {
        munmap(at + before + m->size, align - before);
    }
    return mapped;
}

static ckd_status map(shared_memory *m, size_t page, bool write, ckd_error *err) {
    int protection = PROT_READ | (write ? PROT_WRITE : 0), flags = MAP_SHARED | (write ? MAP_POPULATE : 0);
    void *at = map_aligned(m, page, protection, flags);
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
    if (fallocate(m->fd, 0, 0, (off_t)m->size) != 0) {
        int errnum = errno == ENOSPC ? ENOMEM : errno;
        return err_sys(err, errnum, NULL, "cannot reserve %zu bytes of shared memory", m->size);
    }
    return fcntl(m->fd, F_ADD_SEALS, SEALS) == 0
               ? CKD_OK
               : err_sys(err, errno, NULL, "cannot seal the size of shared memory");
}

static ckd_status fail(shared_memory *m, ckd_status status) {
    if (m->fd >= 0) {
        close(m->fd);
    }
    *m = (shared_memory){.fd = -1};
    return status;
}

static uint64_t whole_pages(uint64_t size, uint64_t page) {
    return (size + page - 1) / page * page;
}

/* Returns the size of the pool's pages; 0: the system has no pool. */
static size_t pool_page(int fd) {
    struct stat st;
    return fd >= 0 && fstat(fd, &st) == 0 && st.st_blksize > 0 ? (size_t)st.st_blksize : 0;
}

/* Replaces the pages of one huge page. Returns false if no more can be replaced. */
static bool join_one(shared_memory *m, size_t at) {
    bool joined = madvise(m->at + at, JOINED, MADV_COLLAPSE) == 0;
    m->huge_bytes += joined ? JOINED : 0;
    return joined || errno == EAGAIN; /* of these pages, some were in use for a moment */
}

/*
 * Asks the kernel to replace ordinary pages by huge ones. It may lack these, or refuse. A huge page needs one ordinary
 * page to replace. Where there are all 512, the kernel copies them, which takes five times as long. A call for many pages
 * does not tell how many it has replaced when it fails.
 */
static void join_pages(shared_memory *m) {
    bool goes_on = true;
    for (size_t at = 0, size; goes_on && m->size - at >= JOINED; at += size) {
        size = m->size - at < AT_ONCE ? m->size - at : AT_ONCE;
        size -= size % JOINED;
        for (size_t i = 0; i < size && goes_on; i += JOINED) {
            goes_on = fallocate(m->fd, 0, (off_t)(at + i), PAGE) == 0;
        }
        if (goes_on && madvise(m->at + at, size, MADV_COLLAPSE) == 0) {
            m->huge_bytes += size;
            continue;
        }
        for (size_t i = 0; i < size && goes_on; i += JOINED) {
            goes_on = join_one(m, at + i);
        }
    }
}

/* The mapping comes before the pages, because they are joined through it. Nobody touches it before they are reserved. */
static ckd_status make(shared_memory *out, int fd, uint64_t size, size_t page, bool joins, ckd_error *err) {
    *out = (shared_memory){.fd = fd, .size = (size_t)whole_pages(size, page)};
    ckd_status status = ftruncate(fd, (off_t)out->size) == 0
                            ? map(out, page, false, err)
                            : err_sys(err, errno, NULL, "cannot make %zu bytes of shared memory", out->size);
    if (status == CKD_OK && joins) {
        join_pages(out);
    }
    THEN(status, reserve(out, err));
    if (status != CKD_OK && out->at) {
        munmap(out->at, out->size);
    }
    return status == CKD_OK ? CKD_OK : fail(out, status);
}

/* The pages have no names in a mounted file system, so nothing has to be mounted. */
static ckd_status make_from_pool(shared_memory *out, uint64_t size, ckd_error *err) {
    ckd_error why;
    int fd = memfd_create("ckptdelta", FLAGS | MFD_HUGETLB);
    size_t page = pool_page(fd);
    if (!page) {
        int errnum = errno;
        *out = (shared_memory){.fd = fd};
        return fail(out, err_sys(err, errnum, NULL, "this system has no pool of huge pages"));
    }
    ckd_status status = make(out, fd, size, page, false, &why);
    return status != CKD_E_NOMEM
               ? err_from(err, status, &why)
               : err_set(err, status,
                         "the pool has too few free huge pages for %llu MiB: it needs %llu of %zu KiB each "
                         "(sysctl vm.nr_hugepages)",
                         (unsigned long long)(size >> 20) + 1,
                         (unsigned long long)(whole_pages(size, page) / page), page >> 10);
}

ckd_status shared_memory_make(shared_memory *out, uint64_t size, huge_pages huge, ckd_error *err) {
    *out = (shared_memory){.fd = -1};
    if (size > INT64_MAX / 2) {
        return err_set(err, CKD_E_NOMEM, "no memory has %llu bytes", (unsigned long long)size);
    }
    if (huge != HUGE_PAGES_OFF) {
        ckd_error why;
        ckd_status status = make_from_pool(out, size, &why);
        out->huge_bytes = status == CKD_OK ? out->size : 0;
        if (status == CKD_OK || huge == HUGE_PAGES_ON) {
            return err_from(err, status, &why);
        }
    }
    int fd = memfd_create("ckptdelta", FLAGS);
    if (fd < 0) {
        return err_sys(err, errno, NULL, "cannot make shared memory");
    }
    return make(out, fd, size, PAGE, huge == HUGE_PAGES_TRY, err);
}

uint64_t shared_memory_bytes(uint64_t size, huge_pages huge) {
    size_t page = 0;
    if (huge != HUGE_PAGES_OFF) {
        int fd = memfd_create("ckptdelta", FLAGS | MFD_HUGETLB);
        page = pool_page(fd);
        if (fd >= 0) {
            close(fd);
        }
    }
    return whole_pages(size, page ? page : PAGE);
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
    ckd_status status = map(out, st.st_blksize > 0 ? (size_t)st.st_blksize : PAGE, write, err);
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
