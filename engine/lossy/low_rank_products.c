/*
 * Products for the search for factors, on all threads. Each part sums in a fixed order, so the bytes of a save do not
 * depend on the number of threads.
 */
#include "engine/lossy/low_rank_products.h"

#include <string.h>

#define SUBMATRIX_ELEMENTS (SUBMATRIX_SIDE * SUBMATRIX_SIDE)

#define FACTORS "factors of a matrix"

ckd_status vectors_begin(vectors *v, size_t n, size_t count, bytes *memory, ckd_error *err) {
    *v = (vectors){bytes_scratch(memory, count * n * sizeof(float), FACTORS, err), n, count, NULL};
    return v->at ? CKD_OK : CKD_E_NOMEM;
}

ckd_status product_context_begin(product_context *c, bytes *memory, ckd_error *err) {
    size_t matrix = 2 * (size_t)SUBMATRIX_ELEMENTS + c->count * SUBMATRIX_SIDE,
           pairs = c->count * (SUBMATRIX_SIDE + c->count), threads = c->pool ? pool_threads(c->pool) : 1;
    c->scratch_of_one = matrix > pairs ? matrix : pairs;
    c->scratch = bytes_scratch(memory, threads * c->scratch_of_one * sizeof(float), FACTORS, err);
    return c->scratch ? CKD_OK : CKD_E_NOMEM;
}

/* Works in squares that stay in the nearest cache. */
#define SQUARE 16
void transpose(float *to, const float *from, size_t rows, size_t columns) {
    for (size_t i0 = 0; i0 < rows; i0 += SQUARE) {
        size_t i1 = i0 + SQUARE < rows ? i0 + SQUARE : rows;
        for (size_t j0 = 0; j0 < columns; j0 += SQUARE) {
            size_t j1 = j0 + SQUARE < columns ? j0 + SQUARE : columns;
            for (size_t j = j0; j < j1; j++) {
                for (size_t i = i0; i < i1; i++) {
                    to[j * rows + i] = from[i * columns + j];
                }
            }
        }
    }
}

static void add(float *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        to[i] += from[i];
    }
}

static ckd_status run(const product_context *c, size_t count, pool_fn fn, void *context, ckd_error *err) {
    if (c->pool) {
        return pool_run(c->pool, count, fn, context, err);
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = fn(context, i, 0, err);
    }
    return status;
}

/* ---- products with a matrix ---- */

typedef struct times_matrix {
    const product_context *c;
    const vectors *to, *from;
    bool transposed;
} times_matrix;

/* Computes one part of all result vectors: sums over the parts of `from`, in their order. */
static ckd_status part_times_matrix(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)err;
    const times_matrix *t = context;
    const low_rank_matrix *x = t->c->x;
    const vectors *from = t->from;
    float *submatrix = t->c->scratch + worker * t->c->scratch_of_one, *right = submatrix + SUBMATRIX_ELEMENTS,
          *sums = right + SUBMATRIX_ELEMENTS, *to = vectors_part(t->to, index);
    size_t width = vectors_width(t->to, index);
    for (size_t i = 0; i < vectors_parts(from); i++) {
        size_t depth = vectors_width(from, i);
        if (t->transposed) {
            x->submatrix(x->context, submatrix, index * SUBMATRIX_SIDE, width, i * SUBMATRIX_SIDE, depth);
            transpose(right, submatrix, width, depth);
        } else {
            x->submatrix(x->context, right, i * SUBMATRIX_SIDE, depth, index * SUBMATRIX_SIDE, width);
        }
        t->c->k->gemm(i ? sums : to, vectors_part(from, i), right, from->count, depth, width);
        if (i) {
            add(to, sums, from->count * width);
        }
    }
    return CKD_OK;
}

ckd_status vectors_times_matrix(vectors *to, const vectors *from, bool transposed, const product_context *c,
                                ckd_error *err) {
    to->count = from->count;
    if (c->x->backend) {
        return c->x->backend->times(c->x->context, to, from, transposed, err);
    }
    times_matrix t = {c, to, from, transposed};
    return run(c, vectors_parts(to), part_times_matrix, &t, err);
}

/* ---- products of vectors with each other ---- */

ckd_status vectors_pairs(float *mix, const vectors *v, const product_context *c, ckd_error *err) {
    if (c->x->backend) {
        return c->x->backend->pairs(c->x->context, mix, v, err);
    }
    float *transposed = c->scratch,
          *sums = transposed + v->count * SUBMATRIX_SIDE; /* the submatrices are not needed now */
    memset(mix, 0, v->count * v->count * sizeof(float));
    for (size_t i = 0; i < vectors_parts(v); i++) {
        size_t width = vectors_width(v, i);
        transpose(transposed, vectors_part(v, i), v->count, width);
        c->k->gemm(i ? sums : mix, vectors_part(v, i), transposed, v->count, width, v->count);
        if (i) {
            add(mix, sums, v->count * v->count);
        }
    }
    return CKD_OK;
}

typedef struct mixing {
    const product_context *c;
    const vectors *from;
    const float *mix;
    size_t count;
} mixing;

static ckd_status mix_part(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)err;
    const mixing *m = context;
    float *sums = m->c->scratch + worker * m->c->scratch_of_one;
    size_t width = vectors_width(m->from, index);
    m->c->k->gemm(sums, m->mix, vectors_part(m->from, index), m->count, m->from->count, width);
    memcpy(m->from->at + index * SUBMATRIX_SIDE * m->count, sums, m->count * width * sizeof(float));
    return CKD_OK;
}

ckd_status vectors_mix(vectors *v, const float *mix, size_t count, const product_context *c, ckd_error *err) {
    mixing m = {c, v, mix, count};
    ckd_status status = CKD_OK;
    if (c->x->backend) {
        return c->x->backend->mix(c->x->context, v, mix, count, err);
    }
    if (count == v->count) {
        status = run(c, vectors_parts(v), mix_part, &m, err);
    } else { /* in order: fewer vectors move down, over parts that are done */
        for (size_t i = 0; i < vectors_parts(v); i++) {
            mix_part(&m, i, 0, err);
        }
    }
    v->count = count;
    return status;
}
