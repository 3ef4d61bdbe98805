/* Sockets between nodes. */
#include "peers/internal.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>

#include "base/file.h"
#include "base/hash.h"
#include "base/local_socket.h"

#define LOOK_MS 100 /* between two looks at whether a wait should end */
#define BACKLOG 128
#define IDLE_S  20

static ckd_status fail(ckd_error *err, int errnum, const char *what) {
    ckd_error why;
    (void)err_sys(&why, errnum, NULL, "%s", what);
    return err_set(err, CKD_E_IO, "%s", why.message);
}

/* ---- when a wait ends ---- */

uint64_t wire_limits_end(const wire_limits *limits) {
    return limits->silence_ms ? clock_monotonic_ns() + limits->silence_ms * UINT64_C(1000000) : UINT64_MAX;
}

ckd_status wire_limits_check(const wire_limits *limits, uint64_t end_ns, ckd_error *err) {
    if (limits->lost && limits->lost(limits->peer)) {
        return err_set(err, CKD_E_IO, "it shows no sign of life any more");
    }
    return clock_monotonic_ns() > end_ns ? err_set(err, CKD_E_BUSY, "it shows no sign of life") : CKD_OK;
}

/* Waits until the socket has or takes bytes, or so many milliseconds have passed. */
static ckd_status wait_ms(int fd, short what, int ms, const wire_limits *limits, ckd_error *err) {
    struct pollfd watched[2] = {{.fd = fd, .events = what}, {.fd = limits->stop, .events = POLLIN}};
    bool stops = poll(watched, 2, ms) > 0 && watched[1].revents != 0;
    return stops ? err_set(err, CKD_E_CANCELLED, "the agent is ending") : CKD_OK;
}

static ckd_status wait_for(int fd, short what, const wire_limits *limits, uint64_t end_ns, ckd_error *err) {
    ckd_status status = wire_limits_check(limits, end_ns, err);
    return status == CKD_OK ? wait_ms(fd, what, LOOK_MS, limits, err) : status;
}

/* A connection on which bytes keep coming never waits, and ends all the same. */
static ckd_status check_stop(const wire_limits *limits, ckd_error *err) {
    return limits->stop >= 0 ? wait_ms(-1, 0, 0, limits, err) : CKD_OK;
}

/* ---- sockets ---- */

static ckd_status resolve(struct addrinfo **out, const peer_host *at, ckd_error *err) {
    char port[8];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    snprintf(port, sizeof(port), "%u", (unsigned)at->port);
    int failed = getaddrinfo(at->host, port, &hints, out);
    bool passing = failed == EAI_AGAIN || failed == EAI_SYSTEM || failed == EAI_MEMORY;
    return failed ? err_set(err, passing ? CKD_E_IO : CKD_E_INVALID, "cannot resolve the node address %s: %s",
                            at->name, gai_strerror(failed))
                  : CKD_OK;
}

static int new_socket(const struct addrinfo *address) {
    return socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* A body does not wait until its head has been acknowledged. Idle connections end when the peer has lost its power. */
static void set_up(int fd) {
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){1}, sizeof(int));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &(int){IDLE_S}, sizeof(int));
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &(int){IDLE_S}, sizeof(int));
}

/* Returns the socket, or -1 with errno. An agent that was killed is started again at its address at once. */
static int listen_at(const struct addrinfo *address) {
    int fd = new_socket(address);
    bool listens = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)) == 0 &&
                   bind(fd, address->ai_addr, address->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0;
    int why = errno;
    if (!listens) {
        local_close(fd);
        errno = why;
    }
    return listens ? fd : -1;
}

/* The same port at all addresses of this machine: others know it by an address that it does not have, as behind NAT. */
static int listen_everywhere(struct addrinfo *address) {
    if (address->ai_family == AF_INET6) {
        ((struct sockaddr_in6 *)address->ai_addr)->sin6_addr = in6addr_any;
    } else {
        ((struct sockaddr_in *)address->ai_addr)->sin_addr.s_addr = htonl(INADDR_ANY);
    }
    return listen_at(address);
}

ckd_status tcp_listen(int *out, const peer_host *at, ckd_error *err) {
    struct addrinfo *all;
    ckd_status status = resolve(&all, at, err);
    if (status != CKD_OK) {
        return status;
    }
    int fd = -1;
    errno = EADDRNOTAVAIL;
    for (struct addrinfo *a = all; a && fd < 0 && errno == EADDRNOTAVAIL; a = a->ai_next) {
        fd = listen_at(a);
    }
    if (fd < 0 && errno == EADDRNOTAVAIL) {
        fd = listen_everywhere(all);
    }
    int why = errno;
    freeaddrinfo(all);
    if (fd < 0) {
        char what[PEER_NAME_MAX + 64];
        snprintf(what, sizeof(what), "this node cannot listen at %s", at->name);
        return fail(err, why, what);
    }
    *out = fd;
    return CKD_OK;
}

ckd_status tcp_accept(int *out, int listener, int stop, ckd_error *err) {
    for (;;) {
        bool ready[2] = {false, false};
        local_wait((int[]){listener, stop}, 2, -1, ready);
        if (ready[1]) {
            return err_set(err, CKD_E_CANCELLED, "the agent is ending");
        }
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            set_up(fd);
            *out = fd;
            return CKD_OK;
        }
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
            return fail(err, errno, "cannot accept a connection");
        }
    }
}

/* Errors: IO (this address is of no use), BUSY, CANCELLED. */
static ckd_status connect_to(int fd, const struct addrinfo *address, const wire_limits *limits,
                             uint64_t end_ns, ckd_error *err) {
    if (fd < 0 || (connect(fd, address->ai_addr, address->ai_addrlen) != 0 && errno != EINPROGRESS)) {
        return fail(err, errno, "there is no connection");
    }
    struct pollfd made = {.fd = fd, .events = POLLOUT};
    ckd_status status = CKD_OK;
    while (status == CKD_OK && poll(&made, 1, 0) == 0) {
        status = wait_for(fd, POLLOUT, limits, end_ns, err);
    }
    int why = 0;
    socklen_t size = sizeof(why);
    (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &size);
    return status == CKD_OK && why ? fail(err, why, "there is no connection") : status;
}

ckd_status tcp_connect(int *out, const peer_host *to, const wire_limits *limits, ckd_error *err) {
    struct addrinfo *all;
    ckd_status status = resolve(&all, to, err);
    if (status != CKD_OK) {
        return status;
    }
    uint32_t count = 0;
    for (const struct addrinfo *a = all; a; a = a->ai_next) {
        count++;
    }
    wire_limits each = *limits;
    each.silence_ms = limits->silence_ms / count + (limits->silence_ms > 0);
    bool next = true;
    for (const struct addrinfo *a = all; a && next; a = a->ai_next) {
        int fd = new_socket(a);
        status = connect_to(fd, a, &each, wire_limits_end(&each), err);
        next = status == CKD_E_IO || status == CKD_E_BUSY;
        if (status == CKD_OK) {
            set_up(fd);
            *out = fd;
        } else {
            local_close(fd);
        }
    }
    freeaddrinfo(all);
    return status;
}

uint64_t tcp_origin(int fd) {
    struct sockaddr_storage at = {.ss_family = AF_UNSPEC};
    socklen_t size = sizeof(at);
    (void)getpeername(fd, (struct sockaddr *)&at, &size);
    uint64_t hash =
        at.ss_family == AF_INET6  ? hash64(&((struct sockaddr_in6 *)&at)->sin6_addr, sizeof(struct in6_addr))
        : at.ss_family == AF_INET ? hash64(&((struct sockaddr_in *)&at)->sin_addr, sizeof(struct in_addr))
                                  : 1;
    return hash | 1;
}

/* A call has failed: waits if that is because there are no bytes, or no room for them, or no connection yet. */
static ckd_status try_again(int fd, short what, const wire_limits *limits, uint64_t end_ns, ckd_error *err) {
    if (errno == EAGAIN) {
        return wait_for(fd, what, limits, end_ns, err);
    }
    return errno == EINTR ? CKD_OK : fail(err, errno, "the connection has ended");
}

ckd_status tcp_send(int fd, const void *data, size_t size, const wire_limits *limits, ckd_error *err) {
    uint64_t end_ns = wire_limits_end(limits);
    ckd_status status = check_stop(limits, err);
    for (size_t at = 0; at < size && status == CKD_OK;) {
        ssize_t sent = send(fd, (const uint8_t *)data + at, size - at, MSG_NOSIGNAL);
        at += sent > 0 ? (size_t)sent : 0;
        status = sent < 0 ? try_again(fd, POLLOUT, limits, end_ns, err) : CKD_OK;
    }
    return status;
}

ckd_status tcp_receive(int fd, void *to, size_t size, const wire_limits *limits, ckd_error *err) {
    uint64_t end_ns = wire_limits_end(limits);
    ckd_status status = check_stop(limits, err);
    for (size_t at = 0; at < size && status == CKD_OK;) {
        ssize_t got = recv(fd, (uint8_t *)to + at, size - at, 0);
        at += got > 0 ? (size_t)got : 0;
        status = got < 0 ? try_again(fd, POLLIN, limits, end_ns, err) : CKD_OK;
        status = got == 0 ? err_set(err, CKD_E_IO, "it has closed the connection") : status;
    }
    return status;
}
