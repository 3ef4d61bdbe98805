/*
 * A step that was saved late, as a delta on a later step, whose own parent is gone. The run's step before that one
 * descends from it. No compaction makes it build on that, or joins files so that both build on each other.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { GONE = 4, FIRST = 5, LATE = 3, ROWS = 64, COLUMNS = 96 };
static const char run[] = "run";

static ckd_store *reopen(const char *dir) {
    return store_reopen(dir, CKD_OPEN_WRITE);
}

/* Saves the steps GONE, FIRST on GONE, and last LATE, on FIRST or alone. */
static ckd_store *make_with(const char *dir, bool alone) {
    const uint64_t shape[] = {ROWS, COLUMNS};
    ckd_store *store = store_create(dir);
    float *values = random_values(CKD_F32, ROWS * COLUMNS, 1);
    save_one(store, run, GONE, "w", CKD_F32, 2, shape, values);
    change_values(CKD_F32, values, ROWS * COLUMNS, 2);
    save_one(store, run, FIRST, "w", CKD_F32, 2, shape, values);
    change_values(CKD_F32, values, ROWS * COLUMNS, 3);
    ckd_save_options o = options_of(run, LATE);
    o.parent_run = alone ? NULL : run;
    o.parent_step = FIRST;
    ckd_save *save = begin_with(store, &o);
    add_tensor(save, "w", CKD_F32, 2, shape, NULL, values);
    assert_int_equal(commit_save(save).kind, alone ? CKD_BASE : CKD_DELTA);
    assert_int_equal(checkpoint_at(store, run, FIRST).kind, CKD_DELTA);
    free(values);
    return store;
}

static ckd_store *make(const char *dir) {
    return make_with(dir, false);
}

static void delete_for_good(ckd_store *store, uint64_t step) {
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    ckd_id id = checkpoint_at(store, run, step).id;
    assert_int_equal(ckd_store_delete(store, &id, 1, &now, NULL), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
}

static void copy_one(ckd_store *to, ckd_store *from, uint64_t step) {
    ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
    ckd_id id = checkpoint_at(from, run, step).id;
    ckd_error err = {0};
    o.checkpoints = &id;
    o.count = 1;
    if (ckd_copy(NULL, to, from, &o, &err) != CKD_OK) {
        fail_msg("copy: %s", err.message);
    }
}

/* Twice, as the first compaction removes files that the second one could need. Nothing is left or lost. */
static void compact_and_check(ckd_store *store, const ckd_compact_options *o, const fingerprints *before) {
    for (int i = 0; i < 2; i++) {
        ckd_compaction *done = compact_with(store, o);
        check_items(done);
        ckd_compaction_free(done);
        assert_int_equal(ckd_store_collect(NULL, store, NULL, NULL), CKD_OK);
        assert_int_equal(fingerprints_check(store, before), 2);
        assert_int_equal(verify_damage(store), 0);
    }
}

/* Gives LATE a date before that of FIRST, as earlier versions did when the clock was set back. */
static ckd_store *set_back(ckd_store *store, const char *dir) {
    ckd_checkpoint late = checkpoint_at(store, run, LATE);
    manifest m;
    bytes data = {0};
    assert_int_equal(store_read_manifest(&m, store, run, LATE, late.generation, NULL), CKD_OK);
    m.checkpoint.created_ns = checkpoint_at(store, run, GONE).created_ns - 1;
    manifest_encode(&data, &store->id, &m);
    write_whole_file(path_manifest(store->path, run, LATE, late.generation).text, data.data, data.size);
    bytes_free(&data);
    manifest_free(&m);
    pathname listed = path_in(store->path, FILE_CATALOG); /* it has the old date */
    ckd_store_close(store);
    assert_int_equal(file_remove(listed.text, true, NULL), CKD_OK);
    return reopen(dir);
}

static void check_lineage(ckd_store *store) {
    fingerprints before = fingerprints_of(store);
    ckd_id late = checkpoint_at(store, run, LATE).id;
    ckd_compact_options o = options_for(4);
    delete_for_good(store, GONE);
    compact_and_check(store, &o, &before);
    ckd_checkpoint first = checkpoint_at(store, run, FIRST);
    assert_memory_not_equal(&first.parent, &late, sizeof(late));
    fingerprints_free(&before);
    ckd_store_close(store);
}

static void test_a_descendant_is_no_ancestor(void **state) {
    check_lineage(make(*state));
}

/* Its date alone would not tell. */
static void test_nor_is_one_with_an_earlier_date(void **state) {
    check_lineage(set_back(make(*state), *state));
}

/* Another store may have a LATE that builds on FIRST. */
static void test_nor_is_one_saved_later(void **state) {
    check_lineage(make_with(*state, true));
}

/*
 * A copy where FIRST builds on LATE, which stands alone there. Earlier versions made such: FIRST was deleted, LATE was
 * rewritten, and FIRST was copied again.
 */
static ckd_store *make_turned(ckd_store *from, const char *dir) {
    ckd_store *store = store_create(dir);
    ckd_compact_options o = options_for(4);
    assert_int_equal(ckd_copy(NULL, store, from, NULL, NULL), CKD_OK);
    store = set_back(store, dir);
    delete_for_good(store, FIRST);
    delete_for_good(store, GONE);
    ckd_compaction_free(compact_with(store, &o));
    assert_int_equal(checkpoint_at(store, run, LATE).kind, CKD_BASE);
    copy_one(store, from, FIRST);
    ckd_compaction_free(compact_with(store, &o));
    ckd_checkpoint first = checkpoint_at(store, run, FIRST), late = checkpoint_at(store, run, LATE);
    assert_memory_equal(&first.parent, &late.id, sizeof(late.id));
    return store;
}

/* LATE builds on FIRST in one store, and FIRST on LATE in the other. A third one gets one of each. */
static void check_joining(const char *dir, uint64_t pack_below) {
    char *turned_dir = tempdir_create(), *joined_dir = tempdir_create();
    ckd_store *from = make(dir), *turned = make_turned(from, turned_dir), *joined = store_create(joined_dir);
    ckd_compact_options o = options_for(4);
    o.pack_below = pack_below;
    copy_one(joined, turned, FIRST);
    copy_one(joined, from, LATE);
    fingerprints before = fingerprints_of(joined);
    assert_int_equal(before.count, 2);
    compact_and_check(joined, &o, &before);
    fingerprints_free(&before);
    ckd_store_close(joined);
    ckd_store_close(turned);
    ckd_store_close(from);
    tempdir_remove(joined_dir);
    tempdir_remove(turned_dir);
}

static void test_joined_files_close_no_circle(void **state) {
    check_joining(*state, CKD_NO_PACKS);
}

static void test_merged_files_close_no_circle(void **state) {
    check_joining(*state, PACK_BELOW);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_a_descendant_is_no_ancestor),  tempdir_test(test_nor_is_one_with_an_earlier_date),
        tempdir_test(test_nor_is_one_saved_later),       tempdir_test(test_joined_files_close_no_circle),
        tempdir_test(test_merged_files_close_no_circle),
    };
    return cmocka_run_group_tests_name("circles", tests, NULL, NULL);
}
