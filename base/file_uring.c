/* Writes that the kernel works on while the caller goes on: io_uring by its system calls, so that nothing is linked. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_direct.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct uring {
    int fd;
    struct io_uring_params params;
    uint8_t *submissions, *completions; /* rings, shared with the kernel; often one piece of memory */
    size_t submissions_size, completions_size;
    struct io_uring_sqe *entries;
};

static size_t entries_size(const uring *u) {
    return u->params.sq_entries * sizeof(struct io_uring_sqe);
}

static uint8_t *map(const uring *u, size_t size, off_t what) {
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd, what);
    return p == MAP_FAILED ? NULL : p;
}

static bool map_rings(uring *u) {
    const struct io_uring_params *p = &u->params;
    u->submissions_size = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    u->completions_size = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    bool one = (p->features & IORING_FEAT_SINGLE_MMAP) != 0;
    if (one && u->completions_size > u->submissions_size) {
        u->submissions_size = u->completions_size;
    }
    u->submissions = map(u, u->submissions_size, IORING_OFF_SQ_RING);
    u->completions = one ? u->submissions : map(u, u->completions_size, IORING_OFF_CQ_RING);
    u->entries = (struct io_uring_sqe *)(void *)map(u, entries_size(u), IORING_OFF_SQES);
    return u->submissions && u->completions && u->entries;
}

uring *uring_open(unsigned depth) {
    uring *u = calloc(1, sizeof(*u));
    if (u == NULL) {
        return NULL;
    }
    u->fd = (int)syscall(SYS_io_uring_setup, depth, &u->params);
    if (u->fd < 0 || !map_rings(u)) { /* no such call, forbidden, or no memory that may be locked */
        uring_close(u);
        return NULL;
    }
    return u;
}

void uring_close(uring *u) {
    if (u == NULL) {
        return;
    }
    if (u->entries) {
        munmap(u->entries, entries_size(u));
    }
    if (u->completions && u->completions != u->submissions) {
        munmap(u->completions, u->completions_size);
    }
    if (u->submissions) {
        munmap(u->submissions, u->submissions_size);
    }
    if (u->fd >= 0) {
        close(u->fd);
    }
    free(u);
}

static uint32_t *word(uint8_t *ring, uint32_t offset) {
    return (uint32_t *)(void *)(ring + offset);
}

/* 0, or an errno. */
static int enter(const uring *u, unsigned submit, unsigned complete) {
    for (;;) {
        long done = syscall(SYS_io_uring_enter, u->fd, submit, complete,
                            complete ? IORING_ENTER_GETEVENTS : 0u, NULL, (size_t)0);
        if (done >= 0) {
            return submit && done == 0 ? EAGAIN : 0;
        }
        if (errno != EINTR) {
            return errno;
        }
    }
}

int uring_write(uring *u, int fd, const struct iovec *iov, uint64_t offset, unsigned number) {
    uint32_t *tail = word(u->submissions, u->params.sq_off.tail);
    uint32_t mask = *word(u->submissions, u->params.sq_off.ring_mask), at = *tail & mask;
    u->entries[at] =
        (struct io_uring_sqe){.opcode = IORING_OP_WRITEV, /* of the first kernel that had it, too */
                              .fd = fd,
                              .off = offset,
                              .addr = (uint64_t)(uintptr_t)iov,
                              .len = 1,
                              .user_data = number};
    word(u->submissions, u->params.sq_off.array)[at] = at;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    int errnum = enter(u, 1, 0);
    if (errnum != 0) { /* not taken: nobody else looks at the ring meanwhile */
        __atomic_store_n(tail, *tail - 1, __ATOMIC_RELEASE);
    }
    return errnum;
}

int uring_wait(uring *u, unsigned *number, int *result) {
    uint32_t *head = word(u->completions, u->params.cq_off.head);
    const uint32_t *tail = word(u->completions, u->params.cq_off.tail);
    while (*head == __atomic_load_n(tail, __ATOMIC_ACQUIRE)) {
        int errnum = enter(u, 0, 1);
        if (errnum != 0) {
            return errnum;
        }
    }
    const struct io_uring_cqe *cqes =
        (const struct io_uring_cqe *)(const void *)(u->completions + u->params.cq_off.cqes);
    const struct io_uring_cqe *c = &cqes[*head & *word(u->completions, u->params.cq_off.ring_mask)];
    *number = (unsigned)c->user_data;
    *result = c->res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return 0;
}
