/* What a session notices: metrics, weights, sizes and times that are unlike those before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <math.h>

#include "engine/session/session.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

enum { COUNT = 1 << 14 };
#define ABSENT (-1e300) /* a step without a metric */

typedef struct watched {
    ckd_session *session;
    float w[COUNT];
    uint64_t seed, step;
    float change; /* of an element in a step, relative to it */
    unsigned told;
    char last[512]; /* message */
} watched;

static void note(void *context, const char *message) {
    watched *c = context;
    c->told++;
    snprintf(c->last, sizeof(c->last), "%s", message);
}

static watched *begin(const char *dir, uint64_t every) {
    static watched c;
    c = (watched){.seed = 1, .change = 0x1p-18f};
    ckd_session_options o = session_options();
    ckd_save_options save = *o.save;
    ckd_store_options store = *o.store;
    save.metric_name = "loss";
    save.metric = NAN;
    store.on_message = note;
    store.message_context = &c;
    o.save = &save;
    o.store = &store;
    o.every_steps = every;
    ckd_error err = {0};
    must(ckd_session_open(&c.session, store_path_of(dir, ""), &o, &err), &err);
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = "layer.weight";
    tensor.dtype = CKD_F32;
    tensor.ndim = 1;
    tensor.shape = (uint64_t[]){COUNT};
    must(ckd_session_add(c.session, &tensor, c.w, 0, &err), &err);
    return &c;
}

/* Changes one in `sparse` elements, and makes a step with this loss. sparse 0: the weights stay as they are. */
static ckd_session_state step(watched *c, unsigned sparse, double loss) {
    ckd_error err = {0};
    ckd_session_state now;
    for (size_t i = 0; i < COUNT && sparse > 0; i += sparse) {
        c->seed = c->seed * 6364136223846793005u + 1442695040888963407u;
        float draw = (float)(c->seed >> 40) * 0x1p-24f;
        c->w[i] = c->step ? c->w[i] * (1 + c->change * draw) : draw;
    }
    if (loss == ABSENT) {
        ckd_session_no_metric(c->session);
    } else {
        ckd_session_metric(c->session, loss);
    }
    must(ckd_session_step(c->session, ++c->step, &err), &err);
    must(ckd_session_wait(c->session, CKD_DURABLE, &err), &err);
    ckd_session_poll(&now, c->session);
    return now;
}

static void end(watched *c) {
    ckd_error err = {0};
    must(ckd_session_close(c->session, &err), &err);
}

static void check_alarm(const watched *c, const ckd_session_state *now, ckd_alarm alarm, const char *text) {
    assert_int_equal(now->alarms, 1);
    assert_int_equal(now->last_alarm, alarm);
    assert_int_equal(now->last_alarm_step, c->step);
    assert_int_equal(c->told, 1);
    assert_non_null(strstr(c->last, text));
}

/* Each step counts, whether it is saved or not. */
static void test_metric(void **state) {
    static const double bad[] = {9, INFINITY};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char dir[4096];
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, i);
        watched *c = begin(dir, 1000);
        ckd_session_state now;
        for (int k = 0; k < 20; k++) {
            now = step(c, 1, 3 + 0.01 * (k % 5));
            (void)step(c, 1, ABSENT); /* an iteration without a figure */
        }
        assert_int_equal(now.alarms, 0);
        now = step(c, 1, bad[i]);
        check_alarm(c, &now, CKD_ALARM_METRIC, "the median of the steps before is 3.0");
        assert_non_null(strstr(c->last, "step 41: loss is "));
        now = step(c, 1, bad[i]);
        assert_int_equal(now.alarms, 1);
        end(c);
    }
}

/* No figure is far from the others, but the mean of four is. */
static void test_metric_that_stays_high(void **state) {
    watched *c = begin(*state, 1000);
    ckd_session_state now;
    for (int k = 0; k < 80; k++) {
        now = step(c, 1, 3 + 0.1 * ((k * 7) % 11 - 5) / 5);
        assert_int_equal(now.alarms, 0);
    }
    int passed = 0;
    for (; passed < 8 && now.alarms == 0; passed++) {
        now = step(c, 1, 3.6 + 0.1 * ((passed * 7) % 11 - 5) / 5);
    }
    assert_in_range(passed, 2, METRIC_MEAN);
    check_alarm(c, &now, CKD_ALARM_METRIC, "the mean of the last 4 values of loss is 3.");
    for (int k = passed; k < 20; k++) { /* the same change */
        now = step(c, 1, 3.6 + 0.1 * ((k * 7) % 11 - 5) / 5);
    }
    assert_int_equal(now.alarms, 1);
    end(c);
}

/* A metric that is no number needs no history. A step without one is no such step. */
static void test_no_number(void **state) {
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char dir[4096];
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, i);
        watched *c = begin(dir, 1000);
        (void)step(c, 1, 3);
        ckd_session_state now = step(c, 1, ABSENT);
        assert_int_equal(now.alarms, 0);
        now = step(c, 1, bad[i]);
        check_alarm(c, &now, CKD_ALARM_METRIC, isnan(bad[i]) ? "loss is nan" : "inf");
        now = step(c, 1, bad[i]);
        assert_int_equal(now.alarms, 1);
        end(c);
    }
}

/* A metric that is only observed counts as well, and each step counts once. */
static void test_observed(void **state) {
    watched *c = begin(*state, 1000);
    ckd_session_state now;
    for (uint64_t k = 1; k <= 20; k++) {
        ckd_session_observe(c->session, k, 3);
        ckd_session_observe(c->session, k, 9); /* the same step */
    }
    ckd_session_poll(&now, c->session);
    assert_int_equal(now.alarms, 0);
    c->step = 21;
    ckd_session_observe(c->session, 21, 9);
    ckd_session_poll(&now, c->session);
    check_alarm(c, &now, CKD_ALARM_METRIC, "loss is 9");
    end(c);
}

/* Makes steps up to this one. */
static ckd_session_state step_to(watched *c, uint64_t last, unsigned sparse) {
    ckd_session_state now = {.alarms = 0};
    while (c->step < last) {
        now = step(c, sparse, ABSENT);
    }
    return now;
}

/* Weights that stay the same for eight steps after they were trained. */
static void test_unchanged_weights(void **state) {
    watched *c = begin(*state, 4);
    (void)step_to(c, 1, 1);
    (void)step_to(c, 12, 0); /* warm-up of the learning rate: nothing was trained so far */
    (void)step_to(c, 20, 16);
    ckd_session_state now = step_to(c, 27, 0);
    assert_int_equal(now.alarms, 0);
    now = step_to(c, 28, 0);
    check_alarm(c, &now, CKD_ALARM_UNCHANGED, "the weights are the same as at step 20");
    c->told = 0;
    (void)step_to(c, 32, 0);
    assert_int_equal(c->told, 0);
    (void)step_to(c, 36, 16); /* they are trained again, and then no more */
    (void)step_to(c, 44, 0);
    assert_non_null(strstr(c->last, "the weights are the same as at step 36"));
    end(c);
}

/* A trainer that goes back makes the same steps again. */
static void test_restored(void **state) {
    watched *c = begin(*state, 4);
    ckd_session_state now;
    ckd_error err = {0};
    (void)step_to(c, 40, 16);
    for (uint64_t k = 41; k <= 60; k++) {
        ckd_session_observe(c->session, k, 3);
    }
    must(ckd_session_restore(NULL, c->session, 20, &err), &err);
    c->step = 20;
    (void)step_to(c, 23, 0);
    ckd_session_poll(&now, c->session);
    assert_int_equal(now.alarms, 0);
    now = step(c, 16, 9); /* the loss of earlier steps is higher */
    assert_int_equal(now.alarms, 0);
    now = step(c, 16, NAN);
    assert_int_equal(now.last_alarm, CKD_ALARM_METRIC);
    assert_int_equal(now.last_alarm_step, 25);
    assert_int_equal(now.alarms, 1);
    end(c);
}

/* The session reports and counts an alarm of the trainer like its own. */
static void test_raised_by_the_trainer(void **state) {
    watched *c = begin(*state, 4);
    ckd_session_state now;
    (void)step_to(c, 8, 16);
    ckd_session_alarm(c->session, CKD_ALARM_NONE, 5, "nothing");
    ckd_session_alarm(c->session, (ckd_alarm)99, 5, "unknown");
    ckd_session_poll(&now, c->session);
    assert_int_equal(now.alarms, 0);
    ckd_session_alarm(c->session, CKD_ALARM_REPLICA, 5, "w is not the same");
    ckd_session_poll(&now, c->session);
    assert_int_equal(now.alarms, 1);
    assert_int_equal(now.last_alarm, CKD_ALARM_REPLICA);
    assert_int_equal(now.last_alarm_step, 5);
    assert_int_equal(c->told, 1);
    assert_non_null(strstr(c->last, "step 5: w is not the same"));
    ckd_session_alarm(c->session, CKD_ALARM_METRIC, 6, NULL);
    assert_non_null(strstr(c->last, "step 6: metric"));
    end(c);
}

static void test_sizes(void **state) {
    for (int empty = 0; empty < 2; empty++) {
        char dir[4096];
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, empty);
        watched *c = begin(dir, 1);
        ckd_session_state now = step_to(c, 10, 1);
        assert_int_equal(now.alarms, 0);
        c->change = empty ? c->change : 0x1p-6f;
        now = step(c, empty ? 4096 : 1, ABSENT);
        check_alarm(c, &now, empty ? CKD_ALARM_UNCHANGED : CKD_ALARM_SIZE, "the delta has ");
        end(c);
    }
}

/* A save that is nearer to the last one than usual may be small. */
static void test_a_save_between_others(void **state) {
    watched *c = begin(*state, 10);
    ckd_session_state now;
    ckd_error err = {0};
    for (int k = 0; k < 100; k++) {
        now = step(c, 8, ABSENT);
    }
    assert_int_equal(now.saved, 10);
    c->w[0] += 1;
    must(ckd_session_save(c->session, ++c->step, &err), &err);
    must(ckd_session_wait(c->session, CKD_DURABLE, &err), &err);
    ckd_session_poll(&now, c->session);
    assert_int_equal(now.alarms, 0);
    end(c);
}

/* Times are passed in, so none of these depends on the disk. */
static void test_times(void **state) {
    watched *c = begin(*state, 1);
    ckd_session_state now;
    for (int k = 0; k < 3; k++) {
        now = step(c, 8, ABSENT);
    }
    ckd_session *s = c->session;
    s->saver.alarms = (save_alarms){.last_step = 0};
    const session_slot *slot = &s->shared.slots[s->shared.first];
    const uint64_t second = 1000000000;
    ckd_checkpoint saved = {.kind = CKD_BASE};
    for (uint64_t k = 0; k < 8; k++) { /* training kept the fifth from ending for a minute */
        uint64_t apart = k == 5 ? 60 * second : 0;
        session_judge_save(s, slot, &saved,
                           &(save_times){.begun_ns = 7, .ended_ns = second + apart, .apart_ns = apart});
    }
    ckd_session_poll(&now, s);
    assert_int_equal(now.alarms, 0);
    session_judge_save(s, slot, &saved, &(save_times){.begun_ns = 7, .ended_ns = 30 * second});
    ckd_session_poll(&now, s);
    assert_true(now.alarms == 1 && now.last_alarm == CKD_ALARM_TIME);
    assert_non_null(strstr(c->last, "the save took 30 s"));
    ckd_checkpoint delta = {.kind = CKD_DELTA, .stored_bytes = 1}; /* bases say nothing about it */
    session_judge_save(s, slot, &delta, &(save_times){.begun_ns = 7, .ended_ns = 90 * second});
    ckd_session_poll(&now, s);
    assert_int_equal(now.alarms, 1);
    for (uint64_t k = 0; k < 8; k++) { /* with ranks: other ranks are slow, then this one is */
        session_judge_save(s, slot, &saved,
                           &(save_times){.begun_ns = 7, .handed_ns = second / 2, .ended_ns = second});
    }
    session_judge_save(s, slot, &saved,
                       &(save_times){.begun_ns = 7, .handed_ns = 20 * second, .ended_ns = 20 * second});
    assert_non_null(strstr(c->last, "took 20 s"));
    ckd_session_poll(&now, s);
    assert_int_equal(now.alarms, 3); /* its part, and the whole */
    end(c);
}

/* ---- changes of tensors ---- */

enum { LAYERS = 6, BROKEN = 3, WIDTH = 1000 };

typedef struct layers {
    watched told;
    ckd_dtype dtype;
    uint16_t halves[LAYERS][WIDTH];
    float floats[LAYERS][WIDTH];
    double doubles[LAYERS][WIDTH];
} layers;

static void *values_of(layers *l, int layer) {
    return l->dtype == CKD_BF16  ? (void *)l->halves[layer]
           : l->dtype == CKD_F64 ? (void *)l->doubles[layer]
                                 : (void *)l->floats[layer];
}

/* Changes a layer by about this share of its values. */
static void train_layer(layers *l, int layer, double share) {
    for (size_t i = 0; i < WIDTH; i++) {
        l->told.seed = l->told.seed * 6364136223846793005u + 1442695040888963407u;
        double factor = 1 + share * ((double)(l->told.seed >> 40) * 0x1p-23 - 1);
        double value = l->doubles[layer][i] *= factor;
        l->floats[layer][i] = (float)value;
        uint32_t bits;
        memcpy(&bits, &l->floats[layer][i], sizeof(bits));
        l->halves[layer][i] = (uint16_t)(bits >> 16);
    }
}

static layers *begin_layers(const char *dir, ckd_dtype dtype) {
    static layers l;
    ckd_error err = {0};
    l = (layers){.told = {.seed = 1}, .dtype = dtype};
    ckd_session_options o = session_options();
    ckd_store_options store = *o.store;
    store.on_message = note;
    store.message_context = &l.told;
    o.store = &store;
    o.every_steps = 1;
    must(ckd_session_open(&l.told.session, store_path_of(dir, ""), &o, &err), &err);
    for (int i = 0; i < LAYERS; i++) {
        char name[32];
        ckd_tensor tensor = CKD_TENSOR_INIT;
        snprintf(name, sizeof(name), "layers.%d.weight", i);
        tensor.name = name;
        tensor.dtype = dtype;
        tensor.ndim = 1;
        tensor.shape = (uint64_t[]){WIDTH};
        for (size_t k = 0; k < WIDTH; k++) {
            l.doubles[i][k] = 1 + (double)k / WIDTH;
        }
        must(ckd_session_add(l.told.session, &tensor, values_of(&l, i), 0, &err), &err);
    }
    return &l;
}

static ckd_session_state step_layers(layers *l, double share, double broken) {
    ckd_error err = {0};
    ckd_session_state now;
    for (int i = 0; i < LAYERS; i++) {
        train_layer(l, i, i == BROKEN ? broken : share);
    }
    must(ckd_session_step(l->told.session, ++l->told.step, &err), &err);
    must(ckd_session_wait(l->told.session, CKD_DURABLE, &err), &err);
    ckd_session_poll(&now, l->told.session);
    return now;
}

/* One layer that changes more than before, and only it, in each dtype of floats. */
static void test_changes(void **state) {
    static const ckd_dtype dtypes[] = {CKD_F32, CKD_F64, CKD_BF16};
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++) {
        char dir[4096];
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, i);
        layers *l = begin_layers(dir, dtypes[i]);
        ckd_session_state now = {.alarms = 0};
        for (int k = 0; k < 12; k++) {
            now = step_layers(l, 0.02, 0.02);
        }
        assert_int_equal(now.alarms, 0);
        now = step_layers(l, 0.02, 0.4);
        check_alarm(&l->told, &now, CKD_ALARM_CHANGE,
                    "step 13: since the last save, layers.3.weight has changed ");
        now = step_layers(l, 0.02, 0.4);
        assert_int_equal(now.alarms, 1);
        end(&l->told);
    }
}

/* What a restore changes is no step of training. */
static void test_changes_by_a_restore(void **state) {
    layers *l = begin_layers(*state, CKD_F32);
    ckd_session_state now = {.alarms = 0};
    ckd_error err = {0};
    for (int k = 0; k < 4; k++) {
        now = step_layers(l, 0.02, 0.9);
    }
    for (int k = 0; k < 30; k++) {
        now = step_layers(l, 0.02, 0.02);
    }
    assert_int_equal(now.alarms, 0);
    must(ckd_session_restore(NULL, l->told.session, 1, &err), &err);
    for (int i = 0; i < LAYERS; i++) {
        for (size_t k = 0; k < WIDTH; k++) {
            l->doubles[i][k] = (double)l->floats[i][k];
        }
    }
    l->told.step = 1;
    now = step_layers(l, 0.02, 0.02);
    assert_int_equal(now.alarms, 0);
    for (int k = 0; k < 3; k++) {
        now = step_layers(l, 0.02, 0.02);
    }
    now = step_layers(l, 0.02, 0.4); /* it still knows what is normal */
    assert_int_equal(now.last_alarm, CKD_ALARM_CHANGE);
    end(&l->told);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_metric),
        tempdir_test(test_metric_that_stays_high),
        tempdir_test(test_no_number),
        tempdir_test(test_observed),
        tempdir_test(test_unchanged_weights),
        tempdir_test(test_restored),
        tempdir_test(test_raised_by_the_trainer),
        tempdir_test(test_sizes),
        tempdir_test(test_a_save_between_others),
        tempdir_test(test_times),
        tempdir_test(test_changes),
        tempdir_test(test_changes_by_a_restore),
    };
    return cmocka_run_group_tests_name("session alarms", tests, NULL, NULL);
}
