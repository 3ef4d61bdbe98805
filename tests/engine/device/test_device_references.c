/*
 * Exact sessions that keep the weights on the device as references for the next save's deltas
 * (device_reference_bytes). Whatever fails, is restored or lacks memory in between, the stored state is the trainer's,
 * bit for bit. The device is emulated.
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
#include "engine/session/session.h"
#include "engine/save/device.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_tensors.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

enum { TENSORS = 4, MOST_SAVES = 400 };

typedef struct kept_tensor {
    const char *name;
    ckd_dtype dtype;
    uint64_t shape[2];
    void *host, *device; /* the trainer's values, and the memory that the session reads */
} kept_tensor;

/*
 * A weight of two blocks, one that is cut into panels, one of another dtype, and a moment, for which no reference is
 * kept.
 */
static const kept_tensor tensors_of_all[TENSORS] = {
    {.name = "tall.weight", .dtype = CKD_F32, .shape = {1030, 300}},
    {.name = "wide.weight", .dtype = CKD_F32, .shape = {60, 2100}},
    {.name = "half.weight", .dtype = CKD_BF16, .shape = {300, 256}},
    {.name = "exp_avg.tall.weight", .dtype = CKD_F32, .shape = {1030, 300}},
};

typedef struct kept_trainer {
    kept_tensor t[TENSORS];
    ckd_session *session;
    uint64_t step;
    unsigned tried;
    ckd_saved last;                       /* the session's result of the last save */
    ckd_id saved[MOST_SAVES];             /* the stored checkpoints */
    hash128 content[MOST_SAVES][TENSORS]; /* the content hashes of their tensors, as the trainer had them */
    size_t count;
} kept_trainer;

static uint64_t size_of(const kept_tensor *t) {
    return t->shape[0] * t->shape[1] * ckd_dtype_size(t->dtype);
}

static uint64_t weight_bytes(const kept_trainer *k) {
    return size_of(&k->t[0]) + size_of(&k->t[1]) + size_of(&k->t[2]);
}

/* Copies to the device. The copy does not count as the call that is to fail. */
static void put(const kept_tensor *t) {
    int fail_after = emulated_fail_after;
    device_queue queue = {.device = 0};
    emulated_fail_after = 0;
    assert_int_equal(backend->copy(&queue, t->device, t->host, size_of(t), DEVICE_TO_DEVICE, &why),
                     DEVICE_DONE);
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
    emulated_fail_after = fail_after;
}

static kept_trainer *trainer_begin(void) {
    kept_trainer *k = calloc(1, sizeof(*k));
    assert_non_null(k);
    for (unsigned i = 0; i < TENSORS; i++) {
        k->t[i] = tensors_of_all[i];
        k->t[i].host = random_values(k->t[i].dtype, k->t[i].shape[0] * k->t[i].shape[1], i + 1);
        k->t[i].device = to_device(k->t[i].host, size_of(&k->t[i]));
    }
    return k;
}

static void trainer_end(kept_trainer *k) {
    for (unsigned i = 0; i < TENSORS; i++) {
        free(k->t[i].host);
        backend->release(0, k->t[i].device);
    }
    free(k);
    assert_int_equal(emulated_memory + emulated_pinned + emulated_marks, 0);
}

/* Overwrites the device memory between steps, since a save must only use the snapshot. */
static void spoil(const kept_trainer *k) {
    for (unsigned i = 0; i < TENSORS; i++) {
        kept_tensor nonsense = k->t[i];
        nonsense.host = malloc(size_of(&nonsense));
        assert_non_null(nonsense.host);
        memset(nonsense.host, 0xee, size_of(&nonsense));
        put(&nonsense);
        free(nonsense.host);
    }
}

static void keep_result(void *context, const ckd_saved *saved) {
    ((kept_trainer *)context)->last = *saved;
}

static void session_begin(kept_trainer *k, const char *dir, ckd_snapshot how, uint64_t budget) {
    ckd_session_options o = session_options();
    char path[512];
    ckd_error err;
    snprintf(path, sizeof(path), "%s/store", dir);
    o.snapshot = how;
    o.every_steps = UINT64_MAX;
    o.device_reference_bytes = budget;
    o.on_saved = keep_result;
    o.saved_context = k;
    must(ckd_session_open(&k->session, path, &o, &err), &err);
    for (unsigned i = 0; i < TENSORS; i++) {
        ckd_tensor d = CKD_TENSOR_INIT;
        d.name = k->t[i].name;
        d.dtype = k->t[i].dtype;
        d.ndim = 2;
        d.shape = k->t[i].shape;
        d.device = &on_device;
        must(ckd_session_add(k->session, &d, k->t[i].device, 0, &err), &err);
    }
}

static void session_end(kept_trainer *k) {
    ckd_error err;
    must(ckd_session_close(k->session, &err), &err);
}

static void note_saved(kept_trainer *k) {
    assert_true(k->count < MOST_SAVES && k->last.status == CKD_OK && k->last.step == k->step);
    for (unsigned i = 0; i < TENSORS; i++) {
        k->content[k->count][i] = hash128_of(k->t[i].host, size_of(&k->t[i]));
    }
    k->saved[k->count++] = k->last.checkpoint.id;
}

static bool not_reached; /* true if the save made fewer calls than the number of the failing one */

/* One training step and its save. `fail_after`: number of the device call that fails; 0: none. */
static ckd_status train(kept_trainer *k, int fail_after, ckd_error *err) {
    k->step++;
    for (unsigned i = 0; i < TENSORS; i++) {
        change_values(k->t[i].dtype, k->t[i].host, k->t[i].shape[0] * k->t[i].shape[1],
                      (unsigned)(100 * ++k->tried + i));
        put(&k->t[i]);
    }
    emulated_fail_after = fail_after;
    ckd_status status = ckd_session_save(k->session, k->step, err);
    ckd_session_fence(k->session);
    spoil(k);
    status = status == CKD_OK ? ckd_session_wait(k->session, CKD_DURABLE, err) : status;
    not_reached = emulated_fail_after > 0;
    emulated_fail_after = 0;
    (void)ckd_session_wait(k->session, CKD_DURABLE, NULL);
    if (status == CKD_OK) {
        note_saved(k);
    }
    return status;
}

static void train_well(kept_trainer *k) {
    ckd_error err;
    must(train(k, 0, &err), &err);
}

static bool is_as_saved(const kept_trainer *k, size_t save, unsigned i, const void *values) {
    hash128 content = hash128_of(values, size_of(&k->t[i]));
    return hash128_equal(&content, &k->content[save][i]);
}

static void check_checkpoint(const kept_trainer *k, ckd_store *store, size_t save) {
    ckd_load *load;
    ckd_error err;
    must(ckd_load_begin(&load, store, &k->saved[save], &err), &err);
    for (unsigned i = 0; i < TENSORS; i++) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = k->t[i].name;
        q.size = size_of(&k->t[i]);
        q.data = malloc(q.size);
        assert_non_null(q.data);
        must(ckd_load_tensor(load, &q, &err), &err);
        assert_true(is_as_saved(k, save, i, q.data));
        free(q.data);
    }
    ckd_load_end(load);
}

/* Checks every checkpoint that was saved. */
static void check_store(const kept_trainer *k, const char *dir) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    for (size_t save = 0; save < k->count; save++) {
        check_checkpoint(k, store, save);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

static uint64_t held(const kept_trainer *k) {
    ckd_session_state now;
    ckd_session_poll(&now, k->session);
    return now.device_reference_bytes;
}

/* ---- without errors ---- */

static void save_a_few(const char *dir, ckd_snapshot how) {
    kept_trainer *k = trainer_begin();
    session_begin(k, dir, how, weight_bytes(k));
    for (int i = 0; i < 4; i++) {
        uint64_t sent = emulated_copied[DEVICE_TO_DEVICE];
        train_well(k);
        assert_int_equal(held(k), weight_bytes(k));
        /* The trainer itself copies everything to the device twice per step. */
        sent = emulated_copied[DEVICE_TO_DEVICE] - sent - 2 * (weight_bytes(k) + size_of(&k->t[3]));
        /* Only tables, and the parent of the moment, which has no reference. */
        assert_true(i == 0 || sent < size_of(&k->t[3]) + weight_bytes(k) / 8);
    }
    session_end(k);
    check_store(k, dir);
    trainer_end(k);
}

static void test_kept(void **state) {
    save_a_few(*state, CKD_SNAPSHOT_COPY);
}

static void test_kept_lazily(void **state) {
    save_a_few(*state, CKD_SNAPSHOT_LAZY);
}

/* ---- errors ---- */

/* Each device call fails once, in one of two ways. The next save is a delta on the last stored checkpoint. */
static void fail_everywhere(const char *dir, device_result as) {
    kept_trainer *k = trainer_begin();
    session_begin(k, dir, CKD_SNAPSHOT_COPY, weight_bytes(k));
    unsigned failed = 0, given_up = 0;
    bool happened = true;
    emulated_fail_as = as;
    train_well(k);
    for (int n = 1; happened; n += n < 40 ? 1 : 17) {
        ckd_error err;
        ckd_status status = train(k, n, &err);
        happened = !not_reached;
        assert_true(status == CKD_OK || status == CKD_E_DEVICE || status == CKD_E_NOMEM);
        failed += status != CKD_OK;
        given_up += status == CKD_OK && happened;
        if (n % 2) {
            train_well(k);
        }
        assert_true(held(k) <= weight_bytes(k));
    }
    assert_true(failed > 5 && given_up > 5);
    train_well(k);
    session_end(k);
    check_store(k, dir);
    trainer_end(k);
    emulated_fail_as = DEVICE_FAILED;
}

static void test_failures(void **state) {
    fail_everywhere(*state, DEVICE_FAILED);
}

static void test_no_memory(void **state) {
    fail_everywhere(*state, DEVICE_FULL);
}

/* After a restore the references belong to another step. The device detects this. */
static void test_restored(void **state) {
    kept_trainer *k = trainer_begin();
    ckd_error err;
    ckd_checkpoint from;
    session_begin(k, *state, CKD_SNAPSHOT_COPY, weight_bytes(k));
    for (int i = 0; i < 4; i++) {
        train_well(k);
    }
    const uint64_t steps[] = {2, CKD_LATEST, 4, 1};
    for (size_t r = 0; r < sizeof(steps) / sizeof(steps[0]); r++) {
        size_t save = 0;
        spoil(k);
        must(ckd_session_restore(&from, k->session, steps[r], &err), &err);
        while (memcmp(&k->saved[save], &from.id, sizeof(from.id)) != 0) {
            assert_true(++save < k->count);
        }
        for (unsigned i = 0; i < TENSORS; i++) {
            from_device(k->t[i].host, k->t[i].device, size_of(&k->t[i]));
            assert_true(is_as_saved(k, save, i, k->t[i].host));
        }
        k->step = from.step;
        assert_int_equal(train(k, r == 1 ? 2 : 0, &err), r == 1 ? CKD_E_DEVICE : CKD_OK);
        train_well(k);
        assert_memory_equal(&k->last.checkpoint.parent, r == 1 ? &from.id : &k->saved[k->count - 2],
                            sizeof(ckd_id));
    }
    session_end(k);
    check_store(k, *state);
    trainer_end(k);
}

/* Overwrites the references, as a failed save could. The device detects this. */
static void test_spoilt(void **state) {
    static const uint8_t nonsense[64] = {1, 2, 3};
    kept_trainer *k = trainer_begin();
    device_queue queue = {.device = 0};
    session_begin(k, *state, CKD_SNAPSHOT_COPY, weight_bytes(k));
    train_well(k);
    for (const device_reference *r = k->session->saver.store->references; r; r = r->next) {
        assert_int_equal(backend->copy(&queue, r->memory, nonsense, sizeof(nonsense), DEVICE_TO_DEVICE, &why),
                         DEVICE_DONE);
    }
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
    train_well(k);
    train_well(k);
    session_end(k);
    check_store(k, *state);
    trainer_end(k);
}

/* ---- lack of device memory ---- */

/* Space for some references. Tensors without one are stored correctly. */
static void test_references_in_little_memory(void **state) {
    kept_trainer *k = trainer_begin();
    session_begin(k, *state, CKD_SNAPSHOT_COPY, size_of(&k->t[0]) + size_of(&k->t[2]) + 1);
    for (int i = 0; i < 4; i++) {
        train_well(k);
        assert_int_equal(held(k), size_of(&k->t[0]) + size_of(&k->t[2]));
    }
    session_end(k);
    check_store(k, *state);
    trainer_end(k);
}

/* The device has less memory than the session may use. Tensors that get none do not count as kept. */
static void test_refused(void **state) {
    kept_trainer *k = trainer_begin();
    ckd_error err;
    session_begin(k, *state, CKD_SNAPSHOT_COPY, 10 * weight_bytes(k));
    must(ckd_session_step(k->session, ++k->step, &err), &err); /* allocates the snapshot */
    emulated_largest_memory = size_of(&k->t[0]) - 1;
    for (int i = 0; i < 4; i++) {
        train_well(k);
        assert_int_equal(held(k), size_of(&k->t[1]) + size_of(&k->t[2]));
    }
    emulated_largest_memory = 0;
    session_end(k);
    check_store(k, *state);
    trainer_end(k);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_kept),
        tempdir_test(test_kept_lazily),
        tempdir_test(test_failures),
        tempdir_test(test_no_memory),
        tempdir_test(test_restored),
        tempdir_test(test_spoilt),
        tempdir_test(test_references_in_little_memory),
        tempdir_test(test_refused),
    };
    backend = emulated_device();
    device_backend_use(backend);
    save_device_use(true);
    return run_sampled("device_references", tests, 2, NULL, NULL);
}
