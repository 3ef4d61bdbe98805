/* What others do while, and after, a store is folded: loads that have begun go on, and copies load or are refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

static ckd_store *make_chain(const char *dir, ckd_fidelity fidelity, uint64_t steps, double load_cost) {
    ckd_store *store = store_create(dir);
    drift d = drift_new(96, 64, 7);
    for (uint64_t step = 0; step < steps; step++) {
        ckd_save_options o = lossy_options("run", step, fidelity);
        o.max_load_cost = o.newest_load_cost = load_cost;
        save_drift(store, &o, &d);
        drift_step(&d);
    }
    drift_free(&d);
    return store;
}

/* Every n-th step stays, and the newest two. */
static void fold(ckd_store *store, uint64_t every) {
    ckd_policy policy = CKD_POLICY_INIT;
    policy.keep_every = every;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = 128;
    o.policy = &policy;
    ckd_compaction *done;
    assert_int_equal(ckd_compact(&done, store, &o, NULL), CKD_OK);
    assert_true(done->pruned->deleted >= 8);
    ckd_compaction_free(done);
}

static void test_a_load_goes_on(void **state) {
    ckd_store *store = make_chain(*state, CKD_NEAR, 17, 1000);
    ckd_checkpoint c = checkpoint_at(store, "run", 12);
    float *before = load_floats(store, "run", 12, "w", CKD_F32, 96 * 64),
          *after = malloc(96 * 64 * sizeof(float));
    ckd_load *load;
    ckd_error err = {0};
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    fold(store, 4);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "w";
    q.data = after;
    q.size = 96 * 64 * sizeof(float);
    if (ckd_load_tensor(load, &q, &err) != CKD_OK) {
        fail_msg("%s", err.message);
    }
    assert_memory_equal(after, before, 96 * 64 * sizeof(float));
    ckd_load_end(load);
    free(before);
    free(after);
    ckd_store_close(store);
}

static ckd_id id_at(ckd_store *store, uint64_t step) {
    return checkpoint_at(store, "run", step).id;
}

/* A copy that has a checkpoint as it was before the fold lacks the deltas that it keeps for others: it cannot have those, says so, and all it lists loads. */
static void test_copies_of_it_load(void **state) {
    ckd_store *from = make_chain(*state, CKD_COMPACT, 65, 4), *early, *fresh;
    char path[2][512];
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof(path[i]), "%s/copy%d", (const char *)*state, i);
    }
    assert_int_equal(ckd_store_open(&early, path[0], CKD_OPEN_CREATE, NULL, NULL), CKD_OK);
    assert_int_equal(ckd_store_open(&fresh, path[1], CKD_OPEN_CREATE, NULL, NULL), CKD_OK);
    ckd_id early_one = id_at(from, 18);
    assert_int_equal(ckd_copy(NULL, early, from, &early_one, 1, NULL, NULL), CKD_OK);
    fingerprints before = fingerprints_of(from);
    size_t early_count = fingerprints_check(early, &before);
    fold(from, 8);
    ckd_error err = {0};
    ckd_status status = ckd_copy(NULL, early, from, NULL, 0, NULL, &err);
    assert_true(status == CKD_OK || (status == CKD_E_STATE && strstr(err.message, "compaction")));
    assert_true(fingerprints_check(early, &before) >= early_count);
    assert_int_equal(verify_damage(early), 0);
    assert_int_equal(ckd_copy(NULL, fresh, from, NULL, 0, NULL, NULL), CKD_OK);
    assert_true(fingerprints_check(fresh, &before) >= 5);
    assert_int_equal(verify_damage(fresh), 0);
    fingerprints_free(&before);
    ckd_store_close(early);
    ckd_store_close(fresh);
    ckd_store_close(from);
}

static ckd_save *begin_next(ckd_store *store, uint64_t step) {
    ckd_save_options o = lossy_options("run", step, CKD_NEAR);
    return begin_with(store, &o);
}

static uint64_t prune_with(ckd_store *store, const ckd_policy *policy) {
    ckd_prune *pruned;
    ckd_error err = {0};
    assert_int_equal(ckd_store_prune(&pruned, store, policy, NULL, &err), CKD_OK);
    uint64_t deleted = pruned->deleted;
    ckd_prune_free(pruned);
    return deleted;
}

/* All writers have begun so many seconds from now. */
static void date_intents(const char *dir, time_t seconds) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/i"), NULL), CKD_OK);
    struct timespec at[2] = {{.tv_sec = time(NULL) + seconds}, {.tv_sec = time(NULL) + seconds}};
    assert_true(list.count > 0);
    for (size_t i = 0; i < list.count; i++) {
        char path[512];
        snprintf(path, sizeof(path), "%s/%s", store_path_of(dir, "data/i"), list.names[i]);
        assert_int_equal(utimensat(AT_FDCWD, path, at, 0), 0);
    }
    dir_list_free(&list);
}

/* A save that began before the fold may build on what its parent was a delta on then: that stays until it has ended. */
static void test_a_save_goes_on(void **state) {
    ckd_store *store = make_chain(*state, CKD_NEAR, 17, 1000);
    drift d = drift_new(96, 64, 7);
    for (int step = 0; step < 17; step++) {
        drift_step(&d);
    }
    ckd_save *save = begin_next(store, 17);
    ckd_policy policy = CKD_POLICY_INIT;
    policy.keep_last = 1;
    ckd_compact_options fold_all = CKD_COMPACT_OPTIONS_INIT;
    fold_all.max_depth = 128;
    fold_all.policy = &policy;
    ckd_compaction *done;
    ckd_error err = {0};
    assert_int_equal(ckd_compact(&done, store, &fold_all, &err), CKD_OK);
    assert_true(done->count >= 1 && done->left == 0 && done->pruned->deleted == 0);
    ckd_compaction_free(done);
    ckd_id old[15];
    for (uint64_t step = 0; step < 15; step++) {
        old[step] = id_at(store, step);
    }
    assert_int_equal(ckd_store_delete(store, old, 15, NULL, &err), CKD_E_BUSY);
    add_drift(save, "w", &d);
    commit_save(save);
    assert_int_equal(verify_damage(store), 0);
    save = begin_next(store, 18);
    assert_int_equal(prune_with(store, &policy), 0); /* it may have begun before */
    date_intents(*state, 120);
    assert_true(prune_with(store, &policy) >= 8); /* it has not */
    add_drift(save, "w", &d);
    commit_save(save);
    assert_int_equal(verify_damage(store), 0);
    drift_free(&d);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_a_load_goes_on),
        tempdir_test(test_a_save_goes_on),
        tempdir_test(test_copies_of_it_load),
    };
    return cmocka_run_group_tests_name("folded", tests, NULL, NULL);
}
