/* Sessions: a restore gives back what was saved, and later saves continue from there or in a branch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/session/session.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define ROWS 300

static void test_nothing_to_restore(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(*state, &o, t);
    trainer_set(t, 9);
    ckd_checkpoint from = {.step = 77};
    ckd_error err = {0};
    assert_int_equal(ckd_session_restore(&from, s, CKD_LATEST, &err), CKD_E_NOT_FOUND);
    assert_int_equal(from.step, 0);
    trainer_check(t, 9);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

/* Makes a run of six steps, and a session that restored step `to`. */
static ckd_session *session_restored_to(const char *dir, const ckd_session_options *o, trainer *t,
                                        uint64_t to) {
    trainer_run(dir, ROWS, 1, 6);
    ckd_session *s = session_of(dir, o, t);
    ckd_error err = {0};
    must(ckd_session_restore(NULL, s, to, &err), &err);
    return s;
}

/*
 * After a restore of an earlier step, saves continue in a branch, beginning with a delta on the restored checkpoint.
 */
static void test_restoring_an_earlier_step_branches(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_restored_to(dir, &o, t, 3);
    ckd_error err = {0};
    trainer_check(t, 3);
    iterate_through(s, t, 4, 8);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 6);
    assert_int_equal(count_of(dir, TRAINER_RUN "~2"), 5);
    ckd_checkpoint three = checkpoint_of(dir, TRAINER_RUN, 3), four = checkpoint_of(dir, TRAINER_RUN "~2", 4),
                   five = checkpoint_of(dir, TRAINER_RUN "~2", 5);
    assert_memory_equal(&four.parent, &three.id, sizeof(three.id));
    assert_memory_equal(&four.resumed_from, &three.id, sizeof(three.id));
    assert_memory_equal(&five.parent, &four.id, sizeof(four.id));
    static const ckd_id none;
    assert_memory_equal(&five.resumed_from, &none, sizeof(none));
    stored_check(dir, TRAINER_RUN "~2", 8, ROWS);
}

/* Restores again, a step before the branch. A new session then continues the newest branch, not the original run. */
static void test_restoring_twice(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_restored_to(dir, &o, t, 3);
    ckd_error err = {0};
    ckd_checkpoint from;
    must(iterate(s, t, 4, &err), &err);
    must(iterate(s, t, 5, &err), &err);
    must(ckd_session_restore(&from, s, 2, &err), &err);
    assert_string_equal(from.run, TRAINER_RUN);
    trainer_check(t, 2);
    must(iterate(s, t, 3, &err), &err);
    must(ckd_session_close(s, &err), &err);
    assert_int_equal(count_of(dir, TRAINER_RUN "~2"), 2);
    assert_int_equal(count_of(dir, TRAINER_RUN "~3"), 1);
    s = session_of(dir, &o, t);
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    assert_string_equal(from.run, TRAINER_RUN "~3");
    assert_int_equal(from.step, 3);
    must(iterate(s, t, 4, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(dir, TRAINER_RUN "~3", 4, ROWS);
}

/* A new session finds a step that only a branch has. */
static void test_a_step_of_a_branch(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_restored_to(dir, &o, t, 4);
    ckd_error err = {0};
    ckd_checkpoint from;
    iterate_through(s, t, 5, 8);
    must(ckd_session_close(s, &err), &err);
    s = session_of(dir, &o, t);
    must(ckd_session_restore(&from, s, 7, &err), &err);
    assert_string_equal(from.run, TRAINER_RUN "~2");
    trainer_check(t, 7);
    assert_int_equal(ckd_session_restore(&from, s, 9, &err), CKD_E_NOT_FOUND);
    must(ckd_session_close(s, &err), &err);
    s = session_of(dir, &o, t);
    must(ckd_session_restore(&from, s, 6, &err), &err); /* both have it: the run's own is restored */
    assert_string_equal(from.run, TRAINER_RUN);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

/* The first save after the restore is later than the abandoned steps. It still builds on the restored checkpoint. */
static void test_saving_beyond_abandoned_steps(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.every_steps = 10;
    ckd_session *s = session_restored_to(dir, &o, t, 3);
    ckd_error err = {0};
    iterate_through(s, t, 4, 20);
    must(ckd_session_restore(NULL, s, 3, &err), &err);
    must(iterate(s, t, 29, &err), &err);
    must(iterate(s, t, 30, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 6);
    assert_int_equal(count_of(dir, TRAINER_RUN "~2"), 2);
    assert_int_equal(count_of(dir, TRAINER_RUN "~3"), 1);
    ckd_checkpoint three = checkpoint_of(dir, TRAINER_RUN, 3), ten = checkpoint_of(dir, TRAINER_RUN "~2", 10),
                   thirty = checkpoint_of(dir, TRAINER_RUN "~3", 30);
    assert_memory_equal(&ten.parent, &three.id, sizeof(three.id));
    assert_memory_equal(&thirty.parent, &three.id, sizeof(three.id));
    stored_check(dir, TRAINER_RUN "~3", 30, ROWS);
}

/*
 * A training that starts over under the name of an existing run gets an error and changes nothing. It saves to a
 * branch only if asked to.
 */
static void test_fresh_starts_are_reported(void **state) {
    const char *dir = *state;
    trainer_run(dir, ROWS, 4, 6);
    for (int branches = 0; branches < 2; branches++) {
        trainer *t = trainer_new(ROWS);
        ckd_session_options o = session_options();
        ckd_save_options save = *o.save;
        save.on_duplicate = branches ? CKD_DUPLICATE_BRANCH : CKD_DUPLICATE_ERROR;
        o.save = &save;
        ckd_session *s = session_of(dir, &o, t);
        ckd_error err = {0};
        ckd_status status = iterate_and_wait(s, t, 1, &err); /* not a step of the existing run */
        assert_int_equal(status, branches ? CKD_OK : CKD_E_EXISTS);
        if (!branches) {
            assert_non_null(strstr(err.message, "up to step 6"));
            /* One step after its end: the state may have been restored by other means. */
            must(iterate_and_wait(s, t, 7, &err), &err);
        }
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
    }
    assert_int_equal(count_of(dir, TRAINER_RUN), 4);
    assert_int_equal(count_of(dir, TRAINER_RUN "~2"), 1);
}

/* A child process, such as a data loader, does not inherit the snapshot. */
static void test_children_have_no_snapshot(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(*state, &o, t);
    ckd_error err = {0};
    must(iterate(s, t, 1, &err), &err);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const void *memory = s->shared.slots[0].snapshot->memory;
    assert_int_equal(write(ends[1], memory, 1), 1);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        bool gone = write(ends[1], memory, 1) < 0 && errno == EFAULT;
        bool refused = ckd_session_close(s, NULL) == CKD_E_STATE;
        _exit(gone && refused ? 0 : 1);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    close(ends[0]);
    close(ends[1]);
    must(iterate(s, t, 2, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(*state, TRAINER_RUN, 2, ROWS);
}

/* Two tensors of the same name would make every save fail. */
static void test_a_name_is_registered_once(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(*state, &o, t);
    ckd_error err = {0};
    static float values[64];
    uint64_t shape[] = {64};
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = "halves";
    tensor.dtype = CKD_F32;
    tensor.ndim = 1;
    tensor.shape = shape;
    tensor.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = 0, .count = 32};
    must(ckd_session_add(s, &tensor, values, 0, &err), &err);
    tensor.region.start = 32;
    must(ckd_session_add(s, &tensor, values + 32, 0, &err), &err); /* another part of the tensor */
    tensor.region.start = 16;
    assert_int_equal(ckd_session_add(s, &tensor, values + 16, 0, &err), CKD_E_INVALID);
    assert_string_equal(err.tensor, "halves");
    tensor.dtype = CKD_I32;
    tensor.region.start = 0;
    assert_int_equal(ckd_session_add(s, &tensor, values, 0, NULL), CKD_E_INVALID);
    must(ckd_session_add_bytes(s, "halves", values, 8, &err), &err); /* bytes have names of their own */
    assert_int_equal(ckd_session_add_bytes(s, "halves", values, 8, NULL), CKD_E_INVALID);
    for (int i = 0; i < 300; i++) {
        char name[16];
        snprintf(name, sizeof(name), "b%d", i);
        must(ckd_session_add_bytes(s, name, values, 8, &err), &err);
        assert_int_equal(ckd_session_add_bytes(s, name, values, 8, NULL), CKD_E_INVALID);
    }
    must(iterate_and_wait(s, t, 1, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

/* ---- the restored checkpoint is deleted or renamed before the first save ---- */

static char messages[2048];

static void keep_message(void *unused, const char *message) {
    size_t used = strlen(messages);
    (void)unused;
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static void delete_or_rename(const char *dir, uint64_t step, bool rename) {
    ckd_error err = {0};
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    ckd_id id = checkpoint_of(dir, TRAINER_RUN, step).id;
    if (rename) {
        must(ckd_store_rename_run(NULL, store, TRAINER_RUN, "old", NULL, &err), &err);
    } else {
        must(ckd_store_delete(store, &id, 1, NULL, &err), &err);
    }
    ckd_store_close(store);
}

/* Restores step 3, which then goes, and saves steps 4 and 5. The first of them must not fail. */
static void save_without_origin(const char *dir, bool base, bool rename) {
    ckd_error err = {0};
    ckd_store_options store = CKD_STORE_OPTIONS_INIT;
    ckd_session_options o = session_options();
    ckd_save_options save = *o.save;
    ckd_id none = {{0}};
    store.on_message = keep_message;
    o.store = &store;
    save.base = base;
    o.save = &save;
    messages[0] = '\0';
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(dir, &o, t);
    ckd_checkpoint from;
    must(ckd_session_restore(&from, s, 3, &err), &err);
    delete_or_rename(dir, 3, rename);
    must(iterate_and_wait(s, t, 4, &err), &err);
    must(iterate(s, t, 5, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(dir, TRAINER_RUN, 4, ROWS);
    stored_check(dir, TRAINER_RUN, 5, ROWS);
    ckd_checkpoint four = checkpoint_of(dir, TRAINER_RUN, 4), five = checkpoint_of(dir, TRAINER_RUN, 5);
    ckd_id two = rename ? none : checkpoint_of(dir, TRAINER_RUN, 2).id; /* is then the newest of the run */
    const ckd_id *parent = base ? &none : rename ? &from.id : &two;
    assert_memory_equal(&four.parent, parent, sizeof(none));
    assert_memory_equal(&four.resumed_from, rename ? &from.id : &none, sizeof(none));
    assert_memory_equal(&five.resumed_from, &none, sizeof(none));
    assert_int_equal(count_of(dir, TRAINER_RUN), rename ? 2 : 4);
    assert_non_null(strstr(messages, rename ? "run@3 is now called old@3; the save of step 4 continues it"
                                            : "step 4 is saved without it"));
    assert_ptr_equal(strchr(messages, '\n'), messages + strlen(messages) - 1); /* one message */
}

static void test_the_origin_is_gone(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        char *dir = tempdir_create();
        trainer_run(dir, ROWS, 1, 3);
        save_without_origin(dir, way & 1, way & 2);
        tempdir_remove(dir);
    }
}

/* A parent that the options name is not given up: the name may be mistyped. */
static void test_a_parent_of_the_options_must_exist(void **state) {
    ckd_error err = {0};
    ckd_session_options o = session_options();
    ckd_save_options save = *o.save;
    save.parent_run = "nobody";
    o.save = &save;
    trainer *t = trainer_new(ROWS);
    ckd_session *s = session_of(*state, &o, t);
    assert_int_equal(iterate_and_wait(s, t, 1, &err), CKD_E_NOT_FOUND);
    assert_non_null(strstr(err.message, "nobody"));
    (void)ckd_session_close(s, NULL);
    trainer_free(t);
    assert_int_equal(count_of(*state, TRAINER_RUN), 0);
}

/* The forward pass draws random numbers. Registered bytes are still those of the step. */
static void test_bytes_are_copied_at_once(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(20000);
    ckd_session_options o = session_options();
    o.snapshot = CKD_SNAPSHOT_LAZY;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    for (uint64_t step = 1; step <= 5; step++) {
        memset(t->loader, 0xee, sizeof(t->loader)); /* before the fence */
        must(iterate(s, t, step, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    for (uint64_t step = 1; step <= 5; step++) {
        stored_check(dir, TRAINER_RUN, step, 20000);
    }
}

static void test_continuing_from_the_newest(void **state) {
    const char *dir = *state;
    trainer_run(dir, ROWS, 1, 3);
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    ckd_checkpoint from;
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    assert_int_equal(from.step, 3);
    must(iterate(s, t, 4, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 4);
    ckd_checkpoint four = checkpoint_of(dir, TRAINER_RUN, 4);
    assert_memory_equal(&four.resumed_from, &from.id, sizeof(from.id));
}

/* A mismatch is found before any of the trainer's memory is written. */
static void test_mismatches_change_nothing(void **state) {
    const char *dir = *state;
    trainer_run(dir, ROWS, 1, 1);
    ckd_session_options o = session_options();
    ckd_error err = {0};
    for (int kind = 0; kind < 3; kind++) {
        trainer *t = trainer_new(kind == 0 ? ROWS + 1 : ROWS);
        trainer_set(t, 5);
        ckd_session *s = session_of(dir, &o, t);
        float more[4] = {1, 2, 3, 4};
        ckd_tensor tensor = CKD_TENSOR_INIT;
        tensor.name = "more";
        tensor.dtype = CKD_F32;
        tensor.ndim = 1;
        tensor.shape = (uint64_t[]){4};
        if (kind == 1) {
            must(ckd_session_add(s, &tensor, more, 0, &err), &err);
        } else if (kind == 2) {
            must(ckd_session_add_bytes(s, "more", more, sizeof(more), &err), &err);
        }
        assert_int_equal(ckd_session_restore(NULL, s, CKD_LATEST, &err), CKD_E_MISMATCH);
        trainer_check(t, 5);
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_nothing_to_restore),
        tempdir_test(test_restoring_an_earlier_step_branches),
        tempdir_test(test_restoring_twice),
        tempdir_test(test_a_step_of_a_branch),
        tempdir_test(test_saving_beyond_abandoned_steps),
        tempdir_test(test_fresh_starts_are_reported),
        tempdir_test(test_children_have_no_snapshot),
        tempdir_test(test_a_name_is_registered_once),
        tempdir_test(test_the_origin_is_gone),
        tempdir_test(test_a_parent_of_the_options_must_exist),
        tempdir_test(test_bytes_are_copied_at_once),
        tempdir_test(test_continuing_from_the_newest),
        tempdir_test(test_mismatches_change_nothing),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("session_restore", tests, NULL, NULL);
    scratch_end();
    return failed;
}
