/*
 * Making parity and repairing are killed at every step, or every step fails once. Intact files stay intact, nothing
 * incomplete is taken for complete, and the next call finishes the work.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/store/handle.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { FILES = 5, LOST = 2 };

typedef struct snapshot {
    char name[FILES][128];
    unsigned char *data[FILES];
    size_t size[FILES];
} snapshot;

static void take(snapshot *s, const char *dir) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/c"), NULL), CKD_OK);
    assert_int_equal(list.count, FILES);
    for (size_t i = 0; i < FILES; i++) {
        snprintf(s->name[i], sizeof(s->name[i]), "data/c/%s", list.names[i]);
        s->data[i] = read_whole_file(store_path_of(dir, s->name[i]), &s->size[i]);
    }
    dir_list_free(&list);
}

static void check_files(const snapshot *s, const char *dir) {
    for (size_t i = 0; i < FILES; i++) {
        size_t size;
        unsigned char *data = read_whole_file(store_path_of(dir, s->name[i]), &size);
        assert_int_equal(size, s->size[i]);
        assert_memory_equal(data, s->data[i], size);
        free(data);
    }
}

/* ---- the work ---- */

typedef ckd_status (*work_fn)(ckd_store *store);

static ckd_status make_rows(ckd_store *store, uint32_t rows) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    o.data = FILES;
    o.parity = rows;
    ckd_status status = ckd_store_parity(&r, store, &o, NULL);
    ckd_parity_result_free(r);
    return status;
}

static ckd_status make_parity(ckd_store *store) {
    return make_rows(store, 1);
}

static ckd_status make_two_rows(ckd_store *store) {
    return make_rows(store, 2);
}

static ckd_status repair(ckd_store *store) {
    ckd_repair_result *r;
    ckd_status status = ckd_store_repair(&r, store, NULL, NULL);
    ckd_repair_result_free(r);
    return status;
}

/* Makes a store with files saved after its parity, so that a group must be made again. */
static void prepare(const char *dir, snapshot *s, work_fn parity) {
    ckd_store *store;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_CREATE, NULL), CKD_OK);
    for (uint64_t step = 0; step < FILES; step++) {
        scene x = scene_of(step);
        x.base = true;
        if (step == 3) {
            assert_int_equal(parity(store), CKD_OK);
        }
        assert_int_equal(scene_save(NULL, store, &x, NULL), CKD_OK);
    }
    ckd_store_close(store);
    take(s, dir);
}

static void prepare_parity(const char *dir, snapshot *s) {
    prepare(dir, s, make_parity);
}

static void prepare_two_rows(const char *dir, snapshot *s) {
    prepare(dir, s, make_two_rows);
}

/* The same with complete parity and one damaged file. */
static void prepare_repair(const char *dir, snapshot *s) {
    ckd_store *store;
    prepare_parity(dir, s);
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(make_parity(store), CKD_OK);
    ckd_store_close(store);
    unsigned char *data = malloc(s->size[LOST]);
    memcpy(data, s->data[LOST], s->size[LOST]);
    data[s->size[LOST] / 2] ^= 1;
    write_whole_file(store_path_of(dir, s->name[LOST]), data, s->size[LOST]);
    free(data);
}

/* A chunk file and the manifest that names it are missing. A writer has noticed, and kept the catalog's row. */
static void prepare_lost(const char *dir, snapshot *s) {
    ckd_store *store;
    manifest m;
    prepare_parity(dir, s);
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(make_parity(store), CKD_OK);
    assert_int_equal(store_read_manifest(&m, store, SCENE_RUN, LOST, 0, NULL), CKD_OK);
    assert_int_equal(unlink(path_chunk(store->path, &m.files[0].id, "").text), 0);
    assert_int_equal(unlink(path_manifest(store->path, SCENE_RUN, LOST, 0).text), 0);
    manifest_free(&m);
    ckd_store_close(store);
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    ckd_store_close(store);
}

/* ---- trouble ---- */

typedef struct trouble {
    unsigned long at, seen;
    int errnum; /* 0: kill the process */
} trouble;

static int hook(void *context, file_op step, const char *path) {
    trouble *t = context;
    (void)path;
    if (!t->errnum && (step == FILE_OP_READ || step == FILE_OP_OPEN)) {
        return 0; /* changes nothing */
    }
    if (++t->seen != t->at) {
        return 0;
    }
    if (!t->errnum) {
        raise(SIGKILL);
    }
    return t->errnum;
}

/* In a child. Returns 0 if the trouble never came. */
static int run_child(const char *dir, work_fn work, trouble *t) {
    ckd_store *store;
    file_set_fault_hook(hook, t);
    if (scene_open(&store, dir, CKD_OPEN_WRITE, NULL) != CKD_OK) {
        return 1;
    }
    (void)work(store); /* an error may be returned or not: the step may not matter */
    ckd_store_close(store);
    return t->seen < t->at ? 0 : 1;
}

/* Returns whether the work finished without trouble. */
static bool in_child(const char *dir, work_fn work, unsigned long at, int errnum) {
    trouble t = {.at = at, .errnum = errnum};
    int code;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        _exit(run_child(dir, work, &t));
    }
    assert_int_equal(waitpid(child, &code, 0), child);
    bool killed = WIFSIGNALED(code) && WTERMSIG(code) == SIGKILL && !errnum;
    assert_true(killed || (WIFEXITED(code) && WEXITSTATUS(code) <= 1));
    return !killed && WEXITSTATUS(code) == 0;
}

/* Only the lock and complete parity files are left. */
static void check_no_leftovers(const char *dir) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/p"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        assert_null(strstr(list.names[i], ".tmp"));
    }
    dir_list_free(&list);
}

static void check_after(const char *dir, const snapshot *s, work_fn work) {
    ckd_store *store;
    ckd_parity_status *status;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    if (work == make_parity || work == make_two_rows) { /* groups exist as a whole or not at all */
        ckd_verify_result *verified;
        assert_int_equal(ckd_store_verify(&verified, store, NULL, NULL), CKD_OK);
        assert_int_equal(verified->damage_count, 0);
        ckd_verify_result_free(verified);
    }
    assert_int_equal(repair(store), CKD_OK);
    assert_int_equal(work == make_two_rows ? make_two_rows(store) : make_parity(store), CKD_OK);
    assert_int_equal(ckd_store_parity_status(&status, store, NULL), CKD_OK);
    assert_true(status->groups == 1 && status->covered_files == FILES && status->weak_groups == 0 &&
                status->unreadable == 0);
    ckd_parity_status_free(status);
    scene_check(store, 0, FILES);
    ckd_store_close(store);
    check_files(s, dir);
    check_no_leftovers(dir);
    store_check_clean(dir);
}

static void sweep(const char *what, const char *dir, void (*prepare_store)(const char *, snapshot *),
                  work_fn work, int errnum) {
    char from[512], to[512];
    snapshot s;
    bool done = false;
    unsigned long every = under_sanitizer() ? 7 : errnum ? test_stride(9, 4, 1) : test_stride(5, 2, 1);
    prepare_store(dir, &s);
    snprintf(from, sizeof(from), "%s", store_path_of(dir, ""));
    for (unsigned long at = test_first(what, every); !done; at += every) {
        char *copy = tempdir_create();
        snprintf(to, sizeof(to), "%s/store", copy);
        tree_copy(from, to);
        done = in_child(copy, work, at, errnum);
        check_after(copy, &s, work);
        tempdir_remove(copy);
        assert_true(at < 1000);
    }
    for (size_t i = 0; i < FILES; i++) {
        free(s.data[i]);
    }
}

static void test_parity_killed(void **state) {
    sweep("parity killed", *state, prepare_parity, make_parity, 0);
}

static void test_repair_killed(void **state) {
    sweep("repair killed", *state, prepare_repair, repair, 0);
}

static void test_parity_fails(void **state) {
    sweep("parity fails", *state, prepare_parity, make_parity, EIO);
}

static void test_two_rows_killed(void **state) {
    sweep("two rows killed", *state, prepare_two_rows, make_two_rows, 0);
}

static void test_two_rows_fail(void **state) {
    sweep("two rows fail", *state, prepare_two_rows, make_two_rows, ENOSPC);
}

static void test_repair_fails(void **state) {
    sweep("repair fails", *state, prepare_repair, repair, ENOSPC);
}

static void test_lost_repair_killed(void **state) {
    sweep("lost repair killed", *state, prepare_lost, repair, 0);
}

static void test_lost_repair_fails(void **state) {
    sweep("lost repair fails", *state, prepare_lost, repair, ENOSPC);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_parity_killed),      tempdir_test(test_repair_killed),
        tempdir_test(test_parity_fails),       tempdir_test(test_repair_fails),
        tempdir_test(test_two_rows_killed),    tempdir_test(test_two_rows_fail),
        tempdir_test(test_lost_repair_killed), tempdir_test(test_lost_repair_fails),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
