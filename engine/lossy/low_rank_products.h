/*
 * Products of a few vectors with a matrix that is never in memory: each product computes the submatrices again. A
 * search then takes the memory of the factors, not of two copies of the tile. The order of sums depends on the shapes
 * only, and is that of one product of the whole matrix. Internal to engine/lossy/low_rank.c.
 */
#ifndef ENGINE_LOW_RANK_PRODUCTS_H
#define ENGINE_LOW_RANK_PRODUCTS_H

#include "base/bytes.h"
#include "base/threads.h"
#include "kernels/kernels.h"

/*
 * Largest side of a submatrix. It equals the depth of one partial sum of a product (kernels/products_loops.h),
 * which keeps the order of sums.
 */
#define SUBMATRIX_SIDE 256u

struct vectors;
/* How each vector is rounded to whole numbers over its scale: see low_rank.c. */
typedef struct vectors_rounding {
    double add, max;
    const double *scale;
    double *largest; /* output, per vector: the largest of these numbers */
} vectors_rounding;

/*
 * Multiplies vectors elsewhere than on the host, such as on a device. The vectors stay there (vectors.device_copy);
 * only small arrays travel. The products are those of the functions below. Errors: NOMEM, DEVICE.
 */
typedef struct vectors_backend {
    /*
     * Makes room for both sides, whose n and count are set to the largest values. Invalidates an earlier search's
     * vectors.
     */
    ckd_status (*begin)(const void *context, struct vectors *left, struct vectors *right, ckd_error *err);
    /* Copy all vectors from host memory (put) and to it (take). */
    ckd_status (*put)(const void *context, const struct vectors *v, ckd_error *err);
    ckd_status (*take)(const void *context, const struct vectors *v, ckd_error *err);
    ckd_status (*times)(const void *context, struct vectors *to, const struct vectors *from, bool transposed,
                        ckd_error *err);
    ckd_status (*pairs)(const void *context, float *mix, const struct vectors *v, ckd_error *err);
    ckd_status (*mix)(const void *context, struct vectors *v, const float *mix, size_t count, ckd_error *err);
    ckd_status (*round)(const void *context, const struct vectors *v, const vectors_rounding *how,
                        ckd_error *err);
} vectors_backend;

typedef struct low_rank_matrix {
    size_t rows, columns;
    /*
     * Writes `rows` rows from `row` on, `columns` columns from `column` on, to `to`, in row-major order.
     * Several threads call it.
     */
    void (*submatrix)(const void *context, float *to, size_t row, size_t rows, size_t column, size_t columns);
    const void *context;
    const vectors_backend *backend; /* replaces `submatrix`; NULL: the host multiplies */
} low_rank_matrix;

/*
 * `count` vectors of n elements, in parts: SUBMATRIX_SIDE elements of each vector, vector after vector, then the
 * next SUBMATRIX_SIDE of each, ...
 */
typedef struct vectors {
    float *at;
    size_t n, count;
    float *device_copy; /* for vectors_backend: whole vectors, one after the other */
} vectors;
/* Allocates in `memory`, which stays the caller's (also in the functions below). Errors: NOMEM. */
ckd_status vectors_begin(vectors *v, size_t n, size_t count, bytes *memory, ckd_error *err);
static inline size_t vectors_parts(const vectors *v) {
    return (v->n + SUBMATRIX_SIDE - 1) / SUBMATRIX_SIDE;
}
static inline size_t vectors_width(const vectors *v, size_t which) {
    size_t left = v->n - which * SUBMATRIX_SIDE;
    return left < SUBMATRIX_SIDE ? left : SUBMATRIX_SIDE;
}
static inline float *vectors_part(const vectors *v, size_t which) {
    return v->at + which * SUBMATRIX_SIDE * v->count;
}
static inline float *vectors_element(const vectors *v, size_t vector, size_t i) {
    size_t which = i / SUBMATRIX_SIDE;
    return vectors_part(v, which) + vector * vectors_width(v, which) + i % SUBMATRIX_SIDE;
}

/* Context of products: the matrix, the threads, scratch of each worker. */
typedef struct product_context {
    const low_rank_matrix *x;
    thread_pool *pool; /* or NULL */
    const kernels *k;
    size_t count; /* largest number of vectors */
    /* Per worker: two submatrices, and sums of `count` vectors over a submatrix's side or of all pairs of vectors. */
    float *scratch;
    size_t scratch_of_one;
} product_context;
/* Sets c->scratch in `memory`, which stays the caller's. All else in c is set before. Errors: NOMEM. */
ckd_status product_context_begin(product_context *c, bytes *memory, ckd_error *err);

void transpose(float *to, const float *from, size_t rows, size_t columns);
/*
 * to = from (vectors of rows) times x; transposed: from (vectors of columns) times x transposed. The caller has
 * set to->n and its memory; to->count becomes from->count.
 */
ckd_status vectors_times_matrix(vectors *to, const vectors *from, bool transposed, const product_context *c,
                                ckd_error *err);
/* mix (count x count) = products of all pairs of vectors. */
ckd_status vectors_pairs(float *mix, const vectors *v, const product_context *c, ckd_error *err);
/* Replaces the vectors by mix (count x v->count) times the vectors, so that `count` are left. count <= v->count. */
ckd_status vectors_mix(vectors *v, const float *mix, size_t count, const product_context *c, ckd_error *err);

#endif
