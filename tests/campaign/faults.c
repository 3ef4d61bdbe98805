/*
 * A library that a campaign preloads into the command. It determines random bytes and the clock, and lets one
 * system call fail.
 *
 *   CAMPAIGN_RANDOM=N        getrandom() gives the stream of this seed, so that ids are the same in a replay
 *   CAMPAIGN_NOW=SECONDS     CLOCK_REALTIME when the process begins, since 1970. It advances for five seconds and
 *                            then stops, so that a slow machine plays the same script
 *   CAMPAIGN_CLOCK=SECONDS   CLOCK_REALTIME is this much ahead, or behind
 *   CAMPAIGN_FAULT=WHAT:N    at the Nth call of those below: `kill` ends the process, `short` moves fewer bytes
 *                            than requested, `EIO`, `ENOSPC`, `EINTR` fail; `EIO+:N` fails from then on
 *   CAMPAIGN_CLOSE=1         closing a descriptor of the file that standard output is fails with EIO, as on NFS
 *
 * Calls on standard input, output and error are not counted, nor are those of the C library itself.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { NOTHING, KILL, SHORT, FAIL };

static atomic_uint_fast64_t calls;
static uint64_t random_state, fault_at;
static bool random_set, for_ever;
static int fault = NOTHING, fault_errno;
static int64_t clock_ahead, clock_now;
static struct timespec began_at;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) {
        abort();
    }
    return found;
}

static void read_fault(const char *text) {
    static const struct {
        const char *name;
        int fault, error;
    } known[] = {{"kill", KILL, 0},        {"short", SHORT, 0},    {"EIO", FAIL, EIO},
                 {"ENOSPC", FAIL, ENOSPC}, {"EINTR", FAIL, EINTR}, {"EMFILE", FAIL, EMFILE}};
    const char *colon = strchr(text, ':');
    size_t length = colon ? (size_t)(colon - text) : 0;
    for_ever = length > 0 && text[length - 1] == '+';
    length -= for_ever;
    for (size_t i = 0; colon && i < sizeof known / sizeof *known; i++) {
        if (strlen(known[i].name) == length && strncmp(known[i].name, text, length) == 0) {
            fault = known[i].fault;
            fault_errno = known[i].error;
            fault_at = strtoull(colon + 1, NULL, 10);
        }
    }
}

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("CAMPAIGN_RANDOM");
    if (text) {
        random_set = true;
        random_state = strtoull(text, NULL, 10);
    }
    if ((text = getenv("CAMPAIGN_CLOCK"))) {
        clock_ahead = strtoll(text, NULL, 10);
    }
    if ((text = getenv("CAMPAIGN_NOW"))) {
        clock_now = strtoll(text, NULL, 10);
        (void)REAL(clock_gettime)(CLOCK_MONOTONIC, &began_at);
    }
    if ((text = getenv("CAMPAIGN_FAULT"))) {
        read_fault(text);
    }
}

/* Counts a call. If it must fail, sets errno and returns true. */
static bool fails(bool *is_short) {
    uint64_t n = atomic_fetch_add(&calls, 1) + 1;
    if (fault == NOTHING || n < fault_at || (n > fault_at && !for_ever)) {
        return false;
    }
    if (fault == KILL) {
        raise(SIGKILL);
    }
    if (fault == SHORT) {
        if (is_short) {
            *is_short = true;
        }
        return false;
    }
    errno = fault_errno;
    return true;
}

ssize_t getrandom(void *out, size_t size, unsigned flags) {
    if (!random_set) {
        return REAL(getrandom)(out, size, flags);
    }
    for (size_t i = 0; i < size; i++) {
        uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);
        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
        ((uint8_t *)out)[i] = (uint8_t)(z >> 56);
    }
    return (ssize_t)size;
}

static int read_clock(clockid_t clock, struct timespec *t) {
    int status = REAL(clock_gettime)(clock, t);
    if (status == 0 && clock == CLOCK_REALTIME && clock_now) {
        (void)REAL(clock_gettime)(CLOCK_MONOTONIC, t);
        int64_t passed = ((int64_t)t->tv_sec - began_at.tv_sec) * 1000000000 + t->tv_nsec - began_at.tv_nsec;
        int64_t most = INT64_C(5000000000);
        passed = passed < most ? passed : most;
        t->tv_sec = (time_t)(clock_now + passed / 1000000000);
        t->tv_nsec = (long)(passed % 1000000000);
    }
    if (status == 0 && clock == CLOCK_REALTIME) {
        t->tv_sec += clock_ahead;
    }
    return status;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    return read_clock(clock, t);
}

time_t time(time_t *out) {
    struct timespec now = {0, 0};
    (void)read_clock(CLOCK_REALTIME, &now);
    if (out) {
        *out = now.tv_sec;
    }
    return now.tv_sec;
}

#define MOVE(name, parameters, arguments)              \
    ssize_t name parameters {                          \
        bool is_short = false;                         \
        if (fd > 2 && fails(&is_short)) {              \
            return -1;                                 \
        }                                              \
        size = is_short && size > 1 ? size / 2 : size; \
        return REAL(name) arguments;                   \
    }

MOVE(read, (int fd, void *data, size_t size), (fd, data, size))
MOVE(write, (int fd, const void *data, size_t size), (fd, data, size))
MOVE(pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
MOVE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))

#define CALL(name, parameters, arguments)               \
    int name parameters {                               \
        return fails(NULL) ? -1 : REAL(name) arguments; \
    }

CALL(fsync, (int fd), (fd))
CALL(fdatasync, (int fd), (fd))
CALL(ftruncate64, (int fd, off64_t size), (fd, size))
CALL(rename, (const char *from, const char *to), (from, to))
CALL(renameat2, (int from_fd, const char *from, int to_fd, const char *to, unsigned flags),
     (from_fd, from, to_fd, to, flags))
CALL(link, (const char *from, const char *to), (from, to))
CALL(unlink, (const char *path), (path))
CALL(mkdir, (const char *path, mode_t mode), (path, mode))

int close(int fd) {
    struct stat closed, out;
    bool is_output = fd > 2 && getenv("CAMPAIGN_CLOSE") && fstat(fd, &closed) == 0 && fstat(1, &out) == 0 &&
                     closed.st_dev == out.st_dev && closed.st_ino == out.st_ino;
    int result = REAL(close)(fd);
    if (is_output) {
        errno = EIO;
    }
    return is_output ? -1 : result;
}

/* The error is the result, as POSIX says. */
int fallocate64(int fd, int mode, off64_t offset, off64_t size) {
    return fails(NULL) ? -1 : REAL(fallocate64)(fd, mode, offset, size);
}

int open64(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;
    va_end(list);
    return fails(NULL) ? -1 : REAL(open64)(path, flags, mode);
}

int openat64(int dir, const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;
    va_end(list);
    return fails(NULL) ? -1 : REAL(openat64)(dir, path, flags, mode);
}
