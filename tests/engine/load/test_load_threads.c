/* Loads of many small tensors: all threads work, and every byte is read once. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/load/load.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scratch.h"
#include "tests/support/stored.h"

/* Each tensor is a block, and large enough to be handed to a thread by itself. */
enum { TENSORS = 40, SIDE = 136, ELEMENTS = SIDE * SIDE, REQUESTS = 3 * TENSORS };
#define LR    1e-3f
#define BETA1 .9f
#define BETA2 .95f
#define EPS   1e-8f

static const uint64_t shape[2] = {SIDE, SIDE};

static const char *name_of(char name[32], const char *prefix, unsigned i) {
    snprintf(name, 32, "%slayer.%03u", prefix, i);
    return name;
}

/* ---- a parameter that AdamW trains ---- */

typedef struct parameter {
    float first[ELEMENTS], second[ELEMENTS], weight[ELEMENTS];
} parameter;

/* No weight decay. The save codes what the optimizer's rounding differs in. */
static void train(parameter *p, uint64_t step, uint64_t *random) {
    double bias1 = 1 - pow(BETA1, (double)step), bias2 = 1 - pow(BETA2, (double)step);
    for (unsigned k = 0; k < ELEMENTS; k++) {
        float gradient = (float)drift_normal(random) * 1e-3f;
        p->first[k] += (1 - BETA1) * (gradient - p->first[k]);
        p->second[k] = p->second[k] * BETA2 + (1 - BETA2) * gradient * gradient;
        p->weight[k] -= LR / (float)bias1 * p->first[k] / (sqrtf(p->second[k]) / (float)sqrt(bias2) + EPS);
    }
}

static void add_part(ckd_save *save, const char *prefix, unsigned i, const float *values,
                     const ckd_optimizer *optimizer) {
    char name[32];
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name_of(name, prefix, i);
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.data = values;
    t.optimizer = optimizer;
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
}

static parameter *all;

static void save_all(ckd_store *store, uint64_t step) {
    ckd_optimizer o = CKD_OPTIMIZER_INIT;
    o.kind = CKD_ADAMW;
    o.lr = (double)LR;
    o.beta1 = (double)BETA1;
    o.beta2 = (double)BETA2;
    o.eps = (double)EPS;
    o.step = step;
    ckd_save *save = begin_save(store, "run", step);
    for (unsigned i = 0; i < TENSORS; i++) {
        add_part(save, "exp_avg.", i, all[i].first, &o);
        add_part(save, "exp_avg_sq.", i, all[i].second, &o);
        add_part(save, "", i, all[i].weight, &o);
    }
    commit_save(save);
}

static int make_store(void **state) {
    stored *f = stored_make(2, 1);
    uint64_t random = 1;
    all = calloc(TENSORS, sizeof(*all));
    assert_non_null(all);
    for (unsigned i = 0; i < TENSORS; i++) {
        for (unsigned k = 0; k < ELEMENTS; k++) {
            all[i].weight[k] = (float)drift_normal(&random) * .02f;
        }
    }
    for (uint64_t step = 1; step <= 3; step++) {
        for (unsigned i = 0; i < TENSORS; i++) {
            train(&all[i], step, &random);
        }
        save_all(f->store, step);
    }
    *state = f;
    return 0;
}

static int remove_store(void **state) {
    free(all);
    return stored_remove(state);
}

/* Requests of all tensors, with memory for them. */
static ckd_load_request *requests_of(void) {
    static const char *const prefix[] = {"exp_avg.", "exp_avg_sq.", ""};
    static char names[REQUESTS][32];
    ckd_load_request *q = calloc(REQUESTS, sizeof(*q));
    assert_non_null(q);
    for (unsigned i = 0; i < REQUESTS; i++) {
        q[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        q[i].name = name_of(names[i], prefix[i % 3], i / 3);
        q[i].size = sizeof(float) * ELEMENTS;
        q[i].data = malloc(q[i].size);
        assert_non_null(q[i].data);
    }
    return q;
}

static void check_and_clear(const ckd_load_request *q) {
    for (unsigned i = 0; i < REQUESTS; i++) {
        const parameter *p = &all[i / 3];
        const float *const saved[] = {p->first, p->second, p->weight};
        assert_memory_equal(q[i].data, saved[i % 3], q[i].size);
        memset(q[i].data, 0xa5, q[i].size);
    }
}

static void free_requests(ckd_load_request *q) {
    for (unsigned i = 0; i < REQUESTS; i++) {
        free(q[i].data);
    }
    free(q);
}

/*
 * The second thread may come too late for a load of a few milliseconds, so there are several. Tensor by tensor, it
 * would never get a block.
 */
static void test_small_tensors_use_all_threads(void **state) {
    const stored *f = *state;
    ckd_load_request *q = requests_of();
    bool helped = false;
    for (int i = 0; i < 200 && !helped; i++) {
        ckd_load *load = stored_load(f->store, "run", 3, NULL);
        assert_int_equal(load->decoder_count, 2);
        assert_int_equal(ckd_load_all(load, q, REQUESTS, 0, NULL), CKD_OK);
        helped = load->decoders[1].bytes_read > 0;
        ckd_load_end(load);
        check_and_clear(q);
    }
    assert_true(helped);
    free_requests(q);
}

/* Weights that are predicted from their moments are decoded on the thread that has these. */
static void test_steps_are_read_once(void **state) {
    const stored *f = *state;
    ckd_load_request *q = requests_of();
    for (int i = 0; i < 20; i++) {
        ckd_load *load = stored_load(f->store, "run", 3, NULL);
        ckd_load_explanation *plan;
        assert_non_null(load->shared.view); /* there are steps */
        assert_int_equal(ckd_load_explain(&plan, load, q, REQUESTS, NULL), CKD_OK);
        assert_int_equal(ckd_load_all(load, q, REQUESTS, 0, NULL), CKD_OK);
        assert_int_equal(ckd_load_bytes_read(load), plan->all.read_bytes);
        ckd_load_explanation_free(plan);
        ckd_load_end(load);
        check_and_clear(q);
    }
    free_requests(q);
}

/* More tensors than one batch holds, among them some that are missing, of no elements, or requested twice. */
static void test_many_batches(void **state) {
    const stored *f = *state;
    enum { COUNT = 2500, SMALL = 3 };
    static float values[COUNT][SMALL], loaded[COUNT + 2][SMALL];
    static char names[COUNT][32];
    ckd_save *save = begin_save(f->store, "many", 0);
    for (unsigned i = 0; i < COUNT; i++) {
        const uint64_t count = i % 100 == 7 ? 0 : SMALL;
        values[i][0] = values[i][2] = (float)i;
        add_tensor(save, name_of(names[i], "", i), CKD_F32, 1, &count, NULL, values[i]);
    }
    commit_save(save);
    ckd_load_request *q = calloc(COUNT + 2, sizeof(*q));
    assert_non_null(q);
    for (unsigned i = 0; i < COUNT + 2; i++) {
        q[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        q[i].name = i < COUNT ? names[i] : i == COUNT ? "missing" : names[COUNT - 1];
        q[i].data = loaded[i];
        q[i].size = i % 100 == 7 ? 0 : sizeof(loaded[i]);
    }
    ckd_load *load = stored_load(f->store, "many", 0, NULL);
    assert_int_equal(ckd_load_all(load, q, COUNT + 2, CKD_DIFFERS_MISSING, NULL), CKD_OK);
    for (unsigned i = 0; i < COUNT; i++) {
        if (i % 100 != 7) {
            assert_memory_equal(loaded[i], values[i], sizeof(values[i]));
        }
    }
    assert_memory_equal(loaded[COUNT + 1], values[COUNT - 1], sizeof(values[0]));
    ckd_load_end(load);
    free(q);
}

static int count_reads(void *context, file_op op, const char *path) {
    *(unsigned *)context += op == FILE_OP_READ && strstr(path, "/data/c/") != NULL;
    return 0;
}

/* Payloads that follow each other in a file are read together, also where a chain alternates between files. */
static void test_small_payloads_are_read_together(void **state) {
    const stored *f = *state;
    enum { COUNT = 500, VALUES = 700 }; /* the files are larger than those that are read at once */
    static char names[COUNT][32];
    const uint64_t count = VALUES;
    float *values = random_values(CKD_F32, (uint64_t)COUNT * VALUES, 3),
          *loaded = malloc(sizeof(float) * COUNT * VALUES);
    ckd_load_request *q = calloc(COUNT, sizeof(*q));
    assert_non_null(loaded);
    assert_non_null(q);
    for (uint64_t step = 0; step < 3; step++) {
        ckd_save *save = begin_save(f->store, "small", step);
        change_values(CKD_F32, values, (uint64_t)COUNT * VALUES, (unsigned)step);
        for (unsigned i = 0; i < COUNT; i++) {
            add_tensor(save, name_of(names[i], "", i), CKD_F32, 1, &count, NULL, values + (size_t)i * VALUES);
        }
        commit_save(save);
    }
    for (unsigned i = 0; i < COUNT; i++) {
        q[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        q[i].name = names[i];
        q[i].data = loaded + (size_t)i * VALUES;
        q[i].size = sizeof(float) * VALUES;
    }
    ckd_store *store = stored_open(f->dir, 1);
    ckd_load *load = stored_load(store, "small", 2, NULL);
    unsigned reads = 0;
    file_set_fault_hook(count_reads, &reads);
    assert_int_equal(ckd_load_all(load, q, COUNT, 0, NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    assert_in_range(reads, 1, COUNT / 4);
    assert_memory_equal(loaded, values, sizeof(float) * COUNT * VALUES);
    ckd_load_end(load);
    ckd_store_close(store);
    free(values);
    free(loaded);
    free(q);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_tensors_use_all_threads), cmocka_unit_test(test_steps_are_read_once),
        cmocka_unit_test(test_many_batches), cmocka_unit_test(test_small_payloads_are_read_together)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_store, remove_store);
    scratch_end();
    return failed;
}
