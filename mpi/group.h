/* Shared by the library's MPI transports. Internal to mpi/. */
#ifndef MPI_GROUP_H
#define MPI_GROUP_H

#include "ckptdelta_mpi.h"

#define MESSAGE_MAX ((size_t)1 << 30) /* bytes per message: MPI counts are ints */

/* Fills err; `why` is the argument of the format. */
ckd_status mpi_failed(ckd_error *err, ckd_status status, const char *format, const char *why);
/* Turns the return code of an MPI function into a status. */
ckd_status mpi_check(int code, ckd_error *err);

#endif
