/* The parts of bench_stall. */
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
    int idle; /* only the optimizer computes */
    ckd_fidelity fidelity;
    const char *json, *svg;
} options;

/* Medians of a session's saves: ms of the four stages and of the whole, and their overlap. */
enum { STAGES = 6 };

/* One loop. */
typedef struct outcome {
    double step_ms, slowed, overhead, stall_ms, stall_most_ms, durable_ms, whole_s;
    int saves, steps;
    double *wholes; /* ms of each iteration, with its waits for saves */
    double stages[STAGES];
    double stalls[SAVES_MAX], durables[SAVES_MAX];
    uint64_t first_step;
    int places[SAVES_MAX];                /* iterations at which they began */
    double *fences, *calls;               /* ms of ckd_session_fence and ckd_session_step in each iteration */
    double call_ms;                       /* the longest ckd_session_step that began a save */
    double fence_ms;                      /* median of the fences after those steps */
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

/* The mean of the two in the middle of an even count; NAN of none. Sorts the values. */
double stall_median(double *values, int count);
/* ms of all iterations of a mode, ascending, malloc'ed. */
double *stall_iterations(int *count, const results *r, const options *o, mode how);

/* Prints tables, and writes JSON if options name a file. */
void stall_report(results *r, const options *o);
/* ---- checks.c ---- */
/* Notes the figures of one loop before and after the change of the disk. Call it before stall_median sorts. */
void stall_note_halves(outcome *of, const options *o);
/* Prints what sessions must show, with figures, and appends it to the JSON. */
void stall_check(results *r, const options *o, FILE *json);
/* ---- trainer.c, kills.c: reports of their own ---- */
void stall_train(const options *o, const char *dir);
void stall_kill(const options *o, const char *dir);
/* Draws for each mode the share of iterations that took longer than a time, if options name a file. */
void stall_draw(const results *r, const options *o);
void stall_free(results *r, const options *o);

#endif
