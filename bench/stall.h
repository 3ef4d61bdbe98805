/* What the parts of bench_stall share. */
#ifndef BENCH_STALL_H
#define BENCH_STALL_H

#include <ckptdelta.h>

enum { REPEATS_MAX = 31, SAVES_MAX = 4096 };

typedef enum mode { NONE, SYNCHRONOUS, COPY, LAZY, MODES } mode;
extern const char *const stall_mode_names[MODES];

typedef struct options {
    double mb, step_ms, overhead, disk_mb_s;
    int steps, every, repeats, snapshots;
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
} outcome;

typedef struct results {
    outcome all[MODES][REPEATS_MAX];
    double copy_one[REPEATS_MAX], copy_two[REPEATS_MAX];
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
/* If it is asked for: of each mode, the share of iterations that took longer than so many ms. */
void stall_draw(const results *r, const options *o);
void stall_free(results *r, const options *o);

#endif
