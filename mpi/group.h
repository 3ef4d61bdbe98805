/* What the library's MPI transports share. Internal to mpi/. */
#ifndef MPI_GROUP_H
#define MPI_GROUP_H

#include "ckptdelta_mpi.h"

#define MPI_PIECE ((size_t)1 << 30) /* bytes of one message: a count of MPI is an int */

/* Fills err; `why` goes into the format. */
ckd_status mpi_failed(ckd_error *err, ckd_status status, const char *format, const char *why);
/* Of what a function of MPI returned. */
ckd_status mpi_check(int code, ckd_error *err);

#endif
