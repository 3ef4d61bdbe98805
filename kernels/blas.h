/*
 * Matrix products by a BLAS that is opened at run time, for encoders; nothing links with it. It is off
 * unless CKD_BLAS in the environment is the path (or a name that dlopen finds) of an OpenBLAS, such as
 * libopenblas.so.0 of Debian's libopenblas0-serial. The variable is read once, on first use.
 *
 * The BLAS is used only while it reports one thread (openblas_get_num_threads): it must not take processors
 * that this library was not given, and its setting belongs to the host program. Calls are serialised, as
 * builds without threads need not be thread-safe. If the host program uses the same file from other
 * threads meanwhile, that build must be thread-safe. Internal to kernels/.
 */
#ifndef KERNELS_BLAS_H
#define KERNELS_BLAS_H

#include <stdbool.h>
#include <stddef.h>

/*
 * sums = left (rows x rank) times right (rank x columns), in row-major order. Returns false if it did
 * nothing. Thread-safe.
 */
bool blas_products(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                   size_t columns);

#endif
