/* Time and randomness. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_op.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define PAUSE_FIRST   UINT64_C(300000) /* ns */
#define PAUSE_LONGEST UINT64_C(20000000)

static uint64_t clock_ns(clockid_t clock) {
    struct timespec t = {0};
    (void)clock_gettime(clock, &t); /* never fails for the two clocks that every Linux has */
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

uint64_t clock_wall_ns(void) {
    return clock_ns(CLOCK_REALTIME);
}

uint64_t clock_monotonic_ns(void) {
    return clock_ns(CLOCK_MONOTONIC);
}

void clock_sleep_ns(uint64_t ns) {
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    (void)nanosleep(&t, NULL); /* a signal may cut it short; then the next attempt comes early */
}

ckd_status random_bytes(void *out, size_t size, ckd_error *err) {
    for (size_t done = 0; done < size;) {
        ssize_t n = getrandom((uint8_t *)out + done, size - done, 0);
        if (n < 0 && errno != EINTR) {
            int errnum = errno;
            memset(out, 0, size);
            return err_sys(err, errnum, NULL, "cannot get random bytes from the system");
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return CKD_OK;
}

ckd_status retry_while_busy(attempt_fn attempt, void *context, uint64_t timeout_ms, ckd_error *err) {
    uint64_t begun = clock_monotonic_ns(), pause = PAUSE_FIRST;
    for (;;) {
        ckd_error why = {0}; /* the caller's err is only for the final failure */
        ckd_status status = attempt(context, &why);
        if (status != CKD_E_BUSY || (clock_monotonic_ns() - begun) / 1000000 >= timeout_ms) {
            return err_from(err, status, &why);
        }
        clock_sleep_ns(pause);
        pause = 2 * pause < PAUSE_LONGEST ? 2 * pause : PAUSE_LONGEST;
    }
}

void boot_id(char out[BOOT_ID]) {
    int fd = file_open_descriptor("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC, 0);
    ssize_t size = fd >= 0 ? read(fd, out, BOOT_ID - 1) : -1;
    if (fd >= 0) {
        close(fd);
    }
    out[size > 0 ? size : 0] = '\0';
    if (size <= 0 || strspn(out, "0123456789abcdef-") != BOOT_ID - 1) {
        strcpy(out, "?");
    }
}
