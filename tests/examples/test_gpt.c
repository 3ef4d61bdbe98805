/*
 * The trainer in examples/: its gradient is compared with finite differences, and its arithmetic with plain
 * loops. Any number of threads gives the same bits. A resume from a store continues as if the training had
 * not been interrupted.
 */
#define _GNU_SOURCE /* memmem */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "examples/gpt.h"

static const gpt_config tiny = {.width = 16, .layers = 2, .heads = 2, .context = 8, .batch = 2};
/* Large enough that matrix products, rows and columns are split into several tasks. */
static const gpt_config middling = {.width = 64, .layers = 2, .heads = 4, .context = 24, .batch = 6};
static const gpt_adamw adamw = {.lr = 1e-2,
                                .min_lr = 1e-3,
                                .beta1 = 0.9,
                                .beta2 = 0.95,
                                .eps = 1e-8,
                                .weight_decay = 0.1,
                                .clip = 1,
                                .warmup = 2,
                                .steps = 10,
                                .cosine = 1};

/* Text with structure: a Markov chain over a few bytes. */
static gpt_text make_text(size_t size, uint64_t seed) {
    gpt_text text = {.bytes = malloc(size), .size = size, .train = size / 10 * 9, .hash = seed};
    assert_non_null(text.bytes);
    gpt_rng rng;
    gpt_rng_seed(&rng, seed, 0);
    uint8_t last = 0;
    for (size_t i = 0; i < size; i++)
        text.bytes[i] = last = (uint8_t)(last * 3 + gpt_rng_next(&rng) % 5);
    return text;
}

/* ---------------------------------------------------------------------------------------------------- gradient */

typedef struct gradient_case {
    gpt_pool *pool;
    gpt_model *model;
    uint8_t tokens[16], targets[16];
} gradient_case;

static double loss_of(gradient_case *c) {
    return gpt_forward(c->model, c->tokens, c->targets);
}

/* Initial weights give tiny gradients. Larger weights, and biases that are not zero, test all paths. */
static gradient_case make_gradient_case(void) {
    gradient_case c = {.pool = gpt_pool_new(1)};
    assert_non_null(c.pool);
    assert_int_equal(gpt_model_new(&c.model, &tiny, c.pool, 7), 0);
    gpt_rng rng;
    gpt_rng_seed(&rng, 11, 0);
    for (size_t i = 0; i < c.model->tensor_count; i++) {
        gpt_tensor *tensor = &c.model->tensors[i];
        for (size_t j = 0; j < tensor->count; j++)
            tensor->weight[j] =
                tensor->ndim == 2 ? tensor->weight[j] * 15 : tensor->weight[j] + 0.2f * gpt_rng_normal(&rng);
    }
    for (size_t i = 0; i < sizeof c.tokens; i++) {
        c.tokens[i] = (uint8_t)(gpt_rng_next(&rng) % 9);
        c.targets[i] = (uint8_t)(gpt_rng_next(&rng) % 9);
    }
    loss_of(&c);
    gpt_backward(c.model, c.tokens);
    return c;
}

static void free_gradient_case(gradient_case *c) {
    gpt_model_free(c->model);
    gpt_pool_free(c->pool);
}

/* Measures the slope of the loss along `direction` (of length 1) by a central difference of fourth order. */
static double measured_slope(gradient_case *c, const gpt_tensor *tensor, const float *direction,
                             double step) {
    static const double offsets[4] = {-2, -1, 1, 2}, factors[4] = {1, -8, 8, -1};
    float *saved = malloc(tensor->count * sizeof *saved);
    assert_non_null(saved);
    memcpy(saved, tensor->weight, tensor->count * sizeof *saved);
    double slope = 0;
    for (int i = 0; i < 4; i++) {
        for (size_t j = 0; j < tensor->count; j++)
            tensor->weight[j] = (float)(saved[j] + offsets[i] * step * direction[j]);
        slope += factors[i] * loss_of(c) / (12 * step);
    }
    memcpy(tensor->weight, saved, tensor->count * sizeof *saved);
    free(saved);
    return slope;
}

static void check_slope(const gpt_tensor *tensor, const char *along, double have, double want,
                        double tolerance) {
    if (!(fabs(have - want) <= tolerance))
        fail_msg("%s along %s: the loss changes by %.6g, backward says %.6g (tolerance %.2g)", tensor->name,
                 along, have, want, tolerance);
}

static double norm_of(const float *x, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += (double)x[i] * x[i];
    return sqrt(sum);
}

/*
 * Along the gradient, where the slope is its length, and along single elements, where mistakes about shapes
 * show.
 */
static void test_backward_is_the_slope_of_the_loss(void **state) {
    (void)state;
    gradient_case c = make_gradient_case();
    gpt_rng rng;
    gpt_rng_seed(&rng, 3, 0);
    for (size_t i = 0; i < c.model->tensor_count; i++) {
        const gpt_tensor *tensor = &c.model->tensors[i];
        double norm = norm_of(tensor->grad, tensor->count);
        assert_true(norm > 1e-3);
        float *direction = calloc(tensor->count, sizeof *direction);
        assert_non_null(direction);
        for (size_t j = 0; j < tensor->count; j++)
            direction[j] = (float)(tensor->grad[j] / norm);
        check_slope(tensor, "its gradient", measured_slope(&c, tensor, direction, 0.02), norm,
                    4e-3 * norm + 2e-4);
        for (int k = 0; k < 8; k++) {
            memset(direction, 0, tensor->count * sizeof *direction);
            size_t element = gpt_rng_next(&rng) % tensor->count;
            if (tensor->ndim == 2 && tensor->shape[0] == GPT_VOCAB)
                element %= 9 * (size_t)tensor->shape[1]; /* rows of tokens that occur in the batch */
            direction[element] = 1;
            check_slope(tensor, "one element", measured_slope(&c, tensor, direction, 0.02),
                        tensor->grad[element], 4e-3 * norm + 2e-4);
        }
        free(direction);
    }
    free_gradient_case(&c);
}

/* Later tokens must not change the logits of earlier positions. */
static void test_attention_is_causal(void **state) {
    (void)state;
    gradient_case c = make_gradient_case();
    float before[8 * GPT_VOCAB];
    loss_of(&c);
    memcpy(before, c.model->logits, sizeof before);
    for (size_t i = 5; i < 8; i++)
        c.tokens[i] = (uint8_t)(c.tokens[i] + 1);
    loss_of(&c);
    assert_memory_equal(c.model->logits, before, 5 * GPT_VOCAB * sizeof(float));
    assert_memory_not_equal(c.model->logits + 5 * GPT_VOCAB, before + 5 * GPT_VOCAB,
                            GPT_VOCAB * sizeof(float));
    free_gradient_case(&c);
}

/* -------------------------------------------------------------------------------------------------- arithmetic */

static float *random_floats(size_t count, uint64_t seed) {
    float *x = gpt_floats(count);
    assert_non_null(x);
    gpt_rng rng;
    gpt_rng_seed(&rng, seed, 1);
    for (size_t i = 0; i < count; i++)
        x[i] = gpt_rng_normal(&rng);
    return x;
}

static float element(const gpt_matrix *m, size_t row, size_t column) {
    return m->data[row * m->row_step + column * m->col_step];
}

/* Compares a product with a plain loop in double. A guard column after each row of c must not change. */
static void check_product(gpt_pool *pool, size_t m, size_t n, size_t k, int transpose, int add) {
    float *a = random_floats(m * k, m), *b = random_floats(k * n, n), *bias = random_floats(n, k);
    float *c = random_floats(m * (n + 1), 5), *serial = gpt_floats(m * (n + 1)),
          *was = gpt_floats(m * (n + 1));
    float *scratch = gpt_floats(gpt_gemm_scratch(m, n, k));
    assert_true(serial && was && scratch);
    memcpy(serial, c, m * (n + 1) * sizeof *c);
    memcpy(was, c, m * (n + 1) * sizeof *c);
    gpt_gemm product = {.m = m,
                        .n = n,
                        .k = k,
                        .a = {a, k, 1},
                        .b = {b, n, 1},
                        .c = c,
                        .c_step = n + 1,
                        .bias = bias,
                        .add = add};
    if (transpose) {
        product.a = (gpt_matrix){a, 1, m};
        product.b = (gpt_matrix){b, 1, k};
    }
    gpt_gemm_run(pool, &product, scratch);
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n; j++) {
            double sum = bias[j] + (add ? was[i * (n + 1) + j] : 0);
            for (size_t p = 0; p < k; p++)
                sum += (double)element(&product.a, i, p) * element(&product.b, p, j);
            assert_true(fabs(c[i * (n + 1) + j] - sum) <= 1e-5 * (double)(k + 1));
        }
        assert_memory_equal(&c[i * (n + 1) + n], &was[i * (n + 1) + n], sizeof *c);
    }
    product.c = serial;
    gpt_gemm_serial(&product, scratch);
    assert_memory_equal(serial, c, m * (n + 1) * sizeof *c);
    float *const all[] = {a, b, bias, c, serial, was, scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void test_products_of_all_shapes(void **state) {
    (void)state;
    static const size_t shapes[][3] = {{1, 1, 1},    {4, 16, 1},    {5, 17, 3},     {3, 15, 256},
                                       {64, 128, 8}, {65, 129, 33}, {130, 20, 257}, {7, 300, 600}};
    gpt_pool *pool = gpt_pool_new(3);
    assert_non_null(pool);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int variant = 0; variant < 4; variant++)
            check_product(pool, shapes[i][0], shapes[i][1], shapes[i][2], variant & 1, variant >> 1);
    gpt_pool_free(pool);
}

/* Tasks are slow: a loop that returned before its last tasks would leave marks unset. */
static void mark_task(void *context, size_t index, int worker) {
    usleep(2000);
    ((int *)context)[index] += 1 + worker;
}

static void test_a_parallel_loop_runs_every_task_once(void **state) {
    (void)state;
    for (int threads = 1; threads <= 5; threads++) {
        gpt_pool *pool = gpt_pool_new(threads);
        assert_non_null(pool);
        for (size_t count = 0; count <= 9; count += 3) {
            int marks[10] = {0};
            gpt_pool_run(pool, count, mark_task, marks);
            for (size_t i = 0; i < 10; i++)
                assert_true(i < count ? marks[i] >= 1 && marks[i] <= threads : marks[i] == 0);
        }
        gpt_pool_free(pool);
    }
}

static void test_exp_is_accurate(void **state) {
    (void)state;
    enum { COUNT = 17003 };
    float *x = gpt_floats(COUNT);
    assert_non_null(x);
    for (int i = 0; i < COUNT; i++)
        x[i] = (float)i * 0.01f - 85.0f;
    gpt_exp(x, COUNT);
    for (int i = 0; i < COUNT; i++) {
        double want = exp((double)((float)i * 0.01f - 85.0f));
        assert_true(fabs(x[i] - want) <= 4e-7 * want);
    }
    float edges[3] = {-1000, 1000, 0};
    gpt_exp(edges, 3);
    assert_true(edges[0] > 0 && edges[0] < 1e-37f && isfinite(edges[1]) && edges[1] > 1e37f &&
                edges[2] == 1.0f);
    free(x);
}

/* Compares two steps with AdamW computed in double. One-dimensional tensors must have no weight decay. */
static void test_adamw_follows_its_definition(void **state) {
    (void)state;
    gpt_pool *pool = gpt_pool_new(2);
    gpt_model *model = NULL;
    assert_int_equal(gpt_model_new(&model, &tiny, pool, 7), 0);
    const gpt_tensor *matrix = &model->tensors[0], *vector = &model->tensors[2];
    assert_int_equal(matrix->ndim, 2);
    assert_int_equal(vector->ndim, 1);
    const float gradient[2] = {0.3f, -0.001f};
    double m[2] = {0}, v[2] = {0}, w[2] = {matrix->weight[5], vector->weight[5]};
    for (uint64_t step = 1; step <= 2; step++) {
        double norm = 0;
        for (int i = 0; i < 2; i++)
            norm += (double)gradient[i] * gradient[i] * (double)(step * step);
        norm = sqrt(norm);
        matrix->grad[5] = gradient[0] * (float)step;
        vector->grad[5] = gradient[1] * (float)step;
        assert_true(fabs(gpt_adamw_step(model, &adamw, step) - norm) <= 1e-7);
        double rate = adamw.lr * (double)step / 2;
        for (int i = 0; i < 2; i++) {
            double g = gradient[i] * (double)step; /* the norm is below 1, so nothing is clipped */
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            w[i] -= i == 0 ? rate * 0.1 * w[i] : 0;
            w[i] -= rate * (m[i] / (1 - pow(0.9, (double)step))) /
                    (sqrt(v[i] / (1 - pow(0.95, (double)step))) + 1e-8);
        }
        assert_true(fabs(matrix->weight[5] - w[0]) <= 1e-6 && fabs(vector->weight[5] - w[1]) <= 1e-6);
        assert_true(fabs(matrix->exp_avg[5] - m[0]) <= 1e-7 && fabs(matrix->exp_avg_sq[5] - v[0]) <= 1e-7);
    }
    matrix->grad[5] = 30;
    vector->grad[5] = 40;
    float before = matrix->exp_avg[5];
    assert_true(fabs(gpt_adamw_step(model, &adamw, 3) - 50) <= 1e-5);
    /* The gradient was clipped to norm 1. */
    assert_true(fabs(matrix->exp_avg[5] - (0.9 * before + 0.1 * 0.6)) <= 1e-6);
    gpt_model_free(model);
    gpt_pool_free(pool);
}

static void test_schedule(void **state) {
    (void)state;
    gpt_adamw o = {.lr = 1, .min_lr = 0.1, .warmup = 10, .steps = 110, .cosine = 1};
    assert_true(fabs(gpt_adamw_rate(&o, 1) - 0.1) <= 1e-12);
    assert_true(fabs(gpt_adamw_rate(&o, 10) - 1) <= 1e-12);
    assert_true(fabs(gpt_adamw_rate(&o, 60) - 0.55) <= 1e-12);
    assert_true(fabs(gpt_adamw_rate(&o, 110) - 0.1) <= 1e-12);
    assert_true(fabs(gpt_adamw_rate(&o, 500) - 0.1) <= 1e-12);
    o.cosine = 0;
    assert_true(fabs(gpt_adamw_rate(&o, 5) - 0.5) <= 1e-12);
    assert_true(fabs(gpt_adamw_rate(&o, 500) - 1) <= 1e-12);
}

/* ------------------------------------------------------------------------------------------------- determinism */

static void train(gpt_model *model, const gpt_text *text, uint64_t from, uint64_t to, double *losses) {
    uint8_t tokens[144], targets[144];
    for (uint64_t step = from; step <= to; step++) {
        gpt_text_batch(text, &model->config, 42, step, tokens, targets, NULL);
        losses[step - 1] = gpt_forward(model, tokens, targets);
        gpt_backward(model, tokens);
        gpt_adamw_step(model, &adamw, step);
    }
}

static void assert_same_state(const gpt_model *a, const gpt_model *b) {
    for (size_t i = 0; i < a->tensor_count; i++) {
        size_t bytes = a->tensors[i].count * sizeof(float);
        assert_memory_equal(a->tensors[i].weight, b->tensors[i].weight, bytes);
        assert_memory_equal(a->tensors[i].exp_avg, b->tensors[i].exp_avg, bytes);
        assert_memory_equal(a->tensors[i].exp_avg_sq, b->tensors[i].exp_avg_sq, bytes);
    }
}

static void test_same_bits_with_any_number_of_threads(void **state) {
    (void)state;
    static const int threads[] = {1, 1, 2, 3, 7};
    gpt_text text = make_text(20000, 1);
    gpt_pool *first_pool = NULL;
    gpt_model *first = NULL;
    double want[5] = {0};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        double losses[5] = {0};
        gpt_pool *pool = gpt_pool_new(threads[i]);
        assert_non_null(pool);
        assert_int_equal(gpt_pool_threads(pool), threads[i]);
        gpt_model *model = NULL;
        assert_int_equal(gpt_model_new(&model, &middling, pool, 42), 0);
        train(model, &text, 1, 5, losses);
        if (i == 0) {
            first = model;
            first_pool = pool;
            memcpy(want, losses, sizeof want);
            assert_true(losses[4] < losses[0]);
            continue;
        }
        assert_memory_equal(losses, want, sizeof want);
        assert_same_state(model, first);
        gpt_model_free(model);
        gpt_pool_free(pool);
    }
    gpt_model_free(first);
    gpt_pool_free(first_pool);
    gpt_text_free(&text);
}

static void test_seed_decides(void **state) {
    (void)state;
    gpt_pool *pool = gpt_pool_new(1);
    gpt_model *a = NULL, *b = NULL;
    assert_int_equal(gpt_model_new(&a, &tiny, pool, 1), 0);
    assert_int_equal(gpt_model_new(&b, &tiny, pool, 2), 0);
    assert_memory_not_equal(a->tensors[0].weight, b->tensors[0].weight, a->tensors[0].count * sizeof(float));
    double deviation = norm_of(a->tensors[0].weight, a->tensors[0].count) / sqrt((double)a->tensors[0].count);
    assert_true(fabs(deviation - 0.02) <= 0.001);
    gpt_model_free(a);
    gpt_model_free(b);
    gpt_pool_free(pool);
}

/* -------------------------------------------------------------------------------------------------------- text */

static char *temporary_directory(void) {
    const char *base = getenv("TMPDIR");
    char path[512];
    snprintf(path, sizeof path, "%s/ckd-gpt-XXXXXX", base && *base ? base : "/tmp");
    assert_non_null(mkdtemp(path));
    char *copy = strdup(path);
    assert_non_null(copy);
    return copy;
}

static void remove_tree(const char *path) {
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static void write_text(const char *path, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    for (size_t i = 0; i < size; i++)
        fputc((int)('a' + i / 4096 % 26), file); /* the letter identifies the page */
    assert_int_equal(fclose(file), 0);
}

static void test_text_is_split_by_pages(void **state) {
    (void)state;
    char *dir = temporary_directory(), path[600];
    snprintf(path, sizeof path, "%s/text", dir);
    size_t size = 25 * 4096 * 10 + 1000;
    write_text(path, size);
    gpt_text text, again;
    assert_int_equal(gpt_text_load(&text, path), 0);
    assert_int_equal(gpt_text_load(&again, path), 0);
    assert_true(text.size == size && text.train == size - 25 * 4096 && text.hash == again.hash);
    for (size_t page = 0, held = 0; page < size / 4096; page++) {
        size_t at = page % 10 == 9 ? text.train + 4096 * held : 4096 * (page - held);
        held += page % 10 == 9;
        assert_int_equal(text.bytes[at], 'a' + page % 26);
        assert_int_equal(text.bytes[at + 4095], 'a' + page % 26);
    }
    gpt_text_free(&again);
    gpt_text_free(&text);
    write_text(path, 150 * 1000);
    assert_int_equal(gpt_text_load(&text, path), -1);
    assert_null(text.bytes);
    remove_tree(dir);
    free(dir);
}

static void test_found_text_is_kept(void **state) {
    (void)state;
    gpt_text found, kept;
    if (gpt_text_load(&found, NULL)) {
        skip(); /* this machine has no text */
    }
    char *dir = temporary_directory(), path[600];
    snprintf(path, sizeof path, "%s/text", dir);
    assert_int_equal(gpt_text_keep(path), 0);
    assert_int_equal(gpt_text_load(&kept, path), 0);
    assert_true(kept.hash == found.hash && kept.size == found.size);
    gpt_text_free(&kept);
    write_text(path, 300 * 1000); /* an existing file is not replaced */
    assert_int_equal(gpt_text_keep(path), 0);
    assert_int_equal(gpt_text_load(&kept, path), 0);
    assert_true(kept.size == 300 * 1000 && kept.hash != found.hash);
    gpt_text_free(&kept);
    gpt_text_free(&found);
    snprintf(path, sizeof path, "%s/none/text", dir);
    assert_int_equal(gpt_text_keep(path), -1);
    remove_tree(dir);
    free(dir);
}

/* A batch depends only on seed and step. Its targets are its tokens, shifted by one byte. */
static void test_batches(void **state) {
    (void)state;
    gpt_text text = make_text(5000, 9);
    uint8_t tokens[3][144], targets[3][144];
    gpt_rng rng[3];
    gpt_text_batch(&text, &middling, 1, 8, tokens[0], targets[0], &rng[0]);
    gpt_text_batch(&text, &middling, 1, 9, tokens[1], targets[1], &rng[1]);
    gpt_text_batch(&text, &middling, 1, 8, tokens[2], targets[2], &rng[2]);
    assert_memory_equal(tokens[0], tokens[2], sizeof tokens[0]);
    assert_memory_equal(&rng[0], &rng[2], sizeof rng[0]);
    assert_memory_not_equal(tokens[0], tokens[1], sizeof tokens[0]);
    assert_memory_not_equal(&rng[0], &rng[1], sizeof rng[0]);
    for (size_t row = 0; row < 6; row++)
        assert_memory_equal(tokens[0] + row * 24 + 1, targets[0] + row * 24, 23);
    for (size_t i = 0; i < 4; i++) {
        gpt_text_validation(&text, &middling, i, 4, tokens[i & 1], targets[i & 1]);
        for (size_t row = 0; row < 6; row++)
            assert_non_null(
                memmem(text.bytes + text.train, text.size - text.train, tokens[i & 1] + row * 24, 24));
    }
    assert_memory_not_equal(tokens[0], tokens[1], sizeof tokens[0]);
    gpt_text_free(&text);
}

/* -------------------------------------------------------------------------------------------------- checkpoints */

typedef struct resume_case {
    char *dir;
    gpt_pool *pool;
    gpt_text text;
    ckd_store *store;
    gpt_model *through; /* trained without interruption: 6 steps, saved after steps 2, 3 and 4 */
    double losses[6];
} resume_case;

static int make_resume_case(void **state) {
    resume_case *c = calloc(1, sizeof *c);
    assert_non_null(c);
    ckd_error err = {0};
    c->dir = temporary_directory();
    c->pool = gpt_pool_new(2);
    c->text = make_text(20000, 1);
    assert_int_equal(gpt_model_new(&c->through, &middling, c->pool, 42), 0);
    if (ckd_store_open(&c->store, c->dir, CKD_OPEN_CREATE, NULL, &err) != CKD_OK)
        fail_msg("%s", err.message);
    gpt_lineage lineage = {.run = "a"};
    for (uint64_t step = 1; step <= 6; step++) {
        train(c->through, &c->text, step, step, c->losses);
        gpt_progress progress = {.step = step, .seed = 42};
        ckd_checkpoint info;
        if (step < 2 || step > 4)
            continue;
        assert_int_equal(gpt_state_save(c->store, &lineage, c->through, &c->text, &progress, 1.5, &info), 0);
        assert_int_equal(info.step, step);
        assert_int_equal(info.tensors, 3 * c->through->tensor_count + 4);
        assert_true(info.metric == 1.5);
    }
    *state = c;
    return 0;
}

static int free_resume_case(void **state) {
    resume_case *c = *state;
    ckd_store_close(c->store);
    gpt_model_free(c->through);
    gpt_text_free(&c->text);
    gpt_pool_free(c->pool);
    remove_tree(c->dir);
    free(c->dir);
    free(c);
    return 0;
}

static void test_resume_continues_bit_for_bit(void **state) {
    resume_case *c = *state;
    static const uint64_t steps[] = {CKD_LATEST, 2};
    for (size_t i = 0; i < 2; i++) {
        gpt_model *model = NULL;
        gpt_progress progress = {.seed = 42};
        double losses[6] = {0};
        assert_int_equal(gpt_model_new(&model, &middling, c->pool, 5), 0);
        assert_int_equal(gpt_state_load(c->store, "a", steps[i], model, &c->text, &progress), 0);
        assert_int_equal(progress.step, i == 0 ? 4 : 2);
        train(model, &c->text, progress.step + 1, 6, losses);
        assert_memory_equal(losses + progress.step, c->losses + progress.step,
                            (6 - progress.step) * sizeof *losses);
        assert_same_state(model, c->through);
        gpt_model_free(model);
    }
}

static void test_resume_refuses_other_models(void **state) {
    resume_case *c = *state;
    gpt_model *model = NULL;
    gpt_progress progress = {.seed = 42};
    gpt_config heads = middling;
    heads.heads = 8; /* the same shapes, but another function */
    assert_int_equal(gpt_model_new(&model, &heads, c->pool, 42), 0);
    assert_int_equal(gpt_state_load(c->store, "a", 3, model, &c->text, &progress), -1);
    gpt_model_free(model);
    assert_int_equal(gpt_model_new(&model, &middling, c->pool, 42), 0);
    assert_int_equal(gpt_state_load(c->store, "a", 7, model, &c->text, &progress), -1);
    assert_int_equal(gpt_state_load(c->store, "b", CKD_LATEST, model, &c->text, &progress), -1);
    progress.seed = 43;
    assert_int_equal(gpt_state_load(c->store, "a", 3, model, &c->text, &progress), -1);
    progress.seed = 42;
    gpt_text other = make_text(20000, 2);
    assert_int_equal(gpt_state_load(c->store, "a", 3, model, &other, &progress), -1);
    gpt_text_free(&other);
    assert_int_equal(gpt_state_load(c->store, "a", 3, model, &c->text, &progress), 0);
    gpt_model_free(model);
}

/* A step may be saved again if the state is the same, and not if it differs. */
static void test_a_step_is_saved_once(void **state) {
    resume_case *c = *state;
    gpt_model *model = NULL;
    gpt_progress progress = {.seed = 42};
    gpt_lineage lineage = {.run = "a", .resumed_run = "a", .resumed_step = 3};
    ckd_checkpoint info;
    assert_int_equal(gpt_model_new(&model, &middling, c->pool, 42), 0);
    assert_int_equal(gpt_state_load(c->store, "a", 4, model, &c->text, &progress), 0);
    assert_int_equal(gpt_state_save(c->store, &lineage, model, &c->text, &progress, 1.5, &info), 0);
    model->tensors[3].weight[0] += 1;
    assert_int_equal(gpt_state_save(c->store, &lineage, model, &c->text, &progress, 1.5, &info), -1);
    gpt_model_free(model);
}

/*
 * Continuing under another name makes a branch. Its first checkpoint is a delta on the one that was resumed.
 */
static void test_a_branch_records_its_origin(void **state) {
    resume_case *c = *state;
    gpt_progress progress = {.step = 5, .seed = 42};
    gpt_lineage lineage = {.run = "b", .resumed_run = "a", .resumed_step = 3, .branch = 1};
    ckd_checkpoint info, origin;
    assert_int_equal(ckd_store_find(&origin, c->store, "a", 3, NULL), CKD_OK);
    assert_int_equal(gpt_state_save(c->store, &lineage, c->through, &c->text, &progress, NAN, &info), 0);
    assert_int_equal(info.kind, CKD_DELTA);
    assert_memory_equal(&info.parent, &origin.id, sizeof origin.id);
    assert_memory_equal(&info.resumed_from, &origin.id, sizeof origin.id);
    lineage.branch = 0;
    progress.step = 6;
    origin = info;
    assert_int_equal(gpt_state_save(c->store, &lineage, c->through, &c->text, &progress, NAN, &info), 0);
    assert_memory_equal(&info.parent, &origin.id, sizeof origin.id);
    assert_true(isnan(info.metric));
}

static void test_dump_writes_raw_floats(void **state) {
    resume_case *c = *state;
    char path[700];
    const gpt_tensor *tensor = &c->through->tensors[4];
    snprintf(path, sizeof path, "%s/dump", c->dir);
    assert_int_equal(gpt_state_dump(path, c->through, 6), 0);
    snprintf(path, sizeof path, "%s/dump/6/exp_avg_sq.blocks.0.attn.qkv.weight.f32", c->dir);
    float *have = gpt_floats(tensor->count + 1);
    assert_non_null(have);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fread(have, sizeof *have, tensor->count + 1, file), tensor->count);
    fclose(file);
    assert_memory_equal(have, tensor->exp_avg_sq, tensor->count * sizeof *have);
    free(have);
    assert_int_equal(gpt_state_dump("/nonexistent/dump", c->through, 6), -1);
}

static void test_bad_shapes_are_refused(void **state) {
    (void)state;
    gpt_pool *pool = gpt_pool_new(1);
    gpt_model *model = NULL;
    gpt_config config = tiny;
    config.width = 12;
    assert_int_equal(gpt_model_new(&model, &config, pool, 1), -1);
    config = tiny;
    config.heads = 3;
    assert_int_equal(gpt_model_new(&model, &config, pool, 1), -1);
    config = tiny;
    config.layers = 0;
    assert_int_equal(gpt_model_new(&model, &config, pool, 1), -1);
    assert_null(model);
    gpt_pool_free(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_backward_is_the_slope_of_the_loss),
        cmocka_unit_test(test_attention_is_causal),
        cmocka_unit_test(test_products_of_all_shapes),
        cmocka_unit_test(test_a_parallel_loop_runs_every_task_once),
        cmocka_unit_test(test_exp_is_accurate),
        cmocka_unit_test(test_adamw_follows_its_definition),
        cmocka_unit_test(test_schedule),
        cmocka_unit_test(test_same_bits_with_any_number_of_threads),
        cmocka_unit_test(test_seed_decides),
        cmocka_unit_test(test_text_is_split_by_pages),
        cmocka_unit_test(test_found_text_is_kept),
        cmocka_unit_test(test_batches),
        cmocka_unit_test_setup_teardown(test_resume_continues_bit_for_bit, make_resume_case,
                                        free_resume_case),
        cmocka_unit_test_setup_teardown(test_resume_refuses_other_models, make_resume_case, free_resume_case),
        cmocka_unit_test_setup_teardown(test_a_step_is_saved_once, make_resume_case, free_resume_case),
        cmocka_unit_test_setup_teardown(test_a_branch_records_its_origin, make_resume_case, free_resume_case),
        cmocka_unit_test_setup_teardown(test_dump_writes_raw_floats, make_resume_case, free_resume_case),
        cmocka_unit_test(test_bad_shapes_are_refused),
    };
    return cmocka_run_group_tests_name("gpt", tests, NULL, NULL);
}
