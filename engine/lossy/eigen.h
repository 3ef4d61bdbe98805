/*
 * Eigenvalues and eigenvectors of a small symmetric matrix: Householder's reduction to a tridiagonal one and implicit QL (Bowdler,
 * Martin, Reinsch, Wilkinson, Numerische Mathematik 11, 1968; EISPACK's tred2 and tql2). Free arithmetic: for encoders.
 * Thread-safe. Internal to engine/.
 */
#ifndef ENGINE_EIGEN_H
#define ENGINE_EIGEN_H

#include <stddef.h>

/*
 * m: n x n, symmetric; becomes the orthonormal eigenvectors, one a row, of values[0], values[1], ..., in no order. spare: n numbers.
 * Of a matrix that is not finite nothing can be said, but that the call ends.
 */
void eigen_symmetric(double *m, double *values, double *spare, size_t n);

#endif
