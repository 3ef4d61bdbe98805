/* A device whose results differ from the host's: no checkpoint is committed, and later saves do not use it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/save/device.h"
#include "engine/store/handle.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_tensors.h"
#include "tests/support/drift.h"
#include "tests/support/tempdir.h"

enum { ROWS = 600, COLUMNS = 500, ELEMENTS = ROWS * COLUMNS };

/*
 * Of lossy values only a few move far, because quantizer steps are as large as the usual movement. Exact values all
 * move a little.
 */
static void train(float *values, ckd_fidelity fidelity, unsigned step) {
    float *by = random_values(CKD_F32, ELEMENTS, step + 1);
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        float far = i % 37 == step ? 1.0f : 0.02f;
        values[i] += by[i] * (step == 0 ? 1.0f : fidelity == CKD_EXACT ? 1e-5f : far);
    }
    free(by);
}

static double most_cost = 1000;

static ckd_status save_from_device(ckd_store *store, ckd_fidelity fidelity, uint64_t step,
                                   const float *values, ckd_error *err) {
    void *there = to_device(values, ELEMENTS * sizeof(float));
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    o.run = "run";
    o.step = step;
    o.fidelity = fidelity;
    o.max_load_cost = o.newest_load_cost = most_cost;
    ckd_status status = ckd_save_begin(&save, store, &o, err);
    if (status != CKD_OK) {
        backend->release(0, there);
        return status;
    }
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "layer.weight";
    t.role = CKD_ROLE_WEIGHT;
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = (uint64_t[]){ROWS, COLUMNS};
    t.data = there;
    t.device = &on_device;
    status = ckd_save_tensor(save, &t, err);
    status = status == CKD_OK ? ckd_save_commit(NULL, save, err) : (ckd_save_abort(save), status);
    backend->release(0, there);
    return status;
}

static void loads(ckd_store *store, ckd_fidelity fidelity, uint64_t step, const float *values) {
    ckd_load *load;
    ckd_error err;
    ckd_checkpoint c = checkpoint_at(store, "run", step);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    float *got = malloc(ELEMENTS * sizeof(float));
    assert_non_null(got);
    q.name = "layer.weight";
    q.data = got;
    q.size = ELEMENTS * sizeof(float);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
    ckd_load_end(load);
    double squares = 0;
    for (uint64_t i = 0; i < ELEMENTS; i++) {
        squares += ((double)got[i] - (double)values[i]) * ((double)got[i] - (double)values[i]);
    }
    assert_true(squares <= (fidelity == CKD_EXACT ? 0 : 0.05 * ELEMENTS));
    free(got);
}

/*
 * Saves a base with a correct device, then twice with a wrong one. The first of these is refused; the second is coded
 * by the host.
 */
static void refuse(const char *dir, ckd_fidelity fidelity, const device_backend *wrong) {
    ckd_store *store = store_create(dir);
    ckd_error err;
    float *values = calloc(ELEMENTS, sizeof(*values)), *before = calloc(ELEMENTS, sizeof(*before));
    assert_true(values && before);
    for (unsigned step = 0; step < 3; step++) {
        memcpy(before, values, ELEMENTS * sizeof(*values));
        train(values, fidelity, step);
        if (step == 2) { /* an open handle keeps its device */
            ckd_store_close(store);
            device_backend_use(wrong);
            store = store_reopen(dir, CKD_OPEN_WRITE);
        }
        ckd_status expected = step == 2 ? CKD_E_DEVICE : CKD_OK;
        assert_int_equal(save_from_device(store, fidelity, step, values, &err), expected);
    }
    assert_non_null(strstr(err.message, "layer.weight"));
    assert_non_null(strstr(err.message, "nothing was committed"));
    loads(store, fidelity, 1, before);
    for (unsigned step = 2; step < 5; step++) {
        assert_int_equal(save_from_device(store, fidelity, step, values, &err), CKD_OK);
        loads(store, fidelity, step, values);
        train(values, fidelity, step);
    }
    assert_int_equal(verify_damage(store), 0);
    free(values);
    free(before);
    ckd_store_close(store);
    device_backend_use(backend);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

static device_result move_wrongly(const device_queue *queue, const device_tile *tile,
                                  device_failure *failure) {
    device_tile wrong = *tile;
    wrong.unit *= 2;
    return emulated_device()->move(queue, &wrong, failure);
}

static void test_values(void **state) {
    device_backend wrong = *emulated_device();
    wrong.move = move_wrongly;
    refuse(*state, CKD_COARSE, &wrong);
}

static device_result subtract_wrongly(const device_queue *queue, bool *known, const device_elements *what,
                                      const device_span *spans, uint32_t count, device_failure *failure) {
    device_span turned[DEVICE_SPANS];
    for (uint32_t i = 0; i < count && what->operation == DEVICE_RESIDUAL; i++) {
        turned[i] = spans[i];
        turned[i].from = spans[i].first;
        turned[i].first = spans[i].from;
    }
    bool residual = what->operation == DEVICE_RESIDUAL;
    return emulated_device()->elements(queue, known, what, residual ? turned : spans, count, failure);
}

static void test_differences(void **state) {
    device_backend wrong = *emulated_device();
    wrong.elements = subtract_wrongly;
    refuse(*state, CKD_EXACT, &wrong);
}

static device_result hash_wrongly(const device_queue *queue, const device_hash_span *spans, uint32_t count,
                                  device_failure *failure) {
    device_hash_span shorter[DEVICE_SPANS];
    for (uint32_t i = 0; i < count; i++) {
        shorter[i] = spans[i];
        shorter[i].bytes--;
    }
    return emulated_device()->hash(queue, shorter, count, failure);
}

static void test_hashes(void **state) {
    device_backend wrong = *emulated_device();
    wrong.hash = hash_wrongly;
    refuse(*state, CKD_EXACT, &wrong);
}

/* The host codes the block after all, because its chain would become too long. */
static void test_hashes_of_blocks_of_the_host(void **state) {
    device_backend wrong = *emulated_device();
    wrong.hash = hash_wrongly;
    save_device_unprepared(true);
    most_cost = 1.7;
    refuse(*state, CKD_EXACT, &wrong);
    most_cost = 1000;
    save_device_unprepared(false);
}

/* ---- failures that are not the device's fault ---- */

static int reads_left;
static int no_reads(void *context, file_op step, const char *path) {
    (void)context;
    (void)path;
    return step == FILE_OP_READ && reads_left-- <= 0 ? EIO : 0;
}

/* If reading fails anywhere, the save fails for that reason or does without the data. The device stays in use. */
static void test_unreadable(void **state) {
    ckd_store *store = store_create(*state);
    ckd_error err;
    float *values = calloc(ELEMENTS, sizeof(*values));
    assert_non_null(values);
    unsigned failed = 0, step = 0;
    bool happened = true;
    for (int n = 0; happened; n += n < 24 ? 2 : 13) {
        train(values, CKD_EXACT, step);
        reads_left = n;
        file_set_fault_hook(step ? no_reads : NULL, NULL);
        ckd_status status = save_from_device(store, CKD_EXACT, step, values, &err);
        file_set_fault_hook(NULL, NULL);
        happened = step == 0 || reads_left < 0;
        assert_true(status != CKD_E_DEVICE);
        assert_false(atomic_load(&store->devices_differ));
        failed += status != CKD_OK;
        step++;
    }
    assert_true(failed > 1);
    loads(store, CKD_EXACT, step - 1, values);
    assert_int_equal(verify_damage(store), 0);
    free(values);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_values),     tempdir_test(test_differences),
        tempdir_test(test_hashes),     tempdir_test(test_hashes_of_blocks_of_the_host),
        tempdir_test(test_unreadable),
    };
    backend = emulated_device();
    device_backend_use(backend);
    save_device_use(true);
    return cmocka_run_group_tests_name("device_trial", tests, NULL, NULL);
}
