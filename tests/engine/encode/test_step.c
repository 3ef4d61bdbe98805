/*
 * Optimizer steps: checkpoints that are one update apart, computed by various optimizers and saved in any order and by
 * regions. Values are always exact. If the update is the one the caller described, little more than the first moment
 * is stored.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "base/file.h"
#include "include/ckptdelta.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { ROWS = 96, COLUMNS = 128, N = ROWS * COLUMNS };
static const uint64_t shape[] = {ROWS, COLUMNS};

/* ---- optimizers, as training programs implement them ---- */

typedef enum flavour {
    PLAIN,       /* f32, one rounding per operation: PyTorch on a CPU, a loop in C */
    PARENTHESES, /* the same with different parentheses */
    FUSED,       /* with one fused multiply-add per update, as on a GPU */
    DOUBLE,      /* f64 internally, like fused kernels */
    APEX,        /* weight decay is added to the direction */
    L2,          /* Adam: weight decay is part of the gradient */
    SGD,
    NESTEROV,
    FLAVOURS
} flavour;

typedef struct model {
    flavour how;
    float scale; /* of gradients that are bf16 before it; 0: they are f32 */
    bool sparse; /* only every eighth row has one: an embedding */
    double lr, beta1, beta2, eps, decay, momentum;
    uint64_t step;
    float *w, *m, *v;
    uint64_t random;
} model;

static double uniform(model *x) {
    x->random = x->random * 6364136223846793005u + 1442695040888963407u;
    return (double)(x->random >> 11) / 9007199254740992.0;
}

static double normal(model *x) {
    double u = uniform(x) + 1e-12, v = uniform(x);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

static model model_new(flavour how, unsigned seed) {
    model x = {
        .how = how, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .decay = 0.1, .momentum = 0.9};
    x.random = seed;
    x.w = random_values(CKD_F32, N, seed);
    x.m = calloc(N, sizeof(float));
    x.v = calloc(N, sizeof(float));
    assert_non_null(x.m);
    assert_non_null(x.v);
    return x;
}

static void model_free(model *x) {
    free(x->w);
    free(x->m);
    free(x->v);
}

static void update_moments(model *x, size_t i, float g) {
    float rest1 = (float)(1 - x->beta1), rest2 = (float)(1 - x->beta2), beta2 = (float)x->beta2;
    float kept = x->v[i] * beta2, square = g * g;
    switch (x->how) {
    case PARENTHESES:
        x->m[i] = (float)x->beta1 * x->m[i] + rest1 * g;
        x->v[i] = kept + rest2 * square;
        break;
    case FUSED:
        x->m[i] = x->m[i] + rest1 * (g - x->m[i]);
        x->v[i] = (float)((double)kept + (double)rest2 * (double)square);
        break;
    case DOUBLE:
        x->m[i] = (float)(x->beta1 * (double)x->m[i] + (1 - x->beta1) * (double)g);
        x->v[i] = (float)(x->beta2 * (double)x->v[i] + (1 - x->beta2) * (double)g * (double)g);
        break;
    default:
        x->m[i] = x->m[i] + rest1 * (g - x->m[i]);
        x->v[i] = kept + rest2 * g * g;
        break;
    }
}

static void update_adam(model *x, size_t i, float g) {
    double bias1 = 1 - pow(x->beta1, (double)x->step), bias2 = 1 - pow(x->beta2, (double)x->step);
    float rate = (float)(x->lr / bias1), root = (float)sqrt(bias2), eps = (float)x->eps, w = x->w[i];
    float keep = x->how == L2 ? 1.0f : (float)(1 - x->lr * x->decay);
    if (x->how == L2) {
        g = g + (float)x->decay * w;
    }
    update_moments(x, i, g);
    float m = x->m[i], below = sqrtf(x->v[i]) / root + eps, kept = w * keep;
    switch (x->how) {
    case PARENTHESES:
        x->w[i] = kept - rate * (m / below);
        break;
    case FUSED:
        x->w[i] = (float)((double)kept - (double)rate * (double)(m / below));
        break;
    case DOUBLE:
        x->w[i] = (float)((double)w - x->lr * x->decay * (double)w) -
                  (rate * m) / (float)((double)(sqrtf(x->v[i]) / root) + x->eps);
        break;
    case APEX:
        m = m / (float)bias1;
        m = m / (sqrtf(x->v[i] / (float)bias2) + eps);
        x->w[i] = w - (float)x->lr * (m + (float)x->decay * w);
        break;
    default:
        x->w[i] = kept - rate * m / below;
        break;
    }
}

static void update_sgd(model *x, size_t i, float g) {
    float momentum = (float)x->momentum, lr = (float)x->lr;
    x->m[i] = momentum * x->m[i] + g;
    x->w[i] = x->w[i] - lr * (x->how == NESTEROV ? g + momentum * x->m[i] : x->m[i]);
}

static float bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static void model_step(model *x) {
    x->step++;
    for (size_t i = 0; i < N; i++) {
        double row = exp(0.5 * sin((double)(i / COLUMNS))), column = exp(0.4 * cos((double)(i % COLUMNS)));
        float g = (float)(1e-3 * row * column * normal(x));
        if (x->sparse && (i / COLUMNS + x->step) % 8 != 0) {
            g = 0;
        }
        if (x->scale > 0) {
            g = bf16_of(g) * x->scale;
        }
        if (x->how == SGD || x->how == NESTEROV) {
            update_sgd(x, i, g);
        } else {
            update_adam(x, i, g);
        }
    }
}

static ckd_optimizer optimizer_of(const model *x) {
    ckd_optimizer o = CKD_OPTIMIZER_INIT;
    bool sgd = x->how == SGD || x->how == NESTEROV;
    o.kind = sgd ? CKD_SGD : x->how == L2 ? CKD_ADAM : CKD_ADAMW;
    o.lr = x->lr;
    o.beta1 = sgd ? 0 : x->beta1;
    o.beta2 = sgd ? 0 : x->beta2;
    o.eps = x->eps;
    o.weight_decay = sgd ? 0 : x->decay;
    o.momentum = sgd ? x->momentum : 0;
    o.nesterov = x->how == NESTEROV;
    o.step = x->step;
    return o;
}

/* ---- saving and checking ---- */

static void add(ckd_save *save, const char *name, const float *values, const ckd_region *region,
                const ckd_optimizer *optimizer) {
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    if (region) {
        t.region = *region;
    }
    t.data = values;
    t.optimizer = optimizer;
    ckd_error err = {0};
    if (ckd_save_tensor(save, &t, &err) != CKD_OK) {
        fail_msg("%s: %s", name, err.message);
    }
}

static ckd_save *begin(ckd_store *store, uint64_t step) {
    ckd_save_options o = options_of("run", step);
    o.max_load_cost = 100;
    return begin_with(store, &o);
}

static ckd_checkpoint commit(ckd_save *save) {
    ckd_checkpoint info;
    assert_int_equal(ckd_save_commit(&info, save, NULL), CKD_OK);
    return info;
}

/* Saves the tensors in the documented order. */
static ckd_checkpoint save_model(ckd_store *store, const model *x, const ckd_optimizer *o) {
    ckd_save *save = begin(store, x->step);
    add(save, "exp_avg.w", x->m, NULL, o);
    if (x->how != SGD && x->how != NESTEROV) {
        add(save, "exp_avg_sq.w", x->v, NULL, o);
    }
    add(save, "w", x->w, NULL, o);
    return commit(save);
}

static void check_values(ckd_store *store, uint64_t step, const char *name, const float *want) {
    float *back = load_whole(store, "run", step, name, N * sizeof(float));
    assert_memory_equal(back, want, N * sizeof(float));
    free(back);
}

static void check_model(ckd_store *store, const model *x) {
    check_values(store, x->step, "w", x->w);
    check_values(store, x->step, "exp_avg.w", x->m);
    if (x->how != SGD && x->how != NESTEROV) {
        check_values(store, x->step, "exp_avg_sq.w", x->v);
    }
}

/* The method of a tensor. Returns its stored bits per element. */
static double look_at(char method[32], ckd_store *store, uint64_t step, const char *name) {
    ckd_checkpoint c;
    ckd_tensor_list *list;
    double bits = -1;
    assert_int_equal(ckd_store_find(&c, store, "run", step, NULL), CKD_OK);
    assert_int_equal(ckd_store_tensors(&list, store, &c.id, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        if (strcmp(list->items[i].name, name) == 0) {
            snprintf(method, 32, "%s", list->items[i].method);
            bits = 8 * (double)list->items[i].stored_bytes / (double)list->items[i].elements;
        }
    }
    ckd_tensor_list_free(list);
    assert_true(bits >= 0);
    return bits;
}

static void check_method(ckd_store *store, uint64_t step, const char *name, const char *want, double most) {
    char method[32];
    double bits = look_at(method, store, step, name);
    assert_string_equal(method, want);
    if (!(bits <= most)) {
        fail_msg("%s takes %.2f bits an element", name, bits);
    }
}

static void check_not_step(ckd_store *store, uint64_t step, const char *name) {
    char method[32];
    look_at(method, store, step, name);
    assert_string_not_equal(method, "step");
}

static void check_flavour(const char *dir, flavour how) {
    ckd_store *store = store_create(dir);
    model x = model_new(how, 7 + (unsigned)how);
    bool sgd = how == SGD || how == NESTEROV;
    for (int i = 0; i < 40; i++) {
        model_step(&x);
    }
    save_model(store, &x, NULL);
    for (int i = 0; i < 4; i++) {
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        save_model(store, &x, &o);
        check_model(store, &x);
        /*
         * Headers and names take 0.5 bits of such small tensors. Nesterov's gradient is known less precisely than the
         * weights are stored.
         */
        check_method(store, x.step, "w", "step", how == NESTEROV ? 2.5 : 0.8);
        if (!sgd) {
            check_method(store, x.step, "exp_avg_sq.w", "step", 2.2);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    model_free(&x);
    ckd_store_close(store);
}

#define DEFINE_FLAVOUR(name, how)           \
    static void test_##name(void **state) { \
        check_flavour(*state, how);         \
    }
DEFINE_FLAVOUR(plain, PLAIN)
DEFINE_FLAVOUR(parentheses, PARENTHESES)
DEFINE_FLAVOUR(fused, FUSED)
DEFINE_FLAVOUR(doubles, DOUBLE)
DEFINE_FLAVOUR(apex, APEX)
DEFINE_FLAVOUR(l2, L2)
DEFINE_FLAVOUR(sgd, SGD)
DEFINE_FLAVOUR(nesterov, NESTEROV)

/*
 * With gradients that were bf16 the first moment takes what these have: a sign, 7 bits of mantissa and 2.4 bits of
 * exponent, with headers. L2 adds the decay to them, so there they are f32.
 */
static void check_gradients(const char *dir, flavour how, float scale) {
    ckd_store *store = store_create(dir);
    model x = model_new(how, 27 + (unsigned)how);
    x.scale = scale;
    bool sgd = how == SGD || how == NESTEROV, known = how != L2;
    for (int i = 0; i < 40; i++) {
        model_step(&x);
    }
    save_model(store, &x, NULL);
    for (int i = 0; i < 4; i++) {
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        save_model(store, &x, &o);
        check_model(store, &x);
        check_method(store, x.step, "exp_avg.w", known ? "step" : "delta", known ? 11.8 : 32);
        check_method(store, x.step, "w", "step", how == NESTEROV ? 2.5 : 0.8);
        if (!sgd) {
            check_method(store, x.step, "exp_avg_sq.w", "step", known ? 0.8 : 2.2);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    model_free(&x);
    ckd_store_close(store);
}

static void test_bf16_gradients(void **state) {
    static const float scales[] = {1, 0.37f, 0.9999f, 1.0f / 3};
    for (int how = 0; how < FLAVOURS; how++) {
        for (size_t i = 0; i < sizeof(scales) / sizeof(scales[0]); i++) {
            char dir[4096];
            snprintf(dir, sizeof(dir), "%s/%d-%zu", (const char *)*state, how, i);
            check_gradients(dir, (flavour)how, scales[i]);
        }
    }
}

/* Whatever the gradients are, and where they change in between, loads stay within the bound. */
static void check_bound(const char *dir, flavour how, double limit, int bf16_from) {
    ckd_store *store = store_create(dir);
    model x = model_new(how, 67);
    bool steps = false;
    for (int i = 0; i < 24; i++) {
        x.scale = i >= bf16_from ? 0.37f : 0;
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        ckd_save_options options = options_of("run", x.step);
        options.max_load_cost = limit;
        ckd_save *save = begin_with(store, &options);
        add(save, "exp_avg.w", x.m, NULL, &o);
        if (how != SGD) {
            add(save, "exp_avg_sq.w", x.v, NULL, &o);
        }
        add(save, "w", x.w, NULL, &o);
        ckd_checkpoint made = commit(save);
        if (!(made.load_cost <= limit)) {
            fail_msg("save %d: a load costs %.2f base loads, the bound is %.0f", i, made.load_cost, limit);
        }
        char method[32];
        look_at(method, store, x.step, "exp_avg.w");
        steps = steps || strcmp(method, "step") == 0;
        check_model(store, &x);
    }
    assert_int_equal(steps, bf16_from < 24);
    model_free(&x);
    ckd_store_close(store);
}

static void test_loads_stay_within_the_bound(void **state) {
    static const struct {
        flavour how;
        double limit;
        int bf16_from;
    } cases[] = {{PLAIN, 4, 0}, {PLAIN, 4, 9}, {SGD, 4, 24}, {SGD, 4, 9}, {SGD, 2, 0}, {PLAIN, 16, 24}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char dir[4096];
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, i);
        check_bound(dir, cases[i].how, cases[i].limit, cases[i].bf16_from);
    }
}

/* An eighth of 10.5 bits, half a bit for which elements these are, and headers. */
static void test_bf16_gradients_of_few_rows(void **state) {
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 47);
    x.scale = 0.37f;
    x.sparse = true;
    for (int i = 0; i < 40; i++) {
        model_step(&x);
    }
    save_model(store, &x, NULL);
    for (int i = 0; i < 4; i++) {
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        save_model(store, &x, &o);
        check_model(store, &x);
        check_method(store, x.step, "exp_avg.w", "step", 3);
    }
    model_free(&x);
    ckd_store_close(store);
}

/* Wrong hyperparameters only make the prediction useless. Values stay exact. */
static void test_wrong_hyperparameters(void **state) {
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 3);
    for (int i = 0; i < 10; i++) {
        model_step(&x);
    }
    save_model(store, &x, NULL);
    model_step(&x);
    ckd_optimizer wrong = optimizer_of(&x);
    wrong.lr = 0.5;
    wrong.beta2 = 0.5;
    save_model(store, &x, &wrong);
    check_model(store, &x);
    check_not_step(store, x.step, "w");
    check_not_step(store, x.step, "exp_avg_sq.w");
    /* The hyperparameters are right, but two steps apart nothing can be predicted. */
    for (int i = 0; i < 2; i++) {
        model_step(&x);
    }
    ckd_optimizer o = optimizer_of(&x);
    save_model(store, &x, &o);
    check_model(store, &x);
    check_not_step(store, x.step, "exp_avg_sq.w");
    assert_int_equal(verify_damage(store), 0);
    model_free(&x);
    ckd_store_close(store);
}

/* ---- moments that are kept in a scratch file ---- */

static void save_with_staging(ckd_store *store, const model *x, const ckd_optimizer *o, uint64_t staging) {
    ckd_save_options options = options_of("run", x->step);
    options.max_load_cost = 100;
    options.staging_bytes = staging;
    ckd_save *save = begin_with(store, &options);
    add(save, "exp_avg.w", x->m, NULL, o);
    add(save, "exp_avg_sq.w", x->v, NULL, o);
    add(save, "w", x->w, NULL, o);
    commit(save);
}

/* With little staging memory the same is stored, and the scratch file is removed. */
static void test_little_staging(void **state) {
    double bits[2];
    for (int i = 0; i < 2; i++) {
        char dir[4096], method[32];
        snprintf(dir, sizeof(dir), "%s/%d", (char *)*state, i);
        assert_int_equal(mkdir(dir, 0777), 0);
        ckd_store *store = store_create(dir);
        model x = model_new(PLAIN, 5);
        for (int k = 0; k < 40; k++) {
            model_step(&x);
        }
        save_model(store, &x, NULL);
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        save_with_staging(store, &x, &o, i ? 1 : 0);
        check_model(store, &x);
        check_method(store, x.step, "exp_avg_sq.w", "step", 2.2);
        bits[i] = look_at(method, store, x.step, "w");
        assert_string_equal(method, "step");
        assert_int_equal(verify_damage(store), 0);
        model_free(&x);
        ckd_store_close(store);
        store_check_clean(dir);
    }
    assert_true(fabs(bits[0] - bits[1]) < 0.01); /* ids may compress a little differently */
}

typedef struct broken {
    file_op step;
    int after; /* this many succeed first */
} broken;

/* The path of an operation on a scratch file ends in the directory's name. */
static int break_scratch(void *context, file_op step, const char *path) {
    broken *b = context;
    size_t length = strlen(path);
    bool scratch = length > 5 && strcmp(path + length - 5, "/data") == 0;
    return scratch && step == b->step && b->after-- <= 0 ? EIO : 0;
}

/* If the scratch file fails, nothing is predicted. The save succeeds. */
static void test_failing_scratch_file(void **state) {
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 5);
    for (int i = 0; i < 10; i++) {
        model_step(&x);
    }
    save_model(store, &x, NULL);
    static const file_op steps[] = {FILE_OP_CREATE, FILE_OP_WRITE, FILE_OP_READ, FILE_OP_READ};
    for (int i = 0; i < 4; i++) {
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        broken b = {steps[i], i == 3};
        file_set_fault_hook(break_scratch, &b);
        save_with_staging(store, &x, &o, 1);
        file_set_fault_hook(NULL, NULL);
        assert_true(b.after < 0);
        check_model(store, &x);
        check_not_step(store, x.step, "w");
    }
    assert_int_equal(verify_damage(store), 0);
    model_free(&x);
    ckd_store_close(store);
}

static void test_invalid_hyperparameters(void **state) {
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 3);
    x.step = 1;
    const ckd_optimizer good = optimizer_of(&x);
    ckd_optimizer bad[6];
    for (size_t i = 0; i < 6; i++) {
        bad[i] = good;
    }
    bad[0].kind = (ckd_optimizer_kind)4;
    bad[1].step = 0;
    bad[2].beta1 = 1;
    bad[3].lr = (double)NAN;
    bad[4].eps = -1;
    bad[5].dampening = (double)INFINITY;
    for (size_t i = 0; i < 6; i++) {
        ckd_save *save = begin(store, 1);
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = "w";
        t.dtype = CKD_F32;
        t.ndim = 2;
        t.shape = shape;
        t.data = x.w;
        t.optimizer = &bad[i];
        assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_E_INVALID);
        ckd_save_abort(save);
    }
    model_free(&x);
    ckd_store_close(store);
}

/* The order of the tensors decides which of them can be predicted. It does not change the values. */
static void test_any_order(void **state) {
    static const char *const names[] = {"exp_avg.w", "exp_avg_sq.w", "w"};
    static const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    static const bool square[] = {true, true, false, false, true, false};
    static const bool weight[] = {true, false, true, false, false, false};
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 5);
    for (int i = 0; i < 10; i++) {
        model_step(&x);
    }
    save_model(store, &x, NULL);
    for (size_t k = 0; k < 6; k++) {
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        const float *values[] = {x.m, x.v, x.w};
        ckd_save *save = begin(store, x.step);
        for (size_t i = 0; i < 3; i++) {
            int which = orders[k][i];
            add(save, names[which], values[which], NULL, &o);
        }
        commit(save);
        check_model(store, &x);
        char method[32];
        look_at(method, store, x.step, "exp_avg_sq.w");
        assert_int_equal(strcmp(method, "step") == 0, square[k]);
        look_at(method, store, x.step, "w");
        assert_int_equal(strcmp(method, "step") == 0, weight[k]);
    }
    assert_int_equal(verify_damage(store), 0);
    model_free(&x);
    ckd_store_close(store);
}

/* The moments of one region do not predict weights of another region. */
static void test_regions(void **state) {
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 5);
    const uint64_t half = N / 2 + 77;
    const ckd_region parts[] = {{.kind = CKD_REGION_FLAT, .start = 0, .count = half},
                                {.kind = CKD_REGION_FLAT, .start = half, .count = N - half}};
    for (int k = 0; k < 5; k++) {
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        ckd_save *save = begin(store, x.step);
        for (size_t p = 0; p < 2; p++) {
            size_t at = p ? half : 0;
            add(save, "exp_avg.w", x.m + at, &parts[p], &o);
            add(save, "exp_avg_sq.w", x.v + at, &parts[p], &o);
            if (k == 4) { /* the weights come at once this time */
                continue;
            }
            add(save, "w", x.w + at, &parts[p], &o);
        }
        if (k == 4) {
            add(save, "w", x.w, NULL, &o);
        }
        commit(save);
        check_model(store, &x);
        if (k == 3) {
            check_method(store, x.step, "w", "step", 1.5);
            check_method(store, x.step, "exp_avg_sq.w", "step", 3);
        }
    }
    check_not_step(store, x.step, "w");
    /* Loads regions that cross the saved ones. */
    ckd_checkpoint c;
    ckd_load *load;
    assert_int_equal(ckd_store_find(&c, store, "run", x.step - 1, NULL), CKD_OK);
    model_free(&x);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
    float *row = malloc(COLUMNS * sizeof(float)),
          *all = load_whole(store, "run", c.step, "w", N * sizeof(float));
    for (uint64_t r = 0; r < ROWS; r += 5) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = "w";
        q.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {r, 0}, .lengths = {1, COLUMNS}};
        q.data = row;
        q.size = COLUMNS * sizeof(float);
        assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
        assert_memory_equal(row, all + r * COLUMNS, q.size);
    }
    ckd_load_end(load);
    free(row);
    free(all);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/* NaNs of several kinds, infinities, zeros of both signs and denormals in every part of the state. */
static void test_special_values(void **state) {
    static const uint32_t special[] = {0x7fc00000, 0xffc00001, 0x7f800001, 0x7f800000,
                                       0xff800000, 0x80000000, 0,          1,
                                       0x807fffff, 0x7f7fffff, 0xff7fffff, 0x00800000};
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 5);
    for (int k = 0; k < 4; k++) {
        model_step(&x);
        for (size_t i = 0; i < 12 * 12 * 12; i++) {
            memcpy(&x.w[i], &special[i % 12], 4);
            memcpy(&x.m[i], &special[i / 12 % 12], 4);
            memcpy(&x.v[i], &special[(i / 144 + (size_t)k) % 12], 4);
        }
        ckd_optimizer o = optimizer_of(&x);
        save_model(store, &x, &o);
        check_model(store, &x);
    }
    check_method(store, x.step, "w", "step", 6);
    assert_int_equal(verify_damage(store), 0);
    model_free(&x);
    ckd_store_close(store);
}

/* The master is predicted, and its rounded copy is derived from it. Moments of another dtype predict nothing. */
static void test_mixed_precision(void **state) {
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 9);
    for (int k = 0; k < 4; k++) {
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        uint16_t *low = round_to_bf16(x.w, N), *low_m = round_to_bf16(x.m, N);
        ckd_save *save = begin(store, x.step);
        add(save, "exp_avg.w", x.m, NULL, &o);
        add(save, "exp_avg_sq.w", x.v, NULL, &o);
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = "w";
        t.dtype = CKD_BF16;
        t.ndim = 2;
        t.shape = shape;
        t.data = low;
        t.optimizer = &o;
        if (k % 2) { /* the copy before its master */
            assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
        }
        add(save, "master.w", x.w, NULL, &o);
        if (k % 2 == 0) {
            assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
        }
        t.name = "exp_avg.y";
        t.data = low_m;
        assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
        add(save, "exp_avg_sq.y", x.v, NULL, &o);
        add(save, "y", x.m, NULL, &o);
        commit(save);
        check_values(store, x.step, "master.w", x.w);
        check_values(store, x.step, "exp_avg_sq.w", x.v);
        check_values(store, x.step, "exp_avg_sq.y", x.v);
        free(low);
        free(low_m);
        if (k) {
            check_method(store, x.step, "master.w", "step", 0.8);
            check_method(store, x.step, "exp_avg_sq.w", "step", 3);
            check_not_step(store, x.step, "y");
        }
        if (k == 2) {
            check_method(store, x.step, "w", "cast", 0.3);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    model_free(&x);
    ckd_store_close(store);
}

/* A long chain within the default load cost. Every value is also found without the materialized copies. */
static void test_chain_within_bounds(void **state) {
    ckd_store *store = store_create(*state);
    enum { STEPS = 20 };
    model x = model_new(PLAIN, 11);
    float *kept[STEPS][3];
    uint64_t first = 11, steps = 0;
    for (int i = 0; i < 10; i++) {
        model_step(&x);
    }
    for (int k = 0; k < STEPS; k++) {
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        ckd_save *save = begin_save(store, "run", x.step);
        add(save, "exp_avg.w", x.m, NULL, &o);
        add(save, "exp_avg_sq.w", x.v, NULL, &o);
        add(save, "w", x.w, NULL, &o);
        ckd_checkpoint info = commit(save);
        assert_true(info.load_cost <= 4);
        char method[32];
        look_at(method, store, x.step, "w");
        steps += strcmp(method, "step") == 0;
        const float *from[] = {x.m, x.v, x.w};
        for (size_t p = 0; p < 3; p++) {
            kept[k][p] = malloc(N * sizeof(float));
            memcpy(kept[k][p], from[p], N * sizeof(float));
        }
    }
    assert_true(steps >= STEPS / 2);
    ckd_store_close(store);
    char copies[4096];
    snprintf(copies, sizeof(copies), "rm -rf '%s/store/data/k'", (const char *)*state);
    assert_int_equal(system(copies), 0);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    for (int k = STEPS; k-- > 0;) {
        check_values(store, first + (uint64_t)k, "w", kept[k][2]);
        check_values(store, first + (uint64_t)k, "exp_avg_sq.w", kept[k][1]);
        check_values(store, first + (uint64_t)k, "exp_avg.w", kept[k][0]);
        for (size_t p = 0; p < 3; p++) {
            free(kept[k][p]);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    model_free(&x);
    ckd_store_close(store);
}

/* Makes all chunk files unreadable. */
static void overwrite_chunk_files(const char *dir) {
    char command[4096];
    snprintf(command, sizeof(command),
             "for f in '%.900s'/store/data/c/*; do head -c $(stat -c %%s \"$f\") /dev/zero >\"$f.new\" && "
             "cat \"$f.new\" >\"$f\"; rm \"$f.new\"; done; rm -rf '%.900s/store/data/k'",
             dir, dir);
    assert_int_equal(system(command), 0);
}

static ckd_status load_part(ckd_load *load, const char *name, uint64_t first, uint64_t rows, float *to) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = name;
    q.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {first, 0}, .lengths = {rows, COLUMNS}};
    q.data = to;
    q.size = rows * COLUMNS * sizeof(float);
    return ckd_load_tensor(load, &q, NULL);
}

/* Like save_model, with noise that makes the file too large to be kept in memory while it is open. */
static void save_model_in_large_file(ckd_store *store, const model *x, const ckd_optimizer *o) {
    enum { BALLAST = 300000 };
    uint8_t *ballast = malloc(BALLAST);
    uint64_t noise = x->step;
    for (size_t i = 0; i < BALLAST; i++) {
        noise = noise * UINT64_C(6364136223846793005) + 1442695040888963407;
        ballast[i] = (uint8_t)(noise >> 56);
    }
    ckd_save *save = begin(store, x->step);
    add(save, "exp_avg.w", x->m, NULL, o);
    add(save, "exp_avg_sq.w", x->v, NULL, o);
    add(save, "w", x->w, NULL, o);
    assert_int_equal(ckd_save_blob(save, "ballast", ballast, BALLAST, NULL), CKD_OK);
    commit(save);
    free(ballast);
}

/*
 * A load keeps what it decoded to rebuild weights or second moments. The other tensors are then loaded after the files
 * were overwritten.
 */
static void test_a_load_rebuilds_once(void **state) {
    static const char *const names[] = {"w", "exp_avg_sq.w", "exp_avg.w"};
    model x = model_new(PLAIN, 23);
    const float *values[] = {x.w, x.v, x.m};
    for (int first = 0; first < 2; first++) {
        char dir[1024];
        snprintf(dir, sizeof(dir), "%.900s/%d", (const char *)*state, first);
        assert_int_equal(mkdir(dir, 0777), 0);
        ckd_store *store = store_create(dir);
        for (int k = 0; k < 4; k++) {
            model_step(&x);
            ckd_optimizer o = optimizer_of(&x);
            save_model_in_large_file(store, &x, &o);
        }
        ckd_store_close(store);
        char copies[4096];
        snprintf(copies, sizeof(copies), "rm -rf '%s/store/data/k'", dir);
        assert_int_equal(system(copies), 0);
        store = store_reopen(dir, CKD_OPEN_READ);
        ckd_checkpoint c;
        ckd_load *load;
        assert_int_equal(ckd_store_find(&c, store, "run", x.step, NULL), CKD_OK);
        assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
        float *to = malloc(N * sizeof(float));
        assert_int_equal(load_part(load, names[first], 0, ROWS, to), CKD_OK);
        assert_memory_equal(to, values[first], N * sizeof(float));
        overwrite_chunk_files(dir);
        for (int k = 0; k < 3; k++) {
            if (k == first) {
                assert_int_not_equal(load_part(load, names[k], 0, ROWS, to),
                                     CKD_OK); /* it was returned, and is not kept */
                continue;
            }
            assert_int_equal(load_part(load, names[k], 1, 5, to),
                             CKD_OK); /* a partial request does not discard it */
            assert_memory_equal(to, values[k] + COLUMNS, 5 * COLUMNS * sizeof(float));
            assert_int_equal(load_part(load, names[k], 0, ROWS, to), CKD_OK);
            assert_memory_equal(to, values[k], N * sizeof(float));
            assert_int_not_equal(load_part(load, names[k], 0, 1, to), CKD_OK);
        }
        free(to);
        ckd_load_end(load);
        ckd_store_close(store);
    }
    model_free(&x);
}

static void test_same_content_again(void **state) {
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 13);
    for (int k = 0; k < 3; k++) {
        model_step(&x);
        ckd_optimizer o = optimizer_of(&x);
        save_model(store, &x, &o);
    }
    ckd_optimizer o = optimizer_of(&x);
    ckd_save_options options = options_of("run", x.step);
    options.on_duplicate = CKD_DUPLICATE_SAME_OK;
    for (int differs = 0; differs < 2; differs++) {
        ckd_save *save = begin_with(store, &options);
        add(save, "exp_avg.w", x.m, NULL, &o);
        add(save, "exp_avg_sq.w", x.v, NULL, &o);
        x.w[5] += differs ? 1.0f : 0.0f;
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = "w";
        t.dtype = CKD_F32;
        t.ndim = 2;
        t.shape = shape;
        t.data = x.w;
        t.optimizer = &o;
        assert_int_equal(ckd_save_tensor(save, &t, NULL), differs ? CKD_E_EXISTS : CKD_OK);
        if (differs) {
            ckd_save_abort(save);
        } else {
            commit(save);
        }
    }
    model_free(&x);
    ckd_store_close(store);
}

/* Steps saved by two ranks, each with its own rows. */
static void test_ranks(void **state) {
    ckd_store *store = store_create(*state);
    model x = model_new(PLAIN, 17);
    const ckd_region rows[] = {
        {.kind = CKD_REGION_BOX, .lengths = {ROWS / 2, COLUMNS}},
        {.kind = CKD_REGION_BOX, .offsets = {ROWS / 2, 0}, .lengths = {ROWS / 2, COLUMNS}}};
    for (int k = 0; k < 3; k++) {
        model_step(&x);
        ckd_optimizer optimizer = optimizer_of(&x);
        ckd_save_options o = options_of("run", x.step);
        o.world = 2;
        o.max_load_cost = 100;
        assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
        ckd_save *saves[2];
        ckd_part parts[2];
        for (o.rank = 0; o.rank < 2; o.rank++) {
            saves[o.rank] = begin_with(store, &o);
            add(saves[o.rank], "exp_avg.w", x.m + o.rank * N / 2, &rows[o.rank], &optimizer);
            add(saves[o.rank], "exp_avg_sq.w", x.v + o.rank * N / 2, &rows[o.rank], &optimizer);
            add(saves[o.rank], "w", x.w + o.rank * N / 2, &rows[o.rank], &optimizer);
            assert_int_equal(ckd_save_seal(&parts[o.rank], saves[o.rank], NULL), CKD_OK);
        }
        assert_int_equal(ckd_save_publish(NULL, saves[0], parts, 2, NULL), CKD_OK);
        ckd_save_end(saves[1]);
        ckd_part_free(&parts[0]);
        ckd_part_free(&parts[1]);
        check_model(store, &x);
    }
    check_method(store, x.step, "w", "step", 1.5);
    check_method(store, x.step, "exp_avg_sq.w", "step", 3);
    assert_int_equal(verify_damage(store), 0);
    model_free(&x);
    ckd_store_close(store);
}

/* The scenes of the tests for crashes, faults and full disks contain steps, however their residuals are coded. */
static void test_scenes_have_steps(void **state) {
    scene_make(*state, 0, 3);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    for (uint64_t step = 1; step < 3; step++) {
        check_not_step(store, step, "exp_avg.net");
        check_method(store, step, "exp_avg_sq.net", "step", 32);
        check_method(store, step, "net", "step", 32);
    }
    ckd_store_close(store);
}

#define TEST(name) tempdir_test(name)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_plain),
        TEST(test_parentheses),
        TEST(test_fused),
        TEST(test_doubles),
        TEST(test_apex),
        TEST(test_l2),
        TEST(test_sgd),
        TEST(test_nesterov),
        TEST(test_bf16_gradients),
        TEST(test_loads_stay_within_the_bound),
        TEST(test_bf16_gradients_of_few_rows),
        TEST(test_wrong_hyperparameters),
        TEST(test_little_staging),
        TEST(test_failing_scratch_file),
        TEST(test_invalid_hyperparameters),
        TEST(test_any_order),
        TEST(test_regions),
        TEST(test_special_values),
        TEST(test_mixed_precision),
        TEST(test_chain_within_bounds),
        TEST(test_a_load_rebuilds_once),
        TEST(test_same_content_again),
        TEST(test_ranks),
        TEST(test_scenes_have_steps),
    };
    return cmocka_run_group_tests_name("step", tests, NULL, NULL);
}
