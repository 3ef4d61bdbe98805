/* The layers between the matrix products, with their gradients. Widths are multiples of eight. */
#include <math.h>

#include "examples/gpt.h"
#include "examples/gpt_vector.h"

enum { ROW_TASK = 16, COLUMN_TASK = 32, ELEMENT_TASK = 1 << 14 };

static size_t task_count(size_t n, size_t each) {
    return (n + each - 1) / each;
}

static size_t task_end(size_t index, size_t each, size_t n) {
    return (index + 1) * each < n ? (index + 1) * each : n;
}

static size_t row_count(const gpt_model *model) {
    return (size_t)model->config.batch * (size_t)model->config.context;
}

/* -------------------------------------------------------------------------------------------------- embeddings */

typedef struct embed_tasks {
    const gpt_model *model;
    const uint8_t *tokens;
    const float *d_x;
} embed_tasks;

static void embed_task(void *context, size_t index, int worker) {
    (void)worker;
    const embed_tasks *t = context;
    size_t width = (size_t)t->model->config.width, length = (size_t)t->model->config.context;
    size_t end = task_end(index, ROW_TASK, row_count(t->model));
    for (size_t row = index * ROW_TASK; row < end; row++) {
        const float *token = t->model->tensors[0].weight + t->tokens[row] * width;
        const float *position = t->model->tensors[1].weight + row % length * width;
        for (size_t j = 0; j < width; j++)
            t->model->embedded[row * width + j] = token[j] + position[j];
    }
}

void gpt_embed(const gpt_model *model, const uint8_t *tokens) {
    embed_tasks tasks = {model, tokens, NULL};
    gpt_pool_run(model->pool, task_count(row_count(model), ROW_TASK), embed_task, &tasks);
}

/* A task owns some columns of both tables and processes rows in order, so rows of one token add up in a fixed order. */
static void embed_back_task(void *context, size_t index, int worker) {
    (void)worker;
    const embed_tasks *t = context;
    const gpt_tensor *wte = &t->model->tensors[0], *wpe = &t->model->tensors[1];
    size_t width = (size_t)t->model->config.width, length = (size_t)t->model->config.context;
    size_t first = index * COLUMN_TASK, end = task_end(index, COLUMN_TASK, width);
    for (size_t i = 0; i < GPT_VOCAB; i++)
        memset(wte->grad + i * width + first, 0, (end - first) * sizeof(float));
    for (size_t i = 0; i < length; i++)
        memset(wpe->grad + i * width + first, 0, (end - first) * sizeof(float));
    for (size_t row = 0; row < row_count(t->model); row++) {
        float *token = wte->grad + t->tokens[row] * width, *position = wpe->grad + row % length * width;
        const float *d = t->d_x + row * width;
        for (size_t j = first; j < end; j++) {
            token[j] += d[j];
            position[j] += d[j];
        }
    }
}

void gpt_embed_back(const gpt_model *model, const uint8_t *tokens, const float *d_x) {
    embed_tasks tasks = {model, tokens, d_x};
    gpt_pool_run(model->pool, task_count((size_t)model->config.width, COLUMN_TASK), embed_back_task, &tasks);
}

/* ------------------------------------------------------------------------------------------ layer normalisation */

typedef struct norm_tasks {
    float *y, *stat, *d_x;
    const float *x, *d_y, *in_stat;
    const gpt_tensor *gain, *bias;
    size_t rows, width;
    int add;
} norm_tasks;

GPT_CLONES
static void norm_row(float *y, float *stat, const float *x, const float *gain, const float *bias,
                     size_t width) {
    gpt_f8 sum = {0}, square = {0};
    for (size_t j = 0; j < width; j += GPT_LANES)
        sum += *(const gpt_f8 *)(x + j);
    float mean = gpt_sum8(&sum) / (float)width;
    for (size_t j = 0; j < width; j += GPT_LANES) {
        gpt_f8 d = *(const gpt_f8 *)(x + j) - mean;
        square += d * d;
    }
    float scale = 1.0f / sqrtf(gpt_sum8(&square) / (float)width + 1e-5f);
    for (size_t j = 0; j < width; j += GPT_LANES) {
        gpt_f8 n = (*(const gpt_f8 *)(x + j) - mean) * scale;
        *(gpt_f8 *)(y + j) = n * *(const gpt_f8 *)(gain + j) + *(const gpt_f8 *)(bias + j);
    }
    stat[0] = mean;
    stat[1] = scale;
}

static void norm_task(void *context, size_t index, int worker) {
    (void)worker;
    const norm_tasks *t = context;
    size_t end = task_end(index, ROW_TASK, t->rows);
    for (size_t row = index * ROW_TASK; row < end; row++)
        norm_row(t->y + row * t->width, t->stat + 2 * row, t->x + row * t->width, t->gain->weight,
                 t->bias->weight, t->width);
}

void gpt_layernorm(gpt_pool *pool, float *y, float *stat, const float *x, const gpt_tensor *gain,
                   const gpt_tensor *bias, size_t rows) {
    norm_tasks tasks = {
        .y = y, .stat = stat, .x = x, .gain = gain, .bias = bias, .rows = rows, .width = gain->count};
    gpt_pool_run(pool, task_count(rows, ROW_TASK), norm_task, &tasks);
}

/* With n = normalised x and e = d_y * gain: d_x = (e - mean(e) - n mean(e n)) / deviation. */
GPT_CLONES
static void norm_back_row(float *d_x, const float *d_y, const float *x, const float *stat, const float *gain,
                          size_t width, int add) {
    gpt_f8 sum = {0}, dot = {0};
    const float mean = stat[0], scale = stat[1];
    for (size_t j = 0; j < width; j += GPT_LANES) {
        gpt_f8 e = *(const gpt_f8 *)(d_y + j) * *(const gpt_f8 *)(gain + j);
        sum += e;
        dot += e * ((*(const gpt_f8 *)(x + j) - mean) * scale);
    }
    float e_mean = gpt_sum8(&sum) / (float)width, en_mean = gpt_sum8(&dot) / (float)width;
    for (size_t j = 0; j < width; j += GPT_LANES) {
        gpt_f8 e = *(const gpt_f8 *)(d_y + j) * *(const gpt_f8 *)(gain + j);
        gpt_f8 n = (*(const gpt_f8 *)(x + j) - mean) * scale;
        gpt_f8 d = (e - e_mean - n * en_mean) * scale;
        if (add)
            d += *(const gpt_f8 *)(d_x + j);
        *(gpt_f8 *)(d_x + j) = d;
    }
}

static void norm_back_task(void *context, size_t index, int worker) {
    (void)worker;
    const norm_tasks *t = context;
    size_t end = task_end(index, ROW_TASK, t->rows);
    for (size_t row = index * ROW_TASK; row < end; row++)
        norm_back_row(t->d_x + row * t->width, t->d_y + row * t->width, t->x + row * t->width,
                      t->in_stat + 2 * row, t->gain->weight, t->width, t->add);
}

GPT_CLONES
static void norm_gain_grads(const norm_tasks *t, size_t first, size_t end) {
    for (size_t j = first; j < end; j += GPT_LANES) {
        gpt_f8 gain = {0}, bias = {0};
        for (size_t row = 0; row < t->rows; row++) {
            gpt_f8 d = *(const gpt_f8 *)(t->d_y + row * t->width + j);
            gpt_f8 x = *(const gpt_f8 *)(t->x + row * t->width + j);
            gain += d * ((x - t->in_stat[2 * row]) * t->in_stat[2 * row + 1]);
            bias += d;
        }
        *(gpt_f8 *)(t->gain->grad + j) = gain;
        *(gpt_f8 *)(t->bias->grad + j) = bias;
    }
}

static void norm_gain_task(void *context, size_t index, int worker) {
    (void)worker;
    const norm_tasks *t = context;
    norm_gain_grads(t, index * COLUMN_TASK, task_end(index, COLUMN_TASK, t->width));
}

void gpt_layernorm_back(gpt_pool *pool, float *d_x, const float *d_y, const float *x, const float *stat,
                        gpt_tensor *gain, gpt_tensor *bias, size_t rows, int add) {
    norm_tasks tasks = {.d_x = d_x,
                        .d_y = d_y,
                        .x = x,
                        .in_stat = stat,
                        .gain = gain,
                        .bias = bias,
                        .rows = rows,
                        .width = gain->count,
                        .add = add};
    gpt_pool_run(pool, task_count(gain->count, COLUMN_TASK), norm_gain_task, &tasks);
    gpt_pool_run(pool, task_count(rows, ROW_TASK), norm_back_task, &tasks);
}

/* -------------------------------------------------------------------------------------------- elementwise, sums */

typedef struct wide_tasks {
    float *y;
    const float *x;
    size_t count, rows;
} wide_tasks;

/*
 * GELU in its tanh form (Hendrycks and Gimpel 2016): x s with s = sigmoid(2 c (x + 0.044715 x^3)), c = sqrt(2 / pi).
 * Its slope is s + x s (1 - s) 2 c (1 + 3 * 0.044715 x^2).
 */
GPT_INLINE void gelu_sigmoid(gpt_f8 *s, const gpt_f8 *x) {
    gpt_f8 v = *x, e = (v + v * v * v * 0.044715f) * -1.5957691216057308f;
    gpt_exp8(&e);
    *s = 1.0f / (1.0f + e);
}

GPT_CLONES
static void gelu_range(float *y, const float *x, size_t first, size_t end) {
    for (size_t i = first; i < end; i += GPT_LANES) {
        gpt_f8 v = *(const gpt_f8 *)(x + i), s;
        gelu_sigmoid(&s, &v);
        *(gpt_f8 *)(y + i) = v * s;
    }
}

GPT_CLONES
static void gelu_back_range(float *d, const float *x, size_t first, size_t end) {
    for (size_t i = first; i < end; i += GPT_LANES) {
        gpt_f8 v = *(const gpt_f8 *)(x + i), s;
        gelu_sigmoid(&s, &v);
        gpt_f8 slope = s + v * s * (1.0f - s) * (1.5957691216057308f + v * v * 0.21406643f);
        *(gpt_f8 *)(d + i) = *(const gpt_f8 *)(d + i) * slope;
    }
}

static void gelu_task(void *context, size_t index, int worker) {
    (void)worker;
    const wide_tasks *t = context;
    gelu_range(t->y, t->x, index * ELEMENT_TASK, task_end(index, ELEMENT_TASK, t->count));
}

static void gelu_back_task(void *context, size_t index, int worker) {
    (void)worker;
    const wide_tasks *t = context;
    gelu_back_range(t->y, t->x, index * ELEMENT_TASK, task_end(index, ELEMENT_TASK, t->count));
}

void gpt_gelu(gpt_pool *pool, float *y, const float *x, size_t count) {
    wide_tasks tasks = {.y = y, .x = x, .count = count};
    gpt_pool_run(pool, task_count(count, ELEMENT_TASK), gelu_task, &tasks);
}

void gpt_gelu_back(gpt_pool *pool, float *d, const float *x, size_t count) {
    wide_tasks tasks = {.y = d, .x = x, .count = count};
    gpt_pool_run(pool, task_count(count, ELEMENT_TASK), gelu_back_task, &tasks);
}

GPT_CLONES
static void sum_columns(float *sums, const float *x, size_t rows, size_t columns, size_t first, size_t end) {
    for (size_t j = first; j < end; j += GPT_LANES) {
        gpt_f8 sum = {0};
        for (size_t row = 0; row < rows; row++)
            sum += *(const gpt_f8 *)(x + row * columns + j);
        *(gpt_f8 *)(sums + j) = sum;
    }
}

static void sum_task(void *context, size_t index, int worker) {
    (void)worker;
    const wide_tasks *t = context;
    sum_columns(t->y, t->x, t->rows, t->count, index * COLUMN_TASK, task_end(index, COLUMN_TASK, t->count));
}

void gpt_column_sums(gpt_pool *pool, float *sums, const float *x, size_t rows, size_t columns) {
    wide_tasks tasks = {.y = sums, .x = x, .count = columns, .rows = rows};
    gpt_pool_run(pool, task_count(columns, COLUMN_TASK), sum_task, &tasks);
}

/* ---------------------------------------------------------------------------------------------------- the loss */

double gpt_cross_entropy(const gpt_model *model, const uint8_t *targets) {
    size_t rows = row_count(model);
    double loss = 0;
    for (size_t i = 0; i < rows; i++) {
        float *row = model->logits + i * GPT_VOCAB, top = row[0], sum = 0;
        for (size_t j = 1; j < GPT_VOCAB; j++)
            top = row[j] > top ? row[j] : top;
        for (size_t j = 0; j < GPT_VOCAB; j++)
            row[j] -= top;
        float target = row[targets[i]];
        gpt_exp(row, GPT_VOCAB);
        for (size_t j = 0; j < GPT_VOCAB; j++)
            sum += row[j];
        loss += log((double)sum) - (double)target;
        float scale = 1.0f / (sum * (float)rows);
        for (size_t j = 0; j < GPT_VOCAB; j++)
            row[j] *= scale;
        row[targets[i]] -= 1.0f / (float)rows;
    }
    return loss / (double)rows;
}
