#include "engine/low_rank.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROUND_UP         0.55 /* fraction from which a factor's integers are rounded up */
#define OVERSAMPLED      8u   /* directions searched for beyond those expected */
#define FIRST_GUESS      8u   /* a matrix's rank is expected to be that part of its smaller side */
#define BITS_A_COMPONENT 8.0
#define JACOBI_SWEEPS    12
#define LARGEST_SUM      8388608.0 /* half of what sums of products may reach */

void low_rank_free(low_rank *f) {
    free(f->left);
    free(f->right);
    free(f->shift);
    *f = (low_rank){0};
}

/* ---- subspaces: `count` vectors, one after the other ---- */

static double dot(const float *a, const float *b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)a[i] * b[i];
    }
    return sum;
}

/* Gram-Schmidt, twice for what rounding leaves. Vectors that depend on others become zero. */
static void orthonormalise(float *vectors, size_t count, size_t n) {
    for (size_t i = 0; i < count; i++) {
        float *v = vectors + i * n;
        double before = sqrt(dot(v, v, n));
        for (int pass = 0; pass < 2; pass++) {
            for (size_t j = 0; j < i; j++) {
                const float *u = vectors + j * n;
                float along = (float)dot(u, v, n);
                for (size_t e = 0; e < n; e++) {
                    v[e] -= along * u[e];
                }
            }
        }
        double length = sqrt(dot(v, v, n));
        float scale = length > 1e-6 * before && length > 0 ? (float)(1 / length) : 0;
        for (size_t e = 0; e < n; e++) {
            v[e] *= scale;
        }
    }
}

static void transpose(float *to, const float *from, size_t rows, size_t columns) {
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < columns; j++) {
            to[j * rows + i] = from[i * columns + j];
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

/* ---- eigenvectors of a small symmetric matrix (cyclic Jacobi) ---- */

static void rotate(double *m, double *vectors, size_t n, size_t p, size_t q) {
    double apq = m[p * n + q], theta = (m[q * n + q] - m[p * n + p]) / (2 * apq);
    double t = (theta >= 0 ? 1 : -1) / (fabs(theta) + sqrt(theta * theta + 1));
    double c = 1 / sqrt(t * t + 1), s = t * c;
    for (size_t i = 0; i < n; i++) {
        double a = m[p * n + i], b = m[q * n + i];
        m[p * n + i] = c * a - s * b;
        m[q * n + i] = s * a + c * b;
    }
    for (size_t i = 0; i < n; i++) {
        double a = m[i * n + p], b = m[i * n + q];
        m[i * n + p] = c * a - s * b;
        m[i * n + q] = s * a + c * b;
    }
    for (size_t i = 0; i < n; i++) {
        double a = vectors[p * n + i], b = vectors[q * n + i];
        vectors[p * n + i] = c * a - s * b;
        vectors[q * n + i] = s * a + c * b;
    }
}

/* vectors[k] goes with m[k][k] afterwards. */
static void jacobi(double *m, double *vectors, size_t n) {
    double all = 0;
    memset(vectors, 0, n * n * sizeof(double));
    for (size_t i = 0; i < n; i++) {
        vectors[i * n + i] = 1;
        all += m[i * n + i];
    }
    for (int sweep = 0; sweep < JACOBI_SWEEPS; sweep++) {
        double off = 0;
        for (size_t p = 0; p < n; p++) {
            for (size_t q = p + 1; q < n; q++) {
                if (fabs(m[p * n + q]) > 1e-9 * all) {
                    off += fabs(m[p * n + q]);
                    rotate(m, vectors, n, p, q);
                }
            }
        }
        if (off <= 1e-9 * all) {
            return;
        }
    }
}

/* ---- decomposition ---- */

typedef struct search {
    const float *x;
    size_t rows, columns, count;
    float *left, *right;    /* count vectors of rows, of columns */
    float *spare;           /* count x max(rows, columns) */
    float *turned;          /* x transposed */
    double *gram, *vectors; /* count x count */
    double *energy;         /* squared singular values, descending after sorting */
    size_t *order;
} search;

static void search_free(search *s) {
    free(s->left);
    free(s->right);
    free(s->spare);
    free(s->turned);
    free(s->gram);
    free(s->vectors);
    free(s->energy);
    free(s->order);
}

static ckd_status search_begin(search *s, size_t count, ckd_error *err) {
    size_t longer = s->rows > s->columns ? s->rows : s->columns;
    s->count = count;
    s->left = malloc(count * s->rows * sizeof(float));
    s->right = malloc(count * s->columns * sizeof(float));
    s->spare = malloc(count * longer * sizeof(float));
    s->turned = malloc(s->rows * s->columns * sizeof(float));
    s->gram = malloc(count * count * sizeof(double));
    s->vectors = malloc(count * count * sizeof(double));
    s->energy = malloc(count * sizeof(double));
    s->order = malloc(count * sizeof(size_t));
    bool all = s->left && s->right && s->spare && s->turned && s->gram && s->vectors && s->energy && s->order;
    return all ? CKD_OK : err_nomem(err, s->rows * s->columns * sizeof(float), "factors of a matrix");
}

/* right becomes an orthonormal basis of the strongest directions of rows, left = right times x. */
static void iterate(search *s, unsigned rounds, const kernels *k) {
    transpose(s->turned, s->x, s->rows, s->columns);
    fill_random(s->right, s->count * s->columns);
    for (unsigned round = 0;; round++) {
        k->products(s->left, s->right, s->turned, s->count, s->columns, s->rows);
        if (round > rounds) {
            return;
        }
        orthonormalise(s->left, s->count, s->rows);
        k->products(s->right, s->left, s->x, s->count, s->rows, s->columns);
        orthonormalise(s->right, s->count, s->columns);
    }
}

static int by_energy(const void *a, const void *b) {
    const double *x = *(const double *const *)a, *y = *(const double *const *)b;
    return (*x < *y) - (*x > *y);
}

static void sort_components(search *s, const double **sorted) {
    for (size_t i = 0; i < s->count; i++) {
        s->energy[i] = s->gram[i * s->count + i];
        sorted[i] = &s->energy[i];
    }
    qsort(sorted, s->count, sizeof(*sorted), by_energy);
    for (size_t i = 0; i < s->count; i++) {
        s->order[i] = (size_t)(sorted[i] - s->energy);
    }
}

/* Mixes the vectors so that they are singular ones: left then has their length, right is orthonormal. */
static ckd_status decompose(search *s, ckd_error *err) {
    size_t n = s->count;
    const double **sorted = malloc(n * sizeof(*sorted));
    if (!sorted) {
        return err_nomem(err, n * sizeof(*sorted), "factors of a matrix");
    }
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j <= i; j++) {
            s->gram[i * n + j] = s->gram[j * n + i] =
                dot(s->left + i * s->rows, s->left + j * s->rows, s->rows);
        }
    }
    jacobi(s->gram, s->vectors, n);
    sort_components(s, sorted);
    free(sorted);
    return CKD_OK;
}

/* Component `k` of one side: n elements. */
static void component(float *to, const search *s, const float *side, size_t n, size_t k) {
    const double *weights = s->vectors + s->order[k] * s->count;
    memset(to, 0, n * sizeof(float));
    for (size_t i = 0; i < s->count; i++) {
        float w = (float)weights[i];
        for (size_t e = 0; e < n; e++) {
            to[e] += w * side[i * n + e];
        }
    }
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

static double round_side(int32_t *to, const float *from, size_t n, uint32_t rank, uint32_t k, double scale) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t v = round_up_late(from[i] * scale);
        to[i * rank + k] = v;
        largest = fabs((double)v) > largest ? fabs((double)v) : largest;
    }
    return largest;
}

static ckd_status make_factors(low_rank *out, const search *s, uint32_t rank, ckd_error *err) {
    out->left = malloc(s->rows * rank * sizeof(int32_t));
    out->right = malloc(s->columns * rank * sizeof(int32_t));
    out->shift = malloc(rank * sizeof(int32_t));
    if (!out->left || !out->right || !out->shift) {
        low_rank_free(out);
        return err_nomem(err, (s->rows + s->columns) * rank * sizeof(int32_t), "factors of a matrix");
    }
    double strongest = sqrt(s->energy[s->order[0]]), bound = 0;
    out->exponent = (int32_t)lrint(-log2(strongest));
    uint32_t used = 0;
    for (uint32_t k = 0; k < rank; k++) {
        /* A unit of the right side is a step's share of the component, to the next power of two. */
        int32_t exponent = (int32_t)lrint(-log2(sqrt(s->energy[s->order[k]])));
        out->shift[k] = exponent - out->exponent;
        component(s->spare, s, s->left, s->rows, k);
        double left = round_side(out->left, s->spare, s->rows, rank, k, 1);
        component(s->spare, s, s->right, s->columns, k);
        double right = round_side(out->right, s->spare, s->columns, rank, k, ldexp(1, -exponent));
        bound += left * right * ldexp(1, out->shift[k]);
        if (out->shift[k] > 20 || bound > LARGEST_SUM) {
            break;
        }
        used++;
    }
    out->rank = used == rank ? rank : 0; /* sums could be inexact: rather no factors at all */
    return CKD_OK;
}

ckd_status low_rank_of(low_rank *out, const float *x, size_t rows, size_t columns, double lambda,
                       uint32_t most, unsigned rounds, const kernels *k, ckd_error *err) {
    *out = (low_rank){0};
    size_t shorter = rows < columns ? rows : columns;
    most = most < shorter ? most : (uint32_t)shorter;
    size_t count = shorter / FIRST_GUESS + OVERSAMPLED;
    for (;;) {
        count = count < most ? count : most;
        search s = {.x = x, .rows = rows, .columns = columns};
        ckd_status status = search_begin(&s, count, err);
        uint32_t rank = 0;
        if (status == CKD_OK) {
            iterate(&s, rounds, k);
            status = decompose(&s, err);
        }
        if (status == CKD_OK) {
            rank = components_that_pay(&s, lambda, &out->bits);
        }
        /* Were there more that pay? */
        bool enough = status != CKD_OK || rank + OVERSAMPLED / 2 <= count || count == most;
        if (status == CKD_OK && enough && rank) {
            status = make_factors(out, &s, rank, err);
        }
        search_free(&s);
        if (enough) {
            return status;
        }
        count *= 2;
    }
}
