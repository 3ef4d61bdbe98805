/* Stack traces of a command that hangs, before it is ended. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "supervise/internal.h"

#define PIDS     "CKPTDELTA_HANG_PIDS"
#define WRITE_NS (5 * SECOND)  /* time for the last process to write its own trace */
#define APART_NS (SECOND / 10) /* time between two processes, so that their lines do not mix */
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
    *t = (trace){.orders = orders, .helper.out = -1, .until = supervise_monotonic()};
    if (!orders->command) {
        signal_next(t);
        return;
    }
    name_pids(orders->pids, orders->count);
    helper_start(
        &t->helper,
        &(helper_orders){.command = orders->command, .mask = orders->mask, .limit_s = orders->grace_s});
    unsetenv(PIDS);
}

bool trace_ended(trace *t) {
    if (t->orders->command) {
        return helper_ended(&t->helper);
    }
    if (supervise_monotonic() >= t->again) {
        signal_next(t);
    }
    return supervise_monotonic() >= t->until;
}

void trace_end(trace *t) {
    helper_free(&t->helper);
    *t = (trace){.helper.out = -1};
}
