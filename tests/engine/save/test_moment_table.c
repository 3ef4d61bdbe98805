/* Many second moments that wait for their weights: each is found at once, and leaves when its weight has come. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/save/lossy.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { TENSORS = 1000, ROWS = 8, COLUMNS = 64 };

static void add_all(ckd_save *save, const char *prefix, const float *values) {
    const uint64_t shape[2] = {ROWS, COLUMNS};
    for (unsigned i = 0; i < TENSORS; i++) {
        char name[64];
        snprintf(name, sizeof(name), "%slayer.%04u.weight", prefix, i);
        add_tensor(save, name, CKD_F32, 2, shape, NULL, values);
    }
}

static size_t longest_bucket(const moment_table *t) {
    size_t longest = 0, all = 0;
    for (size_t i = 0; i < t->size; i++) {
        size_t length = 0;
        for (const moment_stats *k = t->buckets[i]; k; k = k->next) {
            length++;
        }
        longest = length > longest ? length : longest;
        all += length;
    }
    assert_int_equal(all, t->count);
    return longest;
}

/* Trainers save the state of the optimizer before or after all weights. */
static void test_moments_before_all_weights(void **state) {
    ckd_store *store = store_create(*state);
    drift d = drift_new(ROWS, COLUMNS, 1);
    for (uint64_t step = 0; step < 2; step++) {
        ckd_save_options o = lossy_options("run", step, CKD_NEAR);
        ckd_save *save = begin_with(store, &o);
        add_all(save, "exp_avg_sq.", d.second);
        assert_int_equal(save->lossy.moments.count, TENSORS);
        assert_in_range(longest_bucket(&save->lossy.moments), 1, 12);
        add_all(save, "exp_avg.", d.first);
        assert_int_equal(save->lossy.moments.count, TENSORS);
        add_all(save, "", d.weight);
        assert_in_range(save->lossy.moments.count, 0, 2); /* the last tiles are still in progress */
        commit_save(save);
        assert_true(tensor_info(store, "run", step, "exp_avg.layer.0999.weight").direction_change >= 0);
        drift_step(&d);
    }
    drift_free(&d);
    ckd_store_close(store);
}

/*
 * A trainer may have the first moment before the second. While its blocks are in progress, the second one begins the
 * sample that both are compared by.
 */
static void test_first_moments_before_second_ones(void **state) {
    const uint64_t shape[2] = {128, 128};
    ckd_store_options many = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    many.threads = 4;
    char path[4096];
    snprintf(path, sizeof(path), "%s/in-progress", (char *)*state);
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &many, NULL), CKD_OK);
    drift d = drift_new(128, 128, 2);
    for (uint64_t step = 0; step < 4; step++) {
        ckd_save_options o = lossy_options("pairs", step, CKD_NEAR);
        ckd_save *save = begin_with(store, &o);
        save->input.buffers_are_stable =
            true; /* as a session's: tiles stay in progress from tensor to tensor */
        for (unsigned i = 0; i < 200; i++) {
            char name[64];
            snprintf(name, sizeof(name), "exp_avg.layer.%u", i);
            add_tensor(save, name, CKD_F32, 2, shape, NULL, d.first);
            snprintf(name, sizeof(name), "exp_avg_sq.layer.%u", i);
            add_tensor(save, name, CKD_F32, 2, shape, NULL, d.second);
            snprintf(name, sizeof(name), "layer.%u", i);
            add_tensor(save, name, CKD_F32, 2, shape, NULL, d.weight);
        }
        commit_save(save);
        drift_step(&d);
    }
    drift_free(&d);
    ckd_store_close(store);
}

static int make_folder(void **state) {
    *state = tempdir_create();
    return 0;
}

static int remove_folder(void **state) {
    tempdir_remove(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_moments_before_all_weights),
                                       cmocka_unit_test(test_first_moments_before_second_ones)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_folder, remove_folder);
    scratch_end();
    return failed;
}
