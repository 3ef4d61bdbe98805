/*
 * When to save. This is pure arithmetic on times passed in, so it can be tested without a clock. Internal to engine/.
 *
 * A save costs training the time that it stands still (stall), plus the time by which iterations beside the save are
 * slower than without one (interference). The adaptive interval is an account. Each second of training earns `overhead`
 * seconds, and a save pays its actual cost. The next save is due when the cost of recent saves has been earned again.
 * The lost share therefore stays as requested even if the machine, the disk or the model changes, and no save waits
 * longer than necessary.
 *
 * CheckFreq (Mohan et al., FAST 2021, section 4.4) measures the cost once, measures it again when it seems to grow, and
 * fixes a number of iterations. The account needs no such mode.
 */
#ifndef ENGINE_INTERVAL_H
#define ENGINE_INTERVAL_H

#include <stdbool.h>
#include <stdint.h>

typedef struct interval {
    /* as requested; 0: not set */
    uint64_t every_steps;
    double every_s, overhead, mtbf_s;

    double step_s;        /* recent mean of an iteration without a save; 0: not known */
    uint32_t clean;       /* iterations in that mean */
    uint32_t pauses;      /* consecutive ones */
    uint32_t clean_since; /* such iterations since a save was in progress */
    double trained_s;     /* iterations and stalls so far */
    double since_s;       /* the part of it since the last save began */
    /* stall and interference of the current save, or of the last one if none is in progress */
    double spent_s;
    double account_s;               /* earned minus paid */
    double cost_s;                  /* expected cost of a save; 0: not known */
    double persist_s;               /* how long the last save took to become durable */
    double stall_s, interference_s; /* totals */
    bool saving, saved;             /* saving: one is in progress; saved: one has ended */
} interval;

/* If nothing is set, overhead gets its default. */
void interval_init(interval *v, uint64_t every_steps, double every_s, double overhead, double mtbf_s);
/* Records an iteration's duration without stalls. saving: a save was in progress during some part of it. */
void interval_iteration(interval *v, double seconds, bool saving);
/* Records time that training stood still for a save. */
void interval_stalled(interval *v, double seconds);
bool interval_due(const interval *v, uint64_t step);
void interval_begun(interval *v);
/*
 * Records that no save is in progress any more, and how long the last one took to become durable. Failed saves count,
 * too; they cost the same.
 */
void interval_ended(interval *v, double persist_s);
/* Returns the current number of steps between saves; 0: not known. */
uint64_t interval_steps(const interval *v);

#endif
