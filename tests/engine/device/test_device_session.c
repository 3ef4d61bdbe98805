/*
 * Sessions with tensors on a device. The trainer overwrites them on its stream as soon as a step or a fence returns;
 * the stored state is nevertheless that of the step. The device is emulated. Its streams wait only
 * for the events that a call names. tests/engine/device/test_cuda_session.c includes this file for a real device.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>

#include "engine/session/session.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/emulated_device.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define ROWS    UINT64_C(1200) /* 300 KiB per layer: large enough that each is copied by itself */
#define COLUMNS 64
#define LAYER   (ROWS * COLUMNS * sizeof(float))

static const device_backend *backend;
static device_failure why;

/*
 * The layers and the frozen tensor are on the device; the trainer's copy in host memory is what it will put there
 * next. The rest of the state is on the host.
 */
typedef struct device_trainer {
    trainer *host;
    device_queue stream; /* the trainer's stream */
    ckd_device device;
    void *layers[TRAINER_TENSORS], *frozen;
} device_trainer;

static void put(const device_trainer *t, void *to, const void *from, size_t size) {
    assert_int_equal(backend->copy(&t->stream, to, from, size, DEVICE_TO_DEVICE, &why), DEVICE_DONE);
}

static void finish(const device_trainer *t) {
    assert_int_equal(backend->finish(&t->stream, &why), DEVICE_DONE);
}

static device_trainer device_trainer_new(void) {
    device_trainer t = {.host = trainer_new(ROWS), .device = CKD_DEVICE_INIT};
    assert_int_equal(backend->queue_open(&t.stream, 0, false, &why), DEVICE_DONE);
    t.device.stream = t.stream.stream;
    for (int i = 0; i < TRAINER_TENSORS; i++) {
        assert_int_equal(backend->allocate(&t.layers[i], 0, LAYER, &why), DEVICE_DONE);
    }
    assert_int_equal(backend->allocate(&t.frozen, 0, sizeof(t.host->frozen), &why), DEVICE_DONE);
    return t;
}

static void device_trainer_free(device_trainer *t) {
    finish(t);
    for (int i = 0; i < TRAINER_TENSORS; i++) {
        backend->release(0, t->layers[i]);
    }
    backend->release(0, t->frozen);
    backend->queue_close(&t->stream);
    trainer_free(t->host);
}

static void put_layer(const device_trainer *t, int layer, uint64_t step) {
    trainer_set_layer(t->host, (uint64_t)layer, step);
    put(t, t->layers[layer], t->host->layers[layer], LAYER);
}

/* The optimizer runs on the trainer's stream. When it returns, its copies are still in progress. */
static void optimize(const device_trainer *t, uint64_t step) {
    finish(t);
    trainer_set(t->host, step);
    for (int i = 0; i < TRAINER_TENSORS; i++) {
        put_layer(t, i, step);
    }
    put(t, t->frozen, t->host->frozen, sizeof(t->host->frozen));
}

/* Overwrites the whole state as soon as the stream allows it. */
static void spoil(const device_trainer *t) {
    static uint8_t nonsense[LAYER];
    memset(nonsense, 0xee, sizeof(nonsense));
    for (int i = 0; i < TRAINER_TENSORS; i++) {
        put(t, t->layers[i], nonsense, LAYER);
    }
    put(t, t->frozen, nonsense, sizeof(t->host->frozen));
    finish(t);
    trainer_spoil(t->host);
}

static ckd_status add(ckd_session *s, const char *name, uint64_t rows, uint64_t columns, void *data,
                      uint32_t which_group, const ckd_device *device, ckd_error *err) {
    ckd_tensor d = CKD_TENSOR_INIT;
    uint64_t shape[2] = {rows, columns};
    d.name = name;
    d.dtype = CKD_F32;
    d.ndim = columns ? 2 : 1;
    d.shape = shape;
    d.device = device;
    return ckd_session_add(s, &d, data, which_group, err);
}

/* Registers the tensors as trainers.h does, so that stored_check knows them. */
static ckd_session *open_session(const char *dir, const ckd_session_options *o, const device_trainer *t) {
    char path[512], name[32];
    ckd_session *s;
    ckd_error err;
    snprintf(path, sizeof(path), "%s/store", dir);
    must(ckd_session_open(&s, path, o, &err), &err);
    must(add(s, "frozen", TRAINER_FROZEN, 0, t->frozen, 0, &t->device, &err), &err);
    for (int i = 0; i < TRAINER_TENSORS; i++) {
        ckd_device device = t->device; /* the session copies it */
        snprintf(name, sizeof(name), "layer%d", i);
        must(add(s, name, ROWS, COLUMNS, t->layers[i], (uint32_t)i + 1, &device, &err), &err);
    }
    ckd_tensor step = CKD_TENSOR_INIT;
    step.name = "step";
    step.dtype = CKD_I64;
    must(ckd_session_add(s, &step, &t->host->step, 0, &err), &err);
    must(ckd_session_add_bytes(s, "loader", t->host->loader, sizeof(t->host->loader), &err), &err);
    return s;
}

/*
 * Makes a running save wait as long as possible. A tensor that is saved before that was copied because the trainer's
 * stream waits for the copy.
 */
static void hold_saver(ckd_session *s) {
    ckd_session_phase(s, CKD_PHASE_BUSY);
}

static void let_saver_go(ckd_session *s) {
    ckd_session_phase(s, CKD_PHASE_ANY);
}

/* ---- saving ---- */

static void save_and_spoil(const char *dir, ckd_snapshot how, uint64_t device_bytes, uint64_t steps) {
    device_trainer t = device_trainer_new();
    ckd_session_options o = session_options();
    ckd_error err;
    o.snapshot = how;
    o.device_bytes = device_bytes;
    o.saves_under_way = 2;
    ckd_session *s = open_session(dir, &o, &t);
    for (uint64_t step = 1; step <= steps; step++) {
        ckd_session_fence(s);
        spoil(&t);
        optimize(&t, step);
        hold_saver(s);
        must(ckd_session_step(s, step, &err), &err);
        ckd_session_fence(s);
        spoil(&t);
        let_saver_go(s);
    }
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    ckd_session_state now;
    ckd_session_poll(&now, s);
    assert_int_equal(now.saved, steps);
    assert_int_equal(now.failed + now.under_way, 0);
    must(ckd_session_close(s, &err), &err);
    device_trainer_free(&t);
    for (uint64_t step = 1; step <= steps; step++) {
        stored_check(dir, TRAINER_RUN, step, ROWS);
    }
}

static void test_copy(void **state) {
    save_and_spoil(*state, CKD_SNAPSHOT_COPY, 0, 5);
}

static void test_lazy(void **state) {
    save_and_spoil(*state, CKD_SNAPSHOT_LAZY, 0, 5);
}

/* Device memory for a part of the state, with the rest in pinned memory; for two snapshots; for almost nothing. */
static void test_budgets(void **state) {
    char dir[3][600];
    const uint64_t budgets[3] = {2 * LAYER + 100, 2 * (TRAINER_TENSORS * LAYER + 4096), 1};
    for (int i = 0; i < 3; i++) {
        snprintf(dir[i], sizeof(dir[i]), "%s/%d", (const char *)*state, i);
        assert_int_equal(mkdir(dir[i], 0777), 0);
        save_and_spoil(dir[i], i == 1 ? CKD_SNAPSHOT_LAZY : CKD_SNAPSHOT_COPY, budgets[i], 4);
    }
}

static ckd_session_state first_step(const char *dir, const ckd_session_options *o, const device_trainer *t,
                                    uint64_t *free_memory) {
    ckd_session_state now;
    ckd_error err;
    ckd_session *s = open_session(dir, o, t);
    optimize(t, 1);
    *free_memory = emulated_memory;
    must(ckd_session_step(s, 1, &err), &err);
    *free_memory = emulated_memory - *free_memory;
    ckd_session_poll(&now, s);
    must(ckd_session_close(s, &err), &err);
    return now;
}

/* The session reports the memory that it allocated. The frozen tensor is small and also exists on the host. */
static void test_reported_memory(void **state) {
    device_trainer t = device_trainer_new();
    const uint64_t one = TRAINER_TENSORS * LAYER + 4096,
                   cases[][3] = {
                       /* device_bytes; held on the device; held in host memory, at least */
                       {0, one, 4096},
                       {one, one, 4096},
                       {2 * one - 1, one, 4096},
                       {2 * one, 2 * one, 2 * 4096},
                       {5 * one, 2 * one, 2 * 4096},
                       {2 * LAYER + 4096, 2 * LAYER + 4096, 3 * LAYER + 4096},
                       {4095, 0, one},
                   };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char dir[600];
        uint64_t taken;
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, i);
        assert_int_equal(mkdir(dir, 0777), 0);
        ckd_session_options o = session_options();
        o.device_bytes = cases[i][0];
        o.saves_under_way = 2;
        o.every_steps = 1000;
        ckd_session_state now = first_step(dir, &o, &t, &taken);
        assert_int_equal(now.device_bytes, cases[i][1]);
        assert_int_equal(taken, cases[i][1]);
        assert_in_range(now.snapshot_bytes, cases[i][2], cases[i][2] + 1024);
    }
    device_trainer_free(&t);
    assert_int_equal(emulated_memory + emulated_pinned + emulated_marks, 0);
}

/* Only the save itself waits for work on the streams. */
static void test_only_the_save_waits(void **state) {
    for (int i = 0; i < 4; i++) {
        char dir[600];
        ckd_error err;
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, i);
        assert_int_equal(mkdir(dir, 0777), 0);
        device_trainer t = device_trainer_new();
        ckd_session_options o = session_options();
        o.snapshot = i & 1 ? CKD_SNAPSHOT_LAZY : CKD_SNAPSHOT_COPY;
        o.device_bytes = i & 2 ? 1 : 0;
        ckd_session *s = open_session(dir, &o, &t);
        optimize(&t, 1);
        must(ckd_session_step(s, 1, &err), &err);
        must(ckd_session_close(s, &err), &err);
        stored_check(dir, TRAINER_RUN, 1, ROWS);
        device_trainer_free(&t);
    }
}

/* Each layer is overwritten behind its own fence, which does not wait for the other layers. */
static void test_groups(void **state) {
    device_trainer t = device_trainer_new();
    ckd_session_options o = session_options();
    o.snapshot = CKD_SNAPSHOT_LAZY;
    ckd_session *s = open_session(*state, &o, &t);
    ckd_error err;
    optimize(&t, 1);
    for (uint64_t step = 1; step <= 4; step++) {
        hold_saver(s);
        must(ckd_session_step(s, step, &err), &err);
        for (int layer = TRAINER_TENSORS - 1; layer >= 0; layer--) {
            ckd_session_fence_group(s, (uint32_t)layer + 1);
            put_layer(&t, layer, step + 1);
            finish(&t);
        }
        ckd_session_fence_group(s, 0);
        trainer_set(t.host, step + 1);
        ckd_session_fence(s);
        let_saver_go(s);
        must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
    device_trainer_free(&t);
    for (uint64_t step = 1; step <= 4; step++) {
        stored_check(*state, TRAINER_RUN, step, ROWS);
    }
}

static void test_no_fence(void **state) {
    device_trainer t = device_trainer_new();
    ckd_session_options o = session_options();
    o.snapshot = CKD_SNAPSHOT_LAZY;
    ckd_session *s = open_session(*state, &o, &t);
    ckd_error err;
    optimize(&t, 1);
    must(ckd_session_step(s, 1, &err), &err);
    put_layer(&t, 0, 3); /* a copy from host memory is still in progress */
    ckd_status status = ckd_session_step(s, 2, &err);
    status = status == CKD_OK ? ckd_session_wait(s, CKD_DURABLE, &err) : status;
    assert_int_equal(status, CKD_E_STATE);
    assert_non_null(strstr(err.message, "step 1"));
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    optimize(&t, 3);
    must(ckd_session_step(s, 3, &err), &err);
    must(ckd_session_close(s, &err), &err);
    device_trainer_free(&t);
    stored_check(*state, TRAINER_RUN, 3, ROWS);
}

/* ---- lossy tensors, coded on the device against references kept there ---- */

enum { SIDE = 512, SAVES = 6 };

static double rms(const float *a, const float *b) {
    double sum = 0;
    for (int i = 0; i < SIDE * SIDE; i++) {
        sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    }
    return sqrt(sum / (SIDE * SIDE));
}

/* Lossy saves against references on the device store each step's state, although the trainer overwrites it at once. */
static void test_coarse(void **state) {
    device_trainer t = device_trainer_new();
    ckd_session_options o = session_options();
    ckd_save_options save = *o.save;
    ckd_error err;
    void *there;
    float *w[SAVES + 1], *garbage = random_values(CKD_F32, SIDE * SIDE, 77);
    save.fidelity = CKD_COARSE;
    o.save = &save;
    o.device_reference_bytes = SIDE * SIDE * sizeof(float);
    assert_int_equal(backend->allocate(&there, 0, SIDE * SIDE * sizeof(float), &why), DEVICE_DONE);
    ckd_session *s;
    char path[512];
    snprintf(path, sizeof(path), "%s/store", (const char *)*state);
    must(ckd_session_open(&s, path, &o, &err), &err);
    must(add(s, "w", SIDE, SIDE, there, 0, &t.device, &err), &err);
    w[0] = random_values(CKD_F32, SIDE * SIDE, 1);
    for (unsigned i = 1; i <= SAVES; i++) {
        float *step = random_values(CKD_F32, SIDE * SIDE, 10 + i);
        w[i] = malloc(SIDE * SIDE * sizeof(float));
        assert_non_null(w[i]);
        for (int k = 0; k < SIDE * SIDE; k++) {
            w[i][k] = w[i - 1][k] + 0.1f * step[k];
        }
        free(step);
        put(&t, there, w[i], SIDE * SIDE * sizeof(float));
        must(ckd_session_step(s, i, &err), &err);
        put(&t, there, garbage, SIDE * SIDE * sizeof(float));
        finish(&t);
    }
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    ckd_session_state now;
    ckd_session_poll(&now, s);
    assert_int_equal(now.device_reference_bytes, SIDE * SIDE * sizeof(float));
    must(ckd_session_close(s, &err), &err);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    for (unsigned i = 1; i <= SAVES; i++) {
        float *stored = load_whole(store, TRAINER_RUN, i, "w", SIDE * SIDE * sizeof(float));
        /* The change is noise, of which CKD_COARSE keeps little. */
        assert_true(rms(stored, w[i]) < 1.5 * rms(w[i], w[i - 1]));
        free(stored);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    for (unsigned i = 0; i <= SAVES; i++) {
        free(w[i]);
    }
    free(garbage);
    backend->release(0, there);
    device_trainer_free(&t);
}

/* ---- restoring ---- */

static void test_restore(void **state) {
    device_trainer t = device_trainer_new();
    ckd_session_options o = session_options();
    ckd_session *s = open_session(*state, &o, &t);
    ckd_error err;
    ckd_checkpoint from;
    for (uint64_t step = 1; step <= 3; step++) {
        optimize(&t, step);
        must(ckd_session_step(s, step, &err), &err);
    }
    spoil(&t);
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    assert_int_equal(from.step, 3);
    for (int i = 0; i < TRAINER_TENSORS; i++) { /* on the trainer's stream, which waits for the restore */
        assert_int_equal(
            backend->copy(&t.stream, t.host->layers[i], t.layers[i], LAYER, DEVICE_TO_HOST, &why),
            DEVICE_DONE);
    }
    assert_int_equal(
        backend->copy(&t.stream, t.host->frozen, t.frozen, sizeof(t.host->frozen), DEVICE_TO_HOST, &why),
        DEVICE_DONE);
    finish(&t);
    trainer_check(t.host, 3);
    must(ckd_session_close(s, &err), &err);
    device_trainer_free(&t);
}

/* ---- what sensors read of devices ---- */

typedef struct told {
    unsigned alarms;
    char last[600];
} told;

static void keep_told(void *context, const char *message) {
    told *t = context;
    t->alarms++;
    snprintf(t->last, sizeof(t->last), "%s", message);
}

static ckd_session *open_watched(const char *dir, ckd_session_options *o, ckd_store_options *store, told *t,
                                 const device_trainer *source) {
    *store = *o->store;
    store->on_message = keep_told;
    store->message_context = t;
    o->store = store;
    return open_session(dir, o, source);
}

static ckd_session_state save_step(ckd_session *s, uint64_t step) {
    ckd_error err = {0};
    ckd_session_state now;
    must(ckd_session_save(s, step, &err), &err);
    ckd_session_fence(s);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    ckd_session_poll(&now, s);
    return now;
}

/* Within the device's memory, within none of it, and within memory for a part of the tensors. */
static const uint64_t sensor_budgets[] = {0, 1, 2 * LAYER + 4096};
#define BUDGETS (sizeof(sensor_budgets) / sizeof(sensor_budgets[0]))

/* Weights that were trained, and then stay the same. */
static void test_unchanged_weights(void **state) {
    for (size_t i = 0; i < BUDGETS; i++) {
        char dir[512];
        ckd_store_options store;
        told t = {.alarms = 0};
        device_trainer source = device_trainer_new();
        ckd_session_options o = session_options();
        o.device_bytes = sensor_budgets[i];
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, i);
        assert_int_equal(mkdir(dir, 0700), 0);
        ckd_session *s = open_watched(dir, &o, &store, &t, &source);
        ckd_session_state now = {.alarms = 0};
        for (uint64_t step = 1; step <= 12; step++) {
            optimize(&source, step <= 4 ? step : 4);
            if (step == 11) {
                t.alarms = 0; /* a snapshot that goes to host memory says so */
            }
            now = save_step(s, step);
            assert_int_equal(now.alarms, step == 12);
        }
        assert_int_equal(now.last_alarm, CKD_ALARM_UNCHANGED);
        assert_int_equal(t.alarms, 1);
        assert_non_null(strstr(t.last, "step 12: the weights are the same as at step 4"));
        must(ckd_session_close(s, &(ckd_error){0}), &(ckd_error){0});
        device_trainer_free(&source);
    }
}

/* Sets each value of a layer. All layers change alike, apart from one that changes more. */
static void drift(const device_trainer *t, uint64_t step, int broken) {
    for (int layer = 0; layer < TRAINER_TENSORS; layer++) {
        float *values = t->host->layers[layer];
        uint64_t seed = step * 64 + (uint64_t)layer + 1;
        for (uint64_t i = 0; i < ROWS * COLUMNS; i++) {
            seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            float share = layer == broken ? 0.4f : 0.02f;
            values[i] = (step > 1 ? values[i] : 1.0f) * (1 + share * ((float)(seed >> 40) * 0x1p-24f - 0.5f));
        }
        put(t, t->layers[layer], values, LAYER);
    }
}

/* One tensor that changes much more than the others. */
static void test_changed_tensor(void **state) {
    for (size_t i = 0; i < BUDGETS; i++) {
        char dir[512];
        ckd_store_options store;
        told t = {.alarms = 0};
        device_trainer source = device_trainer_new();
        ckd_session_options o = session_options();
        o.device_bytes = sensor_budgets[i];
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, i);
        assert_int_equal(mkdir(dir, 0700), 0);
        ckd_session *s = open_watched(dir, &o, &store, &t, &source);
        ckd_session_state now = {.alarms = 0};
        for (uint64_t step = 1; step <= 14; step++) {
            drift(&source, step, step == 14 ? 2 : -1);
            now = save_step(s, step);
            assert_int_equal(now.alarms, step == 14);
        }
        assert_int_equal(now.last_alarm, CKD_ALARM_CHANGE);
        assert_non_null(strstr(t.last, "step 14: since the last save, layer2 has changed "));
        must(ckd_session_close(s, &(ckd_error){0}), &(ckd_error){0});
        device_trainer_free(&source);
    }
}

/* ---- errors ---- */

static void keep_message(void *context, const char *message) {
    snprintf(context, 300, "%s", message);
}

/*
 * The first step allocates device memory first. If that fails, the snapshot goes to host memory, which only takes
 * longer.
 */
static void test_too_little_memory(void **state) {
    char said[300] = "";
    device_trainer t = device_trainer_new();
    ckd_session_options o = session_options();
    ckd_store_options store = *o.store;
    store.on_message = keep_message;
    store.message_context = said;
    o.store = &store;
    ckd_session *s = open_session(*state, &o, &t);
    ckd_error err;
    optimize(&t, 1);
    emulated_fail_as = DEVICE_FULL;
    emulated_fail_after = 2; /* after opening the queue */
    must(ckd_session_step(s, 1, &err), &err);
    spoil(&t);
    assert_int_equal(emulated_fail_after, 0);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    assert_non_null(strstr(said, "goes to host memory"));
    ckd_session_state now;
    ckd_session_poll(&now, s);
    assert_int_equal(now.device_bytes, 0);
    assert_true(now.snapshot_bytes >= TRAINER_TENSORS * LAYER);
    must(ckd_session_close(s, &err), &err);
    device_trainer_free(&t);
    stored_check(*state, TRAINER_RUN, 1, ROWS);
}

/* Each device call fails once. The session reports it, and the next save works. */
static void test_failures(void **state) {
    device_trainer t = device_trainer_new();
    ckd_session_options o = session_options();
    ckd_session *s = open_session(*state, &o, &t);
    ckd_error err;
    unsigned failed = 0;
    uint64_t step = 0;
    bool happened = true;
    for (int n = 1; happened; n += n < 60 ? 1 : 9) {
        o.snapshot = n % 3 ? CKD_SNAPSHOT_COPY : CKD_SNAPSHOT_LAZY;
        s->options.snapshot = o.snapshot;
        optimize(&t, ++step);
        emulated_fail_as = DEVICE_FAILED;
        emulated_fail_after = n;
        ckd_status status = ckd_session_save(s, step, &err);
        ckd_session_fence(s);
        status = status == CKD_OK ? ckd_session_wait(s, CKD_DURABLE, &err) : status;
        happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        if (status != CKD_OK) {
            assert_int_equal(status, CKD_E_DEVICE);
            assert_non_null(strstr(err.message, "told to fail"));
            failed++;
            /* If the step itself failed, no save is in progress. */
            (void)ckd_session_wait(s, CKD_DURABLE, &err);
        } else {
            stored_check(*state, TRAINER_RUN, step, ROWS);
        }
    }
    assert_true(failed > 20);
    must(ckd_session_close(s, &err), &err);
    device_trainer_free(&t);
    stored_check(*state, TRAINER_RUN, step, ROWS);
    assert_int_equal(emulated_memory + emulated_pinned + emulated_marks, 0);
}

static void test_refused(void **state) {
    device_trainer t = device_trainer_new();
    ckd_session_options o = session_options();
    ckd_session *s = open_session(*state, &o, &t);
    ckd_error err;
    assert_int_equal(add(s, "host", ROWS, COLUMNS, t.host->layers[0], 0, &t.device, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "host memory"));
    assert_string_equal(err.tensor, "host");
    must(ckd_session_close(s, &err), &err);
    device_trainer_free(&t);
}

static void test_no_backend(void **state) {
    device_trainer t = device_trainer_new();
    ckd_session_options o = session_options();
    ckd_session *s = open_session(*state, &o, &t);
    ckd_error err;
    device_backend_use(NULL);
    setenv("CKD_CUDA", "/nowhere/libckptdelta_cuda.so", 1);
    assert_int_equal(add(s, "more", ROWS, COLUMNS, t.layers[0], 0, &t.device, &err), CKD_E_DEVICE);
    unsetenv("CKD_CUDA");
    device_backend_use(backend);
    assert_non_null(strstr(err.message, "/nowhere/"));
    must(ckd_session_close(s, &err), &err);
    device_trainer_free(&t);
}

#ifndef DEVICE_SESSION_TESTS
int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_copy),
        tempdir_test(test_lazy),
        tempdir_test(test_budgets),
        tempdir_test(test_reported_memory),
        tempdir_test(test_only_the_save_waits),
        tempdir_test(test_groups),
        tempdir_test(test_no_fence),
        tempdir_test(test_restore),
        tempdir_test(test_unchanged_weights),
        tempdir_test(test_changed_tensor),
        tempdir_test(test_failures),
        tempdir_test(test_too_little_memory),
        tempdir_test(test_refused),
        tempdir_test(test_no_backend),
        tempdir_test(test_coarse),
    };
    backend = emulated_device();
    device_backend_use(backend);
    return cmocka_run_group_tests_name("device_session", tests, NULL, NULL);
}
#endif
