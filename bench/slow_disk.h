/*
 * A disk of so many bytes a second that has a write cache: a file's bytes go to it from the moment the file was created, behind those of earlier ones, and what is made durable waits until they would
 * have been written.
 */
#ifndef BENCH_SLOW_DISK_H
#define BENCH_SLOW_DISK_H

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef struct slow_disk {
    double rate;    /* bytes/s; 0: as it is */
    double free_at; /* seconds of the day's clock, as files' times are */
    pthread_mutex_t mutex;
} slow_disk;

/* Of an open file, with a path of "" and AT_EMPTY_PATH; or of a path, with AT_FDCWD. */
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
