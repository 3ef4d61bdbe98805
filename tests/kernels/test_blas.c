/*
 * kernels/blas: the library that the environment names is used for large matrices, if it has one thread. The
 * test builds such a library.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>

#include "kernels/cpu.h"

static const char source[] =
    "#include <stdlib.h>\n"
    "int openblas_get_num_threads(void) { return atoi(getenv(\"TEST_THREADS\")); }\n"
    "void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,\n"
    "                 const float *b, int ldb, float beta, float *c, int ldc) {\n"
    "    if (order != 101 || ta != 111 || tb != 111 || alpha != 1 || beta != 0) abort();\n"
    "    for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) {\n"
    "        double sum = 1000; /* which is wrong, so that one sees who was here */\n"
    "        for (int l = 0; l < k; l++) sum += (double)a[i * lda + l] * b[l * ldb + j];\n"
    "        c[i * ldc + j] = (float)sum;\n"
    "    }\n"
    "}\n";

static char folder[4096], library[4200];

static int make_library(void **state) {
    (void)state;
    const char *temporary = getenv("TMPDIR"), *cc = getenv("CC");
    char path[4200], command[20000];
    snprintf(folder, sizeof(folder), "%s", temporary ? temporary : "/tmp");
    snprintf(path, sizeof(path), "%s/test_blas_library.c", folder);
    snprintf(library, sizeof(library), "%s/test_blas_library.so", folder);
    FILE *f = fopen(path, "w");
    if (!f || fputs(source, f) < 0 || fclose(f) != 0) {
        return -1;
    }
    snprintf(command, sizeof(command), "%s -shared -fPIC -o '%s' '%s'", cc && cc[0] ? cc : "cc", library,
             path);
    setenv("CKD_BLAS", library, 1);
    int status = system(command);
    remove(path);
    return status;
}
static int remove_library(void **state) {
    (void)state;
    return remove(library);
}

enum { ROWS = 5, DEPTH = 530, COLUMNS = 70 };

static void check(const char *threads, size_t depth, float more) {
    static float left[ROWS * DEPTH], right[DEPTH * COLUMNS], sums[ROWS * COLUMNS], again[ROWS * COLUMNS];
    for (size_t i = 0; i < ROWS * depth; i++) {
        left[i] = (float)((i * 7 + i / 31) % 11) - 5;
    }
    for (size_t i = 0; i < depth * COLUMNS; i++) {
        right[i] = (float)((i * 5 + i / 37) % 13) - 6;
    }
    setenv("TEST_THREADS", threads, 1);
    const kernels *all[KERNELS_CPU_BEST];
    size_t tables = kernels_cpu_all(all);
    for (size_t t = 0; t < tables; t++) {
        all[t]->gemm(sums, left, right, ROWS, depth, COLUMNS);
        for (size_t i = 0; i < ROWS * COLUMNS; i++) {
            float expected = more;
            for (size_t k = 0; k < depth; k++) {
                expected += left[i / COLUMNS * depth + k] * right[k * COLUMNS + i % COLUMNS];
            }
            assert_true(sums[i] == expected); /* exact, as these are integers */
        }
        all[t]->products(again, left, right, ROWS, depth, COLUMNS);
        for (size_t i = 0; i < ROWS * COLUMNS; i++) {
            assert_true(again[i] == sums[i] - more); /* the decoder never uses the library */
        }
    }
}

static void test_large_products_use_the_library(void **state) {
    (void)state;
    check("1", DEPTH, 1000);
}
static void test_small_products_do_not(void **state) {
    (void)state;
    check("1", 100, 0);
}
static void test_a_library_with_threads_is_not_used(void **state) {
    (void)state;
    check("2", DEPTH, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_large_products_use_the_library),
                                       cmocka_unit_test(test_small_products_do_not),
                                       cmocka_unit_test(test_a_library_with_threads_is_not_used)};
    return cmocka_run_group_tests(tests, make_library, remove_library);
}
