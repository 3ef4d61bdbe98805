/* The supervisor's side of a keeper, and functions that both need to end processes. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "supervise/internal.h"

#define ENVIRONMENT_MAX ((size_t)1 << 20)

/* The state of a process and its parent. Both follow the name, which may contain anything. '?': not known. */
static char look_at(pid_t *parent, pid_t pid) {
    char path[64], text[512];
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0) {
        close(fd);
    }
    text[n > 0 ? n : 0] = '\0';
    const char *name_end = strrchr(text, ')');
    char state;
    return name_end && sscanf(name_end + 1, " %c %d", &state, parent) == 2 ? state : '?';
}

uint64_t process_start_time(pid_t pid) {
    char path[64], text[1024], state;
    unsigned long long started = 0;
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *from = pid > 0 ? fopen(path, "re") : NULL;
    size_t n = from ? fread(text, 1, sizeof(text) - 1, from) : 0;
    if (from) {
        fclose(from);
    }
    text[n] = '\0';
    const char *name_end = strrchr(text, ')');
    /* field 22; the state is field 3 */
    bool found =
        name_end && sscanf(name_end + 1,
                           " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                           &state, &started) == 2;
    return found && state != 'Z' && state != 'X' ? started : 0;
}

bool process_is_below(pid_t pid, pid_t above) {
    pid_t parent;
    while (pid > 1 && pid != above && look_at(&parent, pid) != '?') {
        pid = parent;
    }
    return pid == above;
}

bool process_lives(pid_t pid) {
    pid_t parent;
    char state = look_at(&parent, pid);
    /* where /proc hides other users' processes */
    return state == '?' ? kill(pid, 0) == 0 || errno == EPERM : state != 'Z' && state != 'X';
}

/* The next child of this process in /proc; 0: none is left. */
static pid_t next_child(DIR *all) {
    for (struct dirent *entry; (entry = readdir(all));) {
        pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10), parent = 0;
        if (pid > 1 && look_at(&parent, pid) != '?' && parent == getpid()) {
            return pid;
        }
    }
    return 0;
}

/* Does the environment, in which each variable ends with a zero byte, have this variable? */
static bool has_variable(const char *environment, size_t size, const char *variable) {
    size_t length = strlen(variable) + 1;
    for (size_t at = 0; at + length <= size;) {
        if (memcmp(environment + at, variable, length) == 0) {
            return true;
        }
        const char *end = memchr(environment + at, '\0', size - at);
        at = end ? (size_t)(end - environment) + 1 : size;
    }
    return false;
}

/* Reads the environment that a process was started with. The environments of other users' processes cannot be read. */
static size_t read_environment(char *to, size_t size, pid_t pid) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/environ", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t done = 0;
    for (ssize_t n; fd >= 0 && done < size && (n = read(fd, to + done, size - done)) > 0;) {
        done += (size_t)n;
    }
    if (fd >= 0) {
        close(fd);
    }
    return done;
}

pid_t process_of_attempt(const char *store, const char *run, uint64_t number) {
    char in_store[4200], of_run[CKD_RUN_MAX + 32], of_attempt[64];
    snprintf(in_store, sizeof(in_store), "CKPTDELTA_STORE=%s", store);
    snprintf(of_run, sizeof(of_run), "CKPTDELTA_RUN=%s", run);
    snprintf(of_attempt, sizeof(of_attempt), "CKPTDELTA_ATTEMPT=%llu", (unsigned long long)number);
    char *environment = malloc(ENVIRONMENT_MAX);
    DIR *all = environment ? opendir("/proc") : NULL;
    pid_t found = 0;
    for (struct dirent *entry; all && !found && (entry = readdir(all));) {
        pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
        size_t size = pid > 1 && pid != getpid() ? read_environment(environment, ENVIRONMENT_MAX, pid) : 0;
        found = size && has_variable(environment, size, of_attempt) &&
                        has_variable(environment, size, of_run) &&
                        has_variable(environment, size, in_store) && process_lives(pid)
                    ? pid
                    : 0;
    }
    if (all) {
        closedir(all);
    }
    free(environment);
    return found;
}

void children_signal(int number, pid_t group) {
    DIR *all = opendir("/proc");
    for (pid_t pid; all && (pid = next_child(all));) {
        if (!group || getpgid(pid) != group) {
            kill(pid, number);
        }
    }
    if (all) {
        closedir(all);
    }
}

/* A shell may have started children and then become the supervisor by exec. Those children are not ours. */
static void list_strangers(process *p) {
    DIR *all = opendir("/proc");
    for (pid_t pid; all && p->stranger_count < STRANGERS_MAX && (pid = next_child(all));) {
        p->strangers[p->stranger_count++] = pid;
    }
    if (all) {
        closedir(all);
    }
}

static bool is_stranger(const process *p, pid_t pid) {
    for (size_t i = 0; i < p->stranger_count; i++) {
        if (p->strangers[i] == pid) {
            return true;
        }
    }
    return false;
}

/* Kills the processes that a killed keeper left behind. They are our children now. */
static void end_leftovers(const process *p) {
    for (bool found = true; found;) {
        DIR *all = opendir("/proc");
        found = false;
        for (pid_t pid; all && (pid = next_child(all));) {
            if (!is_stranger(p, pid)) {
                found = true;
                kill(pid, SIGKILL);
                waitpid(pid, NULL, 0);
            }
        }
        if (all) {
            closedir(all);
        }
    }
}

static bool receive(keeper_message *message, int socket) {
    ssize_t n;
    do {
        n = recv(socket, message, sizeof(*message), 0);
    } while (n < 0 && errno == EINTR);
    return n == sizeof(*message);
}

ckd_status process_start(process *out, const supervise_options *options, const sigset_t *mask,
                         ckd_error *err) {
    int ends[2];
    *out = (process){.socket = -1};
    list_strangers(out);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        return supervise_error_sys(err, errno, "cannot start a process");
    }
    fflush(NULL);
    out->keeper = fork();
    if (out->keeper == 0) {
        close(ends[0]);
        keeper_run(&(keeper_orders){options->command, mask, options->grace_s, options->mixed, ends[1]});
    }
    int why = errno;
    close(ends[1]);
    out->socket = ends[0];
    if (out->keeper < 0) {
        close(ends[0]);
        return supervise_error_sys(err, why, "cannot start a process");
    }
    keeper_message message;
    if (!receive(&message, out->socket) || message.news != KEEPER_FORKED) {
        process_close(out);
        return supervise_error(err, CKD_E_IO, "cannot start a process");
    }
    out->pid = (pid_t)message.pid;
    return CKD_OK;
}

static bool order(const process *p, unsigned char what) {
    return send(p->socket, &what, 1, MSG_NOSIGNAL) == 1;
}

ckd_status process_go(process *p, ckd_error *err) {
    return order(p, KEEPER_GO) ? CKD_OK : supervise_error_sys(err, errno, "cannot start the command");
}

void process_signal(process *p, int number, bool stop) {
    order(p, (unsigned char)(number | (stop ? KEEPER_STOP : 0)));
}

/* Waits for the end of the keeper, which ends all other processes unless it is killed. */
static void await_keeper(process *p) {
    int status = 0;
    if (p->keeper <= 0) {
        return;
    }
    while (waitpid(p->keeper, &status, 0) < 0 && errno == EINTR) {
    }
    p->keeper = 0;
    if (!WIFEXITED(status)) {
        end_leftovers(p);
    }
}

bool process_ended(process_end *out, process *p) {
    keeper_message message;
    if (receive(&message, p->socket)) {
        *out = message.end;
        return message.news == KEEPER_ENDED;
    }
    await_keeper(p); /* it was killed, and the command goes on until it is, too */
    *out = (process_end){ATTEMPT_KILLED, SIGKILL};
    return true;
}

void process_close(process *p) {
    if (p->socket < 0) {
        return;
    }
    close(p->socket);
    p->socket = -1;
    await_keeper(p);
}
