/*
 * ckptdelta over MPI: ranks of a communicator save together, and load together. For programs that are MPI programs anyway; others need nothing but the
 * store's directory (ckd_ranks_join without a transport). Link with -lckptdelta_mpi -lckptdelta and MPI.
 */
#ifndef CKPTDELTA_MPI_H
#define CKPTDELTA_MPI_H

#include <ckptdelta.h>
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Joins all ranks of the communicator, of which a copy is kept until ckd_ranks_leave: that and joining are collective. Each rank has opened the same
 * store for writing. Then ckd_ranks_save and the rest as in ckptdelta.h, collective, one thread at a time (MPI_THREAD_FUNNELED or more). If a
 * rank dies, MPI ends the job as a rule, and there is no checkpoint, unless the commit was made. Errors: those of ckd_ranks_join, of any
 * rank; IO (MPI's).
 */
CKD_API ckd_status ckd_mpi_join(ckd_ranks **out, ckd_store *store, MPI_Comm comm, ckd_error *err);

/*
 * ckd_load_all_together by all ranks of the communicator, of which a copy is made for the call: each stored byte is read once by all of them. Each
 * rank has its own load of the same checkpoint, from a store that is open for reading or writing. Collective, one thread at a time
 * (MPI_THREAD_FUNNELED or more). Errors of MPI go to the communicator's error handler, which ends the job unless the program has set another one;
 * then the rank that returned IO must end it, as others may wait for it. Errors: ckd_load_all_together's, the same on all ranks.
 */
CKD_API ckd_status ckd_mpi_load_all(ckd_load *load, MPI_Comm comm, const ckd_load_request *requests,
                                    size_t count, unsigned allowed, ckd_error *err);

#ifdef __cplusplus
}
#endif
#endif
