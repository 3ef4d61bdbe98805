/*
 * Descriptors of files that are read occasionally. A process may read far more files than it may have open. So the pool
 * closes the least recently used descriptor; a reader opens its file again on demand.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_op.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

/* A quarter of the process's limit: the application and files being written need the rest. */
#define POOL_SHARE 4u
#define POOL_MIN   16u
#define POOL_MAX   1024u

static struct {
    pthread_mutex_t mutex; /* never held during a system call that may wait */
    pthread_once_t once;
    pool_handle *oldest, *newest; /* open and not in use */
    size_t open;                  /* handles that are open, in use or not */
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static void lock_pool(void) {
    pthread_mutex_lock(&pool.mutex);
}

static void unlock_pool(void) {
    pthread_mutex_unlock(&pool.mutex);
}

/* Without this, a child forked while another thread held the mutex could not close any file. */
static void lock_around_fork(void) {
    pthread_atfork(lock_pool, unlock_pool, unlock_pool);
}

static void unlink_idle(pool_handle *h) {
    *(h->older != NULL ? &h->older->newer : &pool.oldest) = h->newer;
    *(h->newer != NULL ? &h->newer->older : &pool.newest) = h->older;
    h->older = h->newer = NULL;
}

static void append_idle(pool_handle *h) {
    h->older = pool.newest;
    *(pool.newest != NULL ? &pool.newest->newer : &pool.oldest) = h;
    pool.newest = h;
}

/* Takes the descriptor of the least recently used handle; -1 if all are in use. */
static int take_oldest(void) {
    pool_handle *h = pool.oldest;
    if (h == NULL) {
        return -1;
    }
    int fd = h->fd;
    unlink_idle(h);
    h->fd = -1;
    pool.open--;
    return fd;
}

/* Asks the system each time, as the application may change the limit. */
static size_t pool_limit(void) {
    struct rlimit limit;
    rlim_t files = getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur / POOL_SHARE : POOL_MIN;
    return files < POOL_MIN ? POOL_MIN : files > POOL_MAX ? POOL_MAX : (size_t)files;
}

/* Closes idle descriptors until at most `limit` are open. Returns whether it closed any. */
static bool close_idle(size_t limit) {
    bool any = false;
    for (;;) {
        lock_pool();
        int fd = pool.open > limit ? take_oldest() : -1;
        unlock_pool();
        if (fd < 0) {
            return any;
        }
        close(fd);
        any = true;
    }
}

int file_open_descriptor(const char *path, int flags, mode_t mode) {
    int fd;
    do {
        fd = open(path, flags, mode);
    } while (fd < 0 && (errno == EINTR || ((errno == EMFILE || errno == ENFILE) && close_idle(0))));
    return fd;
}

bool pool_handle_take(pool_handle *h) {
    lock_pool();
    bool open = h->fd >= 0;
    if (open && h->users++ == 0) {
        unlink_idle(h);
    }
    unlock_pool();
    return open;
}

void pool_handle_set(pool_handle *h, int fd) {
    pthread_once(&pool.once, lock_around_fork);
    lock_pool();
    bool is_first = h->fd < 0;
    if (is_first) {
        h->fd = fd;
        pool.open++;
    } else if (h->users == 0) {
        unlink_idle(h);
    }
    h->users++;
    unlock_pool();
    if (!is_first) {
        close(fd);
    }
}

void pool_handle_release(pool_handle *h) {
    lock_pool();
    if (--h->users == 0) {
        append_idle(h);
    }
    bool many = pool.open > POOL_MIN;
    unlock_pool();
    if (many) {
        close_idle(pool_limit());
    }
}

void pool_handle_close(pool_handle *h) {
    lock_pool();
    int fd = h->fd;
    if (fd >= 0) {
        if (h->users == 0) {
            unlink_idle(h);
        }
        pool.open--;
        h->fd = -1;
    }
    unlock_pool();
    if (fd >= 0) {
        close(fd);
    }
}
