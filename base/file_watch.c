/* Waits for changes in directories. */
#include "base/file_op.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <unistd.h>

struct file_watch {
    int changes; /* inotify; -1: not available */
    int wake;    /* eventfd; -1: file_watch_wake has no effect */
};

ckd_status file_watch_open(file_watch **out, ckd_error *err) {
    file_watch *w = *out = malloc(sizeof(*w));
    if (w == NULL) {
        return err_nomem(err, sizeof(*w), "a watch");
    }
    w->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    w->changes = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    return CKD_OK;
}

void file_watch_add(const file_watch *w, const char *directory) {
    if (w->changes >= 0) {
        (void)inotify_add_watch(w->changes, directory,
                                IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE | IN_ONLYDIR);
    }
}

static void drain(int fd) {
    uint8_t buffer[4096];
    while (fd >= 0 && read(fd, buffer, sizeof(buffer)) > 0) {
    }
}

void file_watch_wait(file_watch *w, uint64_t ns) {
    struct pollfd fds[2] = {{.fd = w->changes, .events = POLLIN}, {.fd = w->wake, .events = POLLIN}};
    uint64_t ms = ns / 1000000 + (ns % 1000000 != 0);
    if (poll(fds, 2, ms > 86400000 ? 86400000 : (int)ms) > 0) {
        drain(w->changes);
        drain(w->wake);
    }
}

void file_watch_wake(const file_watch *w) {
    uint64_t one = 1;
    if (write(w->wake, &one, sizeof(one)) < 0) {
        return; /* the counter is full: the waiter wakes anyway */
    }
}

void file_watch_close(file_watch *w) {
    if (w == NULL) {
        return;
    }
    if (w->changes >= 0) {
        close(w->changes);
    }
    if (w->wake >= 0) {
        close(w->wake);
    }
    free(w);
}
