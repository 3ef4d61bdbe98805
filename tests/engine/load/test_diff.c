/* Comparisons of two checkpoints: their figures for all dtypes and layouts, what they read, and who does the work. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/common/common.h"
#include "engine/load/diff.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scratch.h"
#include "tests/support/stored.h"

static ckd_diff *diff_of(ckd_store *store, const char *run_a, uint64_t a, const char *run_b, uint64_t b) {
    ckd_checkpoint x = checkpoint_at(store, run_a, a), y = checkpoint_at(store, run_b, b);
    ckd_diff *diff;
    ckd_error err;
    if (ckd_store_diff(&diff, store, &x.id, &y.id, NULL, &err) != CKD_OK) {
        fail_msg("%s (%s, %s)", err.message, err.tensor, err.file);
    }
    return diff;
}

/* ---- figures ---- */

/* As the documentation defines them, an element at a time. */
static diff_sums defined(ckd_dtype dtype, const uint8_t *a, const uint8_t *b, uint64_t count) {
    diff_sums sums = {0};
    size_t size = ckd_dtype_size(dtype);
    for (uint64_t i = 0; i < count; i++) {
        sums.changed += memcmp(a + i * size, b + i * size, size) != 0;
        double x = element_to_double(dtype, a, i), y = element_to_double(dtype, b, i);
        sums.squares_a += isfinite(x) ? x * x : 0;
        sums.squares_b += isfinite(y) ? y * y : 0;
        if (isfinite(x) && isfinite(y)) {
            sums.squares_diff += (x - y) * (x - y);
            sums.max_diff = fmax(sums.max_diff, fabs(x - y));
        }
    }
    return sums;
}

static void check_close(double got, double want) {
    if (!(fabs(got - want) <= 1e-12 * fabs(want))) {
        fail_msg("%.17g is not %.17g", got, want);
    }
}

/* Random bits are NaNs, infinities and denormals, too. f64 would overflow the sums, so its exponents are small. */
static void *any_values(ckd_dtype dtype, uint64_t count, unsigned seed) {
    uint64_t *values = random_bits(count * ckd_dtype_size(dtype) + 8, seed);
    for (uint64_t i = 0; i < count && dtype == CKD_F64; i++) {
        bool is_finite = (values[i] >> 52 & 0x7ff) != 0x7ff;
        values[i] &= is_finite ? UINT64_C(0xbfffffffffffffff) : UINT64_MAX;
    }
    return values;
}

static void test_figures_of_all_dtypes(void **state) {
    (void)state;
    static const uint64_t counts[] = {0, 1, 7, 8, 9, 511, 512, 513, 3000};
    for (int dtype = CKD_F64; dtype <= CKD_BOOL; dtype++) {
        size_t size = ckd_dtype_size((ckd_dtype)dtype);
        for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++) {
            uint64_t n = counts[i];
            uint8_t *a = any_values((ckd_dtype)dtype, n, 3), *b = any_values((ckd_dtype)dtype, n, 4);
            memcpy(b, a, n / 3 * size); /* a third is equal */
            diff_sums got, want = defined((ckd_dtype)dtype, a, b, n);
            diff_values(&got, (ckd_dtype)dtype, a, b, n);
            assert_int_equal(got.changed, want.changed);
            check_close(got.squares_a, want.squares_a);
            check_close(got.squares_b, want.squares_b);
            check_close(got.squares_diff, want.squares_diff);
            assert_true(memcmp(&got.max_diff, &want.max_diff, sizeof(double)) == 0);
            free(a);
            free(b);
        }
    }
}

/* ---- layouts ---- */

enum { ROWS = 700, COLUMNS = 600, ALL = ROWS * COLUMNS };

/* Blocks of A that are no blocks of B give the same figures, also between a tensor's shards. */
static void test_layouts(void **state) {
    const stored *f = *state;
    const uint64_t shape[2] = {ROWS, COLUMNS};
    float *a = random_values(CKD_F32, ALL, 8), *b = random_values(CKD_F32, ALL, 8);
    change_values(CKD_F32, b, ALL, 3);
    a[5] = NAN;
    b[77] = INFINITY;
    const diff_sums want = defined(CKD_F32, (const uint8_t *)a, (const uint8_t *)b, ALL);
    for (uint64_t layout = 0; layout < 4; layout++) {
        char run[2][16];
        snprintf(run[0], sizeof(run[0]), "cut-a%u", (unsigned)layout);
        snprintf(run[1], sizeof(run[1]), "cut-b%u", (unsigned)layout);
        save_sharded(f->store, run[0], 4, "t", 2, shape, a, layout);
        save_sharded(f->store, run[1], 4, "t", 2, shape, b, (layout + 1) % 4);
        ckd_diff *diff = diff_of(f->store, run[0], 4, run[1], 4);
        assert_int_equal(diff->count, 1);
        assert_int_equal(diff->items[0].comparable, 1);
        assert_int_equal(diff->items[0].elements, ALL);
        assert_int_equal(diff->items[0].changed, want.changed);
        check_close(diff->items[0].norm_a, sqrt(want.squares_a));
        check_close(diff->items[0].norm_b, sqrt(want.squares_b));
        check_close(diff->items[0].norm_diff, sqrt(want.squares_diff));
        assert_true(!(diff->items[0].max_diff < want.max_diff) && !(diff->items[0].max_diff > want.max_diff));
        ckd_diff_free(diff);
    }
    free(a);
    free(b);
}

/* ---- a chain of many small tensors ---- */

enum { STEPS = 12, TENSORS = 8, SIDE = 192, SMALL = SIDE * SIDE };

static int make_store(void **state) {
    stored *f = stored_make(2, 1);
    const uint64_t shape[2] = {SIDE, SIDE};
    float *values[TENSORS];
    for (unsigned i = 0; i < TENSORS; i++) {
        values[i] = random_values(CKD_F32, SMALL, i);
    }
    for (uint64_t step = 0; step < STEPS; step++) {
        ckd_save_options o = options_of("chain", step);
        o.max_load_cost = o.newest_load_cost = 1000;
        ckd_save *save = begin_with(f->store, &o);
        for (unsigned i = 0; i < TENSORS; i++) {
            char name[32];
            snprintf(name, sizeof(name), "layer.%02u", i);
            change_values(CKD_F32, values[i], SMALL, (unsigned)step * TENSORS + i);
            add_tensor(save, name, CKD_F32, 2, shape, NULL, values[i]);
        }
        commit_save(save);
    }
    for (unsigned i = 0; i < TENSORS; i++) {
        free(values[i]);
    }
    *state = f;
    return 0;
}

/* Reads of payloads, and whether some were on another thread than that of the test. */
static struct {
    atomic_uint reads;
    atomic_bool helped;
    pthread_t self;
} watched;

static int watch(void *context, file_op op, const char *path) {
    (void)context;
    if (op == FILE_OP_READ && strstr(path, "/data/c/")) {
        watched.reads++;
        watched.helped = watched.helped || !pthread_equal(pthread_self(), watched.self);
    }
    return 0;
}

static void diff_watched(ckd_store *store, uint64_t a, uint64_t b) {
    watched.reads = 0;
    watched.self = pthread_self();
    file_set_fault_hook(watch, NULL);
    ckd_diff *diff = diff_of(store, "chain", a, "chain", b);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(diff->count, TENSORS);
    ckd_diff_free(diff);
}

/* One checkpoint builds on the other, so both take the reads of one; in either order. */
static void test_a_common_chain_is_read_once(void **state) {
    const stored *f = *state;
    assert_int_equal(tensor_info(f->store, "chain", STEPS - 1, "layer.03").depth, STEPS - 1);
    diff_watched(f->store, STEPS - 2, STEPS - 1);
    assert_in_range(watched.reads, STEPS * TENSORS, STEPS * TENSORS + 8 * STEPS); /* indexes are read, too */
    diff_watched(f->store, STEPS - 1, STEPS - 2);
    assert_in_range(watched.reads, STEPS * TENSORS, STEPS * TENSORS + 8 * STEPS);
}

/* A second thread may come late, so there are several attempts. */
static void test_all_threads_compare(void **state) {
    const stored *f = *state;
    watched.helped = false;
    for (int i = 0; i < 200 && !watched.helped; i++) {
        diff_watched(f->store, STEPS - 2, STEPS - 1);
    }
    assert_true(watched.helped);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_figures_of_all_dtypes), cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_a_common_chain_is_read_once), cmocka_unit_test(test_all_threads_compare)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_store, stored_remove);
    scratch_end();
    return failed;
}
