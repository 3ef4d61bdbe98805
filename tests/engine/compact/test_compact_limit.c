/* A compaction with a limit, as after a save: work ends with it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "engine/compact/internal.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

#define STEPS 6

/* Counts chunk files of the other run that are opened once a checkpoint of one run has been rewritten. */
typedef struct watch {
    char files[2][STEPS][CKD_ID_TEXT]; /* names of the runs' files */
    size_t opened;
    const char (*others)[CKD_ID_TEXT]; /* NULL: nothing was rewritten yet */
} watch;

static int watch_files(void *context, file_op step, const char *path) {
    watch *w = context;
    for (size_t i = 0; i < STEPS && w->others && step == FILE_OP_OPEN; i++) {
        w->opened += strstr(path, w->others[i]) != NULL;
    }
    if (!w->others && step == FILE_OP_RENAME_NOREPLACE && strstr(path, "/" DIR_MANIFESTS "/")) {
        w->others = w->files[strstr(path, "/" DIR_MANIFESTS "/a.") ? 1 : 0];
    }
    return 0;
}

/* Once the limit is reached, checkpoints that have nothing to do with what was rewritten are not even opened. */
static void test_work_ends_with_the_limit(void **state) {
    for (int limited = 0; limited < 2; limited++) {
        char dir[512];
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, limited);
        assert_int_equal(dir_create(dir, false, NULL), CKD_OK);
        ckd_store *store = store_create(dir);
        make_chain(store, "a", CKD_EXACT, 0, STEPS);
        make_chain(store, "b", CKD_EXACT, 0, STEPS);
        watch w = {.others = NULL};
        for (uint64_t i = 0; i < 2 * STEPS; i++) {
            manifest m;
            const char *run = i < STEPS ? "a" : "b";
            assert_int_equal(store_read_manifest(&m, store, run, i % STEPS, 0, NULL), CKD_OK);
            ckd_id_text(w.files[i / STEPS][i % STEPS], &m.files[0].id);
            manifest_free(&m);
        }
        fingerprints before = fingerprints_of(store);
        ckd_compact_options o = options_for(1);
        compact_limits limits = {.dead_percent = CKD_COMPACT_SHARE, .move_max = limited ? 0 : UINT64_MAX};
        ckd_compaction *done;
        bool over;
        file_set_fault_hook(watch_files, &w);
        ckd_status status = compact_within(&done, &over, store, &o, &limits, NULL);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(status, CKD_OK);
        assert_true(over == limited && done->count > 0 && w.others);
        assert_int_equal(w.opened > 0, !limited);
        ckd_compaction_free(done);
        assert_int_equal(fingerprints_check(store, &before), 2 * STEPS);
        fingerprints_free(&before);
        ckd_store_close(store);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_work_ends_with_the_limit)};
    scratch_begin();
    int failed = cmocka_run_group_tests_name("compact_limit", tests, NULL, NULL);
    scratch_end();
    return failed;
}
