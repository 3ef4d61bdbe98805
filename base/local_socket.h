/*
 * Unix sockets between processes of one user on one machine. They carry bytes and descriptors. Sends and receives
 * continue after signals and short counts until they are complete. All descriptors close on exec.
 */
#ifndef BASE_LOCAL_SOCKET_H
#define BASE_LOCAL_SOCKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"

#define LOCAL_PATH_MAX 107 /* bytes of a socket's path */
#define LOCAL_FDS_MAX  4   /* descriptors of one message */

/*
 * Listens at a path. Replaces a socket that is there already: the caller holds a lock, so nobody serves that socket.
 * The socket has mode 0600. Errors: INVALID (the path is too long), EXISTS (something else has the name), IO.
 */
ckd_status local_listen(int *out, const char *path, ckd_error *err);
/*
 * Connects. Connecting, and later sends and receives, fail after limit_ms of silence; 0: they wait forever. Errors:
 * NOT_FOUND (nobody listens there), BUSY (the listener takes no connections), INVALID (the path is too long, or another
 * user listens), IO.
 */
ckd_status local_connect(int *out, const char *path, uint32_t limit_ms, ckd_error *err);
/*
 * Accepts a waiting connection. Its sends and receives fail after 30 s of silence. Errors: READ_ONLY (the peer is
 * another user), IO.
 */
ckd_status local_accept(int *out, int listener, ckd_error *err);
/* May this user talk to a process of `own`? */
bool local_peer_allowed(uid_t peer, uid_t own);
/* Returns the peer's process id as this process sees it; 0: not visible from here. */
pid_t local_peer_process(int fd);
/* Returns a descriptor that becomes readable when the process has ended; -1 on failure. */
int local_watch_process(pid_t process);
/* Has the peer closed its end, or has its process ended? watch: from local_watch_process. */
bool local_peer_gone(int fd, int watch);
/*
 * Waits until one of the descriptors (at most 4) is readable or closed; -1 is skipped. timeout_ms -1: forever. Signals
 * do not end the wait.
 */
void local_wait(const int *fds, size_t count, int timeout_ms, bool *ready);

/* Errors: IO; sys_errno is EPIPE or ECONNRESET if the peer is gone. */
ckd_status local_send(int fd, const void *data, size_t size, const int *fds, size_t fd_count, ckd_error *err);
/*
 * Receives exactly `size` bytes, and up to LOCAL_FDS_MAX descriptors, which the caller closes. fds NULL: received
 * descriptors are closed. Errors: IO; sys_errno is ECONNRESET if the peer has closed its end.
 */
ckd_status local_receive(int fd, void *to, size_t size, int *fds, size_t *fd_count, ckd_error *err);
void local_close(int fd); /* accepts -1 */
int local_copy(int fd);   /* duplicates the descriptor; -1 on failure */

/* Makes a descriptor that becomes readable, and stays so, once local_notify is called. Errors: IO. */
ckd_status local_notifier(int *out, ckd_error *err);
void local_notify(int notifier);

/*
 * Makes a folder that only this user can access, or accepts an existing one. Errors: READ_ONLY (it is somebody else's,
 * or others may write to it), IO.
 */
ckd_status local_private_folder(const char *path, ckd_error *err);

#endif
