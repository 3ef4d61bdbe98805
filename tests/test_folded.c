/* What others do while, and after, a store is folded: loads that have begun go on, and copies load or are refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
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

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_a_load_goes_on),
        tempdir_test(test_copies_of_it_load),
    };
    return cmocka_run_group_tests_name("folded", tests, NULL, NULL);
}
