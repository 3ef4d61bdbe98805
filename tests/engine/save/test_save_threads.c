/* A save of small tensors: a call returns while a worker still codes its tensor. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scratch.h"
#include "tests/support/stored.h"

/* Fewer tensors than blocks that may be in progress, so that no call has to wait for another block. */
enum { TENSORS = 3, SIDE = 256, N = SIDE * SIDE, PATIENCE_S = 20 };

static const uint64_t shape[2] = {SIDE, SIDE};

static struct {
    pthread_t caller;
    atomic_uint begun, returned; /* calls that save a tensor */
    atomic_bool seen, stuck; /* a worker read a payload of the parent; the call did not return meanwhile */
} watched;

/* Holds a worker within its task until the call has returned that was in progress when the task began. */
static int hold_worker(void *context, file_op op, const char *path) {
    (void)context;
    if (op != FILE_OP_READ || !strstr(path, "/data/c/") || pthread_equal(pthread_self(), watched.caller) ||
        watched.seen) {
        return 0;
    }
    watched.seen = true;
    const unsigned call = watched.begun;
    const struct timespec pause = {0, 1000000};
    for (unsigned i = 0; i < PATIENCE_S * 1000 && watched.returned < call; i++) {
        nanosleep(&pause, NULL);
    }
    watched.stuck = watched.returned < call;
    return 0;
}

static void save_step(ckd_store *store, uint64_t step, float *const *values) {
    watched.begun = watched.returned = 0;
    file_set_fault_hook(hold_worker, NULL); /* while no worker is at work */
    ckd_save *save = begin_save(store, "run", step);
    for (unsigned i = 0; i < TENSORS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "layer.%u", i);
        change_values(CKD_F32, values[i], N, (unsigned)step * TENSORS + i);
        watched.begun++;
        add_tensor(save, name, CKD_F32, 2, shape, NULL, values[i]);
        watched.returned++;
    }
    commit_save(save);
    file_set_fault_hook(NULL, NULL);
}

/* A worker may come too late for three tensors, so there are several saves. */
static void test_calls_do_not_wait_for_workers(void **state) {
    const stored *f = *state;
    float *values[TENSORS];
    for (unsigned i = 0; i < TENSORS; i++) {
        values[i] = random_values(CKD_F32, N, i);
    }
    watched.caller = pthread_self();
    watched.seen = watched.stuck = false;
    uint64_t step = 0;
    for (; step < 300 && !watched.seen; step++) {
        save_step(f->store, step, values);
    }
    assert_true(watched.seen);
    assert_false(watched.stuck);
    for (unsigned i = 0; i < TENSORS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "layer.%u", i);
        float *loaded = load_whole(f->store, "run", step - 1, name, N * sizeof(float));
        assert_memory_equal(loaded, values[i], N * sizeof(float));
        free(loaded);
        free(values[i]);
    }
}

/* The caller overwrites its memory at once. Each tensor is a block, or is several, or ends with a small one. */
static void test_the_callers_memory_is_free(void **state) {
    const stored *f = *state;
    static const uint64_t counts[] = {1, 5000, 262144, 262145, 262144 * 20 + 77};
    enum { COUNTS = sizeof(counts) / sizeof(*counts) };
    float *given = calloc(counts[COUNTS - 1], sizeof(float)), *values[COUNTS];
    assert_non_null(given);
    ckd_save *save = begin_save(f->store, "reused", 1);
    for (unsigned i = 0; i < COUNTS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "t%u", i);
        values[i] = random_values(CKD_F32, counts[i], 50 + i);
        memcpy(given, values[i], counts[i] * sizeof(float));
        add_tensor(save, name, CKD_F32, 1, &counts[i], NULL, given);
        memset(given, 0x55, counts[i] * sizeof(float));
    }
    commit_save(save);
    for (unsigned i = 0; i < COUNTS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "t%u", i);
        float *loaded = load_whole(f->store, "reused", 1, name, counts[i] * sizeof(float));
        assert_memory_equal(loaded, values[i], counts[i] * sizeof(float));
        free(loaded);
        free(values[i]);
    }
    free(given);
}

static int make_store(void **state) {
    *state = stored_make(2, 1);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_calls_do_not_wait_for_workers),
                                       cmocka_unit_test(test_the_callers_memory_is_free)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_store, stored_remove);
    scratch_end();
    return failed;
}
