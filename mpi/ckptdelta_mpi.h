/*
 * ckptdelta over MPI: the ranks of a communicator save together and load together. For programs that use MPI already;
 * others need only the store's directory (ckd_ranks_join without a transport). Link with -lckptdelta_mpi -lckptdelta
 * and MPI.
 */
#ifndef CKPTDELTA_MPI_H
#define CKPTDELTA_MPI_H

#include <ckptdelta.h>
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Joins all ranks of the communicator. Collective. Keeps a copy of the communicator until ckd_ranks_leave, which is
 * collective, too. Each rank must have opened the same store for writing. Then call ckd_ranks_save and the rest as in
 * ckptdelta.h: collectively, from one thread at a time (MPI_THREAD_FUNNELED or more). If a rank dies, MPI normally ends
 * the job, and there is no checkpoint unless the commit was made. Errors: those of ckd_ranks_join, of any rank; IO
 * (MPI's).
 */
CKD_API ckd_status ckd_mpi_join(ckd_ranks **out, ckd_store *store, MPI_Comm comm, ckd_error *err);

/*
 * Runs ckd_load_all_together on all ranks of the communicator, using a temporary copy of it. Together they read each
 * stored byte once. Each rank has its own load of the same checkpoint, from a store opened for reading or writing.
 * Collective, from one thread at a time (MPI_THREAD_FUNNELED or more). MPI errors go to the communicator's error
 * handler, which ends the job unless the program has set another one. In that case the rank that returned IO must end
 * the job, since others may wait for it. Errors: those of ckd_load_all_together, the same on all ranks.
 */
CKD_API ckd_status ckd_mpi_load_all(ckd_load *load, MPI_Comm comm, const ckd_load_request *requests,
                                    size_t count, unsigned allowed, ckd_error *err);

#ifdef __cplusplus
}
#endif
#endif
