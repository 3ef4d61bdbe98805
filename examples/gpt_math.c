/*
 * Matrix products and exp. The product packs both operands into panels that the kernel reads sequentially (Goto and van
 * de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"). Every element of c is summed over k in one fixed
 * order, on any thread.
 */
#include <stdlib.h>

#include "examples/gpt.h"
#include "examples/gpt_vector.h"

enum {
    MR = 4,        /* rows of a tile: 4 x 2 vectors of sums fit 16 registers without fused operations */
    NR = 16,       /* columns of a tile */
    K_BLOCK = 256, /* a panel of b of this depth (16 KiB) fits the L1 cache */
    ROW_TASK = 64, /* a task computes at most ROW_TASK x COLUMN_TASK elements of c */
    COLUMN_TASK = 128,
    PACK_TASK = 16 /* panels filled by one packing task */
};

static size_t panels(size_t n, size_t width) {
    return (n + width - 1) / width;
}

float *gpt_floats(size_t count) {
    if (count > SIZE_MAX / sizeof(float) - 64)
        return NULL;
    size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
    float *memory = aligned_alloc(64, bytes ? bytes : 64);
    if (memory)
        memset(memory, 0, bytes);
    return memory;
}

size_t gpt_gemm_scratch(size_t m, size_t n, size_t k) {
    return (panels(m, MR) * MR + panels(n, NR) * NR) * k;
}

/* Packs `width` rows or columns from `first` on as [k][width]; entries beyond `limit` become zero. */
GPT_INLINE void pack_panel(float *to, const float *from, size_t step, size_t k_step, size_t first,
                           size_t limit, size_t k, size_t width) {
    size_t filled = limit - first < width ? limit - first : width;
    from += first * step;
    if (filled < width)
        memset(to, 0, k * width * sizeof *to);
    if (step == 1 && filled == width) {
        for (size_t p = 0; p < k; p++)
            memcpy(to + p * width, from + p * k_step, width * sizeof *to);
        return;
    }
    for (size_t i = 0; i < filled; i++)
        for (size_t p = 0; p < k; p++)
            to[p * width + i] = from[i * step + p * k_step];
}

static void pack_a(const gpt_gemm *g, float *packed, size_t panel) {
    pack_panel(packed + panel * MR * g->k, g->a.data, g->a.row_step, g->a.col_step, panel * MR, g->m, g->k,
               MR);
}

static void pack_b(const gpt_gemm *g, float *packed, size_t panel) {
    pack_panel(packed + panel * NR * g->k, g->b.data, g->b.col_step, g->b.row_step, panel * NR, g->n, g->k,
               NR);
}

/* tile[MR][NR] = the product of two panels over `depth`. */
GPT_INLINE void tile_product(float *tile, const float *a, const float *b, size_t depth) {
    gpt_f8 c00 = {0}, c01 = {0}, c10 = {0}, c11 = {0}, c20 = {0}, c21 = {0}, c30 = {0}, c31 = {0};
    for (size_t p = 0; p < depth; p++, a += MR, b += NR) {
        const gpt_f8 b0 = *(const gpt_f8 *)b, b1 = *(const gpt_f8 *)(b + 8);
        c00 += a[0] * b0;
        c01 += a[0] * b1;
        c10 += a[1] * b0;
        c11 += a[1] * b1;
        c20 += a[2] * b0;
        c21 += a[2] * b1;
        c30 += a[3] * b0;
        c31 += a[3] * b1;
    }
    gpt_f8 *out = (gpt_f8 *)tile;
    out[0] = c00;
    out[1] = c01;
    out[2] = c10;
    out[3] = c11;
    out[4] = c20;
    out[5] = c21;
    out[6] = c30;
    out[7] = c31;
}

/* Stores a tile into c, or adds it to c; adds the bias once. */
GPT_INLINE void store_tile(const gpt_gemm *g, const float *tile, size_t row, size_t column, int add,
                           int bias) {
    size_t rows = g->m - row < MR ? g->m - row : MR, columns = g->n - column < NR ? g->n - column : NR;
    for (size_t i = 0; i < rows; i++) {
        float *c = g->c + (row + i) * g->c_step + column;
        const float *t = tile + i * NR;
        for (size_t j = 0; j < columns; j++) {
            float value = bias ? t[j] + g->bias[column + j] : t[j];
            c[j] = add ? c[j] + value : value;
        }
    }
}

/* Computes c for rows [row, row_end) and columns [column, column_end), both starting at a tile. */
GPT_CLONES
static void multiply_block(const gpt_gemm *g, const float *packed_a, const float *packed_b, size_t row,
                           size_t row_end, size_t column, size_t column_end) {
    float tile[MR * NR] __attribute__((aligned(32)));
    for (size_t k0 = 0; k0 < g->k; k0 += K_BLOCK) {
        size_t depth = g->k - k0 < K_BLOCK ? g->k - k0 : K_BLOCK;
        int add = k0 > 0 || g->add, bias = k0 == 0 && g->bias;
        for (size_t j = column; j < column_end; j += NR) {
            const float *b = packed_b + j * g->k + k0 * NR;
            for (size_t i = row; i < row_end; i += MR) {
                tile_product(tile, packed_a + i * g->k + k0 * MR, b, depth);
                store_tile(g, tile, i, j, add, bias);
            }
        }
    }
}

typedef struct gemm_tasks {
    const gpt_gemm *gemm;
    float *packed_a, *packed_b;
    size_t a_panels, b_panels, column_tasks;
} gemm_tasks;

static gemm_tasks plan(const gpt_gemm *gemm, float *scratch) {
    size_t a_panels = panels(gemm->m, MR);
    return (gemm_tasks){.gemm = gemm,
                        .packed_a = scratch,
                        .packed_b = scratch + a_panels * MR * gemm->k,
                        .a_panels = a_panels,
                        .b_panels = panels(gemm->n, NR),
                        .column_tasks = panels(gemm->n, COLUMN_TASK)};
}

static void pack_task(void *context, size_t index, int worker) {
    (void)worker;
    const gemm_tasks *t = context;
    size_t all = t->a_panels + t->b_panels, end = (index + 1) * PACK_TASK;
    for (size_t p = index * PACK_TASK; p < end && p < all; p++) {
        if (p < t->a_panels)
            pack_a(t->gemm, t->packed_a, p);
        else
            pack_b(t->gemm, t->packed_b, p - t->a_panels);
    }
}

static void multiply_task(void *context, size_t index, int worker) {
    (void)worker;
    const gemm_tasks *t = context;
    size_t row = index / t->column_tasks * ROW_TASK, column = index % t->column_tasks * COLUMN_TASK;
    size_t row_end = row + ROW_TASK < t->gemm->m ? row + ROW_TASK : t->gemm->m;
    size_t column_end = column + COLUMN_TASK < t->gemm->n ? column + COLUMN_TASK : t->gemm->n;
    multiply_block(t->gemm, t->packed_a, t->packed_b, row, row_end, column, column_end);
}

void gpt_gemm_run(gpt_pool *pool, const gpt_gemm *gemm, float *scratch) {
    gemm_tasks tasks = plan(gemm, scratch);
    gpt_pool_run(pool, panels(tasks.a_panels + tasks.b_panels, PACK_TASK), pack_task, &tasks);
    gpt_pool_run(pool, panels(gemm->m, ROW_TASK) * tasks.column_tasks, multiply_task, &tasks);
}

void gpt_gemm_serial(const gpt_gemm *gemm, float *scratch) {
    gemm_tasks tasks = plan(gemm, scratch);
    for (size_t i = 0; i < panels(tasks.a_panels + tasks.b_panels, PACK_TASK); i++)
        pack_task(&tasks, i, 0);
    multiply_block(gemm, tasks.packed_a, tasks.packed_b, 0, gemm->m, 0, gemm->n);
}

GPT_CLONES
void gpt_exp(float *x, size_t count) {
    size_t i = 0;
    for (; i + GPT_LANES <= count; i += GPT_LANES)
        gpt_exp8((gpt_f8 *)(x + i));
    if (i < count) {
        float tail[GPT_LANES] = {0};
        memcpy(tail, x + i, (count - i) * sizeof *x);
        gpt_exp8((gpt_f8 *)tail);
        memcpy(x + i, tail, (count - i) * sizeof *x);
    }
}
