/*
 * Exact mixed-precision states on a device. Masters are coded on the device like other tensors. Weights that are
 * rounded masters are recognised by hashes, so that they hardly cross the bus. What is stored is what a save from host
 * memory stores. The device is emulated; tests/engine/device/test_cuda_masters.c includes this file for a real one.
 */
#include <stdio.h>

#include "engine/device/device.h"
#include "engine/save/device.h"
#include "tests/support/device_exact.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"

/* The masters come first, then their rounded copies. */
enum { MASTERS = 5, TENSORS = 2 * MASTERS, FROZEN = 3, TORN = 1, SMALL = 4 };

/*
 * A master of several blocks, one at an unaligned address, one that is cut into panels like its copy, one that does
 * not change, and a small one.
 */
static void model(tensor *t) {
    static const tensor all[TENSORS] = {
        {.name = "master.a", .dtype = CKD_F32, .ndim = 2, .shape = {2 * BLOCK / 512 + 77, 512}},
        {.name = "master.odd", .dtype = CKD_F32, .ndim = 1, .shape = {BLOCK + 100003, 0}, .shift = 3},
        {.name = "master.wide", .dtype = CKD_F32, .ndim = 2, .shape = {2050, 1030}},
        {.name = "master.frozen", .dtype = CKD_F32, .ndim = 1, .shape = {150000, 0}},
        {.name = "master.small", .dtype = CKD_F32, .ndim = 1, .shape = {3000, 0}},
        {.name = "a.weight", .dtype = CKD_BF16, .ndim = 2, .shape = {2 * BLOCK / 512 + 77, 512}, .shift = 1},
        {.name = "odd.weight", .dtype = CKD_BF16, .ndim = 1, .shape = {BLOCK + 100003, 0}},
        {.name = "wide.weight", .dtype = CKD_BF16, .ndim = 2, .shape = {2050, 1030}},
        {.name = "frozen.weight", .dtype = CKD_F16, .ndim = 1, .shape = {150000, 0}},
        {.name = "small.weight", .dtype = CKD_BF16, .ndim = 1, .shape = {3000, 0}},
    };
    for (unsigned i = 0; i < TENSORS; i++) {
        t[i] = all[i];
        t[i].elements = t[i].shape[0] * (t[i].ndim > 1 ? t[i].shape[1] : 1);
        t[i].exact = i < MASTERS ? random_values(CKD_F32, t[i].elements, i + 1) : t[i - MASTERS].exact;
        t[i].host = malloc(size_of(&t[i]));
        assert_non_null(t[i].host);
        round_all(&t[i]);
    }
}

static void move(tensor *t, unsigned seed) {
    float *by = random_values(CKD_F32, t->elements, seed);
    for (uint64_t j = 0; j < t->elements; j++) {
        t->exact[j] += 1e-5f * by[j];
    }
    free(by);
}

/* Moves all masters a little, except the frozen one. The last value of one weight differs from its rounded master. */
static void train(tensor *t, unsigned step) {
    for (unsigned i = 0; i < TENSORS; i++) {
        if (i < MASTERS && i != FROZEN) {
            move(&t[i], 1000 * step + i);
        }
        round_all(&t[i]);
        if (i == MASTERS + TORN) {
            ((uint16_t *)t[i].host)[t[i].elements - 1] ^= 1;
            give(&t[i]);
        }
    }
}

static void model_free(tensor *t) {
    for (unsigned i = 0; i < TENSORS; i++) {
        if (i < MASTERS) {
            free(t[i].exact);
        }
        free(t[i].host);
        backend->release(0, t[i].device);
    }
}

static uint64_t size_of_some(const tensor *t, unsigned first, unsigned end) {
    uint64_t sum = 0;
    for (unsigned i = first; i < end; i++) {
        sum += size_of(&t[i]);
    }
    return sum;
}

/* The bytes copied to the host by a save of the masters alone. */
static uint64_t masters_alone(ckd_store *store, uint64_t step, double newest, const tensor *t) {
    ckd_save_options o = exact_options("masters", step, newest);
    uint64_t before = emulated_copied[DEVICE_TO_HOST];
    assert_int_equal(save_some(NULL, store, &o, t, MASTERS, true), CKD_OK);
    return emulated_copied[DEVICE_TO_HOST] - before;
}

/* Loads to the device and compares there. */
static void check_device_loads(ckd_store *store, const char *run, uint64_t step, const tensor *t) {
    ckd_checkpoint c;
    ckd_load *load;
    ckd_error err;
    device_queue queue = {.device = 0};
    assert_int_equal(ckd_store_find(&c, store, run, step, &err), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    for (unsigned i = 0; i < TENSORS; i++) {
        void *there, *got = malloc(size_of(&t[i]));
        assert_non_null(got);
        assert_int_equal(backend->allocate(&there, 0, size_of(&t[i]), &why), DEVICE_DONE);
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = t[i].name;
        q.data = there;
        q.size = size_of(&t[i]);
        q.device = &on_device;
        assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
        assert_int_equal(backend->copy(&queue, got, there, size_of(&t[i]), DEVICE_TO_HOST, &why),
                         DEVICE_DONE);
        assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
        assert_memory_equal(got, t[i].host, size_of(&t[i]));
        backend->release(0, there);
        free(got);
    }
    ckd_load_end(load);
}

/*
 * Masters cost about their stored size on the bus. Weights cost 8 bytes per 4096, except for small ones and for a
 * block that is no rounded master. `reference`: bytes of references on the device, enough to keep masters and weights
 * that are no copies, so that their parents are not sent.
 */
static void compare_chain(const char *dir, double newest, uint64_t reference) {
    ckd_store *store = store_create(dir);
    tensor t[TENSORS];
    store->device_reference_bytes = reference;
    model(t);
    uint64_t masters = size_of_some(t, 0, MASTERS), weights = size_of_some(t, MASTERS, TENSORS);
    uint64_t small = size_of(&t[SMALL]) + size_of(&t[MASTERS + SMALL]), torn = 100003 * sizeof(uint16_t);
    for (unsigned step = 0; step < 4; step++) {
        stored_payloads stored;
        bool counted = backend == emulated_device();
        uint64_t alone = reference ? 0 : masters_alone(store, step, newest, t);
        traffic took = save_both(store, step, newest, t, TENSORS, &stored);
        assert_true(stored.rounded > 8);
        assert_true(step == 0 || stored.deltas > 30);
        assert_true(!counted || reference || took.host - alone < weights / 256 + small + (step ? torn : 0));
        assert_true(!counted || step == 0 || took.host < stored.bytes + masters / 8 + small + torn);
        assert_true(!counted || !reference || step == 0 || took.device < masters / 8);
        assert_int_equal(store->device_references_held,
                         reference ? masters - size_of(&t[SMALL]) + (step ? size_of(&t[MASTERS + TORN]) : 0)
                                   : 0);
        check_device_loads(store, "device", step, t);
        train(t, step);
    }
    model_free(t);
    close_store(store);
}

static void test_chains(void **state) {
    compare_chain(*state, 1000, 0);
}

static void test_ready_copies(void **state) {
    compare_chain(*state, 2, 0);
}

static void test_references(void **state) {
    compare_chain(*state, 1000, UINT64_C(1) << 30);
}

static void test_backwards(void **state) {
    emulated_backwards = true;
    compare_chain(*state, 1000, 0);
    emulated_backwards = false;
}

/* ---- errors ---- */

/* A master of one block and its rounded copy. */
static void pair_new(tensor pair[2]) {
    pair[0] = (tensor){.name = "master.w", .dtype = CKD_F32, .ndim = 1, .shape = {50001}, .elements = 50001};
    pair[1] = (tensor){.name = "w", .dtype = CKD_BF16, .ndim = 1, .shape = {50001}, .elements = 50001};
    pair[0].exact = pair[1].exact = random_values(CKD_F32, 50001, 9);
    for (unsigned i = 0; i < 2; i++) {
        pair[i].host = malloc(size_of(&pair[i]));
        assert_non_null(pair[i].host);
        round_all(&pair[i]);
    }
}

static void pair_free(tensor pair[2]) {
    free(pair[0].exact);
    for (unsigned i = 0; i < 2; i++) {
        free(pair[i].host);
        backend->release(0, pair[i].device);
    }
}

/* Each device call fails once. The host takes over or the save fails, and loads give the saved values. */
static void test_failures(void **state) {
    ckd_store *store = store_create(*state);
    tensor pair[2];
    unsigned recovered = 0, failed = 0;
    pair_new(pair);
    for (int n = 0, happened = 1; happened; n++) {
        ckd_save_options o = exact_options("device", (uint64_t)n, 1000);
        emulated_fail_after = n; /* 0: no call */
        emulated_fail_as = n % 2 ? DEVICE_FULL : DEVICE_FAILED;
        ckd_status status = save_some(NULL, store, &o, pair, 2, true);
        happened = emulated_fail_after == 0;
        emulated_fail_after = 0;
        assert_true(status == CKD_OK || (happened && (status == CKD_E_DEVICE || status == CKD_E_NOMEM)));
        recovered += n > 0 && happened && status == CKD_OK;
        failed += status != CKD_OK;
        if (status == CKD_OK) {
            loads_as(store, "device", (uint64_t)n, pair, 2);
        }
        move(&pair[0], (unsigned)n);
        round_all(&pair[0]);
        round_all(&pair[1]);
    }
    assert_true(recovered > 20 && failed > 2);
    pair_free(pair);
    close_store(store);
}

/* Rounds to f16 instead of bf16. */
static device_result round_wrongly(const device_queue *queue, bool *known, const device_elements *what,
                                   const device_span *spans, uint32_t count, device_failure *failure) {
    device_elements other = *what;
    other.to_dtype = what->operation == DEVICE_CAST ? CKD_F16 : what->to_dtype;
    return emulated_device()->elements(queue, known, &other, spans, count, failure);
}

/*
 * The device, and so the trainer's weights, round in another way than loads do. Such a weight is not a copy of its
 * master, and the save is not committed.
 */
static void test_wrong_rounding(void **state) {
    device_backend wrong = *emulated_device();
    wrong.elements = round_wrongly;
    device_backend_use(&wrong);
    ckd_store *store = store_create(*state);
    tensor pair[2];
    pair_new(pair);
    for (unsigned step = 0; step < 4; step++) {
        ckd_save_options o = exact_options("device", step, 1000);
        move(&pair[0], step);
        round_all(&pair[0]);
        kernels_cpu()->cast(CKD_F16, pair[1].host, CKD_F32, pair[0].exact, pair[0].elements);
        give(&pair[1]);
        ckd_status status = save_some(NULL, store, &o, pair, 2, true);
        /* In the base, the host codes the masters. */
        assert_int_equal(status, step == 1 ? CKD_E_DEVICE : CKD_OK);
        if (status == CKD_OK) {
            loads_as(store, "device", step, pair, 2);
        }
    }
    pair_free(pair);
    close_store(store);
    device_backend_use(backend);
}

#ifndef DEVICE_MASTERS_TESTS
int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_chains),    tempdir_test(test_ready_copies), tempdir_test(test_references),
        tempdir_test(test_backwards), tempdir_test(test_failures),     tempdir_test(test_wrong_rounding),
    };
    backend = emulated_device();
    device_backend_use(backend);
    save_device_use(true);
    return run_sampled("device_masters", tests, 2, NULL, NULL);
}
#endif
