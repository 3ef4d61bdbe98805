/*
 * Products of matrices by a BLAS that is there at run time, for encoders; nothing is linked with it. Off, unless CKD_BLAS in the environment
 * is the path (or a name that dlopen finds) of an OpenBLAS: libopenblas.so.0 of Debian's libopenblas0-serial, for example. Read once, when first
 * needed.
 *
 * It is only used while it says that it has one thread (openblas_get_num_threads): it must neither take processors that nobody gave this library,
 * nor have its setting changed, which belongs to the host program, by us. One call at a time, as builds without threads need not be
 * thread-safe; a host program that uses the same file from other threads meanwhile has to have one that is. Internal to kernels/.
 */
#ifndef KERNELS_BLAS_H
#define KERNELS_BLAS_H

#include <stdbool.h>
#include <stddef.h>

/* sums = left (rows x rank) times right (rank x columns), rows one after the other. false: not done. Thread-safe. */
bool blas_products(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                   size_t columns);

#endif
