/*
 * The model, or a stage of it: its table of tensors, the forward pass, and the backward pass, which mirrors it line by
 * line.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt.h"

/* -------------------------------------------------------------------------------------------- the state table */

__attribute__((format(printf, 4, 5))) static void add_tensor(gpt_model *model, uint64_t rows,
                                                             uint64_t columns, const char *format, ...) {
    gpt_tensor *tensor = &model->tensors[model->tensor_count++];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(tensor->name, sizeof tensor->name, format, arguments);
    va_end(arguments);
    tensor->ndim = columns ? 2 : 1;
    tensor->shape[0] = rows;
    tensor->shape[1] = columns;
    tensor->count = (size_t)(rows * (columns ? columns : 1));
    model->parameter_count += tensor->count;
}

static void add_block(gpt_model *model, int block) {
    uint64_t width = (uint64_t)model->config.width;
    add_tensor(model, width, 0, "blocks.%d.ln_1.weight", block);
    add_tensor(model, width, 0, "blocks.%d.ln_1.bias", block);
    add_tensor(model, 3 * width, width, "blocks.%d.attn.qkv.weight", block);
    add_tensor(model, 3 * width, 0, "blocks.%d.attn.qkv.bias", block);
    add_tensor(model, width, width, "blocks.%d.attn.proj.weight", block);
    add_tensor(model, width, 0, "blocks.%d.attn.proj.bias", block);
    add_tensor(model, width, 0, "blocks.%d.ln_2.weight", block);
    add_tensor(model, width, 0, "blocks.%d.ln_2.bias", block);
    add_tensor(model, 4 * width, width, "blocks.%d.mlp.fc.weight", block);
    add_tensor(model, 4 * width, 0, "blocks.%d.mlp.fc.bias", block);
    add_tensor(model, width, 4 * width, "blocks.%d.mlp.proj.weight", block);
    add_tensor(model, width, 0, "blocks.%d.mlp.proj.bias", block);
}

int gpt_is_first(const gpt_model *model) {
    return model->begin == 0;
}

int gpt_is_last(const gpt_model *model) {
    return model->end == model->config.layers;
}

enum { EMBEDDINGS = 2, HEAD = 3 }; /* tensors before and behind the blocks */

size_t gpt_first_tensor(const gpt_model *model) {
    return gpt_is_first(model) ? 0 : EMBEDDINGS + (size_t)model->begin * GPT_BLOCK_TENSORS;
}

static gpt_tensor *block_tensors(const gpt_model *model, int block) {
    size_t before = gpt_is_first(model) ? EMBEDDINGS : 0;
    return &model->tensors[before + (size_t)(block - model->begin) * GPT_BLOCK_TENSORS];
}

static int make_table(gpt_model *model) {
    const gpt_config *config = &model->config;
    uint64_t width = (uint64_t)config->width;
    size_t count = (size_t)(model->end - model->begin) * GPT_BLOCK_TENSORS + EMBEDDINGS + HEAD;
    model->tensors = calloc(count, sizeof *model->tensors);
    if (!model->tensors)
        return -1;
    if (gpt_is_first(model)) {
        add_tensor(model, GPT_VOCAB, width, "wte.weight");
        add_tensor(model, (uint64_t)config->context, width, "wpe.weight");
    }
    for (int i = model->begin; i < model->end; i++)
        add_block(model, i);
    if (gpt_is_last(model)) {
        add_tensor(model, width, 0, "ln_f.weight");
        add_tensor(model, width, 0, "ln_f.bias");
        add_tensor(model, GPT_VOCAB, width, "lm_head.weight");
    }
    model->state = gpt_floats(4 * model->parameter_count);
    if (!model->state)
        return -1;
    float *at = model->state;
    for (size_t i = 0; i < model->tensor_count; i++) {
        gpt_tensor *tensor = &model->tensors[i];
        tensor->weight = at;
        tensor->grad = at + model->parameter_count;
        tensor->exp_avg = at + 2 * model->parameter_count;
        tensor->exp_avg_sq = at + 3 * model->parameter_count;
        at += tensor->count;
    }
    return 0;
}

/* GPT-2's initialisation. Layers that add to the residual stream are scaled by the number of such additions. */
static void initialise(gpt_model *model, uint64_t seed) {
    float residual = 0.02f / sqrtf(2.0f * (float)model->config.layers);
    for (size_t i = 0; i < model->tensor_count; i++) {
        gpt_tensor *tensor = &model->tensors[i];
        gpt_rng rng;
        /* a random stream that no batch uses */
        gpt_rng_seed(&rng, seed, UINT64_MAX - (gpt_first_tensor(model) + i));
        float deviation = strstr(tensor->name, "proj.weight") ? residual : 0.02f;
        int gain = tensor->ndim == 1 && strstr(tensor->name, "weight") != NULL;
        for (size_t j = 0; j < tensor->count; j++)
            tensor->weight[j] = tensor->ndim == 2 ? deviation * gpt_rng_normal(&rng) : (float)gain;
    }
}

/* ------------------------------------------------------------------------------------------------- activations */

/* Call it twice: with NULL to count floats, then with the memory to assign it. Returns the floats used. */
static size_t place_acts(gpt_model *model, float *base) {
    const gpt_config *config = &model->config;
    size_t width = (size_t)config->width, length = (size_t)config->context, used = 0;
    size_t rows = (size_t)config->batch * length, row = rows * width;
    size_t probabilities = (size_t)config->batch * (size_t)config->heads * length * length;
#define PLACE(field, count) ((field) = base ? base + used : NULL, used += ((count) + 15) / 16 * 16)
    PLACE(model->embedded, row);
    for (int i = 0; i < model->end - model->begin; i++) {
        gpt_block_acts *acts = &model->blocks[i];
        PLACE(acts->ln1, row);
        PLACE(acts->ln1_stat, 2 * rows);
        PLACE(acts->qkv, 3 * row);
        PLACE(acts->att, probabilities);
        PLACE(acts->atty, row);
        PLACE(acts->mid, row);
        PLACE(acts->ln2, row);
        PLACE(acts->ln2_stat, 2 * rows);
        PLACE(acts->fc, 4 * row);
        PLACE(acts->gelu, 4 * row);
        PLACE(acts->out, row);
    }
    PLACE(model->lnf, row);
    PLACE(model->lnf_stat, 2 * rows);
    PLACE(model->logits, rows * GPT_VOCAB);
    PLACE(model->d_out, row);
    PLACE(model->d_row, row);
    PLACE(model->d_wide, 4 * row);
    PLACE(model->d_scores, (size_t)gpt_pool_threads(model->pool) * length * length);
    size_t wide = 4 * width > GPT_VOCAB ? 4 * width : GPT_VOCAB, deep = rows > wide ? rows : wide;
    PLACE(model->scratch, gpt_gemm_scratch(deep, wide, deep)); /* at least as much as any product needs */
    size_t head = width / (size_t)config->heads, side = length > head ? length : head;
    model->worker_scratch_count = gpt_gemm_scratch(side, side, side);
    PLACE(model->worker_scratch, model->worker_scratch_count * (size_t)gpt_pool_threads(model->pool));
#undef PLACE
    return used;
}

static int check_config(const gpt_config *c) {
    if (c->width < 8 || c->width > 4096 || c->width % 8 || c->heads < 1 || c->width % c->heads) {
        fprintf(stderr, "train_gpt: --width must be a multiple of 8 and of --heads, 4096 at most\n");
        return -1;
    }
    if (c->layers < 1 || c->layers > 100 || c->context < 1 || c->context > 4096 || c->batch < 1 ||
        c->batch > 4096) {
        fprintf(
            stderr,
            "train_gpt: --layers, --context and --batch must be at least 1, and at most 100, 4096, 4096\n");
        return -1;
    }
    return 0;
}

static int complain_of_memory(gpt_model *model) {
    fprintf(stderr, "train_gpt: out of memory for the model; use a smaller --width, --layers or --batch\n");
    gpt_model_free(model);
    return -1;
}

static int make_acts(gpt_model *model) {
    model->blocks = calloc((size_t)(model->end - model->begin), sizeof *model->blocks);
    model->acts = model->blocks ? gpt_floats(place_acts(model, NULL)) : NULL;
    if (!model->acts)
        return -1;
    place_acts(model, model->acts);
    return 0;
}

int gpt_stage_new(gpt_model **out, const gpt_config *config, int begin, int end, gpt_pool *pool,
                  uint64_t seed) {
    *out = NULL;
    if (check_config(config))
        return -1;
    gpt_model *model = calloc(1, sizeof *model);
    if (!model)
        return complain_of_memory(NULL);
    model->config = *config;
    model->pool = pool;
    model->begin = begin;
    model->end = end;
    if (make_table(model))
        return complain_of_memory(model);
    initialise(model, seed);
    *out = model;
    return 0;
}

int gpt_stage_acts(gpt_model **out, const gpt_model *stage, int batch) {
    *out = NULL;
    gpt_model *model = malloc(sizeof *model);
    if (!model)
        return complain_of_memory(NULL);
    *model = *stage;
    model->shares = 1;
    model->config.batch = batch;
    model->acts = NULL;
    if (make_acts(model))
        return complain_of_memory(model);
    *out = model;
    return 0;
}

int gpt_model_new(gpt_model **out, const gpt_config *config, gpt_pool *pool, uint64_t seed) {
    gpt_model *model;
    *out = NULL;
    if (gpt_stage_new(&model, config, 0, config->layers, pool, seed))
        return -1;
    if (make_acts(model))
        return complain_of_memory(model);
    *out = model;
    return 0;
}

void gpt_model_free(gpt_model *model) {
    if (!model)
        return;
    if (!model->shares) {
        free(model->state);
        free(model->tensors);
    }
    free(model->acts);
    free(model->blocks);
    free(model);
}

/* -------------------------------------------------------------------------------------------- forward, backward */

/* y = x W' + bias (W is [outputs, inputs]); with add, y += that. */
static void linear(const gpt_model *model, float *y, const float *x, const gpt_tensor *weight,
                   const gpt_tensor *bias, size_t rows, int add) {
    size_t outputs = (size_t)weight->shape[0], inputs = (size_t)weight->shape[1];
    gpt_gemm product = {.m = rows,
                        .n = outputs,
                        .k = inputs,
                        .a = {x, inputs, 1},
                        .b = {weight->weight, 1, inputs},
                        .c = y,
                        .c_step = outputs,
                        .bias = bias ? bias->weight : NULL,
                        .add = add};
    gpt_gemm_run(model->pool, &product, model->scratch);
}

/* d_x = d_y W; also sets the gradients of weight and bias. */
static void linear_back(const gpt_model *model, float *d_x, const float *d_y, const float *x,
                        gpt_tensor *weight, gpt_tensor *bias, size_t rows) {
    size_t outputs = (size_t)weight->shape[0], inputs = (size_t)weight->shape[1];
    gpt_gemm to_weight = {.m = outputs,
                          .n = inputs,
                          .k = rows,
                          .a = {d_y, 1, outputs},
                          .b = {x, inputs, 1},
                          .c = weight->grad,
                          .c_step = inputs};
    gpt_gemm to_x = {.m = rows,
                     .n = inputs,
                     .k = outputs,
                     .a = {d_y, outputs, 1},
                     .b = {weight->weight, inputs, 1},
                     .c = d_x,
                     .c_step = inputs};
    gpt_gemm_run(model->pool, &to_weight, model->scratch);
    gpt_gemm_run(model->pool, &to_x, model->scratch);
    if (bias)
        gpt_column_sums(model->pool, bias->grad, d_y, rows, outputs);
}

static void block_forward(const gpt_model *model, int block, const float *x) {
    const gpt_tensor *p = block_tensors(model, block);
    const gpt_block_acts *a = &model->blocks[block - model->begin];
    size_t width = (size_t)model->config.width;
    size_t rows = (size_t)model->config.batch * (size_t)model->config.context;
    gpt_layernorm(model->pool, a->ln1, a->ln1_stat, x, &p[GPT_LN1_W], &p[GPT_LN1_B], rows);
    linear(model, a->qkv, a->ln1, &p[GPT_QKV_W], &p[GPT_QKV_B], rows, 0);
    gpt_attention(model, a);
    memcpy(a->mid, x, rows * width * sizeof *x);
    linear(model, a->mid, a->atty, &p[GPT_ATTN_W], &p[GPT_ATTN_B], rows, 1);
    gpt_layernorm(model->pool, a->ln2, a->ln2_stat, a->mid, &p[GPT_LN2_W], &p[GPT_LN2_B], rows);
    linear(model, a->fc, a->ln2, &p[GPT_FC_W], &p[GPT_FC_B], rows, 0);
    gpt_gelu(model->pool, a->gelu, a->fc, 4 * rows * width);
    memcpy(a->out, a->mid, rows * width * sizeof *x);
    linear(model, a->out, a->gelu, &p[GPT_MLP_W], &p[GPT_MLP_B], rows, 1);
}

/* On entry d_out is the gradient of the block's output; on return, of its input. */
static void block_backward(const gpt_model *model, int block, const float *x) {
    gpt_tensor *p = block_tensors(model, block);
    const gpt_block_acts *a = &model->blocks[block - model->begin];
    size_t width = (size_t)model->config.width;
    size_t rows = (size_t)model->config.batch * (size_t)model->config.context;
    linear_back(model, model->d_wide, model->d_out, a->gelu, &p[GPT_MLP_W], &p[GPT_MLP_B], rows);
    gpt_gelu_back(model->pool, model->d_wide, a->fc, 4 * rows * width);
    linear_back(model, model->d_row, model->d_wide, a->ln2, &p[GPT_FC_W], &p[GPT_FC_B], rows);
    gpt_layernorm_back(model->pool, model->d_out, model->d_row, a->mid, a->ln2_stat, &p[GPT_LN2_W],
                       &p[GPT_LN2_B], rows, 1);
    linear_back(model, model->d_row, model->d_out, a->atty, &p[GPT_ATTN_W], &p[GPT_ATTN_B], rows);
    gpt_attention_back(model, a, model->d_row, model->d_wide);
    linear_back(model, model->d_row, model->d_wide, a->ln1, &p[GPT_QKV_W], &p[GPT_QKV_B], rows);
    gpt_layernorm_back(model->pool, model->d_out, model->d_row, x, a->ln1_stat, &p[GPT_LN1_W], &p[GPT_LN1_B],
                       rows, 1);
}

float *gpt_output(const gpt_model *model) {
    return model->blocks[model->end - model->begin - 1].out;
}

double gpt_forward(gpt_model *model, const uint8_t *tokens, const uint8_t *targets) {
    size_t rows = (size_t)model->config.batch * (size_t)model->config.context;
    if (gpt_is_first(model))
        gpt_embed(model, tokens);
    const float *x = model->embedded;
    for (int i = model->begin; i < model->end; i++) {
        block_forward(model, i, x);
        x = model->blocks[i - model->begin].out;
    }
    if (!gpt_is_last(model))
        return 0;
    /* ln_f.weight, ln_f.bias, lm_head.weight */
    const gpt_tensor *last = &model->tensors[model->tensor_count - HEAD];
    gpt_layernorm(model->pool, model->lnf, model->lnf_stat, x, &last[0], &last[1], rows);
    linear(model, model->logits, model->lnf, &last[2], NULL, rows, 0);
    return gpt_cross_entropy(model, targets);
}

void gpt_backward(gpt_model *model, const uint8_t *tokens) {
    size_t rows = (size_t)model->config.batch * (size_t)model->config.context;
    if (gpt_is_last(model)) {
        gpt_tensor *last = &model->tensors[model->tensor_count - HEAD];
        linear_back(model, model->d_row, model->logits, model->lnf, &last[2], NULL, rows);
        gpt_layernorm_back(model->pool, model->d_out, model->d_row, gpt_output(model), model->lnf_stat,
                           &last[0], &last[1], rows, 0);
    }
    for (int i = model->end - 1; i >= model->begin; i--)
        block_backward(model, i,
                       i > model->begin ? model->blocks[i - model->begin - 1].out : model->embedded);
    if (gpt_is_first(model))
        gpt_embed_back(model, tokens, model->d_out);
}
