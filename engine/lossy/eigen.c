/* Eigenvectors of the small matrices that low_rank.c makes. They are computed here, so the library needs no LAPACK. */
#include "engine/lossy/eigen.h"

#include <math.h>

#define PRECISE    1e-11 /* relative to the largest value */
#define ROUNDS_MAX 50    /* rounds per value; two or three are usual */

/* Row j of the transposed vectors: the inner loops run over contiguous memory. */
#define V(k, j) m[(j)*n + (k)]

static double sum_of_products(const double *a, const double *b, size_t from, size_t to) {
    double sum[4] = {0, 0, 0, 0};
    size_t i = from;
    for (; i + 4 <= to; i += 4) {
        for (size_t j = 0; j < 4; j++) {
            sum[j] += a[i + j] * b[i + j];
        }
    }
    for (; i < to; i++) {
        sum[0] += a[i] * b[i];
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Applies the reflection that clears row i left of its neighbour, from both sides. */
static double reflect(double *m, double *d, double *e, size_t n, size_t i, double scale) {
    double h = 0;
    for (size_t k = 0; k < i; k++) {
        d[k] /= scale;
        h += d[k] * d[k];
        e[k] = 0;
    }
    double f = d[i - 1], g = f > 0 ? -sqrt(h) : sqrt(h);
    e[i] = scale * g;
    h -= f * g;
    d[i - 1] = f - g;
    for (size_t j = 0; j < i; j++) {
        const double *row = &V(0, j);
        f = d[j];
        V(j, i) = f;
        e[j] += row[j] * f + sum_of_products(row, d, j + 1, i);
        for (size_t k = j + 1; k < i; k++) {
            e[k] += row[k] * f;
        }
    }
    f = 0;
    for (size_t j = 0; j < i; j++) {
        e[j] /= h;
        f += e[j] * d[j];
    }
    double half = f / (h + h);
    for (size_t j = 0; j < i; j++) {
        e[j] -= half * d[j];
    }
    for (size_t j = 0; j < i; j++) {
        double *row = &V(0, j);
        f = d[j];
        g = e[j];
        for (size_t k = j; k < i; k++) {
            row[k] -= f * e[k] + g * d[k];
        }
        d[j] = row[i - 1];
        V(i, j) = 0;
    }
    return h;
}

/* d: the diagonal; e[1] ... e[n - 1]: the subdiagonal; m: the transformation. */
static void to_tridiagonal(double *m, double *d, double *e, size_t n) {
    for (size_t j = 0; j < n; j++) {
        d[j] = V(n - 1, j);
    }
    for (size_t i = n - 1; i > 0; i--) {
        double scale = 0, h = 0;
        for (size_t k = 0; k < i; k++) {
            scale += fabs(d[k]);
        }
        if (scale > 0) {
            h = reflect(m, d, e, n, i, scale);
        } else {
            e[i] = d[i - 1];
            for (size_t j = 0; j < i; j++) {
                d[j] = V(i - 1, j);
                V(i, j) = V(j, i) = 0;
            }
        }
        d[i] = h;
    }
    for (size_t i = 0; i + 1 < n; i++) {
        double h = d[i + 1], *next = &V(0, i + 1);
        V(n - 1, i) = V(i, i);
        V(i, i) = 1;
        for (size_t k = 0; k <= i && h != 0; k++) {
            d[k] = next[k] / h;
        }
        for (size_t j = 0; j <= i && h != 0; j++) {
            double *row = &V(0, j), g = sum_of_products(next, row, 0, i + 1);
            for (size_t k = 0; k <= i; k++) {
                row[k] -= g * d[k];
            }
        }
        for (size_t k = 0; k <= i; k++) {
            next[k] = 0;
        }
    }
    for (size_t j = 0; j < n; j++) {
        d[j] = V(n - 1, j);
        V(n - 1, j) = 0;
    }
    V(n - 1, n - 1) = 1;
    e[0] = 0;
}

/* One implicit QL step between l and end. Returns the shift of all values from l on. */
static double ql_step(double *m, double *d, double *e, size_t n, size_t l, size_t end) {
    double g = d[l], p = (d[l + 1] - g) / (2 * e[l]), r = sqrt(p * p + 1);
    r = p < 0 ? -r : r;
    d[l] = e[l] / (p + r);
    d[l + 1] = e[l] * (p + r);
    double first = d[l + 1], shift = g - d[l], el1 = e[l + 1];
    for (size_t i = l + 2; i < n; i++) {
        d[i] -= shift;
    }
    double c = 1, c2 = 1, c3 = 1, s = 0, s2 = 0;
    p = d[end];
    for (size_t i = end; i-- > l;) {
        c3 = c2;
        c2 = c;
        s2 = s;
        g = c * e[i];
        double h = c * p;
        r = sqrt(p * p + e[i] * e[i]);
        e[i + 1] = s * r;
        s = r > 0 ? e[i] / r : 0;
        c = r > 0 ? p / r : 1;
        p = c * d[i] - s * g;
        d[i + 1] = h + s * (c * g + s * d[i]);
        double *a = &V(0, i), *b = &V(0, i + 1);
        for (size_t k = 0; k < n; k++) {
            h = b[k];
            b[k] = s * a[k] + c * h;
            a[k] = c * a[k] - s * h;
        }
    }
    p = -s * s2 * c3 * el1 * e[l] / first;
    e[l] = s * p;
    d[l] = c * p;
    return shift;
}

void eigen_symmetric(double *m, double *values, double *scratch, size_t n) {
    double *d = values, *e = scratch, shifted = 0, largest = 0;
    if (n == 0) {
        return;
    }
    to_tridiagonal(m, d, e, n);
    for (size_t i = 1; i < n; i++) {
        e[i - 1] = e[i];
    }
    e[n - 1] = 0;
    for (size_t l = 0; l < n; l++) {
        double magnitude = fabs(d[l]) + fabs(e[l]);
        largest = magnitude > largest ? magnitude : largest;
        for (int round = 0; round < ROUNDS_MAX; round++) {
            size_t end = l;
            while (end + 1 < n && fabs(e[end]) > PRECISE * largest) {
                end++;
            }
            if (end == l || !(fabs(e[l]) > PRECISE * largest)) {
                break;
            }
            shifted += ql_step(m, d, e, n, l, end);
        }
        d[l] += shifted;
        e[l] = 0;
    }
}
