/*
 * Locks: fcntl's open file description locks. Unlike the older POSIX locks they belong to the descriptor: two
 * threads exclude each other, and closing some other descriptor of the file releases nothing.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_op.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* F_OFD_SETLKW has no timeout. So try, sleep, and try again with growing pauses. */
#define SLEEP_FIRST_NS   UINT64_C(500000)
#define SLEEP_LONGEST_NS UINT64_C(50000000)
#define REOPEN_MAX       1000 /* times that the file may be replaced during one call */

struct file_lock {
    int fd;
    pid_t process;
    const file_mount *mount; /* which holds the lock, too; NULL: none does */
    char name[64];
};

static int open_lock_file(int *fd, const char *path, lock_kind kind, bool create) {
    int flags = (kind == LOCK_EXCLUSIVE ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW;
    /* Try without O_CREAT first: on a read-only file system O_CREAT may fail even if the file exists. */
    *fd = file_open_descriptor(path, flags, 0);
    if (*fd < 0 && errno == ENOENT && create) {
        *fd = file_open_descriptor(path, flags | O_CREAT, 0666);
    }
    return *fd < 0 ? errno : 0;
}

/* Returns 0 or an errno; EAGAIN: someone else holds the lock. */
static int try_lock(int fd, lock_kind kind) {
    struct flock range = {.l_type = kind == LOCK_EXCLUSIVE ? F_WRLCK : F_RDLCK, .l_whence = SEEK_SET};
    while (fcntl(fd, F_OFD_SETLK, &range) != 0) {
        if (errno != EINTR) {
            return errno == EACCES ? EAGAIN : errno;
        }
    }
    return 0;
}

/* The previous holder may have removed the file. A lock on a file without a name excludes nobody. */
static int still_named(bool *named, int fd, const char *path) {
    struct stat opened, named_file;
    *named = false;
    if (fstat(fd, &opened) != 0) {
        return errno;
    }
    if (stat(path, &named_file) != 0) {
        return errno == ENOENT ? 0 : errno;
    }
    *named = opened.st_dev == named_file.st_dev && opened.st_ino == named_file.st_ino;
    return 0;
}

static int wait_for_lock(int fd, lock_kind kind, uint64_t deadline) {
    uint64_t pause = SLEEP_FIRST_NS;
    for (;;) {
        int errnum = try_lock(fd, kind);
        uint64_t now = clock_monotonic_ns();
        if (errnum != EAGAIN || now >= deadline) {
            return errnum;
        }
        clock_sleep_ns(pause < deadline - now ? pause : deadline - now);
        pause = pause * 2 < SLEEP_LONGEST_NS ? pause * 2 : SLEEP_LONGEST_NS;
    }
}

/* Opens and locks. *fd is the locked file; on failure it is closed. */
static int lock_file(int *fd, const char *path, lock_kind kind, bool create, uint64_t deadline) {
    for (int i = 0; i < REOPEN_MAX; i++) {
        bool named = false;
        int errnum = open_lock_file(fd, path, kind, create);
        if (errnum != 0) {
            return errnum;
        }
        errnum = wait_for_lock(*fd, kind, deadline);
        if (errnum == 0) {
            errnum = still_named(&named, *fd, path);
        }
        if (errnum == 0 && named) {
            return 0;
        }
        close(*fd);
        if (errnum != 0) {
            return errnum;
        }
    }
    return EAGAIN;
}

/* Asks the mount of an exclusive lock, for the time that is left. */
static ckd_status lock_mounted(file_lock *lock, const char *path, uint64_t deadline, ckd_error *err) {
    mounted m = mount_of(path);
    if (!m.mount || strlen(m.name) >= sizeof(lock->name)) {
        return CKD_OK;
    }
    uint64_t now = clock_monotonic_ns();
    uint32_t left_ms = now < deadline ? (uint32_t)((deadline - now) / 1000000) : 0;
    ckd_status status = m.mount->lock(m.mount->context, m.name, left_ms, err);
    if (status == CKD_OK) {
        lock->mount = m.mount;
        memcpy(lock->name, m.name, strlen(m.name) + 1);
    }
    return status;
}

ckd_status lock_acquire(file_lock **out, const char *path, lock_kind kind, bool create, uint32_t timeout_ms,
                        ckd_error *err) {
    *out = NULL;
    file_lock *lock = malloc(sizeof(*lock));
    if (lock == NULL) {
        return err_nomem(err, sizeof(*lock), "a lock");
    }
    lock->mount = NULL;
    int errnum = file_op_check(FILE_OP_LOCK, path);
    uint64_t deadline = clock_monotonic_ns() + (uint64_t)timeout_ms * 1000000;
    if (errnum == 0) {
        errnum = lock_file(&lock->fd, path, kind, create, deadline);
    }
    if (errnum == 0) {
        lock->process = getpid();
        ckd_status status = kind == LOCK_EXCLUSIVE ? lock_mounted(lock, path, deadline, err) : CKD_OK;
        if (status == CKD_OK) {
            *out = lock;
        } else {
            lock_release(lock);
        }
        return status;
    }
    free(lock);
    if (errnum == EAGAIN) {
        err_set(err, CKD_E_BUSY, "another process or handle holds the lock %s; waited %u ms: try again later",
                path, (unsigned)timeout_ms);
        return err_in_file(err, CKD_E_BUSY, path);
    }
    return err_sys(err, errnum, path, "cannot lock %s", path);
}

void lock_release(file_lock *lock) {
    if (lock == NULL) {
        return;
    }
    /*
     * A child forked meanwhile shares the open file. So the owner unlocks before it closes; otherwise the child would
     * keep the lock. The child only closes; otherwise a destructor in the child would release its parent's lock.
     */
    if (lock->process == getpid()) {
        if (lock->mount) {
            lock->mount->unlock(lock->mount->context, lock->name);
        }
        struct flock range = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
        while (fcntl(lock->fd, F_OFD_SETLK, &range) != 0 && errno == EINTR) {
        }
    }
    close(lock->fd);
    free(lock);
}
