/*
 * Local sockets by system calls. The kernel says which user and process is at the other end, and only processes of the
 * same user are accepted.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/local_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKLOG     64
#define SILENCE_MS  30000
#define WATCHED_MAX 4

static ckd_status address(struct sockaddr_un *out, const char *path, ckd_error *err) {
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    size_t length = strlen(path);
    if (length == 0 || length > LOCAL_PATH_MAX) {
        return err_set(err, CKD_E_INVALID, "a socket's path has 1 to %d bytes: '%s'", LOCAL_PATH_MAX, path);
    }
    memcpy(out->sun_path, path, length);
    return CKD_OK;
}

static ckd_status new_socket(int *out, ckd_error *err) {
    *out = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return *out >= 0 ? CKD_OK : err_sys(err, errno, NULL, "cannot make a socket");
}

void local_close(int fd) {
    if (fd >= 0) {
        close(fd);
    }
}

int local_copy(int fd) {
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

static ckd_status fail(int *fd, ckd_status status) {
    local_close(*fd);
    *fd = -1;
    return status;
}

static ckd_status remove_stale(const char *path, ckd_error *err) {
    struct stat st;
    if (lstat(path, &st) != 0) {
        return errno == ENOENT ? CKD_OK : err_sys(err, errno, path, "cannot stat the socket");
    }
    if (!S_ISSOCK(st.st_mode)) {
        return err_set(err, CKD_E_EXISTS, "%s is not a socket: choose another name", path);
    }
    return unlink(path) == 0 ? CKD_OK : err_sys(err, errno, path, "cannot remove a stale socket");
}

ckd_status local_listen(int *out, const char *path, ckd_error *err) {
    struct sockaddr_un at;
    *out = -1;
    ckd_status status = address(&at, path, err);
    THEN(status, remove_stale(path, err));
    THEN(status, new_socket(out, err));
    if (status != CKD_OK) {
        return status;
    }
    /* listen() comes last, so the mode is set before anybody can connect */
    if (bind(*out, (const struct sockaddr *)&at, sizeof(at)) != 0 || chmod(path, 0600) != 0 ||
        listen(*out, BACKLOG) != 0) {
        return fail(out, err_sys(err, errno, path, "cannot listen on this socket"));
    }
    return CKD_OK;
}

bool local_peer_allowed(uid_t peer, uid_t own) {
    return peer == own;
}

static bool peer_of(struct ucred *out, int fd) {
    socklen_t size = sizeof(*out);
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, out, &size) == 0;
}

static void limit_silence(int fd, uint32_t limit_ms) {
    struct timeval silence = {.tv_sec = limit_ms / 1000, .tv_usec = (suseconds_t)(limit_ms % 1000) * 1000};
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &silence, sizeof(silence));
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &silence, sizeof(silence));
}

ckd_status local_connect(int *out, const char *path, uint32_t limit_ms, ckd_error *err) {
    struct sockaddr_un at;
    struct ucred peer;
    *out = -1;
    ckd_status status = address(&at, path, err);
    THEN(status, new_socket(out, err));
    if (status != CKD_OK) {
        return status;
    }
    limit_silence(*out, limit_ms);
    if (connect(*out, (const struct sockaddr *)&at, sizeof(at)) != 0) {
        int errnum = errno;
        if (errnum == EAGAIN) {
            return fail(out, err_set(err, CKD_E_BUSY, "no connections are accepted at %s", path));
        }
        return fail(out, errnum == ECONNREFUSED || errnum == ENOENT
                             ? err_set(err, CKD_E_NOT_FOUND, "nothing is listening at %s", path)
                             : err_sys(err, errnum, path, "cannot connect"));
    }
    if (!peer_of(&peer, *out) || !local_peer_allowed(peer.uid, geteuid())) {
        return fail(out, err_set(err, CKD_E_INVALID, "the listener at %s belongs to another user", path));
    }
    return CKD_OK;
}

ckd_status local_accept(int *out, int listener, ckd_error *err) {
    struct ucred peer;
    *out = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (*out < 0) {
        return err_sys(err, errno, NULL, "cannot accept a connection");
    }
    if (!peer_of(&peer, *out) || !local_peer_allowed(peer.uid, geteuid())) {
        return fail(out, err_set(err, CKD_E_READ_ONLY, "another user has connected"));
    }
    limit_silence(*out, SILENCE_MS);
    return CKD_OK;
}

pid_t local_peer_process(int fd) {
    struct ucred peer;
    return peer_of(&peer, fd) ? peer.pid : 0;
}

int local_watch_process(pid_t process) {
    return process > 0 ? (int)syscall(SYS_pidfd_open, process, 0) : -1;
}

void local_wait(const int *fds, size_t count, int timeout_ms, bool *ready) {
    struct pollfd watched[WATCHED_MAX];
    for (size_t i = 0; i < count && i < WATCHED_MAX; i++) {
        watched[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
        ready[i] = false;
    }
    int found;
    do {
        found = poll(watched, count, timeout_ms);
    } while (found < 0 && errno == EINTR);
    if (found > 0) {
        for (size_t i = 0; i < count; i++) {
            ready[i] = fds[i] >= 0 && watched[i].revents != 0;
        }
    }
}

bool local_peer_gone(int fd, int watch) {
    bool ready[2];
    uint8_t next;
    local_wait((int[]){fd, watch}, 2, 0, ready);
    if (ready[1] || !ready[0]) {
        return ready[1];
    }
    ssize_t got = recv(fd, &next, 1, MSG_PEEK | MSG_DONTWAIT); /* ECONNRESET: the peer left answers unread */
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

/* ---- bytes and descriptors ---- */

typedef union control {
    struct cmsghdr head; /* for its alignment */
    char space[CMSG_SPACE(LOCAL_FDS_MAX * sizeof(int))];
} control;

static ssize_t send_some(int fd, struct iovec part, const int *fds, size_t fd_count) {
    control c;
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    memset(&c, 0, sizeof(c));
    if (fd_count > 0) {
        m.msg_control = c.space;
        m.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
        struct cmsghdr *h = CMSG_FIRSTHDR(&m);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
        memcpy(CMSG_DATA(h), fds, fd_count * sizeof(int));
    }
    ssize_t sent;
    do {
        sent = sendmsg(fd, &m, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent;
}

ckd_status local_send(int fd, const void *data, size_t size, const int *fds, size_t fd_count,
                      ckd_error *err) {
    if (fd_count > LOCAL_FDS_MAX) {
        return err_set(err, CKD_E_INVALID, "a message has at most %d descriptors", LOCAL_FDS_MAX);
    }
    for (size_t done = 0; done < size;) {
        struct iovec part = {(void *)((uintptr_t)data + done), size - done};
        ssize_t sent = send_some(fd, part, fds, done == 0 ? fd_count : 0);
        if (sent < 0) {
            return err_sys(err, errno, NULL, "cannot send to another process");
        }
        done += (size_t)sent;
    }
    return CKD_OK;
}

static void take_fds(struct msghdr *m, int *fds, size_t *fd_count) {
    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS || h->cmsg_len < CMSG_LEN(0)) {
            continue;
        }
        size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(fd));
            if (fds && *fd_count < LOCAL_FDS_MAX) {
                fds[(*fd_count)++] = fd;
            } else {
                close(fd);
            }
        }
    }
}

ckd_status local_receive(int fd, void *to, size_t size, int *fds, size_t *fd_count, ckd_error *err) {
    size_t none = 0, *taken = fd_count ? fd_count : &none;
    *taken = 0;
    for (size_t done = 0; done < size;) {
        control c;
        struct iovec part = {(uint8_t *)to + done, size - done};
        struct msghdr m = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = c.space, .msg_controllen = sizeof(c.space)};
        ssize_t got = recvmsg(fd, &m, MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got > 0) {
            take_fds(&m, fds, taken);
            done += (size_t)got;
            continue;
        }
        int errnum = got == 0 ? ECONNRESET : errno;
        for (size_t i = 0; fds && i < *taken; i++) {
            close(fds[i]);
        }
        *taken = 0;
        return err_sys(err, errnum, NULL, "cannot receive from another process");
    }
    return CKD_OK;
}

ckd_status local_notifier(int *out, ckd_error *err) {
    *out = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return *out >= 0 ? CKD_OK : err_sys(err, errno, NULL, "cannot make an event");
}

void local_notify(int notifier) {
    uint64_t one = 1;
    ssize_t written = write(notifier, &one, sizeof(one));
    (void)written; /* a full counter is readable as well */
}

ckd_status local_private_folder(const char *path, ckd_error *err) {
    struct stat st;
    if (mkdir(path, 0700) != 0 && errno != EEXIST) {
        return err_sys(err, errno, path, "cannot create the folder for sockets");
    }
    if (lstat(path, &st) != 0) {
        return err_sys(err, errno, path, "cannot stat the folder for sockets");
    }
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 022) != 0) {
        return err_set(err, CKD_E_READ_ONLY, "%s must be a folder that only this user may write to", path);
    }
    return CKD_OK;
}
