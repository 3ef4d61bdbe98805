/*
 * Stores of early versions, whose manifests only name their own files. A compaction completes their lists of files,
 * whatever happens meanwhile.
 */
#include <errno.h>
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
#include "engine/store/handle.h"
#include "engine/store/manifests.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/early.h"
#include "tests/support/fingerprints.h"
#include "tests/support/level.h"
#include "tests/support/rivals.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

static manifest_set manifest_set_of(ckd_store *store) {
    manifest_set n;
    assert_int_equal(manifest_set_read(&n, store, NULL), CKD_OK);
    return n;
}

static bool names(const manifest *m, const ckd_id *file) {
    bool found = false;
    for (size_t i = 0; i < m->file_count && !found; i++) {
        found = id_equal(&m->files[i].id, file);
    }
    return found;
}

static void check_same_files(const manifest *a, const manifest *b) {
    assert_int_equal(a->file_count, b->file_count);
    assert_int_equal(a->own_count, b->own_count);
    for (size_t i = 0; i < a->file_count; i++) {
        assert_true(names(b, &a->files[i].id));
    }
}

/* Two tensors are new in turn. Each step builds on the one before and needs nothing of earlier ones. */
static void make_turns(ckd_store *store, uint64_t count) {
    enum { SIZE = 5000 };
    const uint64_t shape[] = {SIZE};
    void *values[2] = {random_values(CKD_F32, SIZE, 1), random_values(CKD_F32, SIZE, 2)};
    for (uint64_t step = 0; step < count; step++) {
        ckd_save *save = begin_save(store, "turns", step);
        free(values[step % 2]);
        values[step % 2] = random_values(CKD_F32, SIZE, (unsigned)(3 + step));
        change_values(CKD_F32, values[1 - step % 2], SIZE, (unsigned)step);
        add_tensor(save, "a", CKD_F32, 1, shape, NULL, values[0]);
        add_tensor(save, "b", CKD_F32, 1, shape, NULL, values[1]);
        assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    }
    free(values[0]);
    free(values[1]);
}

/* A manifest names only the files that a load reads, which are those that the save had named. */
static void test_manifests_name_what_loads_read(void **state) {
    ckd_store *store = store_create(*state);
    make_turns(store, 6);
    make_chain(store, "run", CKD_NEAR, 0, 6);
    fingerprints values = fingerprints_of(store);
    manifest_set before = manifest_set_of(store);
    ckd_store_close(store);
    early_store(*state);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    ckd_compact_options o = options_for(100);
    ckd_compaction *done = compact_with(store, &o);
    assert_int_equal(done->count, 0);
    ckd_compaction_free(done);
    manifest_set after = manifest_set_of(store);
    assert_int_equal(after.count, before.count);
    for (size_t i = 0; i < after.count; i++) {
        assert_false(after.items[i].was_own_only);
        check_same_files(&before.items[i].m, &after.items[i].m);
    }
    assert_int_equal(fingerprints_check(store, &values), 12);
    manifest_set_free(&before);
    manifest_set_free(&after);
    fingerprints_free(&values);
    ckd_store_close(store);
}

/*
 * The manifest of step 6 is missing, and step 7 needs it. The files that step 7 may need are not packed; others of
 * their size are.
 */
static void test_protected_files_are_not_packed(void **state) {
    char lost[1024], kept[1024];
    scene_make(*state, 0, 12);
    early_store(*state);
    snprintf(lost, sizeof(lost), "%s", store_path_of(*state, "data/m/run.6.0"));
    snprintf(kept, sizeof(kept), "%s/run.6.0", (char *)*state);
    assert_int_equal(rename(lost, kept), 0);
    /* It would know that a manifest is lost. */
    assert_int_equal(unlink(store_path_of(*state, "catalog.db")), 0);
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    manifest_set before = manifest_set_of(store);
    size_t held = 0, packed = 0;
    ckd_compact_options o = options_for(100);
    o.pack_below = UINT64_C(1) << 20;
    assert_int_equal(ckd_compact(NULL, store, &o, NULL), CKD_OK);
    manifest_set after = manifest_set_of(store);
    for (size_t i = 0; i < before.count; i++) {
        const manifest_entry *b = &before.items[i], *a = manifest_set_find(&after, &b->m.checkpoint.id);
        bool same = id_equal(&a->m.files[0].id, &b->m.files[0].id);
        assert_true(same || !b->is_protected);
        held += b->is_protected && b->m.checkpoint.step < 6;
        packed += !same;
    }
    assert_true(held > 0 && packed > 1);
    manifest_set_free(&before);
    manifest_set_free(&after);
    ckd_store_close(store);
    assert_int_equal(rename(kept, lost), 0);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    scene_check(store, 0, 12);
    assert_int_equal(ckd_compact(NULL, store, &o, NULL), CKD_OK);
    scene_check(store, 0, 12);
    ckd_store_close(store);
}

enum { STEPS = 5 };

/* After a crash, whatever is listed loads, and the deleted checkpoint can be undeleted. */
static void check_after_crash(const char *dir, unsigned long at) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    ckd_trash *trash;
    ckd_error err = {0};
    scene_check(store, 0, STEPS - 1);
    assert_int_equal(ckd_store_trash(&trash, store, NULL), CKD_OK);
    assert_int_equal(trash->count, 1);
    if (ckd_store_undelete(store, &trash->items[0].checkpoint.id, 1, &err) != CKD_OK) {
        fail_msg("killed at step %lu: %s (%s)", at, err.message, err.file);
    }
    ckd_trash_free(trash);
    scene_check(store, 0, STEPS);
    manifest_set n = manifest_set_of(store);
    for (size_t i = 0; i < n.count; i++) {
        assert_false(n.items[i].in_trash);
    }
    manifest_set_free(&n);
    ckd_store_close(store);
    store_check_clean(dir);
}

static void test_killed_at_any_step(void **state) {
    char from[1024];
    scene_make(*state, 0, STEPS);
    early_store(*state);
    scene_trash(*state, STEPS - 1, 1);
    snprintf(from, sizeof(from), "%s", store_path_of(*state, ""));
    bool killed = true;
    unsigned long at = 0, stride = under_sanitizer() ? 9 : 3;
    while (killed) {
        char *dir = tempdir_create();
        rival r = {.dir = dir, .kill_at = at + 1, .torn = at % 2, .compaction = options_for(100)};
        tree_copy(from, store_path_of(dir, ""));
        killed = rival_was_killed("the compaction", rival_compacts(&r, -1));
        check_after_crash(dir, at + 1);
        tempdir_remove(dir);
        at += stride;
    }
    assert_true(at > 100);
}

static int fail_manifest(void *context, file_op step, const char *path) {
    return step == FILE_OP_OPEN && strstr(path, context) ? EIO : 0;
}

/*
 * Step 2 builds on steps 1 and 0, of which one is in the trash. As long as the manifest of either cannot be read, the
 * files of step 2 are unknown.
 */
static void test_a_manifest_that_cannot_be_read_may_name_more_files(void **state) {
    manifest m;
    scene_make(*state, 0, 3);
    scene_trash(*state, 0, 1);
    early_store(*state);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    char manifests[][32] = {"data/m/run.0.0", "data/m/run.1."};
    for (size_t i = 0; i < 2; i++) {
        ckd_error err = {0};
        assert_int_equal(store_read_manifest(&m, store, SCENE_RUN, 2, 0, NULL), CKD_OK);
        assert_true(m.own_only);
        file_set_fault_hook(fail_manifest, manifests[i]);
        assert_int_equal(manifest_complete_early(&m, store, &err), CKD_E_IO);
        file_set_fault_hook(NULL, NULL);
        assert_non_null(strstr(err.file, manifests[i]));
        manifest_free(&m);
    }
    assert_int_equal(store_read_manifest(&m, store, SCENE_RUN, 2, 0, NULL), CKD_OK);
    assert_int_equal(manifest_complete_early(&m, store, NULL), CKD_OK);
    assert_int_equal(m.file_count, 3);
    manifest_free(&m);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_manifests_name_what_loads_read),
        tempdir_test(test_protected_files_are_not_packed),
        tempdir_test(test_killed_at_any_step),
        tempdir_test(test_a_manifest_that_cannot_be_read_may_name_more_files),
    };
    return run_sampled("early", tests, 2, NULL, NULL);
}
