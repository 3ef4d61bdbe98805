/*
 * Products of a few vectors with a matrix that is nowhere in memory: its pieces are made when they are needed, again for each product. So
 * factors of a tile take the memory of the factors, and not two copies of the tile. Sums are made in an order that depends on the
 * shapes only, that of one product of all. Internal to engine/lossy/low_rank.c.
 */
#ifndef ENGINE_LOW_RANK_PRODUCTS_H
#define ENGINE_LOW_RANK_PRODUCTS_H

#include "base/bytes.h"
#include "base/threads.h"
#include "kernels/kernels.h"

/* Rows and columns of a piece at most: as many as a product's sums are made of at once (kernels/products_loops.h), so that their order stays. */
#define PIECE_SIDE 256u

struct vectors;
/* How values of each vector become whole numbers over its scale: see low_rank.c. */
typedef struct vectors_rounding {
    double add, max;
    const double *scale;
    double *largest; /* of each vector: set to the largest of those numbers */
} vectors_rounding;

/*
 * Where vectors are multiplied if not by the host: they stay there (vectors.there), and what is small comes and goes. Products as the functions below. Errors:
 * NOMEM, DEVICE.
 */
typedef struct vectors_elsewhere {
    /* Room for both, which have their n and count: these are the most. What was begun before is gone. */
    ckd_status (*begin)(const void *context, struct vectors *left, struct vectors *right, ckd_error *err);
    /* All vectors, from the host's memory and back. */
    ckd_status (*put)(const void *context, const struct vectors *v, ckd_error *err);
    ckd_status (*take)(const void *context, const struct vectors *v, ckd_error *err);
    ckd_status (*times)(const void *context, struct vectors *to, const struct vectors *from, bool turned,
                        ckd_error *err);
    ckd_status (*pairs)(const void *context, float *mix, const struct vectors *v, ckd_error *err);
    ckd_status (*mix)(const void *context, struct vectors *v, const float *mix, size_t count, ckd_error *err);
    ckd_status (*round)(const void *context, const struct vectors *v, const vectors_rounding *how,
                        ckd_error *err);
} vectors_elsewhere;

typedef struct low_rank_matrix {
    size_t rows, columns;
    /* Rows row ... row + rows - 1 and so many columns from `column` on, in row-major order, into `to`. Called by several threads. */
    void (*piece)(const void *context, float *to, size_t row, size_t rows, size_t column, size_t columns);
    const void *context;
    const vectors_elsewhere *elsewhere; /* instead of pieces; NULL: here */
} low_rank_matrix;

/* `count` vectors of n elements: PIECE_SIDE elements of each of them, one vector after the other, then as many more of each ... */
typedef struct vectors {
    float *at;
    size_t n, count;
    float *there; /* of vectors_elsewhere: the same, n elements of one vector after the other */
} vectors;
/* In `room`, which stays the caller's, as below. Errors: NOMEM. */
ckd_status vectors_begin(vectors *v, size_t n, size_t count, bytes *room, ckd_error *err);
static inline size_t vectors_parts(const vectors *v) {
    return (v->n + PIECE_SIDE - 1) / PIECE_SIDE;
}
static inline size_t vectors_width(const vectors *v, size_t which) {
    size_t left = v->n - which * PIECE_SIDE;
    return left < PIECE_SIDE ? left : PIECE_SIDE;
}
static inline float *vectors_part(const vectors *v, size_t which) {
    return v->at + which * PIECE_SIDE * v->count;
}
/* Where element i of a vector stands. */
static inline float *vectors_element(const vectors *v, size_t vector, size_t i) {
    size_t which = i / PIECE_SIDE;
    return vectors_part(v, which) + vector * vectors_width(v, which) + i % PIECE_SIDE;
}

/* What products need: the matrix, who computes, scratch of each worker. */
typedef struct product_context {
    const low_rank_matrix *x;
    thread_pool *pool; /* or NULL */
    const kernels *k;
    size_t count; /* vectors at most */
    float *
        scratch; /* of each worker: two pieces, and sums of `count` vectors over a piece's side, or of all pairs of vectors */
    size_t scratch_of_one;
} product_context;
/* Errors: NOMEM. */
ckd_status product_context_begin(product_context *c, const low_rank_matrix *x, size_t count,
                                 thread_pool *pool, const kernels *k, bytes *room, ckd_error *err);

void transpose(float *to, const float *from, size_t rows, size_t columns);
/* to = from (vectors of rows) times x, or (turned; vectors of columns) times x transposed. to->n and memory are set, its count becomes from's. */
ckd_status vectors_times_matrix(vectors *to, const vectors *from, bool turned, const product_context *c,
                                ckd_error *err);
/* mix (count x count): products of all pairs of vectors. */
ckd_status vectors_pairs(float *mix, const vectors *v, const product_context *c, ckd_error *err);
/* The vectors become mix (count x v->count) times themselves, so that there are `count`, as many or fewer, of them. */
ckd_status vectors_mix(vectors *v, const float *mix, size_t count, const product_context *c, ckd_error *err);

#endif
