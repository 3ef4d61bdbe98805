/*
 * Products of matrices; part of kernels/cpu_loops.h, which includes it. Panels of the right side are packed,
 * so that they stay in the nearest cache and do not share lines (Goto, van de Geijn, ACM TOMS 34(3), 2008).
 * Sums stay in registers.
 */
#ifndef PANEL_LANES /* of the processor's vectors */
#define PANEL_LANES LANES
#endif
typedef float panel_floats __attribute__((vector_size(4 * PANEL_LANES)));

#define PANEL   (2 * PANEL_LANES) /* columns */
#define DEPTH   256               /* summands at once */
#define HEIGHT  4                 /* rows */
#define AHEAD   8  /* rows of the right side to prefetch: the processor does not predict their addresses */
#define ABREAST 64 /* columns to pack at once, so that each page of the right side is fetched once */

/* HEIGHT x PANEL sums over `depth`. */
CPU_TARGET static inline __attribute__((always_inline)) void panel_sums(float *to,
                                                                        const float *const left[HEIGHT],
                                                                        const float *panel, size_t depth) {
    const float *r0 = left[0], *r1 = left[1], *r2 = left[2], *r3 = left[3];
    panel_floats a0 = {0}, a1 = {0}, b0 = {0}, b1 = {0}, c0 = {0}, c1 = {0}, d0 = {0}, d1 = {0};
    for (size_t k = 0; k < depth; k++) {
        panel_floats x, y;
        memcpy(&x, panel + k * PANEL, sizeof(x));
        memcpy(&y, panel + k * PANEL + PANEL_LANES, sizeof(y));
        a0 += r0[k] * x;
        a1 += r0[k] * y;
        b0 += r1[k] * x;
        b1 += r1[k] * y;
        c0 += r2[k] * x;
        c1 += r2[k] * y;
        d0 += r3[k] * x;
        d1 += r3[k] * y;
    }
    const panel_floats sums[2 * HEIGHT] = {a0, a1, b0, b1, c0, c1, d0, d1};
    memcpy(to, sums, sizeof(sums));
}

/* Packs neighbouring panels, `width` columns in all, one after the other. */
static void pack_panels(float *panels, const float *right, size_t depth, size_t columns, size_t width) {
    for (size_t k = 0; k < depth; k++) {
        const float *from = right + k * columns;
        for (size_t j = 0; k + AHEAD < depth && j < width; j += 16) { /* a line of the cache */
            __builtin_prefetch(from + AHEAD * columns + j);
        }
        for (size_t j = 0; j < width; j += PANEL) {
            float *to = panels + j * DEPTH + k * PANEL;
            if (width - j >= PANEL) {
                memcpy(to, from + j, PANEL * sizeof(float));
            } else {
                memset(to, 0, PANEL * sizeof(float));
                memcpy(to, from + j, (width - j) * sizeof(float));
            }
        }
    }
}

CPU_TARGET static inline __attribute__((always_inline)) void add_row(float *to, const float *from,
                                                                     size_t width, bool first) {
    if (first) {
        memcpy(to, from, width * sizeof(float));
        return;
    }
    if (width == PANEL) {
        panel_floats a[2], b[2];
        memcpy(a, to, sizeof(a));
        memcpy(b, from, sizeof(b));
        a[0] += b[0];
        a[1] += b[1];
        memcpy(to, a, sizeof(a));
        return;
    }
    for (size_t j = 0; j < width; j++) {
        to[j] += from[j];
    }
}

typedef struct panel_factors {
    const float *left, *panel;
    size_t rows, rank, depth; /* a row of `left` has `rank` elements; the panel needs `depth` of them */
} panel_factors;

/* Products of all rows and one panel. Sums begin (first) or continue. */
CPU_TARGET static inline __attribute__((always_inline)) void panel_products(float *sums, size_t columns,
                                                                            size_t width, bool first,
                                                                            const panel_factors *f) {
    float block[HEIGHT * PANEL];
    for (size_t i = 0; i < f->rows; i += HEIGHT) {
        size_t height = f->rows - i < HEIGHT ? f->rows - i : HEIGHT;
        const float *from[HEIGHT];
        for (size_t r = 0; r < HEIGHT; r++) { /* row i stands for missing rows */
            from[r] = f->left + (i + (r < height ? r : 0)) * f->rank;
        }
        panel_sums(block, from, f->panel, f->depth);
        for (size_t r = 0; r < height; r++) {
            add_row(sums + (i + r) * columns, block + r * PANEL, width, first);
        }
    }
}

CPU_LOOP static void products(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                              size_t columns) {
    float panels[DEPTH * ABREAST];
    if (rank == 0) {
        memset(sums, 0, rows * columns * sizeof(float));
    }
    for (size_t k = 0; k < rank; k += DEPTH) {
        size_t depth = rank - k < DEPTH ? rank - k : DEPTH;
        for (size_t j = 0; j < columns; j += ABREAST) {
            size_t width = columns - j < ABREAST ? columns - j : ABREAST;
            pack_panels(panels, right + k * columns + j, depth, columns, width);
            for (size_t p = 0; p < width; p += PANEL) {
                panel_factors f = {left + k, panels + p * DEPTH, rows, rank, depth};
                panel_products(sums + j + p, columns, width - p < PANEL ? width - p : PANEL, k == 0, &f);
            }
        }
    }
}

static void gemm(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                 size_t columns) {
    if (!blas_products(sums, left, right, rows, rank, columns)) {
        products(sums, left, right, rows, rank, columns);
    }
}
