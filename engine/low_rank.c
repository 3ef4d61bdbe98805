#include "engine/low_rank.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/eigen.h"

#define ROUND_UP         0.55 /* fraction from which a factor's integers are rounded up */
#define MORE_TURNS       1    /* of refits, beyond the first */
#define FIRST_GUESS      24u  /* directions searched for at first; more as long as more pay */
#define MORE             3u   /* times as many */
#define OVERSAMPLED      8u   /* directions beyond those that pay */
#define BITS_A_COMPONENT 8.0
#define DEPENDENT        1e-6      /* of its energy: what is left of a vector that says nothing new */
#define LARGEST_SUM      8388608.0 /* half of what sums of products may reach */

void low_rank_free(low_rank *f) {
    free(f->left);
    free(f->right);
    free(f->shift);
    *f = (low_rank){0};
}

/* In squares that stay in the nearest cache. */
#define SQUARE 16
static void transpose(float *to, const float *from, size_t rows, size_t columns) {
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

/* The same every time: what a checkpoint contains depends on the state alone. */
static void fill_random(float *to, size_t n) {
    uint64_t seed = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i < n; i++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        to[i] = (float)((double)(seed >> 40) / 16777216 - 0.5);
    }
}

/* ---- decomposition: `count` vectors of rows and of columns, one after the other ---- */

typedef struct search {
    const float *x;
    size_t rows, columns, count;
    stop_check *stop;
    float *left, *right;   /* count vectors of rows, of columns; they have space for the longer */
    float *spare, *across; /* as much */
    float *turned;         /* x transposed */
    float *mix;            /* count x count, as are these: */
    double *gram, *inverse;
    double *energy;       /* squared singular values */
    double (*largest)[2]; /* integers of either side, of each component */
    size_t *order;        /* of components, strongest first */
} search;

static void search_free(search *s) {
    void *const all[] = {s->left, s->right,   s->spare,  s->across,  s->turned, s->mix,
                         s->gram, s->inverse, s->energy, s->largest, s->order};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        free(all[i]);
    }
}

static ckd_status search_begin(search *s, size_t count, ckd_error *err) {
    size_t longer = s->rows > s->columns ? s->rows : s->columns;
    s->count = count;
    s->left = malloc(count * longer * sizeof(float));
    s->right = malloc(count * longer * sizeof(float));
    s->spare = malloc(count * longer * sizeof(float));
    s->across = malloc(count * longer * sizeof(float));
    s->turned = malloc(s->rows * s->columns * sizeof(float));
    s->mix = malloc(count * count * sizeof(float));
    s->gram = malloc(count * count * sizeof(double));
    s->inverse = malloc(count * count * sizeof(double));
    s->energy = malloc(count * sizeof(double));
    s->largest = malloc(count * sizeof(*s->largest));
    s->order = malloc(count * sizeof(size_t));
    bool all = s->left && s->right && s->spare && s->across && s->turned && s->mix && s->gram && s->inverse &&
               s->energy && s->largest && s->order;
    return all ? CKD_OK : err_nomem(err, s->rows * s->columns * sizeof(float), "factors of a matrix");
}

/* gram: of all pairs of vectors of n elements. scratch: count x n. */
static void pair_up(search *s, const float *vectors, float *scratch, size_t n, const kernels *k) {
    transpose(scratch, vectors, s->count, n);
    k->gemm(s->mix, vectors, scratch, s->count, n, s->count);
    for (size_t i = 0; i < s->count * s->count; i++) {
        s->gram[i] = (double)s->mix[i];
    }
}

/* gram = L L'; mix becomes the inverse of L, with zeros for vectors that depend on those before. */
static void invert_root(search *s) {
    size_t n = s->count;
    double *g = s->gram, *inverse = s->inverse;
    memset(inverse, 0, n * n * sizeof(double));
    for (size_t i = 0; i < n; i++) {
        double own = g[i * n + i], left = own;
        for (size_t j = 0; j < i; j++) {
            double v = g[i * n + j];
            for (size_t m = 0; m < j; m++) {
                v -= g[i * n + m] * g[j * n + m];
            }
            g[i * n + j] = v * inverse[j * n + j];
            left -= g[i * n + j] * g[i * n + j];
        }
        if (!(left > DEPENDENT * own) || !(own > 0)) {
            memset(g + i * n, 0, (i + 1) * sizeof(double));
            continue;
        }
        inverse[i * n + i] = 1 / sqrt(left);
        for (size_t m = 0; m < i; m++) {
            double by = g[i * n + m] * inverse[i * n + i];
            for (size_t j = 0; j <= m && by != 0; j++) {
                inverse[i * n + j] -= by * inverse[m * n + j];
            }
        }
    }
    for (size_t i = 0; i < n * n; i++) {
        s->mix[i] = (float)inverse[i];
    }
}

/* By the Gram matrix's root (CholeskyQR), as many times as rounding asks for. */
static void orthonormalise(search *s, float *vectors, size_t n, unsigned times, const kernels *k) {
    for (unsigned i = 0; i < times; i++) {
        pair_up(s, vectors, s->across, n, k);
        invert_root(s);
        k->gemm(s->spare, s->mix, vectors, s->count, s->count, n);
        memcpy(vectors, s->spare, s->count * n * sizeof(float));
    }
}

/* right becomes an orthonormal basis of the strongest directions of rows, left = right times x. */
static ckd_status iterate(search *s, unsigned rounds, const kernels *k, ckd_error *err) {
    transpose(s->turned, s->x, s->rows, s->columns);
    fill_random(s->right, s->count * s->columns);
    for (unsigned round = 0;; round++) {
        ckd_status status = stop_look(s->stop, err);
        if (status != CKD_OK) {
            return status;
        }
        k->gemm(s->left, s->right, s->turned, s->count, s->columns, s->rows);
        if (round > rounds) {
            return stop_look(s->stop, err);
        }
        orthonormalise(s, s->left, s->rows, 1, k);
        k->gemm(s->right, s->left, s->x, s->count, s->rows, s->columns);
        orthonormalise(s, s->right, s->columns, round == rounds ? 2 : 1, k);
    }
}

static int by_energy(const void *a, const void *b) {
    const double *x = *(const double *const *)a, *y = *(const double *const *)b;
    return (*x < *y) - (*x > *y);
}

/* Finds how to mix the vectors so that they are singular ones: left then has their length, right is orthonormal. */
static ckd_status decompose(search *s, const kernels *k, ckd_error *err) {
    size_t n = s->count;
    const double **sorted = malloc(n * sizeof(*sorted));
    if (!sorted) {
        return err_nomem(err, n * sizeof(*sorted), "factors of a matrix");
    }
    pair_up(s, s->left, s->across, s->rows, k);
    eigen_symmetric(s->gram, s->energy, s->inverse, n);
    for (size_t i = 0; i < n; i++) {
        sorted[i] = &s->energy[i];
    }
    qsort(sorted, n, sizeof(*sorted), by_energy);
    for (size_t i = 0; i < n; i++) {
        s->order[i] = (size_t)(sorted[i] - s->energy);
    }
    free(sorted);
    return CKD_OK;
}

/* The first `rank` components of one side: n elements each, one after the other. */
static void components(float *to, search *s, const float *side, size_t n, uint32_t rank, const kernels *k) {
    for (uint32_t r = 0; r < rank; r++) {
        for (size_t i = 0; i < s->count; i++) {
            s->mix[r * s->count + i] = (float)s->gram[s->order[r] * s->count + i];
        }
    }
    k->gemm(to, s->mix, side, rank, s->count, n);
}

/* ---- what pays ---- */

static double code_length(double deviation, size_t n) {
    return 0.5 * (double)n * log2(1 + 12 * deviation * deviation);
}

/* Components whose energy, less the noise of their integers, is worth the bits. */
static uint32_t components_that_pay(const search *s, double lambda, double *bits) {
    uint32_t rank = 0;
    double m = (double)s->rows, n = (double)s->columns;
    *bits = 8;
    for (; rank < s->count; rank++) {
        double energy = s->energy[s->order[rank]];
        double cost = BITS_A_COMPONENT + code_length(sqrt(energy / m), s->rows) +
                      code_length(sqrt(energy / n), s->columns);
        if (!(energy - (m + n) / 12 > lambda * cost)) {
            break;
        }
        *bits += cost;
    }
    return rank;
}

static int32_t round_up_late(double v) {
    double size = fabs(v) < 100 * LARGEST_SUM ? fabs(v) : 100 * LARGEST_SUM; /* then they are not used */
    int32_t magnitude = (int32_t)(size + 1 - ROUND_UP);
    return v < 0 ? -magnitude : magnitude;
}

/* Component k of one side becomes integers of 1 / scale, and `from` what they are. Returns the largest magnitude. */
static double round_side(int32_t *to, float *from, size_t n, uint32_t rank, uint32_t k, double scale) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t v = round_up_late(from[i] * scale);
        to[i * rank + k] = v;
        from[i] = (float)(v / scale);
        largest = fabs((double)v) > largest ? fabs((double)v) : largest;
    }
    return largest;
}

/* A unit of the right side is a step's share of the component, to the next power of two. */
static int32_t right_exponent(const search *s, uint32_t k) {
    return (int32_t)lrint(-log2(sqrt(s->energy[s->order[k]])));
}

static void round_left(low_rank *out, search *s, uint32_t rank) {
    for (uint32_t k = 0; k < rank; k++) {
        s->largest[k][0] = round_side(out->left, s->spare + k * s->rows, s->rows, rank, k, 1);
    }
}
static void round_right(low_rank *out, search *s, uint32_t rank) {
    for (uint32_t k = 0; k < rank; k++) {
        float *from = s->across + k * s->columns;
        s->largest[k][1] = round_side(out->right, from, s->columns, rank, k, ldexp(1, -right_exponent(s, k)));
    }
}

/*
 * `to`, vectors of n elements, becomes what fits x (m x n) best, together with `kept`, as many vectors of m elements: least squares.
 * Overwrites s->left and s->right.
 */
static void refit(search *s, float *to, size_t n, const float *kept, size_t m, const float *x, uint32_t rank,
                  const kernels *k) {
    size_t count = s->count;
    s->count = rank;
    pair_up(s, kept, s->left, m, k);
    invert_root(s);
    k->gemm(s->left, kept, x, rank, m, n);
    k->gemm(s->right, s->mix, s->left, rank, rank, n);
    transpose(s->left, s->mix, rank, rank);
    k->gemm(to, s->left, s->right, rank, rank, n);
    s->count = count;
}

/*
 * Each side is refitted to what rounding made of the other one. That makes good for a part of the rounding, and is a round of subspace
 * iteration as well.
 */
static ckd_status round_in_turn(low_rank *out, search *s, uint32_t rank, const kernels *k, ckd_error *err) {
    components(s->spare, s, s->left, s->rows, rank, k);
    round_left(out, s, rank);
    for (int turn = 0;; turn++) {
        ckd_status status = stop_look(s->stop, err);
        if (status != CKD_OK) {
            return status;
        }
        refit(s, s->across, s->columns, s->spare, s->rows, s->x, rank, k);
        round_right(out, s, rank);
        if (turn == MORE_TURNS) {
            return CKD_OK;
        }
        refit(s, s->spare, s->rows, s->across, s->columns, s->turned, rank, k);
        round_left(out, s, rank);
    }
}

static ckd_status make_factors(low_rank *out, search *s, uint32_t rank, const kernels *kernel,
                               ckd_error *err) {
    out->left = malloc(s->rows * rank * sizeof(int32_t));
    out->right = malloc(s->columns * rank * sizeof(int32_t));
    out->shift = malloc(rank * sizeof(int32_t));
    if (!out->left || !out->right || !out->shift) {
        low_rank_free(out);
        return err_nomem(err, (s->rows + s->columns) * rank * sizeof(int32_t), "factors of a matrix");
    }
    ckd_status status = round_in_turn(out, s, rank, kernel, err);
    if (status != CKD_OK) {
        low_rank_free(out);
        return status;
    }
    out->exponent = right_exponent(s, 0);
    double bound = 0;
    uint32_t used = 0;
    for (; used < rank; used++) {
        out->shift[used] = right_exponent(s, used) - out->exponent;
        bound += s->largest[used][0] * s->largest[used][1] * ldexp(1, out->shift[used]);
        if (out->shift[used] > 20 || bound > LARGEST_SUM) {
            break;
        }
    }
    out->rank = used == rank ? rank : 0; /* sums could be inexact: rather no factors at all */
    return CKD_OK;
}

ckd_status low_rank_of(low_rank *out, const float *x, size_t rows, size_t columns, double lambda,
                       uint32_t most, unsigned rounds, const kernels *k, stop_check *stop, ckd_error *err) {
    *out = (low_rank){0};
    size_t shorter = rows < columns ? rows : columns;
    most = most < shorter ? most : (uint32_t)shorter;
    size_t count = FIRST_GUESS + OVERSAMPLED;
    for (;;) {
        count = count < most ? count : most;
        search s = {.x = x, .rows = rows, .columns = columns, .stop = stop};
        ckd_status status = search_begin(&s, count, err);
        uint32_t rank = 0;
        if (status == CKD_OK) {
            status = iterate(&s, rounds, k, err);
        }
        if (status == CKD_OK) {
            status = decompose(&s, k, err);
        }
        if (status == CKD_OK) {
            rank = components_that_pay(&s, lambda, &out->bits);
        }
        /* Were there more that pay? */
        bool enough = status != CKD_OK || rank + OVERSAMPLED / 2 <= count || count == most;
        if (status == CKD_OK && enough && rank) {
            status = make_factors(out, &s, rank, k, err);
        }
        search_free(&s);
        if (enough) {
            return status;
        }
        count *= MORE;
    }
}
