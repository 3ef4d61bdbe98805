/*
 * How soon the other ranks learn of a killed one. Four processes save one checkpoint after another through the store's
 * directory. One of them is killed at a random time during a save, half of the time in an exact save, half of it in a
 * near one.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "bench/ranks/ranks.h"
#include "bench/support/support.h"

enum { MATRICES = 2 };

typedef enum phase { PLAN, BEGIN, TENSOR, COMMIT, PHASES } phase;
static const char *const phase_names[] = {"plan", "begin", "tensor", "commit"};

/* In memory that all processes share. */
typedef struct attempt {
    const char *path;
    uint64_t step;
    ckd_fidelity fidelity;
    uint32_t victim;
    double delay; /* seconds from its joining to its death; < 0: nobody is killed */
    volatile double death, begun[RANKS], ended[RANKS];
    volatile ckd_status status[RANKS];
    volatile phase at[RANKS];     /* the phase of the error */
    volatile int finished[RANKS]; /* it has a status */
    char message[RANKS][256];
} attempt;

static void arm(double seconds) {
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
    long ns = (long)(seconds * 1e9) + 1;
    struct itimerspec when = {.it_value = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000}};
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &when, NULL)) {
        bench_die("timer", strerror(errno));
    }
}

/* Like ckd_ranks_save, but notes its phase. */
static ckd_status save(attempt *a, ckd_ranks *ranks, uint32_t rank, ckd_error *err) {
    size_t count;
    const ckd_plan *plan;
    ckd_save *begun;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ranks_state *s = ranks_state_of(MATRICES, a->step, rank, RANKS);
    const ckd_tensor *t = ranks_state_tensors(&count, s);
    o.run = "run";
    o.step = a->step;
    o.fidelity = a->fidelity;
    a->at[rank] = PLAN;
    ckd_status status = ckd_ranks_plan(&plan, ranks, t, count, err);
    if (status == CKD_OK) {
        a->at[rank] = BEGIN;
        status = ckd_ranks_begin(&begun, ranks, &o, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    a->at[rank] = TENSOR;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = ckd_plan_writes(plan, rank, i) ? ckd_save_tensor(begun, &t[i], err) : CKD_OK;
    }
    if (status != CKD_OK) {
        a->ended[rank] = bench_seconds();
        return ckd_ranks_abort(ranks, begun, err);
    }
    a->at[rank] = COMMIT;
    return ckd_ranks_commit(NULL, ranks, begun, err);
}

static int be_rank(void *context, uint32_t rank) {
    attempt *a = context;
    ckd_ranks *ranks;
    ckd_error err = {0};
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    o.rank = rank;
    o.world = RANKS;
    o.timeout_ms = 60000;
    ckd_store *store = ranks_open(a->path, CKD_OPEN_WRITE);
    bench_check(ckd_ranks_join(&ranks, store, &o, &err), &err);
    a->begun[rank] = bench_seconds();
    if (rank == a->victim && a->delay >= 0) {
        a->death = bench_seconds() + a->delay;
        arm(a->delay);
    }
    a->status[rank] = save(a, ranks, rank, &err);
    if (!a->ended[rank]) {
        a->ended[rank] = bench_seconds();
    }
    snprintf(a->message[rank], sizeof(a->message[rank]), "%.255s", err.message);
    a->finished[rank] = 1;
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    return 0;
}

typedef struct figures {
    double *seconds;
    phase *at;
    size_t count;
    unsigned killed, committed, survived;
} figures;

/*
 * Exits unless the previous checkpoint is there, and the new one if and only if the survivors say so. Returns whether
 * it is.
 */
static bool check_survivors(figures *f, const attempt *a) {
    bool committed = a->status[(a->victim + 1) % RANKS] == CKD_OK;
    for (uint32_t r = 0; r < RANKS; r++) {
        if (r == a->victim) {
            continue;
        }
        if (!a->finished[r] || (a->status[r] == CKD_OK) != committed) {
            fprintf(stderr, "bench_ranks: rank %u does not know what the others know: %s\n", r,
                    a->message[r]);
            exit(1);
        }
        if (!committed) {
            f->at[f->count] = a->at[r];
            f->seconds[f->count++] = a->ended[r] - a->death;
        }
    }
    ckd_checkpoint c;
    ckd_error err = {0};
    ckd_store *store = ranks_open(a->path, CKD_OPEN_WRITE);
    bench_check(ckd_store_find(&c, store, "run", CKD_LATEST, &err), &err);
    ckd_store_close(store);
    if (c.step != (committed ? a->step : a->step - 1)) {
        fprintf(stderr, "bench_ranks: the newest checkpoint is that of step %llu\n",
                (unsigned long long)c.step);
        exit(1);
    }
    return committed;
}

static void run_attempt(attempt *a) {
    attempt next = {
        .path = a->path, .step = a->step, .fidelity = a->fidelity, .victim = a->victim, .delay = a->delay};
    *a = next;
    ranks_run(RANKS, be_rank, a);
}

/* Begins a chain. Returns the seconds that its second save takes. */
static double begin_series(attempt *a, ckd_fidelity fidelity) {
    a->fidelity = fidelity;
    a->delay = -1;
    for (a->step = 0; a->step < 2; a->step++) {
        run_attempt(a);
        for (uint32_t r = 0; r < RANKS; r++) {
            if (!a->finished[r] || a->status[r]) {
                bench_die("a save failed", a->message[r]);
            }
        }
    }
    return a->ended[0] - a->begun[0];
}

static void series(figures *f, attempt *a, const ranks_options *o, ckd_fidelity fidelity) {
    a->path = ranks_new_path(o, "kills");
    ckd_store_close(ranks_open(a->path, CKD_OPEN_CREATE));
    double takes = begin_series(a, fidelity);
    fprintf(stderr, "a save takes %.2f s\n", takes);
    for (int i = 0; i < o->kills / 2; i++) {
        a->victim = (uint32_t)i % RANKS;
        a->delay = takes * drand48();
        run_attempt(a);
        if (a->finished[a->victim]) {
            f->survived++;
            a->step += a->status[a->victim] == CKD_OK;
            continue;
        }
        bool committed = check_survivors(f, a);
        f->killed++;
        f->committed += committed;
        a->step += committed;
    }
    bench_remove_tree(a->path);
}

static void print(FILE *json, const figures *f, int of, const char *name, int last) {
    double *values = bench_allocated(malloc((f->count + 1) * sizeof(*values)));
    size_t count = 0;
    for (size_t i = 0; i < f->count; i++) {
        if (of == PHASES || f->at[i] == (phase)of) {
            values[count++] = f->seconds[i];
        }
    }
    bench_sort(values, count);
    double median = ranks_quantile(values, count, 0.5), late = ranks_quantile(values, count, 0.95),
           worst = count ? values[count - 1] : 0;
    printf("%-8s  %9zu  %8.3f  %8.3f  %8.3f\n", name, count, median, late, worst);
    fprintf(json,
            "      {\"in\": \"%s\", \"survivors\": %zu, \"median_seconds\": %.4f, \"p95_seconds\": %.4f, "
            "\"worst_seconds\": %.4f}%s\n",
            name, count, median, late, worst, last ? "" : ",");
    free(values);
}

void bench_kills(FILE *json, const ranks_options *o) {
    size_t errors = (size_t)o->kills * RANKS;
    figures f = {.seconds = bench_allocated(calloc(errors, sizeof(double))),
                 .at = bench_allocated(calloc(errors, sizeof(phase)))};
    attempt *a = mmap(NULL, sizeof(*a), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bench_allocated(a == MAP_FAILED ? NULL : a);
    srand48(1);
    series(&f, a, o, CKD_EXACT);
    series(&f, a, o, CKD_NEAR);
    printf(
        "\nkilled %u of %u times, %u after the commit\nin        survivors  median s     p95 s   worst s\n",
        f.killed, f.killed + f.survived, f.committed);
    fprintf(json, "  \"kills\": {\"ranks\": %d, \"killed\": %u, \"committed\": %u, \"noticed\": [\n", RANKS,
            f.killed, f.committed);
    for (int p = 0; p < PHASES; p++) {
        print(json, &f, p, phase_names[p], 0);
    }
    print(json, &f, PHASES, "all", 1);
    fprintf(json, "  ]}");
    munmap(a, sizeof(*a));
    free(f.seconds);
    free(f.at);
}
