/*
 * Causal multi-head attention and its gradient. A task is one (sequence, head). It computes whole length x length
 * squares with small matrix products, and sets the half above the diagonal to zero. This wastes half of a tenth of the
 * work, but needs only one kernel.
 */
#include <math.h>
#include <string.h>

#include "examples/gpt.h"

typedef struct attention_tasks {
    const gpt_model *model;
    const gpt_block_acts *acts;
    const float *d_atty;
    float *d_qkv;
} attention_tasks;

/* Views of one (sequence, head); rows are positions. */
typedef struct head_view {
    size_t length, size, row, offset; /* positions, elements per head, first row, first column of the head */
    gpt_matrix q, k, v;
    float *probability; /* length x length */
    float *scratch;
} head_view;

static gpt_matrix transposed(gpt_matrix m) {
    return (gpt_matrix){m.data, m.col_step, m.row_step};
}

static head_view view_head(const attention_tasks *t, size_t index, int worker) {
    const gpt_config *config = &t->model->config;
    size_t width = (size_t)config->width, heads = (size_t)config->heads, length = (size_t)config->context;
    head_view h = {.length = length, .size = width / heads, .row = index / heads * length};
    h.offset = index % heads * h.size;
    const float *qkv = t->acts->qkv + h.row * 3 * width + h.offset;
    h.q = (gpt_matrix){qkv, 3 * width, 1};
    h.k = (gpt_matrix){qkv + width, 3 * width, 1};
    h.v = (gpt_matrix){qkv + 2 * width, 3 * width, 1};
    h.probability = t->acts->att + index * length * length;
    h.scratch = t->model->worker_scratch + (size_t)worker * t->model->worker_scratch_count;
    return h;
}

/* Row i becomes softmax(row i, scaled) over positions 0 ... i, and zero after that. */
static void causal_softmax(float *scores, size_t length, float scale) {
    for (size_t i = 0; i < length; i++) {
        float *row = scores + i * length, top = row[0], sum = 0;
        for (size_t j = 1; j <= i; j++)
            top = row[j] > top ? row[j] : top;
        for (size_t j = 0; j <= i; j++)
            row[j] = (row[j] - top) * scale;
        gpt_exp(row, i + 1);
        for (size_t j = 0; j <= i; j++)
            sum += row[j];
        for (size_t j = 0; j <= i; j++)
            row[j] /= sum;
        memset(row + i + 1, 0, (length - i - 1) * sizeof *row);
    }
}

static void attention_task(void *context, size_t index, int worker) {
    const attention_tasks *t = context;
    size_t width = (size_t)t->model->config.width;
    head_view h = view_head(t, index, worker);
    gpt_gemm scores = {.m = h.length,
                       .n = h.length,
                       .k = h.size,
                       .a = h.q,
                       .b = transposed(h.k),
                       .c = h.probability,
                       .c_step = h.length};
    gpt_gemm_serial(&scores, h.scratch);
    causal_softmax(h.probability, h.length, 1.0f / sqrtf((float)h.size));
    gpt_gemm mix = {.m = h.length,
                    .n = h.size,
                    .k = h.length,
                    .a = {h.probability, h.length, 1},
                    .b = h.v,
                    .c = t->acts->atty + h.row * width + h.offset,
                    .c_step = width};
    gpt_gemm_serial(&mix, h.scratch);
}

void gpt_attention(const gpt_model *model, const gpt_block_acts *acts) {
    attention_tasks tasks = {.model = model, .acts = acts};
    gpt_pool_run(model->pool, (size_t)model->config.batch * (size_t)model->config.heads, attention_task,
                 &tasks);
}

/* Turns d, the gradient of the probabilities, into that of the scores before scaling. */
static void softmax_back(float *d, const float *probability, size_t length, float scale) {
    for (size_t i = 0; i < length; i++) {
        float *row = d + i * length, dot = 0;
        const float *p = probability + i * length;
        for (size_t j = 0; j <= i; j++)
            dot += p[j] * row[j];
        for (size_t j = 0; j <= i; j++)
            row[j] = p[j] * (row[j] - dot) * scale;
        memset(row + i + 1, 0, (length - i - 1) * sizeof *row);
    }
}

static void attention_back_task(void *context, size_t index, int worker) {
    const attention_tasks *t = context;
    size_t width = (size_t)t->model->config.width;
    head_view h = view_head(t, index, worker);
    size_t n = h.length;
    float *d_scores = t->model->d_scores + (size_t)worker * n * n;
    float *d_q = t->d_qkv + h.row * 3 * width + h.offset;
    gpt_matrix d_mix = {t->d_atty + h.row * width + h.offset, width, 1};
    gpt_matrix probability = {h.probability, n, 1}, d_s = {d_scores, n, 1};
    const gpt_gemm products[4] = {
        {.m = n, .n = n, .k = h.size, .a = d_mix, .b = transposed(h.v), .c = d_scores, .c_step = n},
        {.m = n,
         .n = h.size,
         .k = n,
         .a = transposed(probability),
         .b = d_mix,
         .c = d_q + 2 * width,
         .c_step = 3 * width},
        {.m = n, .n = h.size, .k = n, .a = d_s, .b = h.k, .c = d_q, .c_step = 3 * width},
        {.m = n, .n = h.size, .k = n, .a = transposed(d_s), .b = h.q, .c = d_q + width, .c_step = 3 * width},
    };
    gpt_gemm_serial(&products[0], h.scratch);
    softmax_back(d_scores, h.probability, n, 1.0f / sqrtf((float)h.size));
    for (size_t i = 1; i < 4; i++)
        gpt_gemm_serial(&products[i], h.scratch);
}

void gpt_attention_back(const gpt_model *model, const gpt_block_acts *acts, const float *d_atty,
                        float *d_qkv) {
    attention_tasks tasks = {model, acts, d_atty, d_qkv};
    gpt_pool_run(model->pool, (size_t)model->config.batch * (size_t)model->config.heads, attention_back_task,
                 &tasks);
}
