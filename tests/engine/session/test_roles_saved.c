/*
 * Roles in saves and sessions of the C API: what a single name tells, what all names together tell, and what is
 * reported about tensors in doubt.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/session/session.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

enum { ROWS = 96, COLUMNS = 64, COUNT = ROWS * COLUMNS, PARTS = 3 };

/* First moment, second moment and weight, as after a step of AdamW. */
typedef struct adam {
    float values[PARTS][COUNT];
    ckd_optimizer optimizer;
} adam;

static void take_step(adam *a) {
    a->optimizer.step++;
    double b1 = 0.9, b2 = 0.95, c1 = 1, c2 = 1;
    for (uint64_t k = 0; k < a->optimizer.step; k++) {
        c1 *= b1;
        c2 *= b2;
    }
    for (int i = 0; i < COUNT; i++) {
        double g = (double)((i * 7919 + (int)a->optimizer.step * 104729) % 2003) / 2003 - 0.5;
        double m = b1 * (double)a->values[0][i] + (1 - b1) * g,
               v = b2 * (double)a->values[1][i] + (1 - b2) * g * g;
        a->values[0][i] = (float)m;
        a->values[1][i] = (float)v;
        a->values[2][i] -= (float)(1e-3 * (m / (1 - c1)) / (__builtin_sqrt(v / (1 - c2)) + 1e-8));
    }
}

static void begin_training(adam *a) {
    memset(a, 0, sizeof(*a));
    for (int i = 0; i < COUNT; i++) {
        a->values[2][i] = (float)(i * 31 % 1009) / 1009 - 0.5f;
    }
    ckd_optimizer adamw = CKD_OPTIMIZER_INIT;
    adamw.kind = CKD_ADAMW;
    adamw.lr = 1e-3;
    adamw.beta1 = 0.9;
    adamw.beta2 = 0.95;
    adamw.eps = 1e-8;
    a->optimizer = adamw;
}

static ckd_tensor tensor_of(const char *name) {
    static const uint64_t shape[] = {ROWS, COLUMNS};
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    return t;
}

typedef struct messages {
    int count;
    char last[512];
} messages;

static void keep_message(void *context, const char *message) {
    messages *t = context;
    if (strstr(message, "like optimizer state")) {
        t->count++;
        snprintf(t->last, sizeof(t->last), "%s", message);
    }
}

static ckd_store *open_store(const char *dir, messages *t) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    ckd_error err;
    o.on_message = keep_message;
    o.message_context = t;
    must(ckd_store_open(&store, store_path_of(dir, ""), CKD_OPEN_CREATE, &o, &err), &err);
    return store;
}

static ckd_save *begin(ckd_store *store, uint64_t step, ckd_fidelity fidelity) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    ckd_error err;
    o.run = "r";
    o.step = step;
    o.fidelity = fidelity;
    must(ckd_save_begin(&save, store, &o, &err), &err);
    return save;
}

/* Returns a tensor's role in the checkpoint. Writes its method to `method_text`, of 32 bytes. */
static ckd_role stored_as(char *method_text, ckd_store *store, const ckd_checkpoint *c, const char *name) {
    ckd_tensor_list *list;
    ckd_role role = CKD_ROLE_AUTO;
    assert_int_equal(ckd_store_tensors(&list, store, &c->id, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        if (strcmp(list->items[i].name, name) == 0) {
            role = list->items[i].role;
            snprintf(method_text, 32, "%s", list->items[i].method);
        }
    }
    ckd_tensor_list_free(list);
    return role;
}

static bool loads_exactly(ckd_store *store, const ckd_checkpoint *c, const char *name, const float *values) {
    static float got[COUNT];
    ckd_load *load;
    ckd_error err;
    must(ckd_load_begin(&load, store, &c->id, &err), &err);
    ckd_load_request r = CKD_LOAD_REQUEST_INIT;
    r.name = name;
    r.data = got;
    r.size = sizeof(got);
    must(ckd_load_tensor(load, &r, &err), &err);
    ckd_load_end(load);
    return memcmp(got, values, sizeof(got)) == 0;
}

static void save_part(ckd_save *save, const adam *a, int which, ckd_tensor t) {
    ckd_error err;
    t.data = a->values[which];
    must(ckd_save_tensor(save, &t, &err), &err);
}

/*
 * In a save, tensors come one at a time. A number in a name identifies nothing, a given role is accepted, and each
 * save reports only once that tensors are in doubt.
 */
static void test_saves_report_doubts(void **state) {
    static adam a;
    messages t = {0};
    ckd_store *store = open_store(*state, &t);
    ckd_error err;
    ckd_checkpoint c;
    char method_text[32];
    begin_training(&a);
    for (int i = 0; i < 20; i++) {
        take_step(&a);
    }
    ckd_save *save = begin(store, 1, CKD_NEAR);
    ckd_tensor given = tensor_of("optimizer.state.1.exp_avg");
    given.role = CKD_ROLE_EXP_AVG;
    save_part(save, &a, 0, given);
    save_part(save, &a, 0, tensor_of("optimizer.state.w.exp_avg"));
    assert_int_equal(ckd_save_in_doubt(save), 0);
    assert_int_equal(t.count, 0);
    save_part(save, &a, 1, tensor_of("optimizer.state.0.exp_avg_sq"));
    save_part(save, &a, 0, tensor_of("optimizer.state.0.exp_avg"));
    save_part(save, &a, 2, tensor_of("w"));
    assert_int_equal(ckd_save_in_doubt(save), 2);
    assert_int_equal(t.count, 1);
    assert_non_null(strstr(t.last, "optimizer.state.0.exp_avg_sq"));
    must(ckd_save_commit(&c, save, &err), &err);
    assert_int_equal(stored_as(method_text, store, &c, "optimizer.state.0.exp_avg_sq"), CKD_ROLE_OTHER);
    assert_true(loads_exactly(store, &c, "optimizer.state.0.exp_avg_sq", a.values[1]));
    assert_true(loads_exactly(store, &c, "optimizer.state.0.exp_avg", a.values[0]));
    assert_int_equal(stored_as(method_text, store, &c, "optimizer.state.1.exp_avg"), CKD_ROLE_EXP_AVG);
    assert_int_equal(stored_as(method_text, store, &c, "optimizer.state.w.exp_avg"), CKD_ROLE_EXP_AVG);
    assert_false(loads_exactly(store, &c, "optimizer.state.1.exp_avg", a.values[0]));
    assert_false(loads_exactly(store, &c, "optimizer.state.w.exp_avg", a.values[0]));
    assert_false(loads_exactly(store, &c, "w", a.values[2]));
    save = begin(store, 2, CKD_EXACT); /* the save is exact, so roles do not matter */
    save_part(save, &a, 1, tensor_of("optimizer.state.0.exp_avg_sq"));
    assert_int_equal(ckd_save_in_doubt(save), 0);
    assert_int_equal(t.count, 1);
    ckd_save_abort(save);
    ckd_store_close(store);
}

/* The caller can name the weight. The optimizer step is then found whatever the tensors are called. */
static void test_named_weights(void **state) {
    static const char *const names[] = {"first", "second", "w"};
    static const ckd_role roles[] = {CKD_ROLE_EXP_AVG, CKD_ROLE_EXP_AVG_SQ, CKD_ROLE_WEIGHT};
    static adam a;
    messages t = {0};
    ckd_store *store = open_store(*state, &t);
    ckd_error err;
    char method_text[32];
    for (int named = 0; named < 2; named++) {
        begin_training(&a);
        ckd_checkpoint c;
        for (uint64_t step = 1; step <= 2; step++) {
            take_step(&a);
            ckd_save *save = begin(store, step + 10 * (uint64_t)named, CKD_EXACT);
            for (int which = 0; which < PARTS; which++) {
                ckd_tensor tensor = tensor_of(names[which]);
                tensor.role = roles[which];
                tensor.optimizer = &a.optimizer;
                tensor.weight = named && which < 2 ? "w" : NULL;
                save_part(save, &a, which, tensor);
            }
            must(ckd_save_commit(&c, save, &err), &err);
        }
        stored_as(method_text, store, &c, "w");
        assert_int_equal(strcmp(method_text, "step") == 0, named);
        assert_true(loads_exactly(store, &c, "w", a.values[2]));
    }
    char longest[CKD_NAME_MAX + 2];
    memset(longest, 'w', sizeof(longest));
    longest[CKD_NAME_MAX + 1] = '\0';
    ckd_save *save = begin(store, 99, CKD_EXACT);
    ckd_tensor tensor = tensor_of("first");
    tensor.weight = longest;
    tensor.data = a.values[0];
    assert_int_equal(ckd_save_tensor(save, &tensor, &err), CKD_E_INVALID);
    ckd_save_abort(save);
    ckd_store_close(store);
}

/* A session knows all names, so it finds weights whose names have a wrapper's prefix. */
static void test_sessions_know_all_names(void **state) {
    static const char *const names[] = {"optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq",
                                        "model._orig_mod.w", "optimizer.state.5.exp_avg_sq"};
    static adam a;
    messages t = {0};
    begin_training(&a);
    ckd_session_options o = session_options();
    ckd_save_options save = *o.save;
    ckd_store_options store_options = *o.store;
    save.role_fidelity[CKD_ROLE_MASTER] = CKD_NEAR; /* no tensor has this role, so everything stays exact */
    store_options.on_message = keep_message;
    store_options.message_context = &t;
    o.save = &save;
    o.store = &store_options;
    ckd_session *s;
    ckd_error err;
    must(ckd_session_open(&s, store_path_of(*state, ""), &o, &err), &err);
    for (int i = 0; i < 4; i++) {
        ckd_tensor tensor = tensor_of(names[i]);
        char weight[] = "model._orig_mod.w";
        tensor.optimizer = &a.optimizer;
        tensor.weight = i == 0 ? weight : NULL;
        must(ckd_session_add(s, &tensor, a.values[i % PARTS == 0 && i ? 1 : i], 0, &err), &err);
        memset(weight, '?', sizeof(weight) - 1); /* it was copied */
    }
    for (uint64_t step = 1; step <= 2; step++) {
        take_step(&a);
        must(ckd_session_step(s, step, &err), &err);
        must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
    assert_int_equal(t.count, 1);
    assert_non_null(strstr(t.last, "'optimizer.state.5.exp_avg_sq'"));
    ckd_checkpoint c = checkpoint_of(*state, TRAINER_RUN, 2);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    char method_text[32];
    assert_int_equal(stored_as(method_text, store, &c, names[3]), CKD_ROLE_OTHER);
    assert_int_equal(stored_as(method_text, store, &c, names[0]), CKD_ROLE_EXP_AVG);
    assert_int_equal(stored_as(method_text, store, &c, names[1]), CKD_ROLE_EXP_AVG_SQ);
    assert_int_equal(stored_as(method_text, store, &c, names[2]), CKD_ROLE_WEIGHT);
    assert_string_equal(method_text, "step");
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_saves_report_doubts),
        tempdir_test(test_named_weights),
        tempdir_test(test_sessions_know_all_names),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("roles_saved", tests, NULL, NULL);
    scratch_end();
    return failed;
}
