/* How saves write: as asked for, or the fastest way, tried once and remembered. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <sqlite3.h>
#include <stdio.h>
#include <string.h>

#include "engine/save/write_path.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"

static void save_step(const char *dir, uint64_t step, ckd_write_choice *choice) {
    ckd_store *store = NULL;
    scene s = scene_of(step);
    ckd_error err = {0};
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, &err), CKD_OK);
    if (scene_save(NULL, store, &s, &err) != CKD_OK) {
        fail_msg("step %u: %s", (unsigned)step, err.message);
    }
    assert_int_equal(ckd_store_write_path(choice, store, NULL), CKD_OK);
    ckd_store_close(store);
}

static void change(const char *dir, const char *sql) {
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(store_path_of(dir, "catalog.db"), &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_changes(db), 1);
    assert_int_equal(sqlite3_close(db), SQLITE_OK);
}

static void test_small_files_are_not_worth_trying(void **state) {
    ckd_write_choice c;
    scene_make(*state, 0, 1);
    save_step(*state, 1, &c);
    assert_true(c.path == CKD_WRITE_BUFFERED && c.asked == CKD_WRITE_AUTO && c.probed_ns == 0);
}

static void test_tried_once_and_remembered(void **state) {
    ckd_write_choice first, again, later;
    scene_make(*state, 0, 1);
    store_probe_from(1);
    save_step(*state, 1, &first);
    assert_true(first.probed_ns > 0 && first.path >= CKD_WRITE_BUFFERED && first.path <= CKD_WRITE_URING);
    assert_true(first.wall_ms_per_mb[CKD_WRITE_BUFFERED] > 0 && first.work_ms_per_mb[CKD_WRITE_BUFFERED] > 0);
    save_step(*state, 2, &again);
    assert_int_equal(again.probed_ns, first.probed_ns);
    assert_int_equal(again.path, first.path);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ); /* who reads may ask, too */
    assert_int_equal(ckd_store_write_path(&later, store, NULL), CKD_OK);
    assert_int_equal(later.probed_ns, first.probed_ns);
    ckd_store_close(store);
    change(*state, "UPDATE meta SET value = '7 1 1 2 2 3 3' WHERE key GLOB 'write path *'"); /* of 1970 */
    save_step(*state, 3, &later);
    assert_true(later.probed_ns > first.probed_ns);
    change(*state, "UPDATE meta SET value = 'fast' WHERE key GLOB 'write path *'");
    save_step(*state, 4, &again);
    assert_true(again.probed_ns > later.probed_ns);
    store_probe_from(UINT64_C(16) << 20);
    store_check_clean(*state);
    survivors_check(*state, 31, 31, 5);
}

/* A session knows how much it saves: its very first one is tried for. */
static void test_a_session_knows_before(void **state) {
    static float values[4096];
    for (size_t large = 0; large < 2; large++) {
        ckd_error err = {0};
        ckd_session *session;
        ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
        ckd_session_options with = CKD_SESSION_OPTIONS_INIT;
        save.run = "r";
        with.save = &save;
        ckd_tensor tensor = CKD_TENSOR_INIT;
        char path[4200];
        snprintf(path, sizeof(path), "%s/%zu", (const char *)*state, large);
        tensor.name = "w";
        tensor.dtype = CKD_F32;
        tensor.ndim = 1;
        tensor.shape = (uint64_t[]){4096};
        store_probe_from(sizeof(values) + !large);
        assert_int_equal(ckd_session_open(&session, path, &with, &err), CKD_OK);
        assert_int_equal(ckd_session_add(session, &tensor, values, 0, &err), CKD_OK);
        assert_int_equal(ckd_session_save(session, 1, &err), CKD_OK);
        assert_int_equal(ckd_session_close(session, &err), CKD_OK);
        ckd_store *store;
        ckd_write_choice c;
        assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_READ, NULL, &err), CKD_OK);
        assert_int_equal(ckd_store_write_path(&c, store, NULL), CKD_OK);
        assert_int_equal(c.probed_ns > 0, large);
        ckd_store_close(store);
    }
    store_probe_from(UINT64_C(16) << 20);
}

/* A quarter less is taken, less than that is not; what is not to be had has no figures. */
static void test_the_fastest_is_taken(void **state) {
    static const struct {
        const char *figures; /* buffered, direct, io_uring: ms a MB, and of the processor */
        ckd_write_path path;
    } cases[] = {{"1 1 0.7 0.7 0.6 0.6", CKD_WRITE_URING},      {"1 1 0.7 0.7 0.76 0.76", CKD_WRITE_DIRECT},
                 {"1 1 0.9 0.7 0.76 0.75", CKD_WRITE_BUFFERED}, {"1 1 0 0 0 0", CKD_WRITE_BUFFERED},
                 {"1 1 0 0 0.1 0.1", CKD_WRITE_URING},          {"1 1 1.4 0.05 1.6 0", CKD_WRITE_DIRECT}};
    scene_make(*state, 0, 1);
    store_probe_from(1);
    ckd_write_choice c;
    save_step(*state, 1, &c);
    store_probe_from(UINT64_C(16) << 20);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char sql[200];
        snprintf(sql, sizeof(sql), "UPDATE meta SET value = '%llu %s' WHERE key GLOB 'write path *'",
                 (unsigned long long)c.probed_ns, cases[i].figures);
        change(*state, sql);
        ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
        ckd_write_choice found;
        assert_int_equal(ckd_store_write_path(&found, store, NULL), CKD_OK);
        assert_int_equal(found.path, cases[i].path);
        ckd_store_close(store);
    }
}

static int fail_tries(void *context, file_step step, const char *path) {
    unsigned *left = context;
    return step == STEP_SYNC && strstr(path, "/data/c/") && *left && (*left)-- ? EIO : 0;
}

/* Trying is no part of the save: where it fails, the save goes on, and nothing is left. */
static void test_trying_fails(void **state) {
    ckd_write_choice c;
    unsigned left = 1;
    scene_make(*state, 0, 1);
    store_probe_from(1);
    file_set_fault_hook(fail_tries, &left);
    save_step(*state, 1, &c);
    file_set_fault_hook(NULL, NULL);
    store_probe_from(UINT64_C(16) << 20);
    assert_int_equal(left, 0);
    assert_int_equal(c.path, CKD_WRITE_BUFFERED);
    store_check_clean(*state);
    survivors_check(*state, 3, 3, 2);
}

static void test_as_asked_for(void **state) {
    scene_make(*state, 0, 1);
    for (uint32_t path = CKD_WRITE_BUFFERED; path <= CKD_WRITE_URING; path++) {
        ckd_write_choice c;
        scene_write(path);
        save_step(*state, path, &c);
        scene_write(CKD_WRITE_AUTO);
        assert_true(c.path == (ckd_write_path)path && c.asked == (ckd_write_path)path && c.probed_ns == 0);
    }
    survivors_check(*state, 15, 15, 4);
    ckd_store *store = NULL;
    ckd_error err = {0};
    scene_write(CKD_WRITE_URING + 1);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_READ, &err), CKD_E_INVALID);
    scene_write(CKD_WRITE_AUTO);
    assert_non_null(strstr(err.message, "write_path 4"));
    assert_null(ckd_write_path_name((ckd_write_path)4));
    assert_string_equal(ckd_write_path_name(CKD_WRITE_URING), "uring");
}

int main(void) {
#define TEST(name) tempdir_test(test_##name)
    const struct CMUnitTest tests[] = {
        TEST(small_files_are_not_worth_trying),
        TEST(tried_once_and_remembered),
        TEST(a_session_knows_before),
        TEST(the_fastest_is_taken),
        TEST(trying_fails),
        TEST(as_asked_for),
    };
    return cmocka_run_group_tests_name("write paths", tests, NULL, NULL);
}
