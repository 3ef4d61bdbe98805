/*
 * Loads, saves and copies during and after a compaction that folds deleted checkpoints into the remaining ones. Loads
 * that have begun continue, and copies can be loaded.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

static void save_steps(ckd_store *store, ckd_fidelity fidelity, uint64_t first, uint64_t end,
                       double load_cost) {
    drift d = drift_new(96, 64, 7);
    for (uint64_t step = 0; step < end; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options("run", step, fidelity);
        o.max_load_cost = o.newest_load_cost = load_cost;
        if (step >= first) {
            save_drift(store, &o, &d);
        }
    }
    drift_free(&d);
}

static ckd_store *make_chain(const char *dir, ckd_fidelity fidelity, uint64_t steps, double load_cost) {
    ckd_store *store = store_create(dir);
    save_steps(store, fidelity, 0, steps, load_cost);
    return store;
}

/* Keeps every n-th step and the newest two. At least `least` steps must be deleted. */
static void fold_with(ckd_store *store, uint64_t every, uint64_t least, const ckd_delete_options *deletion) {
    ckd_policy policy = CKD_POLICY_INIT;
    policy.keep_every = every;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = 128;
    o.policy = &policy;
    o.deletion = deletion;
    ckd_compaction *done;
    assert_int_equal(ckd_compact(&done, store, &o, NULL), CKD_OK);
    assert_true(done->pruned->deleted >= least);
    ckd_compaction_free(done);
}

static void fold(ckd_store *store, uint64_t every) {
    fold_with(store, every, 8, NULL);
}

/* Folds without undo. */
static void fold_for_good(ckd_store *store, uint64_t every) {
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    fold_with(store, every, 1, &now);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
}

static void test_load_during_a_fold(void **state) {
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

static ckd_store *copy_in(const char *dir, unsigned number) {
    ckd_store *store;
    char path[512];
    snprintf(path, sizeof(path), "%s/copy%u", dir, number);
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, NULL, NULL), CKD_OK);
    return store;
}

/* Copies everything and checks a dry run against it. Returns the number of checkpoints moved. */
static size_t copy_all(ckd_store *to, ckd_store *from, const fingerprints *before) {
    ckd_copy_result *would, *done;
    ckd_error err = {0};
    ckd_copy_options dry = CKD_COPY_OPTIONS_INIT;
    size_t count = 0, had = fingerprints_check(to, before);
    dry.dry_run = 1;
    assert_int_equal(ckd_copy(&would, to, from, &dry, NULL), CKD_OK);
    if (ckd_copy(&done, to, from, NULL, &err) != CKD_OK) {
        fail_msg("copy: %s", err.message);
    }
    assert_int_equal(would->count, done->count);
    for (size_t i = 0; i < done->count; i++) {
        const ckd_copied *c = &done->items[i];
        ckd_checkpoint now;
        assert_int_equal(would->items[i].state, c->state);
        assert_int_equal(ckd_store_find(&now, to, "run", c->checkpoint.step, NULL), CKD_OK);
        count += c->state == CKD_COPY_MOVED;
    }
    ckd_copy_result_free(would);
    ckd_copy_result_free(done);
    assert_true(fingerprints_check(to, before) >= had);
    assert_int_equal(verify_damage(to), 0);
    return count;
}

/*
 * Whatever a copy already had, and whatever was folded on either side, all checkpoints that it lists load without the
 * source.
 */
static void test_copies_of_folded_stores(void **state) {
    enum { COPIES = 7 };
    ckd_store *from = make_chain(*state, CKD_NEAR, 65, 6), *early[COPIES];
    for (unsigned i = 0; i < COPIES; i++) {
        ckd_copy_result *done;
        ckd_id one = id_at(from, 8 + 8 * i);
        early[i] = copy_in(*state, i);
        assert_int_equal(
            ckd_copy(
                &done, early[i], from,
                &(ckd_copy_options){.struct_size = sizeof(ckd_copy_options), .checkpoints = &one, .count = 1},
                NULL),
            CKD_OK);
        assert_int_equal(done->count, 1);
        ckd_copy_result_free(done);
        assert_int_equal(verify_damage(early[i]), 0);
    }
    fingerprints before = fingerprints_of(from);
    fold(from, 8);
    for (unsigned i = 0; i < COPIES; i++) {
        assert_true(copy_all(early[i], from, &before) > 0);
        assert_int_equal(copy_all(early[i], from, &before), 0);
    }
    ckd_store *fresh = copy_in(*state, COPIES);
    assert_true(copy_all(fresh, from, &before) > 8);
    ckd_store_close(fresh);

    /* Then both stores are folded independently. */
    save_steps(from, CKD_NEAR, 65, 90, 6);
    fingerprints_free(&before);
    before = fingerprints_of(from);
    for (unsigned i = 0; i < COPIES; i++) {
        ckd_id one = id_at(from, 66 + 3 * i);
        assert_int_equal(
            ckd_copy(
                NULL, early[i], from,
                &(ckd_copy_options){.struct_size = sizeof(ckd_copy_options), .checkpoints = &one, .count = 1},
                NULL),
            CKD_OK);
        fold_for_good(early[i], 24);
    }
    fold(from, 5);
    for (unsigned i = 0; i < COPIES; i++) {
        assert_true(copy_all(early[i], from, &before) > 0);
        ckd_store_close(early[i]);
    }
    fingerprints_free(&before);
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

/* The files that a save reads stay until it has ended, and afterwards as long as its manifest names them. */
static void test_save_during_a_fold(void **state) {
    ckd_store *store = make_chain(*state, CKD_NEAR, 17, 1000);
    drift d = drift_new(96, 64, 7);
    for (int step = 0; step < 17; step++) {
        drift_step(&d);
    }
    ckd_save *save = begin_next(store, 17);
    ckd_policy policy = CKD_POLICY_INIT;
    policy.keep_last = 1;
    ckd_compact_options fold_all = CKD_COMPACT_OPTIONS_INIT;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    fold_all.policy = &policy;
    fold_all.deletion = &now;
    ckd_compaction *done;
    ckd_error err = {0};
    assert_int_equal(ckd_compact(&done, store, &fold_all, &err), CKD_OK);
    assert_true(done->left == 0 && done->pruned->deleted == 15);
    ckd_compaction_free(done);
    ckd_id last = id_at(store, 16);
    assert_int_equal(ckd_store_delete(store, &last, 1, &now, &err), CKD_OK);
    /* The save is in progress: the collection is busy, or removes only what the save does not read. */
    store->options.lock_timeout_ms = 300;
    ckd_store_collect(NULL, store, NULL, NULL);
    store->options.lock_timeout_ms = 30000;
    add_drift(save, "w", &d);
    commit_save(save);
    assert_int_equal(verify_damage(store), 0);
    fingerprints before = fingerprints_of(store);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    assert_int_equal(fingerprints_check(store, &before), 2);
    assert_int_equal(verify_damage(store), 0);
    save = begin_next(store, 18);
    assert_true(prune_with(store, &policy) == 0);
    add_drift(save, "w", &d);
    commit_save(save);
    assert_int_equal(prune_with(store, &policy), 1);
    assert_int_equal(verify_damage(store), 0);
    fingerprints_free(&before);
    drift_free(&d);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_load_during_a_fold),
        tempdir_test(test_save_during_a_fold),
        tempdir_test(test_copies_of_folded_stores),
    };
    return cmocka_run_group_tests_name("folded", tests, NULL, NULL);
}
