/* Opens the BLAS that CKD_BLAS names, and calls its sgemm while it uses one thread. */
#include "kernels/blas.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

#define WIDE_MIN 256 /* columns or depth of a whole submatrix (engine/lossy/low_rank_products.h) */

/* Constants of CBLAS. */
enum { ROW_MAJOR = 101, AS_IT_IS = 111 };
typedef void (*sgemm_function)(int order, int turn_a, int turn_b, int m, int n, int k, float alpha,
                               const float *a, int lda, const float *b, int ldb, float beta, float *c,
                               int ldc);
typedef int (*threads_function)(void);

/* Set once by the first call. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static sgemm_function sgemm;
static threads_function threads;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

/* The library is never closed, as its code may still be running. */
static void find_blas(void) {
    const char *path = secure_getenv("CKD_BLAS");
    void *library = path && path[0] ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        return;
    }
    /* The POSIX way to convert dlsym's object pointer to a function pointer. */
    *(void **)&threads = dlsym(library, "openblas_get_num_threads");
    *(void **)&sgemm = threads ? dlsym(library, "cblas_sgemm") : NULL;
}

bool blas_products(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                   size_t columns) {
    if (rank < WIDE_MIN && columns < WIDE_MIN) {
        return false;
    }
    (void)pthread_once(&once, find_blas);
    if (!sgemm || threads() != 1 || rows > INT_MAX || rank > INT_MAX || columns > INT_MAX ||
        rows * rank * columns == 0) {
        return false;
    }
    pthread_mutex_lock(&one_at_a_time);
    sgemm(ROW_MAJOR, AS_IT_IS, AS_IT_IS, (int)rows, (int)columns, (int)rank, 1, left, (int)rank, right,
          (int)columns, 0, sums, (int)columns);
    pthread_mutex_unlock(&one_at_a_time);
    return true;
}
