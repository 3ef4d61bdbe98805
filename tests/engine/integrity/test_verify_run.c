/*
 * Verification of one run or checkpoint reports the lost manifests of that run or checkpoint, and no others. It never
 * calls undamaged what it did not look at.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

static const uint64_t whole_run = CKD_LATEST;

static void save(ckd_store *store, const char *run, uint64_t step) {
    scene s = scene_of(step);
    s.run = run;
    s.base = true;
    assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
}

/* Steps 0 to 2 of SCENE_RUN and of another run. */
static void make_two_runs(const char *dir) {
    ckd_store *store = store_create(dir);
    for (uint64_t step = 0; step < 3; step++) {
        save(store, SCENE_RUN, step);
        save(store, "other", step);
    }
    ckd_store_close(store);
}

/* Verifies a run, or one step of it. named: the only damaged checkpoint, or NULL. */
static void check_run(ckd_store *store, const char *run, uint64_t step, const char *named) {
    for (int quick = 0; quick <= 1; quick++) {
        ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
        ckd_verify_result *r;
        o.run = run;
        o.step = step;
        o.one_step = step != whole_run;
        o.quick = quick;
        assert_int_equal(ckd_store_verify(&r, store, &o, NULL), CKD_OK);
        assert_int_equal(r->damage_count, named ? 1 : 0);
        if (named) {
            assert_non_null(strstr(r->damage[0].what, "the manifest is lost"));
            assert_int_equal(r->damage[0].checkpoint_count, 1);
            assert_string_equal(r->damage[0].checkpoints[0], named);
        }
        ckd_verify_result_free(r);
    }
}

static void test_lost_manifests_of_a_run(void **state) {
    make_two_runs(*state);
    assert_int_equal(unlink(store_path_of(*state, "data/m/" SCENE_RUN ".1.0")), 0);
    for (int writing = 0; writing <= 1; writing++) { /* a writer drops the checkpoint from the catalog */
        ckd_store *store = store_reopen(*state, writing ? CKD_OPEN_WRITE : CKD_OPEN_READ);
        check_run(store, SCENE_RUN, whole_run, SCENE_RUN "@1");
        check_run(store, SCENE_RUN, 2, NULL);
        check_run(store, "other", whole_run, NULL);
        assert_int_equal(verify_damage(store), 1);
        ckd_store_close(store);
    }
}

/* Nobody knows the run of a file that no manifest names. */
static void test_unnamed_files_belong_to_no_run(void **state) {
    make_two_runs(*state);
    assert_int_equal(unlink(store_path_of(*state, "data/m/" SCENE_RUN ".1.0")), 0);
    assert_int_equal(unlink(store_path_of(*state, "catalog.db")), 0);
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    check_run(store, SCENE_RUN, whole_run, NULL);
    check_run(store, "other", whole_run, NULL);
    assert_int_equal(verify_damage(store), 1);
    ckd_store_close(store);
}

static char messages[4096];

static void remember(void *context, const char *message) {
    (void)context;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

/* An older catalog lists a checkpoint that was deleted since. Only a verification of its run mentions it. */
static void test_doubtful_checkpoints_of_a_run(void **state) {
    char path[600];
    size_t size;
    scene_make(*state, 0, 3); /* step 2 reads the file of step 1, which therefore stays */
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    save(store, "other", 0);
    ckd_store_close(store);
    snprintf(path, sizeof(path), "%s", store_path_of(*state, "catalog.db"));
    unsigned char *old = read_whole_file(path, &size);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    ckd_checkpoint c;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    o.undo_s = 0;
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, 1, NULL), CKD_OK);
    assert_int_equal(ckd_store_delete(store, &c.id, 1, &o, NULL), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
    ckd_store_close(store);
    write_whole_file(path, old, size);
    free(old);
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.on_message = remember;
    assert_int_equal(ckd_store_open(&store, store_path_of(*state, ""), CKD_OPEN_READ, &options, NULL),
                     CKD_OK);
    messages[0] = '\0';
    check_run(store, "other", whole_run, NULL);
    assert_string_equal(messages, "");
    check_run(store, SCENE_RUN, whole_run, NULL);
    assert_non_null(strstr(messages, SCENE_RUN "@1, which has no manifest"));
    ckd_store_close(store);
}

/* ---- somebody changes the run meanwhile ---- */

typedef struct change {
    const char *dir;
    unsigned long at, seen; /* the step of the verification at which it happens, from 1 */
    bool rename;
} change;

static int change_run(void *context, file_op step, const char *path) {
    change *c = context;
    ckd_store *store;
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    (void)step;
    /* while the verification reads the catalog, the other one would wait a second to write it */
    if (strstr(path, "/catalog.db") || ++c->seen != c->at) {
        return 0;
    }
    o.lock_timeout_ms = 1; /* it may be refused, as the verification reads */
    if (ckd_store_open(&store, store_path_of(c->dir, ""), CKD_OPEN_WRITE, &o, NULL) == CKD_OK) {
        ckd_checkpoint found;
        if (c->rename) {
            (void)ckd_store_rename_run(NULL, store, SCENE_RUN, "later", NULL, NULL);
        } else if (ckd_store_find(&found, store, SCENE_RUN, CKD_LATEST, NULL) == CKD_OK) {
            (void)ckd_store_delete(store, &found.id, 1, NULL, NULL);
        }
        ckd_store_close(store);
    }
    return 0;
}

static void test_a_run_that_changes_meanwhile(void **state) {
    (void)state;
    unsigned not_found = 0;
    for (int rename = 0; rename < 2; rename++) {
        change c = {.rename = rename};
        do {
            char *dir = tempdir_create();
            ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
            ckd_verify_result *r;
            o.run = SCENE_RUN;
            scene_make(dir, 0, 1);
            ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
            c = (change){.dir = dir, .at = c.at + 1, .rename = rename};
            file_set_fault_hook(change_run, &c);
            ckd_status status = ckd_store_verify(&r, store, &o, NULL);
            file_set_fault_hook(NULL, NULL);
            if (status == CKD_OK) {
                assert_int_equal(r->checkpoints, 1);
                assert_int_equal(r->damage_count, 0);
            } else {
                assert_true(status == CKD_E_NOT_FOUND || status == CKD_E_BUSY);
                not_found += status == CKD_E_NOT_FOUND;
            }
            ckd_verify_result_free(r);
            ckd_store_close(store);
            tempdir_remove(dir);
        } while (c.seen >= c.at);
    }
    assert_true(not_found > 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_lost_manifests_of_a_run), tempdir_test(test_unnamed_files_belong_to_no_run),
        tempdir_test(test_doubtful_checkpoints_of_a_run), tempdir_test(test_a_run_that_changes_meanwhile)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
