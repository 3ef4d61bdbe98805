/*
 * Checkpoints that become suspect during an attempt, and alarms of its processes. Reports each once, and does what
 * --on-anomaly says.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "supervise/internal.h"

#define STEP "CKPTDELTA_SUSPECT_STEP"
#define ID   "CKPTDELTA_SUSPECT_ID"
#define KIND "CKPTDELTA_ANOMALY"

struct anomaly {
    ckd_id id; /* of a checkpoint; zero: an alarm */
    uint64_t step;
    ckd_alarm alarm; /* CKD_ALARM_NONE: a suspect checkpoint */
};

void anomalies_begin(anomalies *a, const supervise_options *options, const sigset_t *mask,
                     const candidates *known) {
    *a = (anomalies){.options = options, .mask = mask, .known = known, .helper.out = -1};
}

static bool is_known(const anomalies *a, const ckd_id *id) {
    for (size_t i = 0; i < a->known->count; i++) {
        if (memcmp(&a->known->items[i].id, id, sizeof(*id)) == 0) {
            return true;
        }
    }
    for (size_t i = 0; i < a->count; i++) {
        if (memcmp(&a->found[i].id, id, sizeof(*id)) == 0) {
            return true;
        }
    }
    return false;
}

static bool add(anomalies *a, const anomaly *found) {
    anomaly *grown = realloc(a->found, (a->count + 1) * sizeof(*grown));
    if (!grown) {
        return false;
    }
    a->found = grown;
    a->found[a->count++] = *found;
    return true;
}

static void report(anomalies *a, const ckd_checkpoint *c) {
    char ref[SUPERVISE_REF_MAX];
    if (!add(a, &(anomaly){.id = c->id, .step = c->step})) {
        return; /* the next look finds it again */
    }
    candidate_ref(ref, c);
    if (!a->first[0]) {
        memcpy(a->first, ref, sizeof(ref));
    }
    supervise_say(a->options, "%s is suspect: values became NaN or infinite", ref);
}

void anomalies_look(anomalies *a, const candidates *now) {
    for (size_t i = a->known ? now->count : 0; i-- > 0;) { /* the oldest first */
        if (now->items[i].suspect && !is_known(a, &now->items[i].id)) {
            report(a, &now->items[i]);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- alarms */

/* A delta that is too large, or a save that takes long, does not mean that training went wrong. */
static bool acts(ckd_alarm alarm) {
    return alarm == CKD_ALARM_METRIC || alarm == CKD_ALARM_UNCHANGED || alarm == CKD_ALARM_REPLICA ||
           alarm == CKD_ALARM_CHANGE;
}

static const char *describe(ckd_alarm alarm) {
    switch (alarm) {
    case CKD_ALARM_METRIC:
        return "a metric is unlike those of the steps before";
    case CKD_ALARM_UNCHANGED:
        return "weights no longer change";
    case CKD_ALARM_SIZE:
        return "a delta is much larger than those before";
    case CKD_ALARM_TIME:
        return "a save took much longer than those before";
    case CKD_ALARM_REPLICA:
        return "ranks no longer have the same values, but should";
    case CKD_ALARM_CHANGE:
        return "a tensor changes much more than it used to, compared with the others";
    case CKD_ALARM_NONE:
        break;
    }
    return NULL;
}

static bool was_reported(const anomalies *a, ckd_alarm alarm, uint64_t step) {
    for (size_t i = a->count; i-- > 0;) {
        if (a->found[i].alarm == alarm && a->found[i].step == step) {
            return true;
        }
    }
    return false;
}

/*
 * Should this alarm be the one to name? Alarms that cause an action take precedence; among these, the one with the
 * earliest step.
 */
static bool counts_more(const anomalies *a, ckd_alarm alarm, uint64_t step) {
    return !a->alarm[0] || (acts(alarm) && (!a->alarm_acts || step < a->alarm_step));
}

static void take_alarm(anomalies *a, const ckd_progress_slot *slot, ckd_alarm alarm, uint64_t step) {
    char text[SUPERVISE_TEXT_MAX], who[32] = "";
    if (was_reported(a, alarm, step) || !add(a, &(anomaly){.step = step, .alarm = alarm})) {
        return;
    }
    if (slot->rank < CKD_PROGRESS_NO_RANK && alarm != CKD_ALARM_REPLICA) { /* all ranks tell of that one */
        snprintf(who, sizeof(who), "rank %" PRIu64 ", ", slot->rank);
    }
    snprintf(text, sizeof(text), "%sstep %" PRIu64 ": %s", who, step, describe(alarm));
    a->alarms++;
    if (counts_more(a, alarm, step)) {
        memcpy(a->alarm, text, sizeof(text));
        a->alarm_step = step;
        a->alarm_acts = acts(alarm);
    }
    supervise_say(a->options, "alarm: %s", text);
}

/* If a process has raised several alarms of one kind since the last call, its slot has only the last one. */
void anomalies_look_at_slots(anomalies *a, const ckd_progress_slot *slots, size_t count) {
    for (size_t i = 0; a->known && i < count && i < PROGRESS_SLOTS; i++) {
        for (int k = 0; ckd_alarm_name((ckd_alarm)(k + 1)); k++) {
            uint64_t step = slots[i].alarm_steps[k];
            if (step && step != a->seen[i][k]) {
                a->seen[i][k] = step;
                take_alarm(a, &slots[i], (ckd_alarm)(k + 1), step - 1);
            }
        }
    }
}

/* ------------------------------------------------------------------------------------------------- consequences */

void anomalies_reason(char text[SUPERVISE_TEXT_MAX], const anomalies *a) {
    if (a->first[0]) {
        snprintf(text, SUPERVISE_TEXT_MAX, "%s is suspect", a->first);
    } else {
        snprintf(text, SUPERVISE_TEXT_MAX, "%s", a->alarm);
    }
}

bool anomalies_end_attempt(const anomalies *a) {
    supervise_anomaly what = a->options->on_anomaly;
    return (a->first[0] || a->alarm_acts) &&
           (what == SUPERVISE_ANOMALY_REWIND || what == SUPERVISE_ANOMALY_STOP);
}

/* Starts the command for the next one. Returns false if there is none, or the last command still runs. */
static bool start_next(anomalies *a) {
    char step[24], id[CKD_ID_TEXT];
    if (a->options->on_anomaly != SUPERVISE_ANOMALY_COMMAND || !helper_ended(&a->helper) ||
        a->handled == a->count) {
        return false;
    }
    const anomaly *next = &a->found[a->handled++];
    snprintf(step, sizeof(step), "%" PRIu64, next->step);
    ckd_id_text(id, &next->id);
    setenv(STEP, step, 1);
    if (!next->alarm) {
        setenv(ID, id, 1);
    }
    setenv(KIND, next->alarm ? ckd_alarm_name(next->alarm) : "suspect", 1);
    helper_free(&a->helper);
    helper_start(&a->helper, &(helper_orders){.command = a->options->anomaly_command,
                                              .mask = a->mask,
                                              .limit_s = a->options->grace_s});
    unsetenv(STEP);
    unsetenv(ID);
    unsetenv(KIND);
    return true;
}

void anomalies_go_on(anomalies *a) {
    start_next(a);
}

void anomalies_finish(anomalies *a, bool (*stop)(void *context), void *context) {
    while (a->known && helpers_wait(&a->helper, 1, stop, context) && !stop(context) && start_next(a)) {
    }
    helper_free(&a->helper);
    free(a->found);
    a->found = NULL;
    a->known = NULL;
    a->count = a->handled = 0;
}
