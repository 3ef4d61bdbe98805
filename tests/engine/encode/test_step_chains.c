/*
 * Chains of optimizer steps in a run that saves every step: all tensors of a parameter end their chains at the same
 * save, few parameters do so at a time, and each checkpoint stays within the bound on its load.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "include/ckptdelta.h"
#include "tests/support/checkpoints.h"
#include "tests/support/counters.h"
#include "tests/support/tempdir.h"

enum { PARAMETERS = 16, ROWS = 128, COLUMNS = 256, N = ROWS * COLUMNS, SAVES = 36, TENSORS = 3 * PARAMETERS };

static const uint64_t shape[] = {ROWS, COLUMNS};
static const double lr = 1e-3, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;

/* ---- training ---- */

typedef struct parameter {
    float w[N], m[N], v[N];
} parameter;

static uint64_t random_state;

static float normal(void) {
    double u[2];
    for (int i = 0; i < 2; i++) {
        random_state = random_state * 6364136223846793005u + 1442695040888963407u;
        u[i] = ((double)(random_state >> 11) + 0.5) / 9007199254740992.0;
    }
    return (float)(sqrt(-2 * log(u[0])) * cos(6.283185307179586 * u[1]));
}

/* AdamW as PyTorch computes it on a CPU: one rounding per operation. */
static void train(parameter *p, uint64_t step) {
    float one_m = (float)(1 - beta1), one_v = (float)(1 - beta2), b2 = (float)beta2;
    float size = (float)(lr / (1 - pow(beta1, (double)step)));
    float root = (float)sqrt(1 - pow(beta2, (double)step));
    for (size_t i = 0; i < N; i++) {
        float g = 0.01f * normal();
        volatile float scaled = one_m * (g - p->m[i]);
        p->m[i] += scaled;
        volatile float square = g * g, new_part = square * one_v, old_part = p->v[i] * b2;
        p->v[i] = old_part + new_part;
        volatile float denominator = sqrtf(p->v[i]) / root;
        denominator += (float)eps;
        volatile float update = p->m[i] / denominator;
        update *= size;
        p->w[i] -= update;
    }
}

/* ---- saves ---- */

static void add(ckd_save *save, const char *kind, int index, const float *values, const ckd_optimizer *o) {
    char name[64];
    snprintf(name, sizeof(name), "%sp%02d.weight", kind, index);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.data = values;
    t.optimizer = o;
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
}

static ckd_checkpoint save_all(ckd_store *store, const parameter *all, uint64_t step, double limit) {
    ckd_optimizer o = CKD_OPTIMIZER_INIT;
    o.kind = CKD_ADAMW;
    o.lr = lr;
    o.beta1 = beta1;
    o.beta2 = beta2;
    o.eps = eps;
    o.step = step;
    ckd_save_options options = options_of("run", step);
    options.max_load_cost = limit;
    ckd_save *save = begin_with(store, &options);
    for (int i = 0; i < PARAMETERS; i++) {
        add(save, "exp_avg.", i, all[i].m, &o);
        add(save, "exp_avg_sq.", i, all[i].v, &o);
        add(save, "", i, all[i].w, &o);
    }
    ckd_checkpoint info;
    assert_int_equal(ckd_save_commit(&info, save, NULL), CKD_OK);
    return info;
}

/* ---- what is stored ---- */

typedef struct ends {
    bool weight[PARAMETERS], square[PARAMETERS]; /* not coded as a step */
} ends;

static ends find_ends(ckd_store *store, const ckd_id *id) {
    ends e = {{false}, {false}};
    ckd_tensor_list *list;
    assert_int_equal(ckd_store_tensors(&list, store, id, NULL), CKD_OK);
    assert_int_equal(list->count, TENSORS);
    for (size_t i = 0; i < list->count; i++) {
        const ckd_tensor_info *t = &list->items[i];
        int index = atoi(strrchr(t->name, 'p') + 1);
        bool ended = strcmp(t->method, "step") != 0;
        assert_true(index >= 0 && index < PARAMETERS);
        if (t->role == CKD_ROLE_WEIGHT) {
            e.weight[index] = ended;
        } else if (t->role == CKD_ROLE_EXP_AVG_SQ) {
            e.square[index] = ended;
        }
    }
    ckd_tensor_list_free(list);
    return e;
}

/* Loads the checkpoint as a whole: the values are right, and each payload is read once, with little around it. */
static void check_load(ckd_store *store, const ckd_id *id, const parameter *all) {
    ckd_load *load;
    ckd_load_explanation *plan;
    parameter *back = calloc(PARAMETERS, sizeof(*back));
    ckd_load_request requests[TENSORS];
    assert_non_null(back);
    assert_int_equal(ckd_load_begin(&load, store, id, NULL), CKD_OK);
    const ckd_tensor_list *list = ckd_load_tensors(load);
    for (size_t i = 0; i < TENSORS; i++) {
        const ckd_tensor_info *t = &list->items[i];
        parameter *p = &back[atoi(strrchr(t->name, 'p') + 1)];
        requests[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        requests[i].name = t->name;
        requests[i].data = t->role == CKD_ROLE_WEIGHT ? p->w : t->role == CKD_ROLE_EXP_AVG_SQ ? p->v : p->m;
        requests[i].size = sizeof(p->w);
    }
    assert_int_equal(ckd_load_explain(&plan, load, requests, TENSORS, NULL), CKD_OK);
    uint64_t before = bytes_read();
    assert_int_equal(ckd_load_all(load, requests, TENSORS, 0, NULL), CKD_OK);
    uint64_t read = bytes_read() - before;
    if (plan->checkpoints < 14 || read > plan->all.read_bytes * 5 / 4) {
        fail_msg("%llu bytes were read, of %llu in %llu checkpoints", (unsigned long long)read,
                 (unsigned long long)plan->all.read_bytes, (unsigned long long)plan->checkpoints);
    }
    assert_memory_equal(back, all, PARAMETERS * sizeof(*back));
    ckd_load_explanation_free(plan);
    ckd_load_end(load);
    free(back);
}

static parameter *new_parameters(void) {
    parameter *all = calloc(PARAMETERS, sizeof(*all));
    assert_non_null(all);
    random_state = 3;
    for (size_t i = 0; i < PARAMETERS; i++) {
        for (size_t k = 0; k < N; k++) {
            all[i].w[k] = 0.05f * normal();
        }
    }
    return all;
}

static ckd_checkpoint train_and_save(ckd_store *store, parameter *all, uint64_t step, double limit) {
    for (size_t i = 0; i < PARAMETERS; i++) {
        train(&all[i], step);
    }
    return save_all(store, all, step, limit);
}

static void test_chains_of_a_parameter_end_together(void **state) {
    ckd_store *store = store_create(*state);
    parameter *all = new_parameters();
    int most = 0, total = 0;
    for (int n = 0; n < SAVES; n++) {
        ckd_checkpoint made = train_and_save(store, all, (uint64_t)n + 11, 4);
        if (!(made.load_cost <= 4)) {
            fail_msg("save %d: a load costs %.2f base loads", n, made.load_cost);
        }
        ends e = find_ends(store, &made.id);
        int ended = 0;
        for (int i = 0; i < PARAMETERS && n > 0; i++) {
            if (e.weight[i] != e.square[i]) {
                fail_msg("save %d: the chains of parameter %d end apart", n, i);
            }
            ended += e.weight[i];
        }
        most = ended > most ? ended : most;
        total += ended;
    }
    /* Each chain is at least four steps long on average, and at most a quarter of them end with one save. */
    assert_in_range(total, 1, PARAMETERS * SAVES / 4);
    assert_in_range(most, 1, PARAMETERS / 4);
    assert_int_equal(verify_damage(store), 0);
    free(all);
    ckd_store_close(store);
}

/* The chain alternates between more files than a decoder once had windows for. */
static void test_a_load_of_a_long_chain_reads_each_byte_once(void **state) {
    ckd_store *store = store_create(*state);
    parameter *all = new_parameters();
    ckd_checkpoint made;
    for (uint64_t step = 11; step < 11 + 14; step++) {
        made = train_and_save(store, all, step, 100);
    }
    check_load(store, &made.id, all);
    free(all);
    ckd_store_close(store);
}

int main(void) {
#define TEST(test) cmocka_unit_test_setup_teardown(test, tempdir_setup, tempdir_teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_chains_of_a_parameter_end_together),
        TEST(test_a_load_of_a_long_chain_reads_each_byte_once),
    };
    return cmocka_run_group_tests_name("step_chains", tests, NULL, NULL);
}
