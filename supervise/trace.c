/* Stack traces of a command that hangs, before it is ended. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "supervise/internal.h"

#define PIDS     "CKPTDELTA_HANG_PIDS"
#define WRITE_NS (5 * SECOND)  /* for the last process that writes its own trace */
#define APART_NS (SECOND / 10) /* between two of them, so that their lines do not mix */
#define ALL_NS   (5 * SECOND)  /* for all but the last */

/* Does the process handle SIGQUIT? The signal kills those that do not. */
static bool handles_quit(pid_t pid) {
    char path[64], line[256];
    uint64_t caught = 0;
    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    FILE *from = fopen(path, "re");
    while (from && fgets(line, sizeof(line), from) && sscanf(line, "SigCgt: %" SCNx64, &caught) != 1) {
    }
    if (from) {
        fclose(from);
    }
    return caught >> (SIGQUIT - 1) & 1;
}

static void run_helper(const char *command, const sigset_t *mask) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null >= 0) {
        dup2(null, STDIN_FILENO);
    }
    sigprocmask(SIG_SETMASK, mask, NULL);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
}

static void name_pids(const pid_t *pids, size_t count) {
    size_t size = count * 12 + 1, used = 0;
    char *text = calloc(size, 1);
    for (size_t i = 0; text && i < count; i++) {
        used += (size_t)snprintf(text + used, size - used, "%s%d", i ? " " : "", (int)pids[i]);
    }
    setenv(PIDS, text ? text : "", 1);
    free(text);
}

/* Signals the next process that handles SIGQUIT. Sets t->next to the number of processes after the last one. */
static void signal_next(trace *t) {
    const trace_orders *o = t->orders;
    uint64_t apart = o->count * APART_NS < ALL_NS ? APART_NS : ALL_NS / o->count, now = supervise_monotonic();
    for (bool sent = false; t->next < o->count && !sent; t->next++) {
        pid_t pid = o->pids[t->next];
        sent = process_is_below(pid, o->keeper) && handles_quit(pid) && kill(pid, SIGQUIT) == 0;
        if (sent) {
            t->until = now + WRITE_NS;
            t->again = now + apart;
        }
    }
}

void trace_begin(trace *t, const trace_orders *orders) {
    *t = (trace){.orders = orders, .until = supervise_monotonic()};
    if (!orders->command) {
        signal_next(t);
        return;
    }
    name_pids(orders->pids, orders->count);
    fflush(NULL);
    t->helper = fork();
    if (t->helper == 0) {
        run_helper(orders->command, orders->mask);
    }
    unsetenv(PIDS);
    if (t->helper > 0) {
        setpgid(t->helper, t->helper);
        t->until += orders->grace_s * SECOND;
    }
}

bool trace_ended(trace *t) {
    if (!t->orders->command && supervise_monotonic() >= t->again) {
        signal_next(t);
    }
    if (t->helper > 0 && waitpid(t->helper, NULL, WNOHANG) == t->helper) {
        kill(-t->helper, SIGKILL);
        t->helper = 0;
        t->until = 0;
    }
    return supervise_monotonic() >= t->until;
}

void trace_end(trace *t) {
    if (t->helper > 0) {
        kill(-t->helper, SIGKILL);
        while (waitpid(t->helper, NULL, 0) < 0 && errno == EINTR) {
        }
    }
    *t = (trace){0};
}
