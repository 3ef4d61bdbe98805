/*
 * When to save: pure arithmetic on times that are handed in, so that it can be tested without a clock. Internal to engine/.
 *
 * What a save costs training is how long it stood still (stall) and how much longer iterations took beside the save than without one
 * (interference). The adaptive interval is an account: each second of training earns `overhead` seconds, a save pays what it
 * really cost, and the next one is due when what the last ones cost is earned again. So the share that is lost stays what was asked
 * for, whatever changes, the machine, the disk or the model, and no save is waited for longer than that takes.
 *
 * CheckFreq (Mohan et al., FAST 2021, section 4.4) measures the cost once, and again when it sees it grow, and sets a number of
 * iterations; the account needs no such mode.
 */
#ifndef ENGINE_INTERVAL_H
#define ENGINE_INTERVAL_H

#include <stdbool.h>
#include <stdint.h>

typedef struct interval {
    /* what was asked for; 0: not */
    uint64_t every_steps;
    double every_s, overhead, mtbf_s;

    double step_s;        /* an iteration without a save, a recent mean; 0: not known */
    uint32_t clean;       /* iterations that it is made of */
    uint32_t pauses;      /* in a row */
    uint32_t clean_since; /* of them since a save was under way */
    double trained_s;     /* iterations and stalls so far */
    double since_s;       /* of them since the last save began */
    double
        spent_s; /* stall and interference of this save so far, or of the one before if none is under way */
    double account_s;               /* earned less paid */
    double cost_s;                  /* a save is expected to cost; 0: not known */
    double persist_s;               /* and to take until it is durable */
    double stall_s, interference_s; /* in all */
    bool saving, saved;             /* one is under way; there was one */
} interval;

/* overhead: 0 if nothing else is asked for: the default. */
void interval_init(interval *v, uint64_t every_steps, double every_s, double overhead, double mtbf_s);
/* An iteration took so long, stalls not counted. Was a save under way in any part of it? */
void interval_iteration(interval *v, double seconds, bool saving);
/* Training stood still for a save. */
void interval_stalled(interval *v, double seconds);
bool interval_due(const interval *v, uint64_t step);
void interval_begun(interval *v);
/* Nothing is under way any more, and the last save took so long to become durable (failed ones as well: they cost the same). */
void interval_ended(interval *v, double persist_s);
/* Steps between saves as things are; 0: not known. */
uint64_t interval_steps(const interval *v);

#endif
