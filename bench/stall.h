/* What the parts of bench_stall share. */
#ifndef BENCH_STALL_H
#define BENCH_STALL_H

#include <ckptdelta.h>
#include <stdio.h>

enum { REPEATS_MAX = 31, SAVES_MAX = 4096 };

/* memcpy: of the state, in place of a save, by one thread and by two. */
typedef enum mode { NONE, MEMCPY, MEMCPY_TWO, SYNCHRONOUS, COPY, LAZY, MODES } mode;
extern const char *const stall_mode_names[MODES];

typedef struct options {
    double mb, step_ms, overhead, disk_mb_s, slower;
    int steps, every, repeats, snapshots, trainer, kills;
    int idle; /* training does not compute, but for the optimizer */
    ckd_fidelity fidelity;
    const char *json, *svg;
} options;

/* Medians of a session's saves: ms of the four stages and of the whole, and their overlap. */
enum { STAGES = 6 };

/* One loop. */
typedef struct outcome {
    double step_ms, slowed, overhead, stall_ms, stall_most_ms, durable_ms, whole_s;
    int saves, steps;
    double *wholes; /* ms of each iteration, with what it waited for saves */
    double stages[STAGES];
    double stalls[SAVES_MAX], durables[SAVES_MAX];
    uint64_t first_step;
    int places[SAVES_MAX];  /* iterations at which they began */
    double *fences, *calls; /* ms of ckd_session_fence and ckd_session_step in each iteration */
    double call_ms,
        fence_ms; /* of those where a save began: the longest step, the median of the fences behind */
    double early_stall_ms, late_stall_ms; /* medians of saves that began in the first half, in the second */
    int late_from; /* the iteration of the fourth save of the second half; steps: there is none */

} outcome;

typedef struct results {
    outcome all[MODES][REPEATS_MAX];
} results;

/* Was this mode measured? */
static inline int stall_has(const options *o, mode how) {
    return how != SYNCHRONOUS || o->every;
}

/* Sorts them; NAN of none. */
double stall_median(double *values, int count);
/* ms of all iterations of a mode, ascending, malloc'ed. */
double *stall_iterations(int *count, const results *r, const options *o, mode how);

/* A table, and JSON if that is asked for. */
void stall_report(results *r, const options *o);
/* ---- stall_checks.c ---- */
/* Of one loop: what is asked of saves before and after the disk has changed. Before stall_median sorts. */
void stall_note_halves(outcome *of, const options *o);
/* What sessions must show, with figures; JSON behind what stands there. */
void stall_check(results *r, const options *o, FILE *json);
/* ---- stall_trainer.c, stall_kills.c: reports of their own ---- */
void stall_train(const options *o, const char *dir);
void stall_kill(const options *o, const char *dir);
/* If it is asked for: of each mode, the share of iterations that took longer than so many ms. */
void stall_draw(const results *r, const options *o);
void stall_free(results *r, const options *o);

#endif
