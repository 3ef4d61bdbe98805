/*
 * Two sessions of the same run, as after launching a training twice. Their steps are not mixed: one of them gets an
 * error, or both continue in branches of their own. There are no errors without cause.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define ROWS 100

typedef struct launch {
    trainer *t;
    ckd_session *s;
} launch;

static launch launched(const char *dir, const ckd_session_options *o) {
    launch l = {.t = trainer_new(ROWS)};
    l.s = session_of(dir, o, l.t);
    return l;
}

static void end(launch *l) {
    (void)ckd_session_close(l->s, NULL);
    trainer_free(l->t);
}

/* Saves every step and waits for it. */
static void saves(launch *l, uint64_t first, uint64_t last) {
    for (uint64_t step = first; step <= last; step++) {
        ckd_error err = {0};
        must(iterate_and_wait(l->s, l->t, step, &err), &err);
    }
}

static void save_refused(launch *l, uint64_t step, const char *of) {
    ckd_error err = {0};
    ckd_session_state before, now;
    ckd_session_poll(&before, l->s);
    assert_int_equal(iterate_and_wait(l->s, l->t, step, &err), CKD_E_EXISTS);
    if (!strstr(err.message, "another launch saves to run") || !strstr(err.message, of) ||
        !strstr(err.message, " UTC")) {
        fail_msg("'%s' does not tell of %s", err.message, of);
    }
    ckd_session_poll(&now, l->s);
    assert_int_equal(now.saved, before.saved);
}

static void restores(launch *l, uint64_t step) {
    ckd_error err = {0};
    must(ckd_session_restore(NULL, l->s, step, &err), &err);
}

static void make_run(const char *dir, uint64_t last) {
    ckd_session_options o = session_options();
    launch l = launched(dir, &o);
    saves(&l, 1, last);
    end(&l);
}

static void test_two_restored_sessions(void **state) {
    ckd_session_options o = session_options();
    make_run(*state, 3);
    launch a = launched(*state, &o), b = launched(*state, &o);
    restores(&a, CKD_LATEST);
    restores(&b, CKD_LATEST);
    saves(&a, 4, 6);
    save_refused(&b, 7, "run@6");
    saves(&a, 7, 7);
    save_refused(&b, 8, "run@7");
    saves(&a, 8, 9);
    restores(&b, CKD_LATEST); /* the user restores the other's steps: b takes over, and a gets the error */
    saves(&b, 10, 10);
    save_refused(&a, 11, "run@10");
    end(&a);
    end(&b);
    assert_int_equal(count_of(*state, "run"), 10);
}

static void test_two_new_sessions(void **state) {
    ckd_session_options o = session_options();
    launch a = launched(*state, &o), b = launched(*state, &o);
    saves(&a, 1, 2);
    save_refused(&b, 3, "run@2");
    save_refused(&b, 4, "run@2");
    saves(&a, 3, 3);
    end(&a);
    end(&b);
    assert_int_equal(count_of(*state, "run"), 3);
}

/* They save different steps, and b commits while a's save is in progress. */
static void test_commit_during_the_other_save(void **state) {
    ckd_session_options o = session_options(), lazy = session_options();
    ckd_error err = {0};
    make_run(*state, 2);
    lazy.snapshot = CKD_SNAPSHOT_LAZY;
    launch a = launched(*state, &lazy), b = launched(*state, &o);
    restores(&a, CKD_LATEST);
    restores(&b, CKD_LATEST);
    must(iterate(a.s, a.t, 4, &err), &err); /* committed after the next fence */
    saves(&b, 3, 3);
    assert_int_equal(ckd_session_wait(a.s, CKD_DURABLE, &err), CKD_E_EXISTS);
    assert_non_null(strstr(err.message, "run@3"));
    end(&a);
    end(&b);
    assert_int_equal(count_of(*state, "run"), 3);
}

static ckd_session_options branching(void) {
    static ckd_save_options save;
    ckd_session_options o = session_options();
    save = *o.save;
    save.on_duplicate = CKD_DUPLICATE_BRANCH;
    o.save = &save;
    return o;
}

static void test_branches_of_their_own(void **state) {
    make_run(*state, 3);
    ckd_session_options o = branching();
    launch a = launched(*state, &o), b = launched(*state, &o);
    restores(&a, CKD_LATEST);
    restores(&b, CKD_LATEST);
    for (uint64_t step = 4; step < 10; step++) {
        saves(step % 2 ? &a : &b, step, step); /* at different steps */
    }
    saves(&a, 10, 12);
    saves(&b, 10, 12); /* at the same steps */
    end(&a);
    end(&b);
    assert_int_equal(count_of(*state, "run"), 3 + 6); /* b came first and has the run itself */
    assert_int_equal(count_of(*state, "run~2"), 6);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    for (uint64_t branch = 1; branch <= 2; branch++) { /* each step follows one of its own session */
        const char *run = branch == 1 ? "run" : "run~2";
        static const uint64_t steps[2][6] = {{4, 6, 8, 10, 11, 12}, {5, 7, 9, 10, 11, 12}};
        ckd_checkpoint before, c;
        assert_int_equal(ckd_store_find(&before, store, "run", 3, NULL), CKD_OK);
        for (size_t i = 0; i < 6; i++) {
            assert_int_equal(ckd_store_find(&c, store, run, steps[branch - 1][i], NULL), CKD_OK);
            assert_memory_equal(&c.parent, &before.id, sizeof(ckd_id));
            before = c;
        }
    }
    ckd_store_close(store);
}

/* ---- no error without cause ---- */

static void delete_step(const char *dir, const char *run, uint64_t step) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    ckd_checkpoint c;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_error err = {0};
    o.undo_s = 3600;
    assert_int_equal(ckd_store_find(&c, store, run, step, NULL), CKD_OK);
    must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
    ckd_store_close(store);
}

static void test_deleted_last_step(void **state) {
    ckd_session_options o = session_options();
    launch a = launched(*state, &o);
    saves(&a, 1, 4);
    delete_step(*state, "run", 4);
    saves(&a, 5, 6);
    delete_step(*state, "run", 6);
    delete_step(*state, "run", 5);
    saves(&a, 7, 7);
    end(&a);
    ckd_session_options branches = branching();
    launch b = launched(*state, &branches);
    restores(&b, CKD_LATEST);
    saves(&b, 8, 8);
    delete_step(*state, "run", 8);
    saves(&b, 9, 9); /* in the same branch */
    end(&b);
    assert_int_equal(checkpoint_of(*state, "run", 9).step, 9);
}

static void test_a_step_back(void **state) {
    ckd_session_options o = session_options();
    make_run(*state, 6);
    launch a = launched(*state, &o);
    restores(&a, 3);
    saves(&a, 4, 8);
    restores(&a, 5); /* a step of the branch, so the next branch begins */
    saves(&a, 6, 7);
    end(&a);
    launch b = launched(*state, &o);
    restores(&b, CKD_LATEST);
    saves(&b, 8, 9);
    end(&b);
    assert_int_equal(count_of(*state, "run"), 6);
    assert_int_equal(count_of(*state, "run~2"), 5);
    assert_int_equal(count_of(*state, "run~3"), 4);
}

static void test_compaction_and_policies_meanwhile(void **state) {
    ckd_session_options o = session_options();
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_error err = {0};
    launch a = launched(*state, &o);
    policy.keep_last = 2;
    saves(&a, 1, 5);
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    ckd_compact_options compact = CKD_COMPACT_OPTIONS_INIT;
    compact.max_depth = 1;
    must(ckd_compact(NULL, store, &compact, &err), &err);
    saves(&a, 6, 6);
    policy.automatic = 1;
    must(ckd_store_set_policy(store, &policy, &err), &err);
    ckd_store_close(store);
    saves(&a, 7, 12);
    end(&a);
}

/* Replayed steps are compared with the stored ones. The session then continues after the last one. */
static void test_a_replay(void **state) {
    static ckd_save_options save;
    ckd_session_options o = session_options();
    make_run(*state, 6);
    save = *o.save;
    save.on_duplicate = CKD_DUPLICATE_SAME_OK;
    o.save = &save;
    launch a = launched(*state, &o);
    restores(&a, 3);
    saves(&a, 4, 8);
    end(&a);
    assert_int_equal(count_of(*state, "run"), 8);
}

/* An existing run is continued at a higher step without a restore. */
static void test_existing_run(void **state) {
    ckd_session_options o = session_options();
    make_run(*state, 3);
    launch a = launched(*state, &o);
    saves(&a, 4, 6);
    end(&a);
    assert_int_equal(count_of(*state, "run"), 6);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_two_restored_sessions),
        tempdir_test(test_two_new_sessions),
        tempdir_test(test_commit_during_the_other_save),
        tempdir_test(test_branches_of_their_own),
        tempdir_test(test_deleted_last_step),
        tempdir_test(test_a_step_back),
        tempdir_test(test_compaction_and_policies_meanwhile),
        tempdir_test(test_a_replay),
        tempdir_test(test_existing_run),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("session follow", tests, NULL, NULL);
    scratch_end();
    return failed;
}
