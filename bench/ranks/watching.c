/* The cost of watching the other ranks in a save: processor time of one rank's share, in a group and without one. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench/ranks/ranks.h"
#include "bench/support/support.h"

enum { MATRICES = 4, REPEATS = 21 };

/* In memory that all processes share. */
typedef struct watching {
    const char *path;
    double watching[REPEATS], not_watching[REPEATS];
    volatile int done;
} watching;

static double save_all(ckd_save *save) {
    size_t count;
    ckd_error err = {0};
    ranks_state *s = ranks_state_of(MATRICES, 0, 0, RANKS);
    const ckd_tensor *t = ranks_state_tensors(&count, s);
    double begun = bench_cpu_seconds();
    for (size_t i = 0; i < count; i++) {
        bench_check(ckd_save_tensor(save, &t[i], &err), &err);
    }
    double seconds = bench_cpu_seconds() - begun;
    ranks_state_free(s);
    return seconds;
}

/* The same share without a group: nobody is watched. */
static double save_unwatched(ckd_store *store, const ckd_save_options *options) {
    ckd_save *save;
    ckd_error err = {0};
    ckd_save_options o = *options;
    o.world = RANKS;
    bench_check(ckd_id_new(&o.checkpoint_id, &err), &err);
    bench_check(ckd_save_begin(&save, store, &o, &err), &err);
    double seconds = save_all(save);
    ckd_save_abort(save);
    return seconds;
}

/* Rank 0 saves in turns with and without watching the others, which have also begun a save, and do nothing. */
static int be_rank(void *context, uint32_t rank) {
    watching *w = context;
    ckd_ranks *ranks;
    ckd_error err = {0}, cancelled = {.status = CKD_E_CANCELLED};
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    ckd_save_options so = CKD_SAVE_OPTIONS_INIT;
    o.rank = rank;
    o.world = RANKS;
    so.run = "run";
    so.base = 1;
    ckd_store *store = ranks_open(w->path, CKD_OPEN_WRITE);
    bench_check(ckd_ranks_join(&ranks, store, &o, &err), &err);
    for (int i = 0; i < REPEATS; i++) {
        ckd_save *save;
        bench_check(ckd_ranks_begin(&save, ranks, &so, &err), &err);
        if (rank == 0) {
            w->not_watching[i] = i % 2 ? save_unwatched(store, &so) : 0;
            w->watching[i] = save_all(save);
            w->not_watching[i] = i % 2 ? w->not_watching[i] : save_unwatched(store, &so);
            w->done = i + 1;
        }
        while (w->done <= i) {
            usleep(1000);
        }
        ckd_ranks_abort(ranks, save, &cancelled);
    }
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    return 0;
}

void bench_watching(FILE *json, const ranks_options *o) {
    watching *w = mmap(NULL, sizeof(*w), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    double more[REPEATS];
    bench_allocated(w == MAP_FAILED ? NULL : w);
    w->path = ranks_new_path(o, "watching");
    ckd_store_close(ranks_open(w->path, CKD_OPEN_CREATE));
    if (ranks_run(RANKS, be_rank, w) != RANKS) {
        exit(1);
    }
    for (int i = 0; i < REPEATS; i++) {
        more[i] = w->watching[i] / w->not_watching[i] - 1;
    }
    bench_sort(more, REPEATS);
    bench_sort(w->watching, REPEATS);
    bench_sort(w->not_watching, REPEATS);
    double with = ranks_quantile(w->watching, REPEATS, 0.5),
           without = ranks_quantile(w->not_watching, REPEATS, 0.5);
    printf(
        "\na share of %d MiB: %.4f s of processor time watching %d others, %.4f s without; more, pair by pair: "
        "%+.1f %% (%+.1f to %+.1f)\n",
        MATRICES * MATRIX_MIB / RANKS, with, RANKS - 1, without, 100 * ranks_quantile(more, REPEATS, 0.5),
        100 * ranks_quantile(more, REPEATS, 0.25), 100 * ranks_quantile(more, REPEATS, 0.75));
    fprintf(json,
            "  \"watching\": {\"mib\": %d, \"looking_cpu_seconds\": %.4f, \"not_looking_cpu_seconds\": %.4f, "
            "\"more_median\": %.4f, \"more_quartiles\": [%.4f, %.4f]}",
            MATRICES * MATRIX_MIB / RANKS, with, without, ranks_quantile(more, REPEATS, 0.5),
            ranks_quantile(more, REPEATS, 0.25), ranks_quantile(more, REPEATS, 0.75));
    bench_remove_tree(w->path);
    munmap(w, sizeof(*w));
}
