/*
 * Exact tensors in device memory, whose deltas are coded on the device. Every payload is the same as from host memory.
 * Values cross the bus only if the host needs them, and the host takes over what the device cannot do. The device is
 * emulated; tests/engine/device/test_cuda_exact.c includes this file for a real one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/device/device.h"
#include "engine/save/device.h"
#include "tests/support/device_exact.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"

enum { TENSORS = 7 };

static void make_values(tensor *t, unsigned seed) {
    t->elements = t->shape[0] * (t->ndim > 1 ? t->shape[1] : 1);
    t->exact = random_values(CKD_F32, t->elements, seed);
    t->host = malloc(size_of(t));
    assert_non_null(t->host);
    round_all(t);
}

static void free_values(tensor *t) {
    free(t->exact);
    free(t->host);
    backend->release(0, t->device);
}

/*
 * A tensor of several blocks, one that is cut into panels, other dtypes, one at an unaligned address, one that does
 * not change, and a small one.
 */
static void model(tensor *t) {
    static const tensor all[TENSORS] = {
        {.name = "blocks.weight", .dtype = CKD_F32, .ndim = 2, .shape = {2 * BLOCK / 512 + 77, 512}},
        {.name = "wide.weight", .dtype = CKD_F32, .ndim = 2, .shape = {1030, 1100}},
        {.name = "bf16.weight", .dtype = CKD_BF16, .ndim = 2, .shape = {700, 512}},
        {.name = "f16.weight", .dtype = CKD_F16, .ndim = 1, .shape = {300001, 0}},
        {.name = "odd.weight", .dtype = CKD_BF16, .ndim = 1, .shape = {100003, 0}, .shift = 3},
        {.name = "still.weight", .dtype = CKD_F32, .ndim = 1, .shape = {150000, 0}},
        {.name = "small.weight", .dtype = CKD_F32, .ndim = 1, .shape = {3000, 0}},
    };
    for (unsigned i = 0; i < TENSORS; i++) {
        t[i] = all[i];
        make_values(&t[i], i + 1);
    }
}

static void change(tensor *t, float rate, unsigned seed) {
    float *by = random_values(CKD_F32, t->elements, seed);
    for (uint64_t j = 0; j < t->elements; j++) {
        t->exact[j] += rate * by[j];
    }
    free(by);
    round_all(t);
}

/* Most values change, except those of still.weight. */
static void train_one(tensor *t, unsigned i, unsigned step) {
    change(&t[i], i == 5 ? 0 : t[i].dtype == CKD_F32 ? 1e-5f : 2e-3f, 1000 * step + i);
}

static void train(tensor *t, unsigned step) {
    for (unsigned i = 0; i < TENSORS; i++) {
        train_one(t, i, step);
    }
}

static void model_free(tensor *t) {
    for (unsigned i = 0; i < TENSORS; i++) {
        free_values(&t[i]);
    }
}

/* ---- the same payloads as from the host ---- */

/* About as many bytes cross the bus as are stored, also with materialized copies. */
static void compare_chain(const char *dir, double newest) {
    ckd_store *store = store_create(dir);
    tensor t[TENSORS];
    uint64_t raw = 0, parents = 0, small = 3000 * 4;
    model(t);
    for (unsigned i = 0; i < TENSORS; i++) {
        raw += size_of(&t[i]);
        parents += i < 5 ? size_of(&t[i]) : 0;
    }
    for (unsigned step = 0; step < 4; step++) {
        stored_payloads stored;
        traffic took = save_both(store, step, newest, t, TENSORS, &stored);
        bool counted = backend == emulated_device() && step > 0;
        assert_true(step == 0 || stored.deltas > 30);
        assert_true(!counted || took.device >= parents); /* the parent's values and tables */
        assert_true(!counted || took.host < stored.bytes + raw / 8 + small);
        train(t, step);
    }
    model_free(t);
    close_store(store);
}

static void test_chains(void **state) {
    compare_chain(*state, 1000);
}

static void test_ready_copies(void **state) {
    compare_chain(*state, 2);
}

/* By default the host codes, from the values: the same payloads. */
static void test_default(void **state) {
    ckd_store *store = store_create(*state);
    tensor t[TENSORS];
    model(t);
    save_device_use(false);
    for (unsigned step = 0; step < 3; step++) {
        stored_payloads stored;
        traffic took = save_both(store, step, 1000, t, TENSORS, &stored);
        assert_true(step == 0 || stored.deltas > 30);
        assert_true(step == 0 ||
                    took.host > 2 * stored.bytes); /* where the device codes, an eighth more at most */
        train(t, step);
    }
    save_device_use(true);
    model_free(t);
    close_store(store);
}

/* The emulated device runs its threads in reverse order. The result is the same. */
static void test_backwards(void **state) {
    emulated_backwards = true;
    compare_chain(*state, 1000);
    emulated_backwards = false;
}

/*
 * A delta of few changes is a list, which the host makes from the values. The blocks are more than those that show if
 * deltas win.
 */
static void test_few_changes(void **state) {
    ckd_store *store = store_create(*state);
    tensor few = {.name = "few.weight", .dtype = CKD_BF16, .ndim = 2, .shape = {7 * BLOCK / 512, 512}},
           *t = &few;
    make_values(t, 1);
    for (unsigned step = 0; step < 3; step++) {
        stored_payloads stored;
        traffic took = save_both(store, step, 1000, t, 1, &stored);
        bool counted = backend == emulated_device() && step > 0;
        assert_true(step == 0 || stored.deltas > 0);
        assert_true(!counted || (stored.bytes < size_of(t) / 10 && took.host >= size_of(t)));
        assert_true(!counted || took.host < size_of(t) + size_of(t) / 8);
        change(t, 5e-5f, step);
    }
    free_values(t);
    close_store(store);
}

/* ---- references: the parent's values, kept on the device ---- */

static void spoil_references(const ckd_store *store) {
    const float nonsense[4] = {1, 2, 3, 4};
    device_queue queue = {.device = 0};
    for (const device_reference *r = store->references; r; r = r->next) {
        assert_int_equal(backend->copy(&queue, r->memory, nonsense, sizeof(nonsense), DEVICE_TO_DEVICE, &why),
                         DEVICE_DONE);
    }
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
}

/*
 * With references, only tables are sent and nothing is decoded. A reference that does not match the parent is detected
 * for each block.
 */
static void test_references(void **state) {
    ckd_store *store = store_create(*state);
    tensor t[TENSORS];
    uint64_t raw = 0;
    model(t);
    for (unsigned i = 0; i < TENSORS; i++) {
        raw += size_of(&t[i]);
    }
    uint64_t kept = raw - size_of(&t[TENSORS - 1]); /* the host saves the small tensor */
    store->device_reference_bytes = raw;
    for (unsigned step = 0; step < 5; step++) {
        stored_payloads stored;
        if (step == 3) {
            spoil_references(store);
        }
        traffic took = save_both(store, step, 1000, t, TENSORS, &stored);
        assert_int_equal(store->device_references_held, kept);
        bool counted = backend == emulated_device() && step > 0;
        /* The first blocks were overwritten, one of them the first of a panel. */
        uint64_t most = step == 3 ? 5 * (uint64_t)BLOCK * 4 : 0;
        assert_true(!counted || took.device < raw / 8 + most);
        assert_true(!counted || step != 3 || took.device > (uint64_t)BLOCK * 4);
        train(t, step);
    }
    model_free(t);
    close_store(store);
}

/* ---- values that the host needs after all ---- */

/*
 * Two blocks with equal values, and a good delta for each. The second is a copy of the first, whose chain is long, so
 * the host also tries it without a delta.
 */
static void test_twins(void **state) {
    ckd_store *store = store_create(*state);
    tensor t = {
        .name = "twins.weight", .dtype = CKD_F32, .ndim = 1, .shape = {2 * BLOCK}, .elements = 2 * BLOCK};
    t.exact = random_values(CKD_F32, t.elements, 1);
    t.host = malloc(size_of(&t));
    assert_non_null(t.host);
    for (unsigned step = 0; step < 3; step++) {
        for (uint64_t i = 0; i < BLOCK; i++) {
            float by = 1e-6f * (float)((i * 7919 + step) % 101);
            t.exact[i] += by;
            t.exact[BLOCK + i] = step % 2 ? t.exact[i] : t.exact[i] + 1e-6f * (float)(i % 17);
        }
        round_all(&t);
        stored_payloads stored;
        save_both(store, step, step == 1 ? 1 : 1000, &t, 1, &stored);
    }
    free(t.exact);
    free(t.host);
    backend->release(0, t.device);
    close_store(store);
}

/* Materialized copies are decided on after the deltas. Only then are their values read. */
static void test_late_materialized_copies(void **state) {
    ckd_store *store = store_create(*state);
    tensor t[TENSORS];
    model(t);
    save_device_unprepared(true);
    for (unsigned step = 0; step < 4; step++) {
        stored_payloads stored;
        save_both(store, step, 2, t, TENSORS, &stored); /* compares the payloads */
        train(t, step);
    }
    save_device_unprepared(false);
    model_free(t);
    close_store(store);
}

/*
 * Noise never makes good deltas, so it is coded without a parent. So are values that were all zero, once their stored
 * size is known.
 */
static void test_useless_deltas(void **state) {
    ckd_store *store = store_create(*state);
    tensor t[2] = {{.name = "noise", .dtype = CKD_F32, .ndim = 2, .shape = {3000, 500}, .elements = 1500000},
                   {.name = "zeros", .dtype = CKD_F32, .ndim = 1, .shape = {200000}, .elements = 200000}};
    for (unsigned step = 0; step < 3; step++) {
        for (unsigned i = 0; i < 2; i++) {
            if (step) {
                free(t[i].exact);
                free(t[i].host);
            }
            bool zeros = i && step == 0;
            t[i].exact = zeros ? calloc(t[i].elements, 4) : random_values(CKD_F32, t[i].elements, step + 5);
            t[i].host = malloc(size_of(&t[i]));
            assert_true(t[i].exact && t[i].host);
            round_all(&t[i]);
        }
        stored_payloads stored;
        traffic took = save_both(store, step, 1000, t, 2, &stored);
        assert_int_equal(stored.deltas, 0);
        bool counted = backend == emulated_device() && step > 1;
        assert_true(!counted || took.host < stored.bytes + size_of(&t[0]) / 8);
    }
    for (unsigned i = 0; i < 2; i++) {
        free(t[i].exact);
        free(t[i].host);
        backend->release(0, t[i].device);
    }
    close_store(store);
}

/* ---- moments ---- */

static void set_moments(float *first, float *second, unsigned step) {
    enum { COLUMNS = 520 };
    float *noise = random_values(CKD_F32, 500 * (uint64_t)COLUMNS, 40 + step);
    for (uint64_t i = 0; i < 500 * (uint64_t)COLUMNS; i++) {
        float scale = (float)(1 + i % COLUMNS % 31) * (float)(1 + i / COLUMNS % 23);
        first[i] = noise[i] * scale * 1e-4f;
        second[i] = i % 5000 ? first[i] * first[i] + 1e-9f * scale * scale : 0;
    }
    free(noise);
}

/*
 * New moments in each step, with scales per row and column. Second moments are never negative. Their levels and shared
 * bits are coded.
 */
static void test_moments(void **state) {
    ckd_store *store = store_create(*state);
    tensor t[3] = {{.name = "exp_avg.w", .dtype = CKD_F32, .ndim = 2, .shape = {500, 520}},
                   {.name = "exp_avg_sq.w", .dtype = CKD_F32, .ndim = 2, .shape = {500, 520}},
                   {.name = "exp_avg_sq.b", .dtype = CKD_BF16, .ndim = 2, .shape = {500, 520}, .shift = 1}};
    for (unsigned i = 0; i < 3; i++) {
        t[i].elements = t[i].shape[0] * t[i].shape[1];
        t[i].exact = calloc(t[i].elements, 4);
        t[i].host = calloc(t[i].elements, 4);
        assert_true(t[i].exact && t[i].host);
    }
    for (unsigned step = 0; step < 4; step++) {
        set_moments(t[0].exact, t[1].exact, step);
        memcpy(t[2].exact, t[1].exact, t[1].elements * 4);
        for (unsigned i = 0; i < 3; i++) {
            round_all(&t[i]);
        }
        stored_payloads stored;
        emulated_backwards = step % 2 && backend == emulated_device();
        traffic took = save_both(store, step, step == 3 ? 2 : 1000, t, 3, &stored);
        emulated_backwards = false;
        bool counted = backend == emulated_device() && step > 0;
        assert_true(stored.alone + stored.deltas == 3 && stored.alone >= (step ? 1 : 3));
        assert_true(!counted || took.host < stored.bytes + stored.bytes / 10);
    }
    for (unsigned i = 0; i < 3; i++) {
        free(t[i].exact);
        free(t[i].host);
        backend->release(0, t[i].device);
    }
    close_store(store);
}

/* ---- errors ---- */

typedef struct message_counts {
    unsigned coding, all;
} message_counts;

static void note_message(void *context, const char *message) {
    message_counts *h = context;
    h->all += strstr(message, "is copied to the host") != NULL;
    h->coding += strstr(message, "and coded there, as the device failed") != NULL;
}

/* Each device call fails once. The host takes over or the save fails, and there is at most one message per tensor. */
static void test_failures(void **state) {
    ckd_store *store = store_create(*state);
    tensor all[TENSORS], *t = &all[3];
    message_counts h = {0, 0};
    unsigned recovered = 0, failed = 0;
    char path[512];
    ckd_store_close(store);
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    snprintf(path, sizeof(path), "%s/store", (const char *)*state);
    o.on_message = note_message;
    o.message_context = &h;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_WRITE, &o, NULL), CKD_OK);
    model(all);
    store->device_reference_bytes = size_of(t);
    ckd_save_options first = exact_options("device", 0, 1000);
    assert_int_equal(save_some(NULL, store, &first, t, 1, true), CKD_OK);
    bool happened = true;
    const unsigned every = (unsigned)test_stride(3, 1, 1); /* odd, so that both kinds of failure occur */
    for (unsigned n = (unsigned)test_first("exact failures", every); happened; n += every) {
        train_one(all, 3, n);
        ckd_save_options options = exact_options("device", n, 2);
        h = (message_counts){0, 0};
        emulated_fail_after = (int)n;
        emulated_fail_as = n % 2 ? DEVICE_FULL : DEVICE_FAILED;
        ckd_status status = save_some(NULL, store, &options, t, 1, true);
        happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        assert_true(status == CKD_OK || (happened && (status == CKD_E_DEVICE || status == CKD_E_NOMEM)));
        assert_true(h.all <= 1);
        recovered += status == CKD_OK && h.coding;
        failed += status != CKD_OK;
        if (status == CKD_OK) {
            loads_as(store, "device", n, t, 1);
        }
    }
    assert_true(recovered > (every > 1 ? 5 : 25) && failed >= (every > 1 ? 0 : 3));
    model_free(all);
    close_store(store);
}

#ifndef DEVICE_EXACT_TESTS
int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_chains),     tempdir_test(test_ready_copies),
        tempdir_test(test_backwards),  tempdir_test(test_few_changes),
        tempdir_test(test_references), tempdir_test(test_late_materialized_copies),
        tempdir_test(test_twins),      tempdir_test(test_useless_deltas),
        tempdir_test(test_moments),    tempdir_test(test_failures),
        tempdir_test(test_default),
    };
    backend = emulated_device();
    device_backend_use(backend);
    save_device_use(true);
    return run_sampled("device_exact", tests, 2, NULL, NULL);
}
#endif
