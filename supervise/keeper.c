/*
 * The keeper: a process between the supervisor and the command. Every orphan below it becomes its child, so it can end
 * them all. It does so even if the supervisor has been killed: its connection is then closed.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "supervise/internal.h"

typedef struct keeper {
    int socket, children; /* children: a signalfd */
    pid_t pid;            /* of the command; the number of its group */
    int gate;             /* a byte written here starts the command */
    int failure;          /* from which the errno of a failed start can be read */
    bool ended, group_gone, connected;
    int status; /* wait status, if ended */
    uint64_t grace_ns;
    uint64_t deadline; /* of SIGKILL; 0: none yet */
    bool mixed;        /* signals go to the command alone, and SIGKILL to all */
} keeper;

static void run_command(const keeper_orders *orders, int gate, int failure) {
    char go;
    setpgid(0, 0);
    /* If the supervisor and the keeper are both killed, the kernel at least asks the command to save and stop. */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    /* Nobody types into a supervised command. A background group that reads from the terminal would be stopped. */
    int null = open("/dev/null", O_RDONLY);
    if (null >= 0) {
        dup2(null, STDIN_FILENO);
    }
    if (null > STDIN_FILENO) {
        close(null);
    }
    if (read(gate, &go, 1) != 1) {
        _exit(0);
    }
    sigprocmask(SIG_SETMASK, orders->mask, NULL);
    execvp(orders->command[0], orders->command);
    int why = errno;
    if (write(failure, &why, sizeof(why)) < 0) {
        _exit(126);
    }
    _exit(127);
}

static bool fork_command(keeper *k, const keeper_orders *orders) {
    int gate[2], failure[2];
    if (pipe2(gate, O_CLOEXEC) != 0 || pipe2(failure, O_CLOEXEC) != 0) {
        return false;
    }
    k->pid = fork();
    if (k->pid == 0) {
        close(gate[1]);
        close(orders->socket);
        run_command(orders, gate[0], failure[1]);
    }
    setpgid(k->pid, k->pid); /* parent and child both call it, so neither can run ahead of it */
    close(gate[0]);
    close(failure[1]);
    k->gate = gate[1];
    k->failure = failure[0];
    return k->pid > 0;
}

static void begin_end(keeper *k) {
    if (!k->deadline) {
        k->deadline = supervise_monotonic() + k->grace_ns;
    }
}

/* The number of a group may be reused once the group is empty and its leader has been reaped. */
static void signal_group(const keeper *k, int number) {
    if (!k->group_gone) {
        kill(-k->pid, number);
    }
}

/* The number of the command is its own until it has been reaped. */
static void pass_on(const keeper *k, int number) {
    if (k->mixed && !k->ended) {
        kill(k->pid, number);
    } else {
        signal_group(k, number);
    }
}

/*
 * Asks the remaining processes to end, but only once: many programs take a second SIGTERM as an order to quit at once.
 */
static void end_rest(keeper *k) {
    if (!k->deadline) {
        pass_on(k, SIGTERM);
        signal_group(k, SIGCONT);
        begin_end(k);
    }
    if (!k->mixed || k->ended) {
        children_signal(SIGTERM, k->pid);
    }
}

/* Reaps processes that have ended. Returns false once none is left. */
static bool reap(keeper *k) {
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid <= 0) {
            return pid == 0;
        }
        if (pid == k->pid) {
            k->ended = true;
            k->status = status;
            k->group_gone = kill(-k->pid, 0) != 0;
            if (k->mixed && k->deadline) {
                signal_group(k, SIGTERM); /* the others were not asked before */
            }
            end_rest(k);
        }
        k->group_gone = k->group_gone || (k->ended && kill(-k->pid, 0) != 0);
    }
}

static void take_orders(keeper *k) {
    unsigned char order;
    ssize_t n = recv(k->socket, &order, 1, 0);
    if (n < 0 && errno == EINTR) {
        return;
    }
    if (n != 1) {
        k->connected = false;
        if (k->gate >= 0) {
            close(k->gate); /* if the command has not started by now, it never will */
            k->gate = -1;
        }
        end_rest(k);
    } else if (order == KEEPER_GO) {
        if (write(k->gate, "", 1) != 1) {
            end_rest(k);
        }
        close(k->gate);
        k->gate = -1;
    } else {
        pass_on(k, order & ~KEEPER_STOP);
        if (order & KEEPER_STOP) {
            signal_group(k, SIGCONT);
            begin_end(k);
        }
    }
}

/* Returns when nothing is left. */
static void keep(keeper *k) {
    while (reap(k)) {
        int wait_ms = -1;
        if (k->deadline) {
            uint64_t now = supervise_monotonic();
            if (now >= k->deadline) {
                signal_group(k, SIGKILL);
                children_signal(SIGKILL, 0);
            }
            uint64_t left_ms = now >= k->deadline ? 20 : (k->deadline - now) / 1000000 + 1;
            wait_ms = left_ms < 1000 ? (int)left_ms : 1000;
        }
        struct pollfd polled[] = {{k->children, POLLIN, 0}, {k->connected ? k->socket : -1, POLLIN, 0}};
        if (poll(polled, 2, wait_ms) < 0) {
            continue;
        }
        struct signalfd_siginfo info;
        if (polled[0].revents && read(k->children, &info, sizeof(info)) < 0 && errno != EAGAIN) {
            continue;
        }
        if (polled[1].revents) {
            take_orders(k);
        }
    }
}

static process_end end_of(const keeper *k) {
    int why;
    if (read(k->failure, &why, sizeof(why)) == sizeof(why)) {
        return (process_end){ATTEMPT_REFUSED, why};
    }
    return WIFSIGNALED(k->status) ? (process_end){ATTEMPT_KILLED, WTERMSIG(k->status)}
                                  : (process_end){ATTEMPT_EXITED, WEXITSTATUS(k->status)};
}

void keeper_run(const keeper_orders *orders) {
    keeper k = {.socket = orders->socket,
                .gate = -1,
                .connected = true,
                .grace_ns = orders->grace_s * SECOND,
                .mixed = orders->mixed};
    sigset_t child, all;
    signal(SIGCHLD, SIG_DFL);
    setsid(); /* only the supervisor gets the signals of a terminal, and passes them on */
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_NAME, "ckptdelta-run");
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    k.children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (k.children < 0 || !fork_command(&k, orders)) {
        _exit(1);
    }
    keeper_message message = {.news = KEEPER_FORKED, .pid = k.pid};
    send(k.socket, &message, sizeof(message), MSG_NOSIGNAL);
    keep(&k);
    message = (keeper_message){.news = KEEPER_ENDED, .pid = k.pid, .end = end_of(&k)};
    send(k.socket, &message, sizeof(message), MSG_NOSIGNAL);
    _exit(0);
}
