/* Sessions: a restore finds the newest state, whatever the clock shows and whoever committed it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/wait.h>
#include <unistd.h>

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
    trainer_run(dir, ROWS, 1, 4);
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
    trainer_run(dir, ROWS, 1, 6);
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
    trainer_run(dir, ROWS, 1, 1);
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

/* ---- the newest state, when another launch committed it after this one opened the store ---- */

/* Ends the process when the catalog is changed after the commit of step 6. */
static int die_before_the_catalog(void *context, file_op step, const char *path) {
    if (step == FILE_OP_SYNC && strstr(path, FILE_CATALOG) && file_exists(context)) {
        _exit(77);
    }
    return 0;
}

/* Saves step 6 in a process that dies before the catalog has it. */
static void save_and_die(const char *dir) {
    pid_t child = fork();
    if (child == 0) {
        char manifest_path[4096];
        snprintf(manifest_path, sizeof(manifest_path), "%s",
                 store_path_of(dir, "data/m/" TRAINER_RUN ".6.0"));
        file_set_fault_hook(die_before_the_catalog, manifest_path);
        trainer_run(dir, ROWS, 6, 6);
        _exit(1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 77);
}

/* A restore finds a save whose writer died after this session had opened the store. */
static void test_another_launch_died(void **state) {
    (void)state;
    for (int latest = 0; latest < 2; latest++) {
        char *dir = tempdir_create();
        trainer_run(dir, ROWS, 1, 5);
        trainer *t = trainer_new(ROWS);
        ckd_session_options o = session_options();
        ckd_session *s = session_of(dir, &o, t);
        ckd_checkpoint from;
        ckd_error err = {0};
        save_and_die(dir);
        must(ckd_session_restore(&from, s, latest ? CKD_LATEST : 6, &err), &err);
        assert_string_equal(from.run, TRAINER_RUN);
        assert_int_equal(from.step, 6);
        trainer_check(t, 6);
        must(iterate_and_wait(s, t, 7, &err), &err);
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
        assert_int_equal(count_of(dir, TRAINER_RUN), 7);
        tempdir_remove(dir);
    }
}

/* Another launch, which commits a step while this one restores. */
typedef struct rival {
    const char *dir;
    ckd_session *session;
    trainer *trainer;
    bool saved;
} rival;

/* Saves step 6 when the manifests are listed without the publish lock, by the check whether there is a newer one. */
static int save_meanwhile(void *context, file_op step, const char *path) {
    rival *r = context;
    size_t length = strlen(path);
    file_lock *lock;
    if (r->saved || step != FILE_OP_OPEN || length < 7 || strcmp(path + length - 7, "/data/m") != 0 ||
        lock_acquire(&lock, path_in(store_path_of(r->dir, ""), FILE_PUBLISH_LOCK).text, LOCK_EXCLUSIVE, true,
                     0, NULL) != CKD_OK) {
        return 0;
    }
    lock_release(lock);
    r->saved = true;
    ckd_error err = {0};
    must(iterate_and_wait(r->session, r->trainer, 6, &err), &err);
    return 0;
}

static void test_another_launch_saves_meanwhile(void **state) {
    const char *dir = *state;
    trainer_run(dir, ROWS, 1, 5);
    trainer *t = trainer_new(ROWS), *others = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    rival r = {dir, session_of(dir, &o, others), others, false};
    ckd_checkpoint from;
    ckd_error err = {0};
    file_set_fault_hook(save_meanwhile, &r);
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    file_set_fault_hook(NULL, NULL);
    assert_true(r.saved);
    assert_int_equal(err.status, CKD_OK);
    assert_int_equal(from.step, 6);
    trainer_check(t, 6);
    must(ckd_session_close(r.session, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    trainer_free(others);
}

/* A restore that cannot look for other launches' saves says so, and changes nothing. */
static void test_the_lock_is_held(void **state) {
    const char *dir = *state;
    trainer_run(dir, ROWS, 1, 2);
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_store_options store = *o.store;
    store.lock_timeout_ms = 20;
    o.store = &store;
    ckd_session *s = session_of(dir, &o, t);
    trainer_set(t, 9);
    file_lock *lock;
    ckd_checkpoint from;
    ckd_error err = {0};
    pathname p = path_in(store_path_of(dir, ""), FILE_PUBLISH_LOCK);
    must(lock_acquire(&lock, p.text, LOCK_EXCLUSIVE, true, 0, &err), &err);
    assert_int_equal(ckd_session_restore(&from, s, CKD_LATEST, &err), CKD_E_BUSY);
    assert_int_equal(from.step, 0);
    assert_non_null(strstr(err.message, "let that process continue, or end it, then try again"));
    trainer_check(t, 9);
    lock_release(lock);
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    assert_int_equal(from.step, 2);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

/* ckd_store_check_newest reports a newer checkpoint that can be loaded, and the handle finds it from then on. */
static void test_the_newest_is_checked(void **state) {
    const char *dir = *state;
    trainer_run(dir, ROWS, 1, 5);
    ckd_store *stores[] = {store_reopen(dir, CKD_OPEN_READ), store_reopen(dir, CKD_OPEN_WRITE)};
    save_and_die(dir);
    for (size_t i = 0; i < 2; i++) { /* the reader first, as the writer repairs the catalog */
        ckd_checkpoint found;
        ckd_error err = {0};
        must(ckd_store_find(&found, stores[i], TRAINER_RUN, CKD_LATEST, &err), &err);
        assert_int_equal(found.step, 5);
        assert_int_equal(ckd_store_check_newest(stores[i], &found, &err), CKD_E_EXISTS);
        assert_non_null(strstr(err.message, TRAINER_RUN "@6 is newer than " TRAINER_RUN "@5"));
        must(ckd_store_find(&found, stores[i], TRAINER_RUN, CKD_LATEST, &err), &err);
        assert_int_equal(found.step, 6);
        must(ckd_store_check_newest(stores[i], &found, &err), &err);
        ckd_store_close(stores[i]);
    }
}

/* The manifest of the newest one can be read, but has a time that cannot be listed. */
static void test_the_newest_contradicts_itself(void **state) {
    const char *dir = *state;
    trainer_run(dir, ROWS, 1, 2);
    set_date(dir, TRAINER_RUN, 2, UINT64_MAX);
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    for (int older = 0; older < 2; older++) {
        o.restore_older = older;
        ckd_session *s = session_of(dir, &o, t);
        ckd_checkpoint from;
        ckd_error err = {0};
        assert_int_equal(ckd_session_restore(&from, s, CKD_LATEST, &err), older ? CKD_OK : CKD_E_CORRUPT);
        assert_int_equal(from.step, older ? 1 : 0);
        assert_true(older || strstr(err.message, TRAINER_RUN "@2 is newer than " TRAINER_RUN "@1"));
        must(ckd_session_close(s, &err), &err);
    }
    trainer_free(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_the_highest_step_is_the_newest), tempdir_test(test_the_clock_is_set_back),
        tempdir_test(test_a_parent_of_another_run),        tempdir_test(test_another_launch_died),
        tempdir_test(test_another_launch_saves_meanwhile), tempdir_test(test_the_lock_is_held),
        tempdir_test(test_the_newest_is_checked),          tempdir_test(test_the_newest_contradicts_itself),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("session_newest", tests, NULL, NULL);
    scratch_end();
    return failed;
}
