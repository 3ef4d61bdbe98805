/*
 * A node of a network file system may believe for a while that a file exists which another node removed. Opening the
 * file asks the server. So nothing is committed that names a file which cannot be opened, and a failure to open it is
 * no proof that it is gone.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/pairs.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

/* Chunk files cannot be opened while the publish lock is held to commit. An intent is written under it as well. */
typedef struct removal {
    int errnum;
    bool commits;
    unsigned asked;
} removal;

static int open_nothing(void *context, file_op step, const char *path) {
    removal *r = context;
    size_t length = strlen(path), end = strlen("/data/lock");
    if (step == FILE_OP_LOCK && length > end && strcmp(path + length - end, "/data/lock") == 0) {
        r->commits = true;
    }
    if (step == FILE_OP_CREATE && strstr(path, "/data/i/")) {
        r->commits = false;
    }
    bool fails = r->commits && step == FILE_OP_OPEN && strstr(path, "/data/c/");
    r->asked += fails;
    return fails ? r->errnum : 0;
}

static const struct {
    int errnum;
    ckd_status saves, restores, copies;
} cases[] = {
    {ENOENT, CKD_E_NOT_FOUND, CKD_E_NOT_FOUND, CKD_E_STATE},
    {EIO, CKD_E_IO, CKD_E_IO, CKD_E_IO},
    {EMFILE, CKD_E_IO, CKD_E_IO, CKD_E_IO},
};
enum { CASES = sizeof(cases) / sizeof(cases[0]) };

static void end_removal(const removal *r) {
    file_set_fault_hook(NULL, NULL);
    assert_true(r->asked > 0);
}

static void test_a_save(void **state) {
    ckd_store *store;
    scene_make(*state, 0, 2);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, NULL), CKD_OK);
    for (int i = 0; i < CASES; i++) {
        removal r = {.errnum = cases[i].errnum};
        scene s = scene_of(2);
        ckd_error err = {0};
        file_set_fault_hook(open_nothing, &r);
        assert_int_equal(scene_save(NULL, store, &s, &err), cases[i].saves);
        end_removal(&r);
        assert_int_equal(strstr(err.message, "is gone") != NULL, cases[i].errnum == ENOENT);
        ckd_checkpoint found;
        assert_int_equal(ckd_store_find(&found, store, SCENE_RUN, 2, NULL), CKD_E_NOT_FOUND);
    }
    scene s = scene_of(2);
    assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
    scene_check(store, 0, 3);
    ckd_store_close(store);
}

/* A checkpoint whose new files are gone, or cannot be read, keeps its generation. Other failures end the compaction. */
static void test_a_compaction(void **state) {
    ckd_store *store;
    ckd_checkpoint found;
    ckd_compact_options o = options_for(1);
    scene_make(*state, 0, 4);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, NULL), CKD_OK);
    for (int i = 0; i < CASES; i++) {
        removal r = {.errnum = cases[i].errnum};
        file_set_fault_hook(open_nothing, &r);
        ckd_status status = ckd_compact(NULL, store, &o, NULL);
        end_removal(&r);
        assert_int_equal(status, cases[i].errnum == EMFILE ? CKD_E_IO : CKD_OK);
        for (uint64_t step = 0; step < 4; step++) {
            assert_int_equal(ckd_store_find(&found, store, SCENE_RUN, step, NULL), CKD_OK);
            assert_int_equal(found.generation, 0);
        }
    }
    ckd_compaction *done = compact_with(store, &o);
    assert_true(done->count > 0);
    check_items(done);
    ckd_compaction_free(done);
    scene_check(store, 0, 4);
    ckd_store_close(store);
}

static void test_a_return_from_the_trash(void **state) {
    ckd_store *store;
    ckd_checkpoint last;
    scene_make(*state, 0, 3);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&last, store, SCENE_RUN, 2, NULL), CKD_OK);
    assert_int_equal(ckd_store_delete(store, &last.id, 1, NULL, NULL), CKD_OK);
    for (int i = 0; i < CASES; i++) {
        removal r = {.errnum = cases[i].errnum};
        file_set_fault_hook(open_nothing, &r);
        assert_int_equal(ckd_store_undelete(store, &last.id, 1, NULL), cases[i].restores);
        end_removal(&r);
    }
    assert_int_equal(ckd_store_undelete(store, &last.id, 1, NULL), CKD_OK);
    scene_check(store, 0, 3);
    ckd_store_close(store);
}

/* The destination has the files of the steps 0 and 1, on which step 2 builds. */
static void test_a_copy(void **state) {
    pair *p = *state;
    pair_make_source(p);
    pair_open(p);
    ckd_id first[] = {pair_id(p->from, SCENE_RUN, 0), pair_id(p->from, SCENE_RUN, 1)};
    pair_counts(pair_copy(p, first, 2, NULL), 2, 2);
    for (int i = 0; i < CASES; i++) {
        removal r = {.errnum = cases[i].errnum};
        file_set_fault_hook(open_nothing, &r);
        assert_int_equal(ckd_copy(NULL, p->to, p->from, NULL, NULL), cases[i].copies);
        end_removal(&r);
        ckd_checkpoint found;
        assert_int_equal(ckd_store_find(&found, p->to, SCENE_RUN, 2, NULL), CKD_E_NOT_FOUND);
    }
    ckd_copy_result_free(pair_copy(p, NULL, 0, NULL));
    scene_check(p->to, 0, 4);
    pair_check_lists(p);
    pair_check_clean(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_a_save),
        tempdir_test(test_a_compaction),
        tempdir_test(test_a_return_from_the_trash),
        cmocka_unit_test_setup_teardown(test_a_copy, pair_setup, pair_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
