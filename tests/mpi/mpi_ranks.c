/*
 * Ranks of a communicator save together. tests/mpi/check_mpi.sh starts this program under mpirun.
 *
 *   mpi_ranks STORE save FIRST COUNT    save these steps, each rank its rows; then each loads another's rows
 *   mpi_ranks STORE die STEP            rank world - 1 kills itself in the middle of the save
 *   mpi_ranks STORE refuse STEP         save overlapping layouts, which is refused
 *   mpi_ranks STORE bytes STEP          print the stored bytes of the step
 *
 * Exit status 0: success.
 */
#include <ckptdelta_mpi.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 512, COLUMNS = 1024 };

static int rank, world;

static void die(const char *what, const ckd_error *err) {
    fprintf(stderr, "mpi_ranks: rank %d: %s: %s (%s)\n", rank, what, err->message, err->tensor);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static float value_at(uint64_t step, uint64_t element) {
    uint64_t noise = (element + 1) * UINT64_C(0x9e3779b97f4a7c15);
    noise = (noise ^ noise >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
    return (float)(noise >> 40) / 65536 + (float)(step * (element % 31 == 0));
}

static uint64_t row_of(int r) {
    return (uint64_t)ROWS * (uint64_t)r / (uint64_t)world;
}

/* Saves "w" by rows, and "bias" on every rank. */
static ckd_status save(ckd_checkpoint *info, ckd_ranks *ranks, uint64_t step, int overlap, ckd_error *err) {
    static const uint64_t shape[2] = {ROWS, COLUMNS}, length[1] = {COLUMNS};
    uint64_t first = row_of(rank), count = row_of(rank + 1) - first;
    if (overlap && rank + 1 < world) {
        count++;
    }
    float *values = malloc(count * COLUMNS * sizeof(float)), *bias = malloc(COLUMNS * sizeof(float));
    for (uint64_t i = 0; i < count * COLUMNS; i++) {
        values[i] = value_at(step, first * COLUMNS + i);
    }
    for (uint64_t i = 0; i < COLUMNS; i++) {
        bias[i] = value_at(step, i);
    }
    ckd_tensor t[2] = {CKD_TENSOR_INIT, CKD_TENSOR_INIT};
    t[0].name = "w";
    t[1].name = "bias";
    t[0].dtype = t[1].dtype = CKD_F32;
    t[0].ndim = 2;
    t[1].ndim = 1;
    t[0].shape = shape;
    t[1].shape = length;
    t[0].region.kind = CKD_REGION_BOX;
    t[0].region.offsets[0] = first;
    t[0].region.lengths[0] = count;
    t[0].region.lengths[1] = COLUMNS;
    t[0].data = values;
    t[1].data = bias;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    o.step = step;
    ckd_status status = ckd_ranks_save(info, ranks, &o, t, 2, err);
    free(values);
    free(bias);
    return status;
}

/* Loads and checks the rows of the next rank. */
static void check(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    ckd_load *load;
    ckd_error err = {0};
    int other = (rank + 1) % world;
    uint64_t first = row_of(other), count = row_of(other + 1) - first;
    float *got = malloc(count * COLUMNS * sizeof(float));
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "w";
    q.region.kind = CKD_REGION_BOX;
    q.region.offsets[0] = first;
    q.region.lengths[0] = count;
    q.region.lengths[1] = COLUMNS;
    q.data = got;
    q.size = count * COLUMNS * sizeof(float);
    if (ckd_store_find(&c, store, "run", step, &err) || ckd_load_begin(&load, store, &c.id, &err) ||
        ckd_load_tensor(load, &q, &err)) {
        die("load", &err);
    }
    for (uint64_t i = 0; i < count * COLUMNS; i++) {
        if (got[i] != value_at(step, first * COLUMNS + i)) {
            die("a wrong value was loaded", &err);
        }
    }
    ckd_load_end(load);
    free(got);
}

/* All ranks join and begin, but one dies before its part exists. */
static void save_and_die(ckd_ranks *ranks, uint64_t step) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *begun;
    ckd_error err = {0};
    o.run = "run";
    o.step = step;
    if (ckd_ranks_begin(&begun, ranks, &o, &err)) {
        die("begin", &err);
    }
    if (rank + 1 == world) {
        raise(SIGKILL);
    }
    ckd_ranks_commit(NULL, ranks, begun, &err); /* MPI may end this process here */
    exit(1);
}

static void save_steps(ckd_store *store, ckd_ranks *ranks, uint64_t first, uint64_t count) {
    ckd_error err = {0};
    ckd_checkpoint c;
    for (uint64_t step = first; step < first + count; step++) {
        if (save(&c, ranks, step, 0, &err)) {
            die("save", &err);
        }
        if (c.step != step || c.world != (uint32_t)world || c.raw_bytes != (ROWS + 1) * COLUMNS * 4) {
            die("what was saved is not what was to be saved", &err);
        }
    }
    for (uint64_t step = 0; step < first + count; step++) {
        check(store, step);
    }
}

static void be_refused(ckd_ranks *ranks, uint64_t step) {
    ckd_error err = {0};
    if (save(NULL, ranks, step, 1, &err) != CKD_E_MISMATCH || strcmp(err.tensor, "w") != 0 ||
        !strstr(err.message, "both hold its elements")) {
        die("layouts that overlap", &err);
    }
    if (save(NULL, ranks, step, 0, &err)) { /* the group can still be used */
        die("save", &err);
    }
}

/* The last rank opens the store for reading only. */
static void fail_to_join(ckd_store **store, const char *path) {
    ckd_ranks *ranks;
    ckd_error err = {0};
    bool last = rank + 1 == world;
    if (last) {
        ckd_store_close(*store);
        if (ckd_store_open(store, path, CKD_OPEN_READ, NULL, &err)) {
            die("open", &err);
        }
    }
    if (ckd_mpi_join(&ranks, *store, MPI_COMM_WORLD, &err) != CKD_E_READ_ONLY || ranks ||
        (!last && !strstr(err.message, "could not join"))) {
        die("join what one rank cannot", &err);
    }
}

static void print_bytes(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    ckd_error err = {0};
    if (ckd_store_find(&c, store, "run", step, &err)) {
        die("find", &err);
    }
    if (rank == 0) {
        printf("%llu\n", (unsigned long long)c.stored_bytes);
    }
}

int main(int argc, char **argv) {
    ckd_store *store = NULL;
    ckd_ranks *ranks;
    ckd_error err = {0};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc < 4) {
        return 2;
    }
    uint64_t step = strtoull(argv[3], NULL, 10);
    for (int turn = 0; turn < 2; turn++) { /* rank 0 creates the store */
        if ((rank == 0) == (turn == 0) && ckd_store_open(&store, argv[1], CKD_OPEN_CREATE, NULL, &err)) {
            die("open", &err);
        }
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (strcmp(argv[2], "closed") == 0) {
        fail_to_join(&store, argv[1]);
        ckd_store_close(store);
        MPI_Finalize();
        return 0;
    }
    if (ckd_mpi_join(&ranks, store, MPI_COMM_WORLD, &err)) {
        die("join", &err);
    }
    if (strcmp(argv[2], "save") == 0 && argc == 5) {
        save_steps(store, ranks, step, strtoull(argv[4], NULL, 10));
    } else if (strcmp(argv[2], "die") == 0) {
        save_and_die(ranks, step);
    } else if (strcmp(argv[2], "refuse") == 0) {
        be_refused(ranks, step);
    } else {
        print_bytes(store, step);
    }
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    MPI_Finalize();
    return 0;
}
