/*
 * Waits until the memory of the devices that the last attempt used is free. A driver may still be releasing memory when
 * a process has ended, and the next attempt would then find too little.
 */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "supervise/internal.h"

#define QUESTION                                     \
    "command -v nvidia-smi >/dev/null || exit 127; " \
    "exec nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader 2>/dev/null"
#define LIMIT_S  10
#define AGAIN_NS (SECOND / 2)

typedef struct holder {
    pid_t pid;
    char memory[32];
} holder;

/* A line is "1234, 512 MiB"; the memory is "[N/A]" if the driver does not tell. Returns false if none is held. */
static bool read_holder(holder *h, const char *line) {
    char *end;
    long pid = strtol(line, &end, 10);
    end += strspn(end, ", ");
    snprintf(h->memory, sizeof(h->memory), "%.*s", (int)strcspn(end, "\r\n"), end);
    h->pid = (pid_t)pid;
    return pid > 0 && pid <= INT32_MAX && (!isdigit((unsigned char)*end) || strtol(end, NULL, 10) > 0);
}

static bool is_listed(const devices *d, pid_t pid) {
    for (size_t i = 0; i < d->count; i++) {
        if (d->before[i] == pid) {
            return true;
        }
    }
    return false;
}

/*
 * Is this a process of the last attempt? It has ended, and held no memory before the attempt. Others may use the same
 * devices; in a container the process numbers of others name no process.
 */
static bool is_left(const devices *d, const holder *h) {
    return !is_listed(d, h->pid) && !process_lives(h->pid);
}

static void record(devices *d, pid_t pid) {
    pid_t *grown = realloc(d->before, (d->count + 1) * sizeof(*grown));
    if (grown) {
        d->before = grown;
        d->before[d->count++] = pid;
    }
}

/*
 * Finds a process of the last attempt that still holds memory. *noted: all processes that hold some. Returns false if
 * the driver does not answer.
 */
static bool look(holder *left, devices *noted, const devices *d) {
    helper h;
    helper_start(&h,
                 &(helper_orders){.command = QUESTION, .mask = d->mask, .limit_s = LIMIT_S, .listens = true});
    bool answered = helpers_wait(&h, 1, d->stop, d->stop_context) && h.status == 0;
    char *rest = answered ? h.answer : NULL;
    left->pid = 0;
    for (char *line; rest && (line = strsep(&rest, "\n"));) {
        holder found;
        if (read_holder(&found, line)) {
            record(noted, found.pid);
            *left = is_left(d, &found) ? found : *left;
        }
    }
    noted->absent = h.status == 127;
    helper_free(&h);
    return answered;
}

void devices_settle(devices *d, bool follows) {
    const supervise_options *o = d->options;
    uint64_t until = supervise_monotonic() + o->device_wait_s * SECOND;
    holder left;
    for (bool reported = false; !d->absent && o->device_wait_s > 0; reported = true) {
        devices now = *d;
        now.before = NULL;
        now.count = 0;
        bool waits = look(&left, &now, d) && follows && left.pid, late = supervise_monotonic() >= until;
        if (waits && late) {
            supervise_say(o, "process %d still holds %s of a device after %" PRIu64 " s; starts anyway",
                          (int)left.pid, left.memory, o->device_wait_s);
        } else if (waits && !reported) {
            supervise_say(o, "waiting for process %d, which has ended, to give back %s of a device",
                          (int)left.pid, left.memory);
        }
        if (!waits || late) { /* memory that is still held now does not belong to the next attempt */
            devices_free(d);
            *d = now;
            return;
        }
        devices_free(&now);
        for (uint64_t again = supervise_monotonic() + AGAIN_NS; supervise_monotonic() < again;) {
            if (d->stop(d->stop_context)) {
                return;
            }
            nanosleep(&(struct timespec){.tv_nsec = (long)(AGAIN_NS / 20)}, NULL);
        }
    }
}

void devices_free(devices *d) {
    free(d->before);
    d->before = NULL;
    d->count = 0;
}
