/* Short commands that the supervisor runs for itself: checks of hosts, questions to a driver or a scheduler. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "supervise/internal.h"

#define LOOK_MS    20
#define REAP_NS    (2 * SECOND) /* even SIGKILL may not end a process in the middle of a driver's call */
#define MAX_ARGS   4
#define MAX_ANSWER ((size_t)1 << 20)
#define NO_STATUS  127

static void become(const helper_orders *o, int out) {
    const char *argv[MAX_ARGS + 4] = {"sh", "-c", o->command, "sh"};
    for (size_t i = 0; i < MAX_ARGS && o->args && o->args[i]; i++) {
        argv[4 + i] = o->args[i];
    }
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null >= 0) {
        dup2(null, STDIN_FILENO);
    }
    if (out >= 0) {
        dup2(out, STDOUT_FILENO);
    }
    sigset_t mask = *o->mask;
    if (o->deaf) { /* a scheduler may already be ending this job */
        signal(SIGTERM, SIG_IGN);
        sigaddset(&mask, SIGINT);
        sigaddset(&mask, SIGHUP);
        sigaddset(&mask, SIGUSR1);
    }
    sigprocmask(SIG_SETMASK, &mask, NULL);
    if (o->work) {
        _exit(o->work(o->work_context));
    }
    execv("/bin/sh", (char *const *)(const void *)argv);
    _exit(NO_STATUS);
}

void helper_start(helper *h, const helper_orders *o) {
    int ends[2] = {-1, -1};
    *h = (helper){.out = -1, .status = NO_STATUS, .until = supervise_monotonic() + o->limit_s * SECOND};
    if (o->listens && pipe2(ends, O_CLOEXEC) != 0) {
        return;
    }
    fflush(NULL);
    h->pid = fork();
    if (h->pid == 0) {
        become(o, ends[1]);
    }
    if (ends[1] >= 0) {
        close(ends[1]);
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
    }
    h->out = ends[0];
    if (h->pid > 0) {
        setpgid(h->pid, h->pid); /* parent and child both call it, so neither can run ahead of it */
    } else {
        h->pid = 0;
    }
}

/* Reads what the command has written so far. Output that is too long is cut off. */
static void take_answer(helper *h) {
    char part[4096];
    for (ssize_t n; h->out >= 0 && (n = read(h->out, part, sizeof(part))) > 0;) {
        char *grown = h->size + (size_t)n < MAX_ANSWER ? realloc(h->answer, h->size + (size_t)n + 1) : NULL;
        if (grown) {
            memcpy(grown + h->size, part, (size_t)n);
            h->answer = grown;
            h->size += (size_t)n;
            h->answer[h->size] = '\0';
        }
    }
}

bool helper_ended(helper *h) {
    int status;
    take_answer(h);
    pid_t ended = h->pid ? waitpid(h->pid, &status, WNOHANG) : 0;
    if (ended < 0) {
        h->pid = 0; /* reaped together with processes that a killed keeper left behind */
    } else if (ended > 0) {
        h->status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        kill(-h->pid, SIGKILL);
        h->pid = 0;
        take_answer(h);
    } else if (h->pid && supervise_monotonic() >= h->until) {
        h->late = true;
        helper_end(h);
    }
    return !h->pid;
}

void helper_end(helper *h) {
    uint64_t until = supervise_monotonic() + REAP_NS;
    if (h->pid) {
        kill(-h->pid, SIGKILL);
    }
    while (h->pid && waitpid(h->pid, NULL, WNOHANG) == 0 && supervise_monotonic() < until) {
        nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 100000L}, NULL);
    }
    h->pid = 0;
}

void helper_free(helper *h) {
    helper_end(h);
    if (h->out >= 0) {
        close(h->out);
    }
    free(h->answer);
    *h = (helper){.out = -1};
}

bool helpers_wait(helper *helpers, size_t count, bool (*stop)(void *context), void *context) {
    for (;;) {
        bool ended = true;
        for (size_t i = 0; i < count; i++) {
            ended &= helper_ended(&helpers[i]);
        }
        if (ended) {
            return true;
        }
        if (stop && stop(context)) {
            return false;
        }
        nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000L}, NULL);
    }
}
