/*
 * Products of matrices; part of kernels/cpu_loops.h, which includes it. Panels of the right side are packed, so that they stay in the
 * nearest cache and off each other's lines (Goto, van de Geijn, ACM TOMS 34(3), 2008); sums stay in registers.
 */
#define PANEL  (2 * FEW) /* columns */
#define DEPTH  256       /* of the sums that are made at once */
#define HEIGHT 4         /* rows */

/* HEIGHT x PANEL sums over `depth`. */
CPU_TARGET static inline __attribute__((always_inline)) void panel_sums(float *to,
                                                                        const float *const left[HEIGHT],
                                                                        const float *panel, size_t depth) {
    const float *r0 = left[0], *r1 = left[1], *r2 = left[2], *r3 = left[3];
    few_floats a0 = {0}, a1 = {0}, b0 = {0}, b1 = {0}, c0 = {0}, c1 = {0}, d0 = {0}, d1 = {0};
    for (size_t k = 0; k < depth; k++) {
        few_floats x, y;
        memcpy(&x, panel + k * PANEL, sizeof(x));
        memcpy(&y, panel + k * PANEL + FEW, sizeof(y));
        a0 += r0[k] * x;
        a1 += r0[k] * y;
        b0 += r1[k] * x;
        b1 += r1[k] * y;
        c0 += r2[k] * x;
        c1 += r2[k] * y;
        d0 += r3[k] * x;
        d1 += r3[k] * y;
    }
    const few_floats sums[2 * HEIGHT] = {a0, a1, b0, b1, c0, c1, d0, d1};
    memcpy(to, sums, sizeof(sums));
}

static void pack_panel(float *panel, const float *right, size_t depth, size_t columns, size_t width) {
    for (size_t k = 0; k < depth; k++) {
        float *to = panel + k * PANEL;
        const float *from = right + k * columns;
        if (width == PANEL) {
            memcpy(to, from, PANEL * sizeof(float));
        } else {
            memset(to, 0, PANEL * sizeof(float));
            memcpy(to, from, width * sizeof(float));
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
        few_floats a[2], b[2];
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

CPU_LOOP static void products(float *sums, const float *left, const float *right, size_t rows, size_t rank,
                              size_t columns) {
    float panel[DEPTH * PANEL], block[HEIGHT * PANEL];
    if (rank == 0) {
        memset(sums, 0, rows * columns * sizeof(float));
    }
    for (size_t k = 0; k < rank; k += DEPTH) {
        size_t depth = rank - k < DEPTH ? rank - k : DEPTH;
        for (size_t j = 0; j < columns; j += PANEL) {
            size_t width = columns - j < PANEL ? columns - j : PANEL;
            pack_panel(panel, right + k * columns + j, depth, columns, width);
            for (size_t i = 0; i < rows; i += HEIGHT) {
                size_t height = rows - i < HEIGHT ? rows - i : HEIGHT;
                const float *from[HEIGHT];
                for (size_t r = 0; r < HEIGHT; r++) { /* those that there are not are computed twice */
                    from[r] = left + (i + (r < height ? r : 0)) * rank + k;
                }
                panel_sums(block, from, panel, depth);
                for (size_t r = 0; r < height; r++) {
                    add_row(sums + (i + r) * columns + j, block + r * PANEL, width, k == 0);
                }
            }
        }
    }
}
