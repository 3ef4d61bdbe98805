/*
 * How soon a store can be written again after a trainer was killed in its saves, and how many states that it had handed
 * over are lost.
 */
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "bench/session/stall.h"
#include "bench/support/support.h"

enum { EVERY = 2 };

/* In memory that both processes share. */
typedef struct progress {
    volatile uint64_t staged; /* the newest step that was handed over; 0: none */
} progress;

static void train(const char *path, uint64_t from, size_t count, progress *shared) {
    ckd_error err = {0};
    ckd_session *s;
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    ckd_session_options with = CKD_SESSION_OPTIONS_INIT;
    save.run = "killed";
    with.save = &save;
    with.every_steps = EVERY;
    float *values = malloc(count * sizeof(float));
    for (size_t i = 0; i < count; i++) {
        values[i] = (float)rand() / (float)RAND_MAX;
    }
    bench_check(ckd_session_open(&s, path, &with, &err), &err);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = (uint64_t[]){count};
    bench_check(ckd_session_add(s, &t, values, 0, &err), &err);
    for (uint64_t step = from + 1;; step++) {
        ckd_session_state now;
        usleep(1000);
        for (size_t i = 0; i < count; i += 7) {
            values[i] += 1e-4f;
        }
        bench_check(ckd_session_step(s, step, &err), &err);
        ckd_session_poll(&now, s);
        shared->staged = now.staged_step == CKD_LATEST ? 0 : now.staged_step;
    }
}

static uint64_t newest_step(ckd_store *store) {
    ckd_checkpoint c;
    return ckd_store_find(&c, store, "killed", CKD_LATEST, NULL) == CKD_OK ? c.step : 0;
}

void stall_kill(const options *o, const char *dir) {
    char path[4096];
    double *free_ms = calloc((size_t)o->kills, sizeof(*free_ms));
    uint64_t most_lost = 0, durable = 0;
    progress *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    snprintf(path, sizeof(path), "%s/killed", dir);
    for (int i = 0; i < o->kills; i++) {
        ckd_error err = {0};
        ckd_store *store;
        shared->staged = 0;
        pid_t child = fork();
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            train(path, durable, (size_t)(o->mb * 1e6 / sizeof(float)), shared);
        }
        while (shared->staged == 0) {
            usleep(500);
        }
        usleep((useconds_t)(rand() % 400000));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        double start = bench_seconds();
        bench_check(ckd_store_open(&store, path, CKD_OPEN_WRITE, NULL, &err), &err);
        free_ms[i] = 1e3 * (bench_seconds() - start);
        durable = newest_step(store);
        ckd_store_close(store);
        uint64_t lost = shared->staged > durable ? (shared->staged - durable) / EVERY : 0;
        most_lost = lost > most_lost ? lost : most_lost;
    }
    double median = stall_median(free_ms, o->kills), most = free_ms[o->kills - 1];
    printf(
        "%s\n%d kills in saves of %.0f MB: open for writing again after %.2f ms (median; %.2f at most), leftovers removed; "
        "states that were handed over and lost: %u at most\n",
        bench_machine(), o->kills, o->mb, median, most, (unsigned)most_lost);
    FILE *json = o->json ? bench_open_output(o->json) : NULL;
    if (json) {
        fprintf(
            json,
            "{\"machine\": \"%s\", \"kills\": %d, \"state_mb\": %g, \"open_again_ms\": %.4g, \"open_again_most_ms\": %.4g, \"states_lost_most\": %u}\n",
            bench_machine(), o->kills, o->mb, median, most, (unsigned)most_lost);
        bench_close_output(json, o->json);
    }
    munmap(shared, sizeof(*shared));
    free(free_ms);
}
