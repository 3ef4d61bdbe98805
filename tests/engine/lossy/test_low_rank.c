/* engine/eigen and engine/low_rank: decompositions of known matrices. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/lossy/eigen.h"
#include "engine/lossy/low_rank.h"

static low_rank_scratch scratch;

static uint64_t seed = 1;
static double even(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (double)(seed >> 40) / (1 << 23) - 1;
}

enum { LARGEST = 70 };

/* kind 0: random; 1: of rank 2; 2: diagonal, with equal values; 3: zero. */
static void fill(double *m, size_t n, int kind) {
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j <= i; j++) {
            double of_two = (double)((i + 1) * (j + 1)) + sin((double)i) * sin((double)j);
            double v = kind == 0 ? even() : kind == 1 ? of_two : kind == 2 && i == j ? (double)(i / 3) : 0;
            m[i * n + j] = m[j * n + i] = v;
        }
    }
}

static void test_eigen(void **state) {
    (void)state;
    static double m[LARGEST * LARGEST], v[LARGEST * LARGEST];
    double values[LARGEST], spare[LARGEST];
    for (size_t n = 0; n <= LARGEST; n++) {
        for (int kind = 0; kind < 4; kind++) {
            fill(m, n, kind);
            double size = 1e-30;
            for (size_t i = 0; i < n * n; i++) {
                v[i] = m[i];
                size = fabs(m[i]) > size ? fabs(m[i]) : size;
            }
            eigen_symmetric(v, values, spare, n);
            for (size_t a = 0; a < n; a++) {
                for (size_t b = 0; b <= a; b++) {
                    double dot = 0;
                    for (size_t i = 0; i < n; i++) {
                        dot += v[a * n + i] * v[b * n + i];
                    }
                    assert_true(fabs(dot - (a == b)) <= 1e-9);
                }
                for (size_t i = 0; i < n; i++) {
                    double turned = 0;
                    for (size_t j = 0; j < n; j++) {
                        turned += m[i * n + j] * v[a * n + j];
                    }
                    assert_true(fabs(turned - values[a] * v[a * n + i]) <= 1e-7 * size * (double)n);
                }
            }
        }
    }
}

typedef struct array {
    const float *at;
    size_t columns;
} array;

static void submatrix_of_array(const void *context, float *to, size_t row, size_t rows, size_t column,
                               size_t columns) {
    const array *a = context;
    for (size_t i = 0; i < rows; i++) {
        memcpy(to + i * columns, a->at + (row + i) * a->columns + column, columns * sizeof(float));
    }
}

/* A matrix of `rank` directions and weak noise is decomposed into as many components, and only noise is left. */
static void test_factors(void **state) {
    (void)state;
    static const size_t sizes[][3] = {{64, 96, 3}, {200, 100, 40}, {33, 257, 0}, {300, 300, 110}};
    /*
     * The share of the energy left at most. Rounding each side once, without refitting it to the other, leaves 7.6e-4,
     * 3.4e-4, 1 and 1.6e-4.
     */
    static const double most[] = {7.3e-4, 2.7e-4, 1, 1.15e-4};
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        size_t rows = sizes[s][0], columns = sizes[s][1], rank = sizes[s][2];
        float *x = calloc(rows * columns, sizeof(float));
        float *left = malloc(rows * (rank + 1) * sizeof(float)),
              *right = malloc(columns * (rank + 1) * sizeof(float));
        assert_true(x && left && right);
        for (size_t i = 0; i < rows * rank; i++) {
            left[i] = (float)even();
        }
        for (size_t i = 0; i < columns * rank; i++) {
            right[i] = (float)even();
        }
        double energy = 0, error = 0;
        for (size_t i = 0; i < rows * columns; i++) {
            for (size_t k = 0; k < rank; k++) {
                x[i] += 6 * left[i / columns * rank + k] * right[i % columns * rank + k];
            }
            x[i] += 0.1f * (float)even();
            energy += (double)x[i] * (double)x[i];
        }
        array a = {x, columns};
        low_rank_matrix m = {rows, columns, submatrix_of_array, &a, NULL};
        low_rank f = {0};
        ckd_error err = {0};
        low_rank_search how = {.lambda = 0.15, .max = 256, .kernels = kernels_cpu(), .scratch = &scratch};
        assert_int_equal(low_rank_of(&f, &m, &how, &err), CKD_OK);
        assert_int_equal(f.rank, rank);
        for (size_t i = 0; i < rows * columns; i++) {
            double sum = 0;
            for (size_t k = 0; k < f.rank; k++) {
                sum += ldexp((double)f.left[i / columns * f.rank + k] * f.right[i % columns * f.rank + k],
                             f.exponent + f.shift[k]);
            }
            error += ((double)x[i] - sum) * ((double)x[i] - sum);
        }
        assert_true(error <= most[s] * energy);
        low_rank_free(&f);
        free(x);
        free(left);
        free(right);
    }
}

/* Cancels at the check after `left` more. */
static ckd_status count_down(void *context, ckd_error *err) {
    int *left = context;
    return (*left)-- > 0 ? CKD_OK : err_set(err, CKD_E_CANCELLED, "enough");
}

static void test_cancellation(void **state) {
    enum { SIDE = 64 };
    (void)state;
    float *x = malloc(SIDE * SIDE * sizeof(float));
    assert_non_null(x);
    for (int i = 0; i < SIDE * SIDE; i++) {
        x[i] = (float)(4 * even());
    }
    array a = {x, SIDE};
    low_rank_matrix m = {SIDE, SIDE, submatrix_of_array, &a, NULL};
    int checks = 0;
    for (ckd_status status = CKD_E_CANCELLED; status != CKD_OK; checks++) {
        low_rank f = {0};
        int left = checks;
        cancel_check stop = {.poll = count_down, .context = &left};
        low_rank_search how = {.lambda = 0.15,
                               .max = 256,
                               .rounds = 2,
                               .kernels = kernels_cpu(),
                               .scratch = &scratch,
                               .stop = &stop};
        status = low_rank_of(&f, &m, &how, NULL);
        assert_true(status == CKD_OK ? f.rank > 0 : status == CKD_E_CANCELLED && !f.left);
        low_rank_free(&f);
    }
    assert_true(checks >= 6); /* at least one check per round and per refit */
    free(x);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_eigen), cmocka_unit_test(test_factors),
                                       cmocka_unit_test(test_cancellation)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
