/*
 * A disk of limited speed with a write cache. The bytes of a file go to it from the moment the file was created, after
 * those of earlier files. A call that makes a file durable waits until they would have been written.
 */
#ifndef BENCH_SLOW_DISK_H
#define BENCH_SLOW_DISK_H

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct slow_disk {
    double rate;    /* bytes/s; 0: unlimited */
    double free_at; /* CLOCK_REALTIME in seconds, as times of files are */
    pthread_mutex_t mutex;
} slow_disk;

/* For an open file, with a path of "" and AT_EMPTY_PATH; or for a path, with AT_FDCWD. */
static inline void slow_disk_wait(slow_disk *d, int at, const char *path, int flags) {
    struct statx of;
    struct timespec clock;
    if (d->rate <= 0 || statx(at, path, flags, STATX_SIZE | STATX_BTIME | STATX_MODE, &of) != 0 ||
        !S_ISREG(of.stx_mode)) {
        return;
    }
    clock_gettime(CLOCK_REALTIME, &clock);
    double now = (double)clock.tv_sec + 1e-9 * (double)clock.tv_nsec, from = now;
    if (of.stx_mask & STATX_BTIME) {
        from = (double)of.stx_btime.tv_sec + 1e-9 * (double)of.stx_btime.tv_nsec;
    }
    pthread_mutex_lock(&d->mutex);
    double until = (from > d->free_at ? from : d->free_at) + (double)of.stx_size / d->rate;
    d->free_at = until;
    pthread_mutex_unlock(&d->mutex);
    if (until > now) {
        usleep((useconds_t)(1e6 * (until - now)));
    }
}

#endif
