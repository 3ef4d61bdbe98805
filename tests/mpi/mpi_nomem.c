/*
 * Lack of memory on one rank of a communicator: all ranks fail, or none, and none is left waiting. The linker redirects
 * the library's calls of malloc and the like to this file, but not those of MPI. tests/mpi/check_mpi.sh starts this
 * program under mpirun, which ends it if a rank waits for ever.
 *
 *   mpi_nomem STORE plan FIRST STRIDE    allocation FIRST, FIRST + STRIDE ... fails, on each rank in turn
 *   mpi_nomem STORE save FIRST STRIDE
 *
 * Exit status 0: success.
 */
#include <ckptdelta_mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS = 2000, SMALL = 64 };

static int rank, world;

static struct {
    bool for_ever;
    unsigned long at, seen; /* number of the allocation that fails, from 1; 0: none */
} shortage;
static _Thread_local bool counts;

static bool fails(void) {
    if (!counts || shortage.at == 0) {
        return false;
    }
    shortage.seen++;
    return shortage.seen == shortage.at || (shortage.for_ever && shortage.seen > shortage.at);
}

#define WRAPPED(name, parameters, arguments)             \
    void *__real_##name parameters;                      \
    void *__wrap_##name parameters;                      \
    void *__wrap_##name parameters {                     \
        return fails() ? NULL : __real_##name arguments; \
    }

WRAPPED(malloc, (size_t size), (size))
WRAPPED(calloc, (size_t count, size_t size), (count, size))
WRAPPED(realloc, (void *block, size_t size), (block, size))

static void die(const char *what, const ckd_error *err) {
    fprintf(stderr, "mpi_nomem: rank %d: %s: %s\n", rank, what, err->message);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

/* A description of many tensors is larger than what MPI sends before it is received. */
static ckd_status plan(ckd_ranks *ranks, uint64_t step, ckd_error *err) {
    static ckd_tensor t[TENSORS];
    static char names[TENSORS][64];
    static const uint64_t length[1] = {SMALL};
    const ckd_plan *made;
    (void)step;
    for (int i = 0; i < TENSORS; i++) {
        snprintf(names[i], sizeof(names[i]), "rank.%d.a.long.name.of.a.tensor.number.%d", rank, i);
        t[i] = (ckd_tensor)CKD_TENSOR_INIT;
        t[i].name = names[i];
        t[i].dtype = CKD_F32;
        t[i].ndim = 1;
        t[i].shape = length;
    }
    return ckd_ranks_plan(&made, ranks, t, TENSORS, err);
}

static ckd_status save(ckd_ranks *ranks, uint64_t step, ckd_error *err) {
    static float values[SMALL];
    static const uint64_t length[1] = {SMALL};
    char name[16];
    ckd_tensor t = CKD_TENSOR_INIT;
    snprintf(name, sizeof(name), "rank.%d", rank);
    values[0] = (float)step;
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = length;
    t.data = values;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    o.step = step;
    return ckd_ranks_save(NULL, ranks, &o, &t, 1, err);
}

typedef ckd_status (*act_fn)(ckd_ranks *ranks, uint64_t step, ckd_error *err);

static void expect_alike(ckd_status status, const char *what, unsigned long at, const ckd_error *err) {
    int here = status == CKD_OK, all, any;
    MPI_Allreduce(&here, &all, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
    MPI_Allreduce(&here, &any, 1, MPI_INT, MPI_LOR, MPI_COMM_WORLD);
    if (all != any) {
        fprintf(stderr, "allocation %lu, rank %d: %s: %s\n", at, rank, what, here ? "done" : err->message);
        MPI_Barrier(MPI_COMM_WORLD);
        die("the ranks differ", err);
    }
}

/* Returns whether the allocation was made at all. */
static bool attempt(ckd_store *store, act_fn act, uint64_t step, int victim, unsigned long at) {
    ckd_ranks *ranks = NULL;
    ckd_error err = {0};
    shortage.at = rank == victim ? at : 0;
    shortage.seen = 0;
    counts = true;
    ckd_status status = ckd_mpi_join(&ranks, store, MPI_COMM_WORLD, &err);
    counts = false;
    expect_alike(status, "join", at, &err);
    if (status == CKD_OK) {
        counts = true;
        status = act(ranks, step, &err);
        counts = false;
        expect_alike(status, "act", at, &err);
        if (status == CKD_OK && act(ranks, step + 1, &err) != CKD_OK) { /* they are at the same point */
            die("after a success", &err);
        }
        ckd_ranks_leave(ranks);
    }
    shortage.at = 0;
    int reached = rank == victim && shortage.seen >= at, any;
    MPI_Allreduce(&reached, &any, 1, MPI_INT, MPI_LOR, MPI_COMM_WORLD);
    return any;
}

int main(int argc, char **argv) {
    ckd_store *store = NULL;
    ckd_error err = {0};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc < 5) {
        return 2;
    }
    act_fn act = strcmp(argv[2], "plan") == 0 ? plan : save;
    unsigned long first = strtoul(argv[3], NULL, 10), stride = strtoul(argv[4], NULL, 10), attempts = 0;
    for (int turn = 0; turn < 2; turn++) { /* rank 0 creates the store */
        if ((rank == 0) == (turn == 0) && ckd_store_open(&store, argv[1], CKD_OPEN_CREATE, NULL, &err)) {
            die("open", &err);
        }
        MPI_Barrier(MPI_COMM_WORLD);
    }
    for (int mode = 0; mode < 2; mode++) {
        shortage.for_ever = mode == 1;
        for (int victim = 0; victim < world; victim++) {
            for (unsigned long at = first; attempt(store, act, 2 * attempts, victim, at); at += stride) {
                attempts++;
            }
            attempts++;
        }
    }
    if (rank == 0) {
        printf("%s: %lu attempts without memory\n", argv[2], attempts);
    }
    ckd_store_close(store);
    MPI_Finalize();
    return 0;
}
