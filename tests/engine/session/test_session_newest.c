/* Sessions: a restore finds the newest state, whatever the clock shows and whoever committed it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/session/session.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define ROWS 300

static uint64_t behind_s; /* how far the clock was set back */

uint64_t __real_clock_wall_ns(void);
uint64_t __wrap_clock_wall_ns(void);
uint64_t __wrap_clock_wall_ns(void) {
    return __real_clock_wall_ns() - behind_s * UINT64_C(1000000000);
}

static void iterate_through(ckd_session *s, trainer *t, uint64_t first, uint64_t last) {
    ckd_error err = {0};
    for (uint64_t step = first; step <= last; step++) {
        must(iterate(s, t, step, &err), &err);
    }
}

static void make_run(const char *dir, uint64_t first, uint64_t last) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    iterate_through(s, t, first, last);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

/* ---- the newest state, whatever the clock shows ---- */

/* Restores `which` in a new session, checks that it is run@step, and trains `more` steps from there. */
static void resume(const char *dir, uint64_t which, const char *run, uint64_t step, uint64_t more) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    ckd_checkpoint from;
    ckd_error err = {0};
    must(ckd_session_restore(&from, s, which, &err), &err);
    assert_string_equal(from.run, run);
    assert_int_equal(from.step, step);
    trainer_check(t, step);
    iterate_through(s, t, step + 1, step + more);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

/* Gives a checkpoint another time, as earlier versions did when the clock was set back. */
static void set_date(const char *dir, const char *run, uint64_t step, uint64_t created_ns) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    manifest m;
    bytes data = {0};
    ckd_error err = {0};
    must(store_read_manifest(&m, store, run, step, 0, &err), &err);
    m.checkpoint.created_ns = created_ns;
    manifest_encode(&data, &store->id, &m);
    write_whole_file(path_manifest(store->path, run, step, 0).text, data.data, data.size);
    bytes_free(&data);
    manifest_free(&m);
    must(file_remove(path_in(store->path, FILE_CATALOG).text, true, &err), &err); /* it has the old time */
    ckd_store_close(store);
}

/* In a run the highest step is the newest, whatever its time. */
static void test_the_highest_step_is_the_newest(void **state) {
    const char *dir = *state;
    make_run(dir, 1, 4);
    set_date(dir, TRAINER_RUN, 3, checkpoint_of(dir, TRAINER_RUN, 1).created_ns - 2);
    set_date(dir, TRAINER_RUN, 4, checkpoint_of(dir, TRAINER_RUN, 1).created_ns - 1);
    resume(dir, CKD_LATEST, TRAINER_RUN, 4, 2);
    resume(dir, CKD_LATEST, TRAINER_RUN, 6, 0);
    assert_int_equal(count_of(dir, TRAINER_RUN), 6);
}

static void check_dates(const char *dir, const char *before, uint64_t step_before, const char *after,
                        uint64_t step_after) {
    assert_true(checkpoint_of(dir, before, step_before).created_ns <
                checkpoint_of(dir, after, step_after).created_ns);
}

/* The clock is set back before each restart. Each save is later than the ones before it, whatever run they are in. */
static void test_the_clock_is_set_back(void **state) {
    const char *dir = *state;
    make_run(dir, 1, 6);
    behind_s = 600;
    resume(dir, CKD_LATEST, TRAINER_RUN, 6, 2);
    check_dates(dir, TRAINER_RUN, 6, TRAINER_RUN, 7);
    behind_s = 1200;
    resume(dir, 3, TRAINER_RUN, 3, 2); /* abandons the steps 4 to 8 */
    check_dates(dir, TRAINER_RUN, 8, TRAINER_RUN "~2", 4);
    behind_s = 1800;
    resume(dir, CKD_LATEST, TRAINER_RUN "~2", 5, 0);
    resume(dir, 8, TRAINER_RUN, 8, 1); /* goes on in the run after all */
    check_dates(dir, TRAINER_RUN "~2", 5, TRAINER_RUN, 9);
    resume(dir, CKD_LATEST, TRAINER_RUN, 9, 0);
    behind_s = 0;
}

/* A save whose parent is in another run is not older than it. */
static void test_a_parent_of_another_run(void **state) {
    const char *dir = *state;
    make_run(dir, 1, 1);
    behind_s = 600;
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    float value = 1;
    ckd_error err = {0};
    ckd_save_options o = options_of("other", 1);
    o.parent_run = TRAINER_RUN;
    o.parent_step = 1;
    ckd_save *save = begin_with(store, &o);
    add_tensor(save, "w", CKD_F32, 1, (uint64_t[]){1}, NULL, &value);
    must(ckd_save_commit(NULL, save, &err), &err);
    ckd_store_close(store);
    behind_s = 0;
    check_dates(dir, TRAINER_RUN, 1, "other", 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_the_highest_step_is_the_newest),
        tempdir_test(test_the_clock_is_set_back),
        tempdir_test(test_a_parent_of_another_run),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("session_newest", tests, NULL, NULL);
    scratch_end();
    return failed;
}
