/*
 * The size that four ranks store, and that one rank stores: through the store's directory, and over MPI if it is
 * installed.
 */
#include <stdlib.h>

#include "bench/ranks/ranks.h"
#include "bench/support/support.h"

enum { STEPS = 2 };

typedef struct series {
    const ranks_options *o;
    char path[4096];
    uint32_t world;
    ckd_fidelity fidelity;
} series;

static int be_rank(void *context, uint32_t rank) {
    const series *s = context;
    ckd_ranks *ranks;
    ckd_error err = {0};
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    o.rank = rank;
    o.world = s->world;
    ckd_store *store = ranks_open(s->path, CKD_OPEN_WRITE);
    bench_check(ckd_ranks_join(&ranks, store, &o, &err), &err);
    for (uint64_t step = 0; step < STEPS; step++) {
        size_t count;
        ckd_save_options so = CKD_SAVE_OPTIONS_INIT;
        so.run = "run";
        so.step = step;
        so.fidelity = s->fidelity;
        ranks_state *state = ranks_state_of((unsigned)s->o->matrices, step, rank, s->world);
        const ckd_tensor *t = ranks_state_tensors(&count, state);
        bench_check(ckd_ranks_save(NULL, ranks, &so, t, count, &err), &err);
        ranks_state_free(state);
    }
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    return 0;
}

/* mpi_save lies beside this program if MPI was there when it was built. */
static bool run_mpi(const series *s) {
    char program[BENCH_PATH], command[4 * BENCH_PATH];
    bench_beside_program(program, "mpi_save");
    if (!bench_file_exists(program) || system("command -v mpirun >/dev/null 2>&1") != 0) {
        return false;
    }
    snprintf(command, sizeof(command),
             "mpirun --allow-run-as-root --oversubscribe -n %u '%s' '%s' %d %u %d 2>/dev/null",
             (unsigned)s->world, program, s->path, s->o->matrices, (unsigned)STEPS, (int)s->fidelity);
    if (system(command) != 0) {
        bench_die(command, "failed");
    }
    return true;
}

typedef struct figures {
    double stored[STEPS], raw, files, seconds;
    uint32_t world;
} figures;

static bool measure(figures *f, const ranks_options *o, uint32_t world, ckd_fidelity fidelity, bool mpi) {
    series s = {.o = o, .world = world, .fidelity = fidelity};
    snprintf(s.path, sizeof(s.path), "%s", ranks_new_path(o, "bytes"));
    ckd_store_close(ranks_open(s.path, CKD_OPEN_CREATE));
    double begun = bench_seconds();
    if (mpi ? !run_mpi(&s) : ranks_run(world, be_rank, &s) != world) {
        bench_remove_tree(s.path);
        if (!mpi) {
            exit(1);
        }
        return false;
    }
    *f = (figures){.seconds = bench_seconds() - begun, .files = ranks_tree_bytes(s.path)};
    ckd_store *store = ranks_open(s.path, CKD_OPEN_READ);
    for (uint64_t step = 0; step < STEPS; step++) {
        ckd_checkpoint c;
        ckd_error err = {0};
        bench_check(ckd_store_find(&c, store, "run", step, &err), &err);
        f->stored[step] = (double)c.stored_bytes;
        f->raw = (double)c.raw_bytes;
        f->world = c.world;
    }
    ckd_store_close(store);
    bench_remove_tree(s.path);
    return true;
}

static void print(FILE *json, const char *fidelity, const char *how, const figures *f, const figures *one,
                  int first) {
    printf("%-6s  %-10s  %5u  %12.0f  %6.4f  %12.0f  %6.4f  %12.0f  %6.4f\n", fidelity, how,
           (unsigned)f->world, f->stored[0], f->stored[0] / one->stored[0], f->stored[1],
           f->stored[1] / one->stored[1], f->files, f->files / one->files);
    fprintf(
        json,
        "%s    {\"fidelity\": \"%s\", \"through\": \"%s\", \"ranks\": %u, \"raw_bytes\": %.0f, \"first_bytes\": %.0f, "
        "\"delta_bytes\": %.0f, \"all_files_bytes\": %.0f, \"seconds\": %.1f}",
        first ? "" : ",\n", fidelity, how, (unsigned)f->world, f->raw, f->stored[0], f->stored[1], f->files,
        f->seconds);
}

void bench_bytes(FILE *json, const ranks_options *o) {
    static const ckd_fidelity fidelities[] = {CKD_EXACT, CKD_NEAR};
    printf("\nstate of %d MiB\n%-6s  %-10s  ranks  %12s  %6s  %12s  %6s  %12s  %6s\n",
           o->matrices * MATRIX_MIB, "", "through", "first bytes", "of one", "delta bytes", "of one",
           "all files", "of one");
    fprintf(json, "  \"bytes\": [\n");
    for (int i = 0; i < 2; i++) {
        const char *name = ckd_fidelity_name(fidelities[i]);
        figures one, many;
        measure(&one, o, 1, fidelities[i], false);
        print(json, name, "directory", &one, &one, i == 0);
        measure(&many, o, RANKS, fidelities[i], false);
        print(json, name, "directory", &many, &one, 0);
        if (measure(&many, o, RANKS, fidelities[i], true)) {
            print(json, name, "MPI", &many, &one, 0);
        }
    }
    fprintf(json, "\n  ]");
}
