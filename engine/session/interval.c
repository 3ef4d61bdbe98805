/*
 * Decides when the next save is due: by steps, by time, or by what recent saves have cost training. It reads no clock,
 * as trainer.c measures.
 */
#include "engine/session/interval.h"

#include <math.h>

#define DEFAULT_OVERHEAD 0.035
#define WARM_UP          2   /* first iterations to ignore: they allocate, compile and fill caches */
#define CLEAN_ENOUGH     4   /* iterations without a save before their mean is trusted */
#define CLEAN_MEMORY     64  /* the mean forgets iterations older than about this many */
#define COST_MEMORY      0.5 /* weight of the previous expected cost when a new cost is known */
#define ACCOUNT_COSTS    1.0 /* cap on unspent time, in costs of a save: prevents bursts after a pause */
#define PAUSE_STEPS      8   /* An iteration of at least this many steps' time, */
#define PAUSE_S          1   /* and this many seconds, contains something else: a validation, a debugger. */
#define PAUSES_MAX       4   /* consecutive ones */
#define CLEAN_SHARE \
    0.25 /* share of a save's duration to leave before the next one, to measure iterations without a save */

void interval_init(interval *v, uint64_t every_steps, double every_s, double overhead, double mtbf_s) {
    *v = (interval){.every_steps = every_steps, .every_s = every_s, .overhead = overhead, .mtbf_s = mtbf_s};
    if (every_steps == 0 && every_s == 0 && overhead == 0 && mtbf_s == 0) {
        v->overhead = DEFAULT_OVERHEAD;
    }
}

static bool steps_known(const interval *v) {
    return v->clean >= WARM_UP + CLEAN_ENOUGH;
}

static bool is_pause(const interval *v, double seconds) {
    return seconds > PAUSE_S && seconds > PAUSE_STEPS * v->step_s;
}

static void add_clean(interval *v, double seconds) {
    v->clean_since++;
    v->clean++;
    if (v->clean <= WARM_UP) {
        return;
    }
    uint32_t samples = v->clean - WARM_UP;
    if (samples > CLEAN_ENOUGH && is_pause(v, seconds)) {
        if (++v->pauses < PAUSES_MAX) {
            return;
        }
        v->clean = WARM_UP + 1; /* these are no pauses: iterations have become longer */
        v->step_s = 0;
        samples = 1;
    }
    v->pauses = 0;
    v->step_s += (seconds - v->step_s) / (samples < CLEAN_MEMORY ? samples : CLEAN_MEMORY);
}

static void pass(interval *v, double seconds) {
    v->trained_s += seconds;
    v->since_s += seconds;
    v->account_s += v->overhead * seconds;
    double max = ACCOUNT_COSTS * v->cost_s;
    if (v->cost_s > 0 && v->account_s > max) {
        v->account_s = max;
    }
}

static void pay(interval *v, double seconds) {
    v->spent_s += seconds;
    v->account_s -= seconds;
}

void interval_iteration(interval *v, double seconds, bool saving) {
    pass(v, seconds);
    if (!saving) {
        add_clean(v, seconds);
    } else if (steps_known(v) && !is_pause(v, seconds)) {
        double longer = seconds - v->step_s; /* may be negative: noise cancels out over a save */
        pay(v, longer);
        v->interference_s += longer;
    }
}

void interval_stalled(interval *v, double seconds) {
    v->trained_s += seconds;
    v->since_s += seconds;
    v->stall_s += seconds;
    pay(v, seconds);
}

/* Young's and Daly's first-order optimum. */
static double daly_s(const interval *v) {
    return sqrt(2 * fmax(v->cost_s, 0) * v->mtbf_s);
}

/* Returns whether enough time has passed since the last save for another one to be within the limits. */
static bool affordable(const interval *v) {
    if (!steps_known(v) || v->saving) {
        return false;
    }
    if (!v->saved) {
        return true; /* the first save shows what one costs */
    }
    if (v->clean_since * v->step_s < CLEAN_SHARE * v->persist_s) {
        return false;
    }
    if (v->mtbf_s > 0 && v->since_s < daly_s(v)) {
        return false;
    }
    return v->overhead == 0 || v->account_s >= v->cost_s;
}

bool interval_due(const interval *v, uint64_t step) {
    if (v->every_steps > 0 && step % v->every_steps == 0) {
        return true;
    }
    if (v->every_s > 0 && v->since_s >= v->every_s) {
        return true;
    }
    return (v->overhead > 0 || v->mtbf_s > 0) && affordable(v);
}

void interval_begun(interval *v) {
    if (!v->saving) {
        v->spent_s = 0;
    }
    v->saving = true;
    v->since_s = 0;
    v->clean_since = 0;
}

void interval_ended(interval *v, double persist_s) {
    double cost = fmax(v->spent_s, 0);
    v->cost_s = v->saved ? COST_MEMORY * v->cost_s + (1 - COST_MEMORY) * cost : cost;
    v->persist_s = persist_s;
    v->saving = false;
    if (!v->saved) {
        v->account_s = 0; /* the first save only measures the cost; it must not cause a long gap */
    }
    v->saved = true;
}

uint64_t interval_steps(const interval *v) {
    if (v->every_steps > 0) {
        return v->every_steps;
    }
    if (!steps_known(v) || !(v->step_s > 0) || (v->every_s == 0 && !v->saved)) {
        return 0;
    }
    double between_s = v->every_s;
    if (between_s == 0) {
        between_s = (1 + CLEAN_SHARE) * v->persist_s;
        between_s = v->overhead > 0 ? fmax(between_s, v->cost_s / v->overhead) : between_s;
        between_s = v->mtbf_s > 0 ? fmax(between_s, daly_s(v)) : between_s;
    }
    double steps = ceil(between_s / v->step_s);
    return steps < 1 ? 1 : steps < 1e18 ? (uint64_t)steps : UINT64_MAX;
}
