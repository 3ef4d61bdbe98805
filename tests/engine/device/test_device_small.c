/*
 * Many small tensors on a device. A session gathers them with one launch for every 32 and copies them to the host in
 * one transfer, whatever groups they are in and however little device memory it may use. A save of a single one waits
 * once. What is stored is the state of the step. The device is emulated; tests/engine/device/test_cuda_small.c
 * includes this file for a real one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <sys/stat.h>

#include "engine/session/device_snapshot.h"
#include "engine/session/session.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/emulated_device.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

enum { SMALL = 2000, GROUPS = 7, LARGE = 90000, STEPS = 3 };

static const device_backend *backend;
static device_failure why;

/*
 * Vectors, scalars and small matrices of three dtypes, from 4 bytes to 64 KiB, and after them a large tensor, all in
 * one allocation on the device.
 */
typedef struct small_model {
    device_queue stream; /* the trainer's stream */
    ckd_device on;
    uint8_t *host, *device;
    uint64_t size, at[SMALL + 1]; /* offsets in bytes */
    uint64_t elements[SMALL + 1];
} small_model;

static ckd_dtype dtype_of(unsigned i) {
    static const ckd_dtype all[3] = {CKD_F32, CKD_BF16, CKD_I64};
    return i == SMALL ? CKD_F32 : all[i % 3];
}

/* The large tensor has a group of its own. */
static uint32_t group_of(unsigned i) {
    return i == SMALL ? GROUPS : i % GROUPS;
}

static uint64_t size_of(const small_model *m, unsigned i) {
    return m->elements[i] * ckd_dtype_size(dtype_of(i));
}

static small_model model_new(void) {
    small_model m = {.on = CKD_DEVICE_INIT};
    for (unsigned i = 0; i <= SMALL; i++) {
        m.elements[i] = i == SMALL ? LARGE : i % 50 == 0 ? 8192 : 1 + i * 7919u % 700;
        m.at[i] = (m.size + 7) / 8 * 8; /* aligned for their dtypes, but not more */
        m.size = m.at[i] + size_of(&m, i);
    }
    m.host = malloc(m.size);
    assert_non_null(m.host);
    assert_int_equal(backend->queue_open(&m.stream, 0, false, &why), DEVICE_DONE);
    m.on.stream = m.stream.stream;
    void *there;
    assert_int_equal(backend->allocate(&there, 0, m.size, &why), DEVICE_DONE);
    m.device = there;
    return m;
}

static void model_free(small_model *m) {
    assert_int_equal(backend->finish(&m->stream, &why), DEVICE_DONE);
    backend->release(0, m->device);
    backend->queue_close(&m->stream);
    free(m->host);
}

/* One third of the tensors does not change. */
static void image_of(uint8_t *to, const small_model *m, uint64_t step) {
    for (unsigned i = 0; i <= SMALL; i++) {
        uint64_t seed = i % 3 == 1 ? 1 : step;
        for (uint64_t j = 0; j < size_of(m, i); j++) {
            to[m->at[i] + j] = (uint8_t)((j * 2654435761u + i * 40503u + seed * 97u) >> 7);
        }
    }
}

/* Copies a part on the trainer's stream. The copy is still in progress when it returns. */
static void put(const small_model *m, uint64_t at, uint64_t size) {
    assert_int_equal(backend->copy(&m->stream, m->device + at, m->host + at, size, DEVICE_TO_DEVICE, &why),
                     DEVICE_DONE);
}

static void optimize(small_model *m, uint64_t step) {
    assert_int_equal(backend->finish(&m->stream, &why), DEVICE_DONE);
    image_of(m->host, m, step);
    put(m, 0, m->size);
}

/* Overwrites the tensors of a group, or all of them, as soon as the stream allows it. */
static void spoil(small_model *m, uint32_t which_group) {
    assert_int_equal(backend->finish(&m->stream, &why), DEVICE_DONE);
    memset(m->host, 0xee, m->size);
    for (unsigned i = 0; i <= SMALL; i++) {
        if (which_group == SNAPSHOT_ALL || group_of(i) == which_group) {
            put(m, m->at[i], size_of(m, i));
        }
    }
    assert_int_equal(backend->finish(&m->stream, &why), DEVICE_DONE);
}

static ckd_tensor description(const small_model *m, unsigned i, char name[32]) {
    ckd_tensor d = CKD_TENSOR_INIT;
    snprintf(name, 32, i == SMALL ? "large" : "small.%u", i);
    d.name = name;
    d.dtype = dtype_of(i);
    d.ndim = m->elements[i] > 1;
    d.shape = &m->elements[i];
    d.device = &m->on;
    return d;
}

/* Registers the first `count` tensors. The large one is the last. */
static ckd_session *open_session(const char *dir, const ckd_session_options *o, const small_model *m,
                                 unsigned count) {
    char path[600], name[32];
    ckd_session *s;
    ckd_error err;
    snprintf(path, sizeof(path), "%s/store", dir);
    must(ckd_session_open(&s, path, o, &err), &err);
    for (unsigned i = 0; i < count; i++) {
        ckd_tensor d = description(m, i, name);
        must(ckd_session_add(s, &d, m->device + m->at[i], group_of(i), &err), &err);
    }
    return s;
}

static void stored_are(const char *dir, const small_model *m, uint64_t step, unsigned count) {
    uint8_t *image = malloc(m->size);
    char name[32];
    assert_non_null(image);
    image_of(image, m, step);
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    for (unsigned i = count; i-- > 0; i -= i < 20 ? 0 : i < 36 ? i - 20 : 36) {
        description(m, i, name);
        void *got = load_whole(store, TRAINER_RUN, step, name, size_of(m, i));
        assert_memory_equal(got, image + m->at[i], size_of(m, i));
        free(got);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    free(image);
}

static emulated_calls calls_since(const emulated_calls *before) {
    emulated_calls now = emulated_called();
    now.launches -= before->launches;
    now.waits -= before->waits;
    for (int i = 0; i < 3; i++) {
        now.copies[i] -= before->copies[i];
    }
    return now;
}

/* ---- sessions ---- */

/* Saves a step. The trainer overwrites the tensors as soon as it may, group by group. */
static void step_and_spoil(ckd_session *s, small_model *m, uint64_t step) {
    ckd_error err;
    optimize(m, step);
    /* Everything copied before the save may continue was copied because the trainer's stream waits for it. */
    ckd_session_phase(s, CKD_PHASE_BUSY);
    must(ckd_session_step(s, step, &err), &err);
    for (uint32_t which_group = GROUPS; which_group > 0; which_group--) {
        ckd_session_fence_group(s, which_group);
        spoil(m, which_group);
    }
    ckd_session_fence(s);
    spoil(m, SNAPSHOT_ALL);
    ckd_session_phase(s, CKD_PHASE_ANY);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
}

static void save_steps(const char *dir, ckd_snapshot how, uint64_t device_bytes, unsigned count) {
    small_model m = model_new();
    ckd_session_options o = session_options();
    ckd_error err;
    o.snapshot = how;
    o.device_bytes = device_bytes;
    ckd_session *s = open_session(dir, &o, &m, count);
    for (uint64_t step = 1; step <= STEPS; step++) {
        step_and_spoil(s, &m, step);
    }
    ckd_session_state now;
    ckd_session_poll(&now, s);
    assert_int_equal(now.saved, STEPS);
    must(ckd_session_close(s, &err), &err);
    for (uint64_t step = 1; step <= STEPS; step++) {
        stored_are(dir, &m, step, count);
    }
    model_free(&m);
    assert_int_equal(emulated_memory + emulated_pinned + emulated_marks, 0);
}

static void in_folders(const char *dir, ckd_snapshot how, const uint64_t *budgets, int count) {
    for (int i = 0; i < count; i++) {
        char sub[600];
        snprintf(sub, sizeof(sub), "%s/%d", dir, i);
        assert_int_equal(mkdir(sub, 0777), 0);
        save_steps(sub, how, budgets[i], SMALL + 1);
    }
}

/* space on the device for everything, for some of the small tensors, for nothing */
static const uint64_t budgets[3] = {0, 500000, 1};

static void test_values(void **state) {
    in_folders(*state, CKD_SNAPSHOT_COPY, budgets, 3);
}

static void test_lazy_values(void **state) {
    in_folders(*state, CKD_SNAPSHOT_LAZY, budgets, 3);
}

/*
 * At most one launch per 32 tensors and group, and one transfer, or none if the tensors are gathered directly on the
 * host. The save itself makes no device calls for them.
 */
static void test_calls(void **state) {
    for (int i = 0; i < 4; i++) {
        char dir[600];
        ckd_error err;
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, i);
        assert_int_equal(mkdir(dir, 0777), 0);
        small_model m = model_new();
        ckd_session_options o = session_options();
        o.snapshot = i & 1 ? CKD_SNAPSHOT_LAZY : CKD_SNAPSHOT_COPY;
        o.device_bytes = i & 2 ? 1 : 0;
        ckd_session *s = open_session(dir, &o, &m, SMALL);
        for (uint64_t step = 1; step <= STEPS; step++) {
            optimize(&m, step);
            emulated_calls before = emulated_called();
            must(ckd_session_step(s, step, &err), &err);
            ckd_session_fence(s);
            must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
            emulated_calls took = calls_since(&before);
            bool counted = backend == emulated_device();
            assert_true(!counted || took.launches <= (SMALL + DEVICE_SPANS - 1) / DEVICE_SPANS + GROUPS);
            assert_true(!counted || took.copies[DEVICE_TO_HOST] == (i & 2 ? 0 : 1));
            assert_int_equal(took.copies[DEVICE_TO_DEVICE] + took.copies[DEVICE_ON_DEVICE], 0);
            assert_true(took.waits <= GROUPS + 2);
        }
        must(ckd_session_close(s, &err), &err);
        stored_are(dir, &m, STEPS, SMALL);
        model_free(&m);
    }
}

/* ---- larger tensors: a stream holds about a thousand commands, after which starting a snapshot would wait ---- */

/*
 * Layers of four equal matrices, three other equal ones and two vectors, the last of an odd size. Every tenth layer
 * begins at an odd address.
 */
enum { LAYERS = 20, EACH = 9, LARGER = LAYERS * EACH };

static uint64_t larger_size(unsigned i) {
    unsigned which = i % EACH;
    return which < 4 ? 300000 : which < 7 ? 700000 + 16 * which : which == 7 ? 90000 : 70001;
}

/* Returns how many bytes they take. */
static uint64_t larger_sources(device_source *sources, const ckd_device *on, uint8_t *memory) {
    uint64_t at = 0;
    for (unsigned i = 0; i < LARGER; i++) {
        uint64_t odd = i / EACH % 10 == 9;
        sources[i] = (device_source){
            .data = memory + at + odd, .bytes = larger_size(i), .group = i / EACH % 2, .stream = on->stream};
        at += (larger_size(i) + 1 + 15) / 16 * 16;
    }
    return at;
}

static void read_larger(device_snapshot *s, const small_model *m, const device_source *sources) {
    uint8_t *got = malloc(1 << 20);
    assert_non_null(got);
    for (unsigned i = 0; i < LARGER; i++) {
        const void *data;
        ckd_device on;
        ckd_error err;
        const uint8_t *is = m->host + ((const uint8_t *)sources[i].data - m->device);
        must(device_snapshot_read(&data, &on, s, i, &err), &err);
        if (on.struct_size) {
            assert_int_equal(backend->copy(&m->stream, got, data, sources[i].bytes, DEVICE_TO_HOST, &why),
                             DEVICE_DONE);
            assert_int_equal(backend->finish(&m->stream, &why), DEVICE_DONE);
            data = got;
        }
        assert_memory_equal(data, is, sources[i].bytes);
    }
    free(got);
}

static void test_larger_tensors_are_copied_together(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        small_model m = {.on = CKD_DEVICE_INIT};
        device_source sources[LARGER];
        device_snapshot *s;
        ckd_error err;
        void *there;
        m.size = larger_sources(sources, &m.on, NULL);
        m.host = random_bits(m.size, 5);
        assert_int_equal(backend->queue_open(&m.stream, 0, false, &why), DEVICE_DONE);
        assert_int_equal(backend->allocate(&there, 0, m.size, &why), DEVICE_DONE);
        m.on.stream = m.stream.stream;
        m.device = there;
        larger_sources(sources, &m.on, m.device);
        put(&m, 0, m.size);
        must(device_snapshot_new(&s, sources, LARGER, i ? m.size / 4 : 2 * m.size, &err), &err);
        emulated_calls before = emulated_called();
        must(device_snapshot_start(s, &err), &err);
        emulated_calls took = calls_since(&before);
        if (backend == emulated_device() && i == 0) {
            /* Two groups, each with two alternating kinds of matrices and the short vectors. */
            assert_true(took.launches <= 2 * (2 * LAYERS / 2 + 2));
            assert_int_equal(took.copies[DEVICE_ON_DEVICE], LAYERS / 10 * 7); /* those at odd addresses */
            assert_int_equal(took.copies[DEVICE_TO_HOST], 0);
        }
        assert_int_equal(took.waits, 0);
        must(device_snapshot_wait(s, &err), &err);
        read_larger(s, &m, sources);
        device_snapshot_free(s, false);
        model_free(&m);
    }
    assert_int_equal(emulated_memory + emulated_pinned + emulated_marks, 0);
}

/* ---- waiting ---- */

/* Only the thread that reads the snapshot waits for the copies. */
static void test_only_the_save_waits(void **state) {
    for (int i = 0; i < 2; i++) {
        char dir[600];
        ckd_error err;
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, i);
        assert_int_equal(mkdir(dir, 0777), 0);
        small_model m = model_new();
        ckd_session_options o = session_options();
        ckd_session_state now = {0};
        o.device_bytes = i ? 1 : 0;
        ckd_session *s = open_session(dir, &o, &m, SMALL + 1);
        for (uint64_t step = 1; step <= STEPS; step++) {
            optimize(&m, step);
            must(ckd_session_step(s, step, &err), &err);
            for (ckd_session_poll(&now, s); now.saved + now.failed < step; ckd_session_poll(&now, s)) {
                usleep(1000);
            }
        }
        assert_int_equal(now.failed, 0);
        must(ckd_session_close(s, &err), &err);
        for (uint64_t step = 1; step <= STEPS; step++) {
            stored_are(dir, &m, step, SMALL + 1);
        }
        model_free(&m);
    }
}

/* The limit of snapshots in host memory is too small for these tensors. */
static void test_host_memory(void **state) {
    small_model m = model_new();
    ckd_session_options o = session_options();
    ckd_error err;
    o.snapshot_bytes = 100000;
    ckd_session *s = open_session(*state, &o, &m, SMALL);
    assert_int_equal(ckd_session_step(s, 1, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "snapshot_bytes"));
    must(ckd_session_close(s, &err), &err);
    model_free(&m);
}

/* ---- saved one by one ---- */

static void test_one_by_one(void **state) {
    enum { ONES = 40 };
    ckd_store *store = store_create(*state);
    small_model m = model_new();
    char name[32];
    ckd_error err;
    store->device_reference_bytes = m.size;
    for (uint64_t step = 1; step <= STEPS; step++) {
        optimize(&m, step);
        ckd_save *save = begin_save(store, TRAINER_RUN, step);
        for (unsigned i = 0; i < ONES; i++) {
            ckd_tensor d = description(&m, i, name);
            d.data = m.device + m.at[i];
            emulated_calls before = emulated_called();
            must(ckd_save_tensor(save, &d, &err), &err);
            emulated_calls took = calls_since(&before);
            assert_true(backend != emulated_device() ||
                        (took.copies[DEVICE_TO_HOST] == 1 && took.waits == 1));
            assert_int_equal(took.launches + took.copies[DEVICE_TO_DEVICE] + took.copies[DEVICE_ON_DEVICE],
                             0);
        }
        must(ckd_save_commit(NULL, save, &err), &err);
    }
    ckd_store_close(store);
    for (uint64_t step = 1; step <= STEPS; step++) {
        stored_are(*state, &m, step, ONES);
    }
    model_free(&m);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

#ifndef DEVICE_SMALL_TESTS
int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_values),
        tempdir_test(test_lazy_values),
        tempdir_test(test_only_the_save_waits),
        tempdir_test(test_host_memory),
        tempdir_test(test_calls),
        cmocka_unit_test(test_larger_tensors_are_copied_together),
        tempdir_test(test_one_by_one),
    };
    backend = emulated_device();
    device_backend_use(backend);
    return run_sampled("device_small", tests, 2, NULL, NULL);
}
#endif
