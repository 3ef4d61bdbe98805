/*
 * Ranks of a communicator load together. tests/mpi/check_mpi.sh starts this program under mpirun.
 *
 *   mpi_load STORE save RUN COUNT     save this many steps of "exact" or "near", each rank its rows
 *   mpi_load STORE load RUN           load the last step in several layouts, reading each byte once
 *   mpi_load STORE mismatch RUN       one rank requests something else: no rank writes anything
 *   mpi_load STORE damaged FILE       FILE is damaged, so one of the runs cannot be loaded: all ranks fail
 *
 * Exit status 0: success.
 */
#include <ckptdelta_mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 640, COLUMNS = 512, MATRICES = 4, REQUESTS = MATRICES + 1, WORLD_MOST = 16 };

static const char *const names[MATRICES] = {"w", "exp_avg.w", "exp_avg_sq.w", "embedding"};
static int rank, world;

static void die(const char *what, const ckd_error *err) {
    fprintf(stderr, "mpi_load: rank %d: %s: %s (%s, %s)\n", rank, what, err->message, err->tensor, err->file);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void check(bool good, const char *what) {
    ckd_error err = {0};
    if (!good) {
        die(what, &err);
    }
}

static float value_at(int matrix, uint64_t step, uint64_t element) {
    uint64_t noise = (element + 1 + (uint64_t)matrix * 7919) * UINT64_C(0x9e3779b97f4a7c15);
    noise = (noise ^ noise >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
    uint64_t moved = (noise ^ step * UINT64_C(0x94d049bb133111eb)) * UINT64_C(0x9e3779b97f4a7c15);
    float value = (float)(int64_t)(noise >> 40) / 8388608 - 1;
    value += (float)step * (float)((int64_t)(moved >> 48) - 32768) / 32768 / 1024;
    return matrix == 2 ? value * value : value;
}

static uint64_t part_of(uint64_t all, int r, int of) {
    return all * (uint64_t)r / (uint64_t)of;
}

static void save(ckd_ranks *ranks, const char *run, uint64_t step) {
    static const uint64_t shape[2] = {ROWS, COLUMNS};
    uint64_t first = part_of(ROWS, rank, world), count = part_of(ROWS, rank + 1, world) - first;
    ckd_tensor t[MATRICES];
    ckd_error err = {0};
    for (int m = 0; m < MATRICES; m++) {
        float *values = malloc(count * COLUMNS * sizeof(float));
        for (uint64_t i = 0; i < count * COLUMNS; i++) {
            values[i] = value_at(m, step, first * COLUMNS + i);
        }
        t[m] = (ckd_tensor)CKD_TENSOR_INIT;
        t[m].name = names[m];
        t[m].dtype = CKD_F32;
        t[m].ndim = 2;
        t[m].shape = shape;
        t[m].region.kind = CKD_REGION_BOX;
        t[m].region.offsets[0] = first;
        t[m].region.lengths[0] = count;
        t[m].region.lengths[1] = COLUMNS;
        t[m].data = values;
    }
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = run;
    o.step = step;
    o.fidelity = strcmp(run, "near") == 0 && step > 0 ? CKD_NEAR : CKD_EXACT;
    o.max_load_cost = o.newest_load_cost = 1000;
    if (ckd_ranks_save(NULL, ranks, &o, t, MATRICES, &err)) {
        die("save", &err);
    }
    for (int m = 0; m < MATRICES; m++) {
        free((void *)t[m].data);
    }
}

/* ---- layouts: the requests of rank r ---- */

typedef enum layout { BY_ROWS, BY_COLUMNS, REPLICAS, OVERLAPPING, ONE_RANK, LAYOUTS } layout;

/* Makes the requests, and returns how many. data stays NULL. */
static size_t requests_of(ckd_load_request *q, layout l, int r) {
    for (int m = 0; m < MATRICES; m++) {
        uint64_t offsets[2] = {0, 0}, lengths[2] = {ROWS, COLUMNS};
        unsigned dim = l == BY_COLUMNS || (l == OVERLAPPING && m % 2) ? 1 : 0;
        if (l == BY_ROWS || l == BY_COLUMNS) {
            offsets[dim] = part_of(lengths[dim], r, world);
            lengths[dim] = part_of(lengths[dim], r + 1, world) - offsets[dim];
        } else if (l == OVERLAPPING) {
            offsets[dim] = 13 * (uint64_t)r + 7 * (uint64_t)m;
            lengths[dim] = lengths[dim] / 3 + 1;
        }
        q[m] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        q[m].name = names[m];
        q[m].region.kind = CKD_REGION_BOX;
        memcpy(q[m].region.offsets, offsets, sizeof(offsets));
        memcpy(q[m].region.lengths, lengths, sizeof(lengths));
        q[m].size = lengths[0] * lengths[1] * sizeof(float);
    }
    return l == ONE_RANK && r != world - 1 ? 0 : l == OVERLAPPING ? MATRICES - 1 : MATRICES;
}

static void give_memory(ckd_load_request *q, size_t count) {
    for (size_t i = 0; i < count; i++) {
        q[i].data = malloc(q[i].size + 1);
        memset(q[i].data, 0x5a, q[i].size);
    }
}

static void take_memory(ckd_load_request *q, size_t count) {
    for (size_t i = 0; i < count; i++) {
        free(q[i].data);
    }
}

static ckd_load *begin(ckd_store *store, const char *run) {
    ckd_checkpoint c;
    ckd_load *load;
    ckd_error err = {0};
    if (ckd_store_find(&c, store, run, CKD_LATEST, &err) || ckd_load_begin(&load, store, &c.id, &err)) {
        die("begin", &err);
    }
    return load;
}

/* The bytes that are read if each requested byte is read once. */
static uint64_t union_bytes(ckd_store *store, const char *run, layout l) {
    ckd_load_request q[WORLD_MOST * MATRICES];
    size_t count = 0;
    for (int r = 0; r < world; r++) {
        count += requests_of(q + count, l, r);
    }
    ckd_load *load = begin(store, run);
    ckd_load_explanation *e;
    ckd_error err = {0};
    if (ckd_load_explain(&e, load, q, count, &err)) {
        die("explain", &err);
    }
    uint64_t bytes = e->all.read_bytes;
    check(e->all.depth >= 3, "the chain is too short to show anything");
    ckd_load_explanation_free(e);
    ckd_load_end(load);
    return bytes;
}

/* Compares with a plain load. *alone is what that reads. */
static void compare(ckd_store *store, const char *run, const ckd_load_request *got, size_t count,
                    uint64_t *alone) {
    ckd_load_request q[REQUESTS];
    ckd_load *load = begin(store, run);
    ckd_error err = {0};
    memcpy(q, got, count * sizeof(*q));
    give_memory(q, count);
    if (ckd_load_all(load, q, count, CKD_DIFFERS_UNEXPECTED, &err)) {
        die("a plain load", &err);
    }
    for (size_t i = 0; i < count; i++) {
        check(memcmp(q[i].data, got[i].data, q[i].size) == 0, "values differ from those of a plain load");
    }
    *alone = ckd_load_bytes_read(load);
    take_memory(q, count);
    ckd_load_end(load);
}

static void load_layout(ckd_store *store, const char *run, layout l) {
    static const char *const called[LAYOUTS] = {"rows", "columns", "replicas", "overlapping", "one rank"};
    ckd_load_request q[REQUESTS];
    ckd_error err = {0};
    size_t count = requests_of(q, l, rank);
    ckd_load *load = begin(store, run);
    give_memory(q, count);
    /* In the overlapping layout no rank requests the last matrix. That must be allowed. */
    if (ckd_mpi_load_all(load, MPI_COMM_WORLD, q, count, l == OVERLAPPING ? CKD_DIFFERS_UNEXPECTED : 0,
                         &err)) {
        die("load", &err);
    }
    uint64_t mine[2] = {ckd_load_bytes_read(load), 0}, sum[2], most;
    compare(store, run, q, count, &mine[1]);
    MPI_Reduce(mine, sum, 2, MPI_UINT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Reduce(mine, &most, 1, MPI_UINT64_T, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        uint64_t all = union_bytes(store, run, l);
        printf("%d ranks, %s, %s: %llu bytes read together (most by one %llu), %llu each for itself\n", world,
               run, called[l], (unsigned long long)sum[0], (unsigned long long)most,
               (unsigned long long)sum[1]);
        check(sum[0] == all, "not each stored byte was read once");
        check(l == OVERLAPPING || all == union_bytes(store, run, REPLICAS), "not all was asked for");
    }
    take_memory(q, count);
    ckd_load_end(load);
}

static void be_refused(ckd_store *store, const char *run) {
    ckd_load_request q[REQUESTS];
    ckd_error err = {0};
    size_t count = requests_of(q, BY_ROWS, rank);
    ckd_load *load = begin(store, run);
    give_memory(q, count);
    q[1].dtype = rank == world - 1 ? CKD_BF16 : CKD_F32;
    ckd_status status = ckd_mpi_load_all(load, MPI_COMM_WORLD, q, count, 0, &err);
    check(status == CKD_E_MISMATCH && strcmp(err.tensor, names[1]) == 0, "what one rank gets wrong");
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < q[i].size; k++) {
            check(((unsigned char *)q[i].data)[k] == 0x5a, "something was written");
        }
    }
    q[1].dtype = CKD_F32; /* the same load can still be used */
    if (ckd_mpi_load_all(load, MPI_COMM_WORLD, q, count, 0, &err)) {
        die("load", &err);
    }
    take_memory(q, count);
    ckd_load_end(load);
}

static void find_damage(ckd_store *store, const char *file) {
    int found = 0;
    for (int k = 0; k < 2; k++) {
        for (layout l = BY_ROWS; l < ONE_RANK; l++) {
            ckd_load_request q[REQUESTS];
            ckd_error err = {0};
            size_t count = requests_of(q, l, rank);
            ckd_load *load = begin(store, k ? "near" : "exact");
            give_memory(q, count);
            ckd_status status =
                ckd_mpi_load_all(load, MPI_COMM_WORLD, q, count, CKD_DIFFERS_UNEXPECTED, &err);
            ckd_error first = err;
            MPI_Bcast(&first, sizeof(first), MPI_BYTE, 0, MPI_COMM_WORLD);
            check(status == first.status && strcmp(err.message, first.message) == 0,
                  "ranks do not say the same");
            check(status == CKD_OK || (status == CKD_E_CORRUPT && strstr(err.file, file)), "another error");
            found += status != CKD_OK;
            take_memory(q, count);
            ckd_load_end(load);
        }
    }
    check(found > 0, "the damage was not noticed");
}

int main(int argc, char **argv) {
    ckd_store *store = NULL;
    ckd_error err = {0};
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    bool saving = argc == 5 && strcmp(argv[2], "save") == 0;
    if (argc < 4 || world > WORLD_MOST) {
        return 2;
    }
    for (int turn = 0; turn < 2; turn++) { /* rank 0 creates the store */
        ckd_open_mode mode = saving ? CKD_OPEN_CREATE : CKD_OPEN_READ;
        if ((rank == 0) == (turn == 0) && ckd_store_open(&store, argv[1], mode, NULL, &err)) {
            die("open", &err);
        }
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (saving) {
        ckd_ranks *ranks;
        if (ckd_mpi_join(&ranks, store, MPI_COMM_WORLD, &err)) {
            die("join", &err);
        }
        for (uint64_t step = 0; step < strtoull(argv[4], NULL, 10); step++) {
            save(ranks, argv[3], step);
        }
        ckd_ranks_leave(ranks);
    } else if (strcmp(argv[2], "load") == 0) {
        for (layout l = BY_ROWS; l < LAYOUTS; l++) {
            load_layout(store, argv[3], l);
        }
    } else if (strcmp(argv[2], "mismatch") == 0) {
        be_refused(store, argv[3]);
    } else {
        find_damage(store, argv[3]);
    }
    ckd_store_close(store);
    MPI_Finalize();
    return 0;
}
