/*
 * Watches a command: its steps and its checkpoints. Decides when it hangs, and finds checkpoints that become suspect.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "supervise/internal.h"

#define LOOKS       20 /* per allowed time */
#define LONGEST_NS  SECOND
#define SHORTEST_NS (SECOND / 50)
#define MARK_NS     (60 * SECOND) /* between looks at the store, if nothing depends on them */
#define ACT_NS      (5 * SECOND)  /* if a suspect checkpoint ends the command, or starts one */

typedef enum stage { STAGE_WATCHING = 0, STAGE_TRACING = 1, STAGE_ENDING = 2 } stage;

struct watch {
    const supervise_options *options;
    const progress *progress;
    trace_orders orders;
    stage stage;
    trace trace;
    uint64_t interval_ns, looked_ns; /* at steps; monotonic: clocks of other machines may differ */
    uint64_t listing_ns, listed_ns;  /* at checkpoints */
    anomalies *anomalies;
    ckd_id newest;       /* checkpoint */
    uint64_t changed_ns; /* when it was seen first */
    liveness liveness;
    size_t count; /* of slots */
    ckd_progress_slot slots[PROGRESS_SLOTS];
    uint64_t started[PROGRESS_SLOTS]; /* of the slots' processes; 0: not seen alive */
    bool gone[PROGRESS_SLOTS];
    pid_t pids[PROGRESS_SLOTS + 1];
};

static uint64_t share_of(uint64_t allowed_s) {
    uint64_t share = allowed_s * SECOND / LOOKS;
    return share < SHORTEST_NS ? SHORTEST_NS : share;
}

watch *watch_new(const watch_rule *rule) {
    watch *w = calloc(1, sizeof(*w));
    if (!w) {
        return NULL; /* nothing is watched then */
    }
    const supervise_options *o = rule->options;
    w->options = o;
    w->trace.helper.out = -1;
    w->progress = rule->progress;
    w->anomalies = rule->anomalies;
    w->orders = rule->orders;
    w->newest = rule->newest;
    w->looked_ns = w->listed_ns = w->changed_ns = supervise_monotonic();
    w->interval_ns = share_of(o->hang_floor_s);
    w->interval_ns = w->interval_ns > LONGEST_NS ? LONGEST_NS : w->interval_ns;
    w->listing_ns = o->on_anomaly == SUPERVISE_ANOMALY_MARK ? MARK_NS : ACT_NS;
    if (o->hang == SUPERVISE_HANG_TIME && w->listing_ns > share_of(o->hang_s)) {
        w->listing_ns = share_of(o->hang_s);
    }
    w->liveness.start_s = (double)rule->start_ns / (double)SECOND;
    w->liveness.floor_s = (double)o->hang_floor_s * (double)((uint64_t)1 << rule->doublings);
    return w;
}

void watch_free(watch *w) {
    if (w) {
        trace_end(&w->trace);
        free(w);
    }
}

int watch_wait_ms(const watch *w) {
    if (!w || w->stage == STAGE_ENDING) {
        return -1;
    }
    bool steps = w->interval_ns < w->listing_ns;
    uint64_t ns = w->stage == STAGE_TRACING ? SHORTEST_NS : steps ? w->interval_ns : w->listing_ns;
    return (int)((ns < LONGEST_NS ? ns : LONGEST_NS) / 1000000);
}

/* ----------------------------------------------------------------------------------------------------- looking */

/* If the store cannot be read, the command is left alone. */
static watch_news look_at_checkpoints(char reason[SUPERVISE_TEXT_MAX], watch *w, uint64_t now) {
    candidates seen;
    ckd_error why;
    if (candidates_read(&seen, w->options->store, w->options->run, &why) != CKD_OK) {
        return WATCH_NOTHING;
    }
    if (seen.count > 0 && memcmp(&seen.items[0].id, &w->newest, sizeof(w->newest)) != 0) {
        w->newest = seen.items[0].id;
        w->changed_ns = now;
    }
    anomalies_look(w->anomalies, &seen);
    candidates_free(&seen);
    if (anomalies_end_attempt(w->anomalies)) {
        w->stage = STAGE_ENDING;
        return WATCH_SUSPECT;
    }
    snprintf(reason, SUPERVISE_TEXT_MAX, "it has made no checkpoint for %" PRIu64 " s", w->options->hang_s);
    return w->options->hang == SUPERVISE_HANG_TIME && now - w->changed_ns >= w->options->hang_s * SECOND
               ? WATCH_HUNG
               : WATCH_NOTHING;
}

/*
 * Finds processes that have ended. They are no longer watched, and neither is another process that gets the same
 * number.
 */
static void find_gone(watch *w) {
    for (size_t i = 0; i < w->count; i++) {
        uint64_t started = process_start_time((pid_t)w->slots[i].pid);
        if (!w->started[i]) {
            w->started[i] = started;
        }
        w->gone[i] = !started || started != w->started[i];
    }
}

/* Time in which the supervisor did not run either does not count: both were stopped, or the machine slept. */
static watch_news look_at_steps(char reason[SUPERVISE_TEXT_MAX], watch *w, uint64_t passed_ns) {
    uint64_t max = 3 * w->interval_ns;
    passed_ns = passed_ns < max ? passed_ns : max;
    w->count = progress_read(w->slots, w->progress);
    anomalies_look_at_slots(w->anomalies, w->slots, w->count);
    if (anomalies_end_attempt(w->anomalies)) {
        w->stage = STAGE_ENDING;
        return WATCH_SUSPECT;
    }
    if (w->options->hang != SUPERVISE_HANG_AUTO) {
        return WATCH_NOTHING;
    }
    find_gone(w);
    if (!liveness_look(&w->liveness, w->slots, w->gone, w->count, (double)passed_ns / (double)SECOND)) {
        return WATCH_NOTHING;
    }
    liveness_reason(reason, &w->liveness, w->slots, w->gone, w->count);
    return WATCH_HUNG;
}

static void begin_trace(watch *w) {
    for (size_t i = 0; i < w->count; i++) {
        if (!w->gone[i]) {
            w->pids[w->orders.count++] = (pid_t)w->slots[i].pid;
        }
    }
    if (w->orders.count == 0) {
        w->pids[w->orders.count++] = w->orders.pid;
    }
    w->orders.pids = w->pids;
    trace_begin(&w->trace, &w->orders);
    w->stage = STAGE_TRACING;
}

watch_news watch_look(watch *w, char reason[SUPERVISE_TEXT_MAX]) {
    if (!w || w->stage == STAGE_ENDING) {
        return WATCH_NOTHING;
    }
    anomalies_go_on(w->anomalies);
    if (w->stage == STAGE_TRACING) {
        if (!trace_ended(&w->trace)) {
            return WATCH_NOTHING;
        }
        w->stage = STAGE_ENDING;
        return WATCH_END;
    }
    watch_news news = WATCH_NOTHING;
    uint64_t now = supervise_monotonic(), passed = now - w->looked_ns;
    if (now - w->listed_ns >= w->listing_ns) {
        w->listed_ns = now;
        news = look_at_checkpoints(reason, w, now);
    }
    if (news == WATCH_NOTHING && passed >= w->interval_ns) {
        w->looked_ns = now;
        news = look_at_steps(reason, w, passed);
    }
    if (news == WATCH_HUNG) {
        begin_trace(w);
    }
    return news;
}
