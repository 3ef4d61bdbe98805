/*
 * Two compactions at the same time: whenever one is about to take the publish lock, another one runs, to its end or
 * until it is killed before one of its manifests. A manifest that the first one publishes then names the files that
 * the other has made, or it is not published. All listed checkpoints keep their values.
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
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/fingerprints.h"
#include "tests/support/level.h"
#include "tests/support/rivals.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { SAVES = 9, KEPT = 6, MANIFESTS = 2 /* from rivals.c */ };

/* Where the other compaction runs. */
typedef struct meeting {
    rival other;
    unsigned long at, seen; /* the turn of the publish lock, from 1 */
    bool busy;
} meeting;

static int meet(void *context, file_op step, const char *path) {
    meeting *m = context;
    size_t size = strlen(path);
    bool publish_lock = step == FILE_OP_LOCK && size > 10 && strcmp(path + size - 10, "/data/lock") == 0;
    if (publish_lock && !m->busy && ++m->seen == m->at) {
        m->busy = true;
        (void)rival_was_killed("the other one", rival_compacts(&m->other, -1));
        m->busy = false;
    }
    return 0;
}

/* The first compaction deletes all but the newest checkpoints. */
static void compact_meeting(meeting *m, const char *dir) {
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_delete_options deletion = CKD_DELETE_OPTIONS_INIT;
    ckd_compact_options o = options_for(4);
    ckd_store *store;
    ckd_error err = {0};
    policy.keep_last = KEPT;
    deletion.undo_s = 0;
    o.policy = &policy;
    o.deletion = &deletion;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    file_set_fault_hook(meet, m);
    ckd_status status = ckd_compact(NULL, store, &o, &err);
    file_set_fault_hook(NULL, NULL);
    if (status != CKD_OK) {
        fail_msg("met at turn %lu: %s (%s)", m->at, err.message, err.file);
    }
    ckd_store_close(store);
}

static void check(const char *dir, const fingerprints *before) {
    size_t left = before->count < KEPT ? before->count : KEPT;
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE); /* opening removes what killed processes left */
    assert_int_equal(fingerprints_check(store, before), left);
    assert_int_equal(verify_damage(store), 0);
    ckd_compact_options o = options_for(1);
    ckd_compaction_free(compact_with(store, &o));
    assert_int_equal(fingerprints_check(store, before), left);
    ckd_store_close(store);
    store_check_clean(dir);
}

/* The other compaction is killed before its second, third or fourth manifest, or not at all. */
static void meet_everywhere(const char *from, const fingerprints *before) {
    static const unsigned long kill_at[] = {0, 2, 3, 4};
    unsigned long turns = 0;
    for (size_t k = 0; k < sizeof(kill_at) / sizeof(kill_at[0]); k++) {
        bool met = true;
        for (unsigned long at = 1; met; at++) {
            char *dir = tempdir_create();
            meeting m = {.at = at};
            m.other = (rival){.dir = dir,
                              .kill_at = kill_at[k],
                              .at_site = kill_at[k] > 0,
                              .step = FILE_OP_RENAME_NOREPLACE,
                              .place = MANIFESTS,
                              .compaction = options_for(1)};
            tree_copy(from, store_path_of(dir, ""));
            compact_meeting(&m, dir);
            check(dir, before);
            met = m.seen >= at;
            turns += met;
            tempdir_remove(dir);
        }
    }
    assert_true(turns > 20);
}

static void test_new_chains(void **state) {
    char from[1024];
    ckd_store *store = store_create(*state);
    make_chain(store, "run", CKD_COARSE, 0, SAVES);
    fingerprints before = fingerprints_of(store);
    ckd_store_close(store);
    snprintf(from, sizeof(from), "%s", store_path_of(*state, ""));
    meet_everywhere(from, &before);
    fingerprints_free(&before);
}

/* Both compactions complete the lists of files in the manifests before they remove links that others need. */
static void test_store_of_an_early_version(void **state) {
    tree_copy("tests/golden/v1/links", store_path_of(*state, ""));
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    fingerprints before = fingerprints_of(store);
    ckd_store_close(store);
    meet_everywhere("tests/golden/v1/links", &before);
    fingerprints_free(&before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_new_chains),
        tempdir_test(test_store_of_an_early_version),
    };
    return run_sampled("compact_two", tests, 2, NULL, NULL);
}
