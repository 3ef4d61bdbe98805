/* mpi_save STORE MATRICES STEPS FIDELITY: saves bench_ranks' state over MPI; started by bench_ranks, under mpirun. */
#include <ckptdelta_mpi.h>
#include <stdlib.h>

#include "bench/ranks/ranks.h"

static void must(ckd_status status, const char *what, const ckd_error *err) {
    if (status != CKD_OK) {
        fprintf(stderr, "mpi_save: %s: %s (%s)\n", what, err->message, err->tensor);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

int main(int argc, char **argv) {
    int rank, world;
    ckd_store *store;
    ckd_ranks *ranks;
    ckd_error err = {0};
    ckd_store_options so = CKD_STORE_OPTIONS_INIT;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc != 5) {
        return 2;
    }
    so.threads = 1;
    must(ckd_store_open(&store, argv[1], CKD_OPEN_WRITE, &so, &err), "open", &err);
    must(ckd_mpi_join(&ranks, store, MPI_COMM_WORLD, &err), "join", &err);
    for (uint64_t step = 0; step < strtoull(argv[3], NULL, 10); step++) {
        size_t count;
        ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
        o.run = "run";
        o.step = step;
        o.fidelity = (ckd_fidelity)atoi(argv[4]);
        ranks_state *s = ranks_state_of((unsigned)atoi(argv[2]), step, (uint32_t)rank, (uint32_t)world);
        const ckd_tensor *t = ranks_state_tensors(&count, s);
        must(ckd_ranks_save(NULL, ranks, &o, t, count, &err), "save", &err);
        ranks_state_free(s);
    }
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    MPI_Finalize();
    return 0;
}
