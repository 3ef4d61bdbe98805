/*
 * Finds the low-rank factors of a matrix: the directions, how many of them pay, and their integers. low_rank_products.c
 * multiplies on the host, low_rank_device.c on a device.
 */
#include "engine/lossy/low_rank.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/lossy/eigen.h"

#define ROUND_UP         0.55 /* fraction from which a factor's integers round up */
#define MORE_PASSES      1    /* refits beyond the first */
#define FIRST_GUESS      24u  /* directions in the first search */
#define MORE             3u   /* growth factor of the search while more directions may pay */
#define OVERSAMPLED      8u   /* directions searched beyond those that pay */
#define BITS_A_COMPONENT 8.0
#define DEPENDENT        1e-6      /* share of a vector's energy; with a smaller remainder it is dependent */
#define LARGEST_SUM      8388608.0 /* half the limit for sums of products */

void low_rank_free(low_rank *f) {
    bytes_free(&f->memory);
    *f = (low_rank){0};
}

void low_rank_scratch_free(low_rank_scratch *r) {
    bytes_free(&r->left);
    bytes_free(&r->right);
    bytes_free(&r->small);
    bytes_free(&r->scratch);
}

/* The seed is fixed, so that a checkpoint's content depends on the state alone. */
static void fill_random(vectors *to) {
    uint64_t seed = 0x9e3779b97f4a7c15u;
    for (size_t v = 0; v < to->count; v++) {
        for (size_t i = 0; i < to->n; i++) {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            *vectors_element(to, v, i) = (float)((double)(seed >> 40) / 16777216 - 0.5);
        }
    }
}

/* ---- decomposition ---- */

typedef struct search {
    const low_rank_matrix *x;
    size_t count;
    cancel_check *stop;
    vectors left, right; /* vectors of x->rows and of x->columns elements */
    product_context products;
    float *mix; /* count x count, as are gram and inverse */
    double *gram, *inverse;
    double *energy;       /* squared singular values */
    double (*largest)[2]; /* largest integer on either side, per component */
    size_t *order;        /* components, strongest first */
    const double **sorted;
} search;

static ckd_status search_begin(search *s, size_t count, const low_rank_search *options, ckd_error *err) {
    low_rank_scratch *scratch = options->scratch;
    size_t square = count * count;
    size_t per_component = 3 * sizeof(double) + sizeof(*s->order) + sizeof(*s->sorted);
    s->count = count;
    s->gram =
        bytes_scratch(&scratch->small, square * (2 * sizeof(double) + sizeof(float)) + count * per_component,
                      "factors of a matrix", err);
    if (!s->gram) {
        return CKD_E_NOMEM;
    }
    s->inverse = s->gram + square;
    s->energy = s->inverse + square;
    s->largest = (double(*)[2])(void *)(s->energy + count);
    s->order = (size_t *)(void *)(s->largest + count);
    s->sorted = (const double **)(void *)(s->order + count);
    s->mix = (float *)(void *)(s->sorted + count);
    ckd_status status = vectors_begin(&s->left, s->x->rows, count, &scratch->left, err);
    THEN(status, vectors_begin(&s->right, s->x->columns, count, &scratch->right, err));
    if (status == CKD_OK && s->x->backend) {
        status = s->x->backend->begin(s->x->context, &s->left, &s->right, err);
    }
    s->products = (product_context){.x = s->x, .pool = options->pool, .k = options->kernels, .count = count};
    return status == CKD_OK ? product_context_begin(&s->products, &scratch->scratch, err) : status;
}

/* gram = products of all pairs of vectors. */
static ckd_status pair_up(search *s, const vectors *v, ckd_error *err) {
    ckd_status status = vectors_pairs(s->mix, v, &s->products, err);
    for (size_t i = 0; i < v->count * v->count && status == CKD_OK; i++) {
        s->gram[i] = (double)s->mix[i];
    }
    return status;
}

/* Cholesky: gram (n x n) = L L'. mix becomes the inverse of L, with zeros for vectors that depend on earlier ones. */
static void invert_root(search *s, size_t n) {
    double *g = s->gram, *inverse = s->inverse;
    memset(inverse, 0, n * n * sizeof(double));
    for (size_t i = 0; i < n; i++) {
        double diagonal = g[i * n + i], remainder = diagonal;
        for (size_t j = 0; j < i; j++) {
            double v = g[i * n + j];
            for (size_t m = 0; m < j; m++) {
                v -= g[i * n + m] * g[j * n + m];
            }
            g[i * n + j] = v * inverse[j * n + j];
            remainder -= g[i * n + j] * g[i * n + j];
        }
        if (!(remainder > DEPENDENT * diagonal) || !(diagonal > 0)) {
            memset(g + i * n, 0, (i + 1) * sizeof(double));
            continue;
        }
        inverse[i * n + i] = 1 / sqrt(remainder);
        for (size_t m = 0; m < i; m++) {
            double factor = g[i * n + m] * inverse[i * n + i];
            for (size_t j = 0; j <= m && factor != 0; j++) {
                inverse[i * n + j] -= factor * inverse[m * n + j];
            }
        }
    }
    for (size_t i = 0; i < n * n; i++) {
        s->mix[i] = (float)inverse[i];
    }
}

/* Orthonormalises by the Gram matrix's root (CholeskyQR), `times` times to remove rounding errors. */
static ckd_status orthonormalise(search *s, vectors *v, unsigned times, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (unsigned i = 0; i < times && status == CKD_OK; i++) {
        status = pair_up(s, v, err);
        if (status == CKD_OK) {
            invert_root(s, v->count);
            status = vectors_mix(v, s->mix, v->count, &s->products, err);
        }
    }
    return status;
}

/* right becomes an orthonormal basis of the strongest directions of rows, left = right times x transposed. */
static ckd_status iterate(search *s, unsigned rounds, ckd_error *err) {
    const vectors_backend *backend = s->x->backend;
    fill_random(&s->right);
    ckd_status status = backend ? backend->put(s->x->context, &s->right, err) : CKD_OK;
    for (unsigned round = 0;; round++) {
        THEN(status, cancel_poll(s->stop, err));
        THEN(status, vectors_times_matrix(&s->left, &s->right, true, &s->products, err));
        if (round > rounds || status != CKD_OK) {
            return status == CKD_OK ? cancel_poll(s->stop, err) : status;
        }
        status = orthonormalise(s, &s->left, 1, err);
        THEN(status, vectors_times_matrix(&s->right, &s->left, false, &s->products, err));
        THEN(status, orthonormalise(s, &s->right, round == rounds ? 2 : 1, err));
        if (status != CKD_OK) {
            return status;
        }
    }
}

static int by_energy(const void *a, const void *b) {
    const double *x = *(const double *const *)a, *y = *(const double *const *)b;
    return (*x < *y) - (*x > *y);
}

/*
 * Finds the mix that turns the vectors into singular vectors. Left then carries the singular values, and right is
 * orthonormal.
 */
static ckd_status decompose(search *s, ckd_error *err) {
    size_t n = s->count;
    const double **sorted = s->sorted;
    ckd_status status = pair_up(s, &s->left, err);
    if (status != CKD_OK) {
        return status;
    }
    eigen_symmetric(s->gram, s->energy, s->inverse, n);
    for (size_t i = 0; i < n; i++) {
        sorted[i] = &s->energy[i];
    }
    qsort(sorted, n, sizeof(*sorted), by_energy);
    for (size_t i = 0; i < n; i++) {
        s->order[i] = (size_t)(sorted[i] - s->energy);
    }
    return CKD_OK;
}

/* Reduces a side to its first `rank` components. */
static ckd_status components(search *s, vectors *side, uint32_t rank, ckd_error *err) {
    for (uint32_t r = 0; r < rank; r++) {
        for (size_t i = 0; i < s->count; i++) {
            s->mix[r * s->count + i] = (float)s->gram[s->order[r] * s->count + i];
        }
    }
    return vectors_mix(side, s->mix, rank, &s->products, err);
}

/* ---- which components pay ---- */

static double code_length(double deviation, size_t n) {
    return 0.5 * (double)n * log2(1 + 12 * deviation * deviation);
}

/* Counts the components whose energy, less the noise of their integers, is worth their bits. */
static uint32_t components_that_pay(const search *s, double lambda, double *bits) {
    uint32_t rank = 0;
    double m = (double)s->x->rows, n = (double)s->x->columns;
    *bits = 8;
    for (; rank < s->count; rank++) {
        double energy = s->energy[s->order[rank]];
        double cost = BITS_A_COMPONENT + code_length(sqrt(energy / m), s->x->rows) +
                      code_length(sqrt(energy / n), s->x->columns);
        if (!(energy - (m + n) / 12 > lambda * cost)) {
            break;
        }
        *bits += cost;
    }
    return rank;
}

#define ROUNDED_MAX (100 * LARGEST_SUM) /* factors with larger integers are not used */

static int32_t round_up_late(double v) {
    double size = fabs(v) < ROUNDED_MAX ? fabs(v) : ROUNDED_MAX;
    int32_t magnitude = (int32_t)(size + 1 - ROUND_UP);
    return v < 0 ? -magnitude : magnitude;
}

/* Rounds component k of one side to integers over `scale`. Returns the largest magnitude of these integers. */
static double round_component(vectors *side, size_t k, double scale) {
    double largest = 0;
    for (size_t p = 0; p < vectors_parts(side); p++) {
        size_t n = vectors_width(side, p);
        float *at = vectors_part(side, p) + k * n;
        for (size_t i = 0; i < n; i++) {
            int32_t v = round_up_late(at[i] * scale);
            at[i] = (float)(v / scale);
            largest = fabs((double)v) > largest ? fabs((double)v) : largest;
        }
    }
    return largest;
}

/* A unit of the right side is the reciprocal of the component's singular value, rounded to a power of two. */
static int32_t right_exponent(const search *s, size_t k) {
    return (int32_t)lrint(-log2(sqrt(s->energy[s->order[k]])));
}

/* Returns the reciprocal of a unit of component k. */
static double scale_of(const search *s, size_t k, int side) {
    return side ? ldexp(1, -right_exponent(s, k)) : 1;
}

static ckd_status round_on_backend(search *s, int which, ckd_error *err) {
    const vectors *side = which ? &s->right : &s->left;
    double *scale = s->inverse, *largest = scale + side->count; /* the inverse is not needed now */
    for (size_t k = 0; k < side->count; k++) {
        scale[k] = scale_of(s, k, which);
    }
    vectors_rounding rounding = {1 - ROUND_UP, ROUNDED_MAX, scale, largest};
    ckd_status status = s->x->backend->round(s->x->context, side, &rounding, err);
    for (size_t k = 0; k < side->count && status == CKD_OK; k++) {
        s->largest[k][which] = largest[k];
    }
    return status;
}

static ckd_status round_side(search *s, int which, ckd_error *err) {
    vectors *side = which ? &s->right : &s->left;
    if (s->x->backend) {
        return round_on_backend(s, which, err);
    }
    for (size_t k = 0; k < side->count; k++) {
        s->largest[k][which] = round_component(side, k, scale_of(s, k, which));
    }
    return CKD_OK;
}

/* Least squares: `to` becomes the best fit of x with `fixed` as the other side, or of x transposed. */
static ckd_status refit(search *s, vectors *to, const vectors *fixed, bool transposed, ckd_error *err) {
    size_t rank = fixed->count;
    float *transposed_mix = s->products.scratch;
    ckd_status status = vectors_times_matrix(to, fixed, transposed, &s->products, err);
    if (status != CKD_OK) {
        return status;
    }
    status = pair_up(s, fixed, err);
    if (status != CKD_OK) {
        return status;
    }
    invert_root(s, rank);
    status = vectors_mix(to, s->mix, rank, &s->products, err);
    transpose(transposed_mix, s->mix, rank, rank);
    memcpy(s->mix, transposed_mix, rank * rank * sizeof(float));
    return status == CKD_OK ? vectors_mix(to, s->mix, rank, &s->products, err) : status;
}

/*
 * Refits each side to the rounded other side. This makes up for a part of the rounding, and is also a round of subspace
 * iteration.
 */
static ckd_status round_in_turn(search *s, uint32_t rank, ckd_error *err) {
    ckd_status status = components(s, &s->left, rank, err);
    for (int pass = 0; status == CKD_OK; pass++) {
        status = round_side(s, 0, err);
        THEN(status, cancel_poll(s->stop, err));
        THEN(status, refit(s, &s->right, &s->left, false, err));
        THEN(status, round_side(s, 1, err));
        if (status != CKD_OK || pass == MORE_PASSES) {
            break;
        }
        status = refit(s, &s->left, &s->right, true, err);
    }
    return status;
}

/*
 * Writes the side's integers: n x rank. Each float is a whole number over the scale. If the number is too large for a
 * float, the factors are not used anyway.
 */
static void integers_of(int32_t *all, const search *s, int which) {
    const vectors *side = which ? &s->right : &s->left;
    size_t rank = side->count;
    for (size_t i = 0; i < vectors_parts(side); i++) {
        size_t n = vectors_width(side, i);
        const float *from = vectors_part(side, i);
        int32_t *to = all + i * SUBMATRIX_SIDE * rank;
        for (size_t k = 0; k < rank; k++) {
            double scale = scale_of(s, k, which);
            for (size_t j = 0; j < n; j++) {
                to[j * rank + k] = (int32_t)(from[k * n + j] * scale);
            }
        }
    }
}

/* Copies both sides to host memory, if they are elsewhere. */
static ckd_status take_sides(search *s, ckd_error *err) {
    const vectors_backend *backend = s->x->backend;
    ckd_status status = backend ? backend->take(s->x->context, &s->left, err) : CKD_OK;
    return backend && status == CKD_OK ? backend->take(s->x->context, &s->right, err) : status;
}

static ckd_status make_factors(low_rank *out, search *s, uint32_t rank, ckd_error *err) {
    size_t rows = s->x->rows, columns = s->x->columns;
    int32_t *left = bytes_scratch(&out->memory, (rows + columns + 1) * rank * sizeof(int32_t),
                                  "factors of a matrix", err);
    ckd_status status = left ? round_in_turn(s, rank, err) : CKD_E_NOMEM;
    THEN(status, take_sides(s, err));
    if (status != CKD_OK) {
        return status;
    }
    int32_t *right = left + rows * rank, *shift = right + columns * rank;
    integers_of(left, s, 0);
    integers_of(right, s, 1);
    out->left = left;
    out->right = right;
    out->shift = shift;
    out->exponent = right_exponent(s, 0);
    double bound = 0;
    uint32_t used = 0;
    for (; used < rank; used++) {
        shift[used] = right_exponent(s, used) - out->exponent;
        bound += s->largest[used][0] * s->largest[used][1] * ldexp(1, shift[used]);
        if (shift[used] > 20 || bound > LARGEST_SUM) {
            break;
        }
    }
    out->rank = used == rank ? rank : 0; /* sums could be inexact: use no factors */
    return CKD_OK;
}

ckd_status low_rank_of(low_rank *out, const low_rank_matrix *x, const low_rank_search *options,
                       ckd_error *err) {
    *out = (low_rank){.memory = out->memory};
    size_t shorter = x->rows < x->columns ? x->rows : x->columns;
    size_t max = options->max < shorter ? options->max : shorter;
    size_t count = FIRST_GUESS + OVERSAMPLED;
    for (;;) {
        count = count < max ? count : max;
        search s = {.x = x, .stop = options->stop};
        ckd_status status = search_begin(&s, count, options, err);
        uint32_t rank = 0;
        THEN(status, iterate(&s, options->rounds, err));
        THEN(status, decompose(&s, err));
        if (status == CKD_OK) {
            rank = components_that_pay(&s, options->lambda, &out->bits);
        }
        /* Could more components pay? */
        bool done = status != CKD_OK || rank + OVERSAMPLED / 2 <= count || count == max;
        if (status == CKD_OK && done && rank) {
            status = make_factors(out, &s, rank, err);
        }
        if (done) {
            return status;
        }
        count *= MORE;
    }
}
