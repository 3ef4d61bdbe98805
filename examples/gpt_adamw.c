/*
 * AdamW (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2), with PyTorch's arithmetic.
 * Weight decay applies to matrices only, as usual for GPTs.
 */
#include <math.h>

#include "examples/gpt.h"
#include "examples/gpt_vector.h"

enum { CHUNK = 1 << 13 }; /* elements per task: fixed, so that sums have one order */

double gpt_adamw_rate(const gpt_adamw *o, uint64_t step) {
    if (step <= o->warmup)
        return o->lr * (double)step / (double)o->warmup;
    if (!o->cosine || o->steps <= o->warmup)
        return o->lr;
    double done = (double)(step - o->warmup) / (double)(o->steps - o->warmup);
    return done >= 1 ? o->min_lr
                     : o->min_lr + 0.5 * (o->lr - o->min_lr) * (1 + cos(3.14159265358979323846 * done));
}

typedef struct update {
    const gpt_tensor *tensor;
    float decay, beta2, rest1, rest2, rate, root, eps, clip; /* rest = 1 - beta; root: bias correction of v */
} update;

GPT_CLONES
static void update_range(const update *u, size_t first, size_t end) {
    const gpt_tensor *t = u->tensor;
    for (size_t i = first; i < end; i++) {
        float g = t->grad[i] * u->clip;
        float m = t->exp_avg[i] + u->rest1 * (g - t->exp_avg[i]);
        float v = t->exp_avg_sq[i] * u->beta2 + u->rest2 * g * g;
        t->exp_avg[i] = m;
        t->exp_avg_sq[i] = v;
        t->weight[i] = t->weight[i] * u->decay - u->rate * m / (sqrtf(v) / u->root + u->eps);
    }
}

static void update_task(void *context, size_t index, int worker) {
    (void)worker;
    const update *u = context;
    size_t end = (index + 1) * CHUNK;
    update_range(u, index * CHUNK, end < u->tensor->count ? end : u->tensor->count);
}

double gpt_sum_of_squares(const float *x, size_t count) {
    double total = 0;
    for (size_t first = 0; first < count; first += CHUNK) {
        size_t end = first + CHUNK < count ? first + CHUNK : count;
        double lane[4] = {0};
        for (size_t i = first; i < end; i++)
            lane[i & 3] += (double)x[i] * (double)x[i];
        total += (lane[0] + lane[1]) + (lane[2] + lane[3]);
    }
    return total;
}

void gpt_adamw_apply(gpt_model *model, const gpt_adamw *o, uint64_t step, double norm) {
    double rate = gpt_adamw_rate(o, step);
    double correction1 = 1 - pow(o->beta1, (double)step), correction2 = 1 - pow(o->beta2, (double)step);
    update u = {.beta2 = (float)o->beta2,
                .rest1 = (float)(1 - o->beta1),
                .rest2 = (float)(1 - o->beta2),
                .rate = (float)(rate / correction1),
                .root = (float)sqrt(correction2),
                .eps = (float)o->eps,
                .clip = o->clip > 0 && norm > o->clip ? (float)(o->clip / norm) : 1.0f};
    for (size_t i = 0; i < model->tensor_count; i++) {
        u.tensor = &model->tensors[i];
        u.decay = u.tensor->ndim > 1 ? (float)(1 - rate * o->weight_decay) : 1.0f;
        gpt_pool_run(model->pool, (u.tensor->count + CHUNK - 1) / CHUNK, update_task, &u);
    }
}

double gpt_adamw_step(gpt_model *model, const gpt_adamw *o, uint64_t step) {
    /* the gradients of all tensors are one array, in table order */
    double norm = sqrt(gpt_sum_of_squares(model->tensors[0].grad, model->parameter_count));
    gpt_adamw_apply(model, o, step, norm);
    return norm;
}
