/* Checkpoints that become suspect during an attempt: tells of each once, and does what --on-anomaly says. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "supervise/internal.h"

#define STEP "CKPTDELTA_SUSPECT_STEP"
#define ID   "CKPTDELTA_SUSPECT_ID"

struct anomaly {
    ckd_id id;
    uint64_t step;
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

static void tell(anomalies *a, const ckd_checkpoint *c) {
    char ref[SUPERVISE_REF_MAX];
    anomaly *grown = realloc(a->found, (a->count + 1) * sizeof(*grown));
    if (!grown) {
        return; /* the next look finds it again */
    }
    a->found = grown;
    a->found[a->count++] = (anomaly){c->id, c->step};
    candidate_ref(ref, c);
    if (!a->first[0]) {
        memcpy(a->first, ref, sizeof(ref));
    }
    supervise_say(a->options, "%s is suspect: values became NaN or infinite", ref);
}

void anomalies_look(anomalies *a, const candidates *now) {
    for (size_t i = a->known ? now->count : 0; i-- > 0;) { /* the oldest first */
        if (now->items[i].suspect && !is_known(a, &now->items[i].id)) {
            tell(a, &now->items[i]);
        }
    }
}

bool anomalies_end_attempt(const anomalies *a) {
    supervise_anomaly what = a->options->on_anomaly;
    return a->first[0] && (what == SUPERVISE_ANOMALY_REWIND || what == SUPERVISE_ANOMALY_STOP);
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
    setenv(ID, id, 1);
    helper_free(&a->helper);
    helper_start(&a->helper, &(helper_orders){.command = a->options->anomaly_command,
                                              .mask = a->mask,
                                              .limit_s = a->options->grace_s});
    unsetenv(STEP);
    unsetenv(ID);
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
