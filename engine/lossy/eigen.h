/*
 * Eigenvalues and eigenvectors of a small symmetric matrix: Householder reduction to tridiagonal form, then
 * implicit QL (Bowdler, Martin, Reinsch, Wilkinson, Numerische Mathematik 11, 1968; EISPACK's tred2 and
 * tql2). Only encoders use it, so its arithmetic is free. Thread-safe. Internal to engine/.
 */
#ifndef ENGINE_EIGEN_H
#define ENGINE_EIGEN_H

#include <stddef.h>

/*
 * Decomposes m, a symmetric n x n matrix. m becomes the orthonormal eigenvectors, one per row, of values[0],
 * values[1], ..., unsorted. scratch: n numbers. If m is not finite, the call returns, but the results are
 * undefined.
 */
void eigen_symmetric(double *m, double *values, double *scratch, size_t n);

#endif
