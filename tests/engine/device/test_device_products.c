/*
 * Products of factors on a device. They are products of bytes if all integers fit bytes. They are products of floats
 * if not, if the columns do not suit tensor cores, or if the device lacks byte products. What is saved and loaded does
 * not depend on it. The device is emulated; tests/kernels/cuda/test_cuda_parity.c tests the products themselves on a real
 * one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/load/load.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_tensors.h"
#include "tests/support/drift.h"
#include "tests/support/tempdir.h"

enum { ROWS = 512, WIDE = 512, ODD = 509, STEPS = 3, PARTS = 3 };
static const char *const parts[PARTS] = {"exp_avg_sq.w", "exp_avg.w", "w"};

/*
 * How a state moves. far: one row and one column move hundreds of times as far as the others, in directions of their
 * own.
 */
typedef struct course {
    uint64_t columns;
    bool far;
} course;

/* Saves a step. Returns how many byte products the save of the weights made. */
static uint64_t save_step(ckd_store *store, const char *run, uint64_t step, const drift *d) {
    const uint64_t shape[2] = {d->rows, d->columns};
    const float *values[PARTS] = {d->second, d->first, d->weight};
    ckd_save_options o = lossy_options(run, step, CKD_NEAR);
    ckd_error err;
    ckd_save *save = begin_with(store, &o);
    uint64_t before = 0;
    for (int i = 0; i < PARTS; i++) {
        void *there = to_device(values[i], d->count * sizeof(float));
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = parts[i];
        t.dtype = CKD_F32;
        t.ndim = 2;
        t.shape = shape;
        t.data = there;
        t.device = &on_device;
        before = emulated_byte_products;
        assert_int_equal(ckd_save_tensor(save, &t, &err), CKD_OK);
        backend->release(0, there);
    }
    uint64_t made = emulated_byte_products - before;
    commit_save(save);
    return made;
}

/*
 * Moves along one direction that is stronger than the others, so that its integers need shifts; and, with `far`, along
 * one row and one column.
 */
static void move_further(drift *d, const course *c) {
    float row[ROWS], column[WIDE];
    for (uint64_t i = 0; i < ROWS + c->columns; i++) {
        *(i < ROWS ? &row[i] : &column[i - ROWS]) = (float)drift_normal(&d->random);
    }
    for (uint64_t i = 0; i < d->count; i++) {
        uint64_t r = i / c->columns, k = i % c->columns;
        float by = (c->far ? 8e-3f : 8e-4f) * row[r] * column[k];
        by += c->far && r == 5 ? 0.3f * column[(k + 1) % c->columns] : 0;
        by += c->far && k == 9 ? 0.3f * row[(r + 1) % ROWS] : 0;
        d->weight[i] += by;
        d->first[i] += by;
    }
}

/* Saves all steps. Returns the number of byte products for weights. */
static uint64_t save_course(ckd_store *store, const char *run, const course *c, bool of_bytes) {
    drift d = drift_new(ROWS, c->columns, 7);
    uint64_t made = 0;
    emulated_without_bytes = !of_bytes;
    for (uint64_t step = 1; step <= STEPS; step++) {
        made += save_step(store, run, step, &d);
        drift_step(&d);
        move_further(&d, c);
    }
    emulated_without_bytes = false;
    drift_free(&d);
    return made;
}

/* Loads to the device and to the host and compares the bytes. */
static void check_load(ckd_load *load, const char *name, uint64_t size) {
    ckd_error err;
    void *values[2] = {malloc(size), malloc(size)}, *there = to_device(values[0], size);
    assert_true(values[0] && values[1]);
    for (int device = 0; device < 2; device++) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = name;
        q.size = size;
        q.data = device ? there : values[0];
        q.device = device ? &on_device : NULL;
        assert_int_equal(ckd_load_tensor(load, &q, &err), CKD_OK);
    }
    assert_int_equal(load->device.given_up, 0);
    from_device(values[1], there, size);
    assert_memory_equal(values[0], values[1], size);
    backend->release(0, there);
    free(values[0]);
    free(values[1]);
}

static uint64_t load_course(ckd_store *store, const char *run, const course *c, bool of_bytes) {
    uint64_t before = 0, decoded = 0, made = 0;
    emulated_without_bytes = !of_bytes;
    for (uint64_t step = 1; step <= STEPS; step++) {
        ckd_checkpoint at = checkpoint_at(store, run, step);
        ckd_load *load;
        ckd_error err;
        assert_int_equal(ckd_load_begin(&load, store, &at.id, &err), CKD_OK);
        for (int i = 0; i < PARTS; i++) {
            before = emulated_byte_products;
            decoded = load->device.decoded;
            check_load(load, parts[i], ROWS * c->columns * sizeof(float));
        }
        made += emulated_byte_products - before;
        assert_true(load->device.decoded > decoded || step != 2);
        ckd_load_end(load);
    }
    emulated_without_bytes = false;
    return made;
}

/* Runs saved with and without byte products must have the same values. */
static void check_same_runs(ckd_store *store, const course *c) {
    for (uint64_t step = 1; step <= STEPS; step++) {
        for (int i = 0; i < PARTS; i++) {
            uint64_t size = ROWS * c->columns * sizeof(float);
            void *a = load_whole(store, "bytes", step, parts[i], size),
                 *b = load_whole(store, "floats", step, parts[i], size);
            assert_memory_equal(a, b, size);
            free(a);
            free(b);
        }
    }
}

static void follow(const char *dir, const course *c, bool saved, bool loaded) {
    ckd_store *store = store_create(dir);
    assert_int_equal(save_course(store, "bytes", c, true) > 0, saved);
    assert_int_equal(save_course(store, "floats", c, false), 0);
    check_same_runs(store, c);
    assert_int_equal(load_course(store, "bytes", c, true) > 0, loaded);
    assert_int_equal(load_course(store, "bytes", c, false), 0);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

static void test_bytes(void **state) {
    follow(*state, &(course){WIDE, false}, true, true);
}

static void test_odd_columns(void **state) {
    follow(*state, &(course){ODD, false}, false, false);
}

/* The integers of far movements do not fit bytes. */
static void test_wide_integers(void **state) {
    follow(*state, &(course){WIDE, true}, false, false);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_bytes),
        tempdir_test(test_odd_columns),
        tempdir_test(test_wide_integers),
    };
    backend = emulated_device();
    device_backend_use(backend);
    return cmocka_run_group_tests_name("device_products", tests, NULL, NULL);
}
