/* Full pieces of a new file past the page cache. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_direct.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/threads.h"

enum { PIECES = 4, ALIGNMENT = 4096 };
#define RESERVE_MOST (UINT64_C(16) << 20)

static size_t piece_size = (size_t)1 << 20;

typedef struct direct_piece {
    struct iovec iov;
    uint64_t offset;
    bool busy;
} direct_piece;

struct direct_file {
    int fd, flags;     /* flags: those that it had before */
    int errnum;        /* the first failure */
    file_room *room;   /* whose memory the pieces are */
    size_t size;       /* of a piece */
    unsigned next;     /* the piece that is being filled */
    uint64_t reserved; /* bytes that the file system was asked for, so that writing only fills them */
    bool reserves;
    direct_piece pieces[PIECES];
    uring *ring; /* or NULL, and: */
    pthread_t writer;
    pthread_mutex_t mutex; /* guards errnum, and busy */
    pthread_cond_t moved;
    bool ending, ended;
    bool lost; /* nobody knows what the ring does with the memory: it is not given back */
    uint64_t helper_ns;
};

void file_set_direct_piece(size_t size) {
    piece_size = size;
}

/* ---- writing a piece ---- */

/* What is left of it after `done` bytes; an errno, or 0. */
static int write_rest(const direct_file *d, const direct_piece *p, size_t done) {
    const uint8_t *data = p->iov.iov_base;
    while (done < p->iov.iov_len) {
        ssize_t put = pwrite(d->fd, data + done, p->iov.iov_len - done, (off_t)(p->offset + done));
        if (put == 0) {
            return EIO;
        }
        if (put < 0 && errno != EINTR) {
            return errno;
        }
        done += put > 0 ? (size_t)put : 0;
    }
    return 0;
}

/* Pieces are written in the order in which they were put. */
static void *write_pieces(void *context) {
    direct_file *d = context;
    struct timespec took;
    pthread_mutex_lock(&d->mutex);
    for (unsigned at = 0;; at = (at + 1) % PIECES) {
        direct_piece *p = &d->pieces[at];
        while (!p->busy && !d->ending) {
            pthread_cond_wait(&d->moved, &d->mutex);
        }
        if (!p->busy) {
            break;
        }
        bool wanted = d->errnum == 0;
        pthread_mutex_unlock(&d->mutex);
        int errnum = wanted ? write_rest(d, p, 0) : 0;
        pthread_mutex_lock(&d->mutex);
        d->errnum = d->errnum ? d->errnum : errnum;
        p->busy = false;
        pthread_cond_broadcast(&d->moved);
    }
    pthread_mutex_unlock(&d->mutex);
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &took) == 0) {
        d->helper_ns = (uint64_t)took.tv_sec * 1000000000 + (uint64_t)took.tv_nsec;
    }
    return NULL;
}

/*
 * One that the ring worked on has ended. What it did not write is written here: some systems do not write all at once, and the kernel gives up what it has not begun of
 * a thread that ends (the file is one thread's at a time, but not always the same one's).
 */
static void take_ended(direct_file *d) {
    unsigned number = 0;
    int result = 0, errnum = uring_wait(d->ring, &number, &result);
    if (errnum != 0) { /* never seen: the ring is lost, and with it what is under way */
        d->errnum = d->errnum ? d->errnum : errnum;
        d->lost = true;
        for (unsigned i = 0; i < PIECES; i++) {
            d->pieces[i].busy = false;
        }
        return;
    }
    direct_piece *p = &d->pieces[number % PIECES];
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -ECANCELED) {
        errnum = -result;
    } else if (d->errnum == 0) {
        errnum = write_rest(d, p, result > 0 ? (size_t)result : 0);
    }
    d->errnum = d->errnum ? d->errnum : errnum;
    p->busy = false;
}

/* ---- opening ---- */

static bool start_writer(direct_file *d) {
    pthread_mutex_init(&d->mutex, NULL);
    pthread_cond_init(&d->moved, NULL);
    return thread_start(&d->writer, write_pieces, d, NULL) == CKD_OK;
}

/* NULL: out of memory. */
static uint8_t *memory_of(file_room *room, size_t size) {
    if (room->pieces_size != size) {
        free(room->pieces);
        room->pieces = aligned_alloc(ALIGNMENT, size);
        room->pieces_size = room->pieces ? size : 0;
    }
    return room->pieces;
}

direct_file *direct_open(int fd, file_way way, file_room *room) {
    int flags = fcntl(fd, F_GETFL);
    direct_file *d = flags < 0 ? NULL : calloc(1, sizeof(*d));
    if (d == NULL) {
        return NULL;
    }
    *d = (direct_file){.fd = fd, .flags = flags, .room = room, .size = piece_size, .reserves = true};
    uint8_t *memory = memory_of(room, PIECES * d->size);
    bool good = memory != NULL && fcntl(fd, F_SETFL, flags | O_DIRECT) == 0;
    if (good && way == FILE_URING) {
        d->ring = uring_open(PIECES);
        good = d->ring != NULL;
    } else if (good) {
        good = start_writer(d);
    }
    if (!good) {
        (void)fcntl(fd, F_SETFL, flags);
        free(d);
        return NULL;
    }
    for (unsigned i = 0; i < PIECES; i++) {
        d->pieces[i].iov = (struct iovec){memory + i * d->size, d->size};
    }
    return d;
}

size_t direct_piece_size(const direct_file *d) {
    return d->size;
}

/* ---- using it ---- */

/* Until a piece is not under way. */
static void await(direct_file *d, unsigned at) {
    const direct_piece *p = &d->pieces[at];
    if (d->ring) {
        while (p->busy) {
            take_ended(d);
        }
        return;
    }
    pthread_mutex_lock(&d->mutex);
    while (p->busy) {
        pthread_cond_wait(&d->moved, &d->mutex);
    }
    pthread_mutex_unlock(&d->mutex);
}

uint8_t *direct_room(direct_file *d) {
    await(d, d->next);
    return d->pieces[d->next].iov.iov_base;
}

/*
 * A write that lengthens a file waits for the file system, and others wait for it: so the length is there before. Where that cannot be had, or
 * not so much, files grow by what is written, as ever.
 */
static void reserve(direct_file *d, uint64_t end) {
    if (!d->reserves || end <= d->reserved) {
        return;
    }
    uint64_t more = end < RESERVE_MOST ? end : RESERVE_MOST;
    if (fallocate(d->fd, 0, (off_t)d->reserved, (off_t)(end + more - d->reserved)) == 0) {
        d->reserved = end + more;
    } else {
        d->reserves = false;
    }
}

/* With a thread, under the mutex. */
static int submit(direct_file *d, direct_piece *p) {
    if (d->errnum != 0) {
        return d->errnum;
    }
    int errnum = d->ring ? uring_write(d->ring, d->fd, &p->iov, p->offset, d->next) : 0;
    if (errnum == EAGAIN || errnum == EBUSY) { /* the kernel has no room for it: so it is written here */
        errnum = write_rest(d, p, 0);
    } else {
        p->busy = errnum == 0;
    }
    d->errnum = errnum;
    return errnum;
}

int direct_put(direct_file *d, uint64_t offset) {
    direct_piece *p = &d->pieces[d->next];
    p->offset = offset;
    reserve(d, offset + d->size);
    if (!d->ring) {
        pthread_mutex_lock(&d->mutex);
    }
    int errnum = submit(d, p);
    if (!d->ring) {
        pthread_cond_broadcast(&d->moved);
        pthread_mutex_unlock(&d->mutex);
    }
    d->next = (d->next + 1) % PIECES;
    return errnum;
}

/* Nothing is under way any more. */
static void end(direct_file *d) {
    for (unsigned i = 0; i < PIECES; i++) {
        await(d, i);
    }
    if (!d->ring && !d->ended) {
        pthread_mutex_lock(&d->mutex);
        d->ending = true;
        pthread_cond_broadcast(&d->moved);
        pthread_mutex_unlock(&d->mutex);
        pthread_join(d->writer, NULL);
    }
    d->ended = true;
}

int direct_settle(direct_file *d, uint64_t size) {
    end(d);
    int errnum = d->errnum;
    /* Also where reserving failed: it may have lengthened the file before. */
    if (errnum == 0 && (d->reserved > size || !d->reserves) && ftruncate(d->fd, (off_t)size) != 0) {
        errnum = errno;
    }
    if (fcntl(d->fd, F_SETFL, d->flags) != 0 && errnum == 0) {
        errnum = errno;
    }
    return errnum;
}

uint64_t direct_helper_ns(const direct_file *d) {
    return d->helper_ns;
}

void direct_free(direct_file *d, bool in_child) {
    if (d == NULL) {
        return;
    }
    if (!in_child) { /* a child has neither the thread nor, in its hands, the ring */
        end(d);
        if (!d->ring) {
            pthread_cond_destroy(&d->moved);
            pthread_mutex_destroy(&d->mutex);
        }
    }
    uring_close(d->ring);
    if (d->lost) {
        d->room->pieces = NULL;
        d->room->pieces_size = 0;
    }
    free(d);
}
