/* catalog: times of each rank's stages, and catalogs of version 5, which had no table for them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "catalog/catalog.h"
#include "tests/support/catalogs.h"
#include "tests/support/tempdir.h"

/*
 * Runs SQL on dir/catalog.db with SQLite itself. Returns the first number of the first row, or -1 if there is
 * none.
 */
static int64_t first_number(const char *dir, const char *sql) {
    sqlite3 *db = NULL;
    sqlite3_stmt *stmt = NULL;
    assert_int_equal(sqlite3_open(catalog_sample_path(dir, "catalog.db"), &db), SQLITE_OK);
    if (sqlite3_prepare_v2(db, sql, -1, &stmt, NULL) != SQLITE_OK) {
        fail_msg("%s: %s", sql, sqlite3_errmsg(db));
    }
    int rc = sqlite3_step(stmt);
    int64_t number = rc == SQLITE_ROW ? sqlite3_column_int64(stmt, 0) : -1;
    assert_true(rc == SQLITE_ROW || rc == SQLITE_DONE);
    sqlite3_finalize(stmt);
    assert_int_equal(sqlite3_close(db), SQLITE_OK);
    return number;
}

static ckd_stage_times stage_of(uint32_t rank, ckd_stage stage, uint64_t begin, uint64_t end) {
    return (ckd_stage_times){
        .rank = rank, .stage = stage, .begin_ns = begin, .end_ns = end, .work_ns = 7, .bytes = 9};
}

static void add(catalog *c, uint64_t seed, uint32_t rank, ckd_stage stage, uint64_t begin, uint64_t end) {
    ckd_id id = catalog_sample_id(seed);
    ckd_stage_times s = stage_of(rank, stage, begin, end);
    assert_int_equal(catalog_add_stage(c, &id, &s, NULL), CKD_OK);
}

static void expect_stage(const ckd_timeline *t, size_t i, size_t save, uint32_t rank, ckd_stage stage,
                         uint64_t begin) {
    assert_true(i < t->stage_count);
    const ckd_stage_times *s = &t->stages[i];
    if (s->save != save || s->rank != rank || s->stage != stage || s->begin_ns != begin) {
        fail_msg("stage %zu: save %zu, rank %u, stage %d from %llu", i, s->save, (unsigned)s->rank,
                 (int)s->stage, (unsigned long long)s->begin_ns);
    }
}

static void test_by_save_rank_and_stage(void **state) {
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(c, "b", 1, 1);
    catalog_sample_add(c, "a", 5, 20);
    catalog_sample_add(c, "a", 6, 30); /* has no timings, so it is not in the timeline */
    catalog_sample_add(c, "a", 7, 40);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    for (uint64_t seed = 1; seed <= 40; seed += seed == 1 ? 19 : 20) {
        ckd_id id = catalog_sample_id(seed);
        assert_int_equal(catalog_add_timing(c, &id, "total", 10, 0, NULL), CKD_OK);
    }
    add(c, 1, 0, CKD_STAGE_COMMIT, 80, 90);
    add(c, 40, 1, CKD_STAGE_SYNC, 5, 6);
    add(c, 40, 1, CKD_STAGE_ANALYSE, 1, 4);
    add(c, 40, 0, CKD_STAGE_WAIT, 3, 3);
    add(c, 40, 0, CKD_STAGE_WAIT, 2, INT64_MAX); /* added a second time */
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    ckd_timeline t;
    assert_int_equal(catalog_timings(&t, c, NULL, NULL), CKD_OK);
    assert_int_equal(t.count, 3);
    assert_int_equal(t.stage_count, 4);
    expect_stage(&t, 0, 1, 0, CKD_STAGE_WAIT, 2);
    expect_stage(&t, 1, 1, 1, CKD_STAGE_ANALYSE, 1);
    expect_stage(&t, 2, 1, 1, CKD_STAGE_SYNC, 5);
    expect_stage(&t, 3, 2, 0, CKD_STAGE_COMMIT, 80);
    assert_true(t.stages[0].end_ns == INT64_MAX && t.stages[0].work_ns == 7 && t.stages[0].bytes == 9);
    free(t.items);
    free(t.stages);
    assert_int_equal(catalog_timings(&t, c, "b", NULL), CKD_OK);
    assert_int_equal(t.stage_count, 1);
    expect_stage(&t, 0, 0, 0, CKD_STAGE_COMMIT, 80);
    free(t.items);
    free(t.stages);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_remove(c, "a", 7, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
    assert_int_equal(first_number(*state, "SELECT count(*) FROM rank_timings"), 1);
}

static void test_invalid_stages_are_refused(void **state) {
    ckd_id id = catalog_sample_id(1), unknown = catalog_sample_id(2);
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(c, "a", 1, 1);
    ckd_stage_times good = stage_of(0, CKD_STAGE_SYNC, 4, 5);
    assert_int_equal(catalog_add_stage(c, &id, &good, NULL), CKD_E_STATE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add_stage(c, &unknown, &good, NULL), CKD_E_NOT_FOUND);
    const ckd_stage_times bad[] = {
        stage_of(0, (ckd_stage)0, 4, 5), stage_of(0, (ckd_stage)(CKD_STAGE_LAST + 1), 4, 5),
        stage_of(0, CKD_STAGE_SYNC, 5, 4), stage_of(0, CKD_STAGE_SYNC, 5, UINT64_MAX)};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(catalog_add_stage(c, &id, &bad[i], NULL), CKD_E_INVALID);
    }
    assert_int_equal(catalog_add_stage(c, &id, &good, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    catalog_close(c);
    /* A later version may have more stages. */
    first_number(*state, "INSERT INTO rank_timings SELECT key, 0, 'dream', 0, 1, 1, 1 FROM checkpoints");
    first_number(*state, "INSERT INTO timings SELECT key, 'total', 1, 1 FROM checkpoints");
    c = catalog_sample_open(*state, CATALOG_READ);
    ckd_timeline t;
    assert_int_equal(catalog_timings(&t, c, NULL, NULL), CKD_OK);
    assert_true(t.count == 1 && t.stage_count == 1 && t.stages[0].stage == CKD_STAGE_SYNC);
    free(t.items);
    free(t.stages);
    catalog_close(c);
}

/* Makes a catalog as version 5 wrote it, with a checkpoint and its timing. */
static void make_version_5(const char *dir) {
    catalog *c = catalog_sample_open(dir, CATALOG_WRITE);
    ckd_id id = catalog_sample_id(1);
    catalog_sample_add(c, "a", 1, 1);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add_timing(c, &id, "total", 77, 0, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    catalog_close(c);
    catalog_sample_age(dir, 5);
}

static void expect_total(catalog *c, size_t stages) {
    ckd_timeline t;
    assert_int_equal(catalog_timings(&t, c, NULL, NULL), CKD_OK);
    assert_true(t.count == 1 && t.items[0].total_ns == 77 && t.stage_count == stages);
    free(t.items);
    free(t.stages);
}

static void test_version_5_is_read_and_upgraded(void **state) {
    make_version_5(*state);
    catalog *c = catalog_sample_open(*state, CATALOG_READ);
    expect_total(c, 0);
    catalog_close(c);
    assert_int_equal(first_number(*state, "PRAGMA user_version"), 5); /* readers change nothing */
    c = catalog_sample_open(*state, CATALOG_WRITE);
    expect_total(c, 0);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    add(c, 1, 3, CKD_STAGE_SYNC, 1, 2);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    expect_total(c, 1);
    catalog_close(c);
    assert_int_equal(first_number(*state, "PRAGMA user_version"), 8);
    c = catalog_sample_open(*state, CATALOG_READ);
    expect_total(c, 1);
    catalog_close(c);
    first_number(*state, "DROP TABLE rank_timings"); /* a catalog since version 6 needs this table */
    ckd_id store = catalog_sample_store();
    assert_int_equal(
        catalog_open(&c, catalog_sample_path(*state, "catalog.db"), CATALOG_WRITE, &store, 0, NULL),
        CKD_E_CORRUPT);
}

/*
 * A reader of a catalog of version 6 sees no suspect checkpoints, as that version could not store any. It sees those
 * that another process adds with an upgrade meanwhile.
 */
static void test_version_6_is_read_and_upgraded(void **state) {
    catalog_close(catalog_sample_open(*state, CATALOG_WRITE));
    catalog_sample_age(*state, 6);
    catalog *old = catalog_sample_open(*state, CATALOG_READ), *writer;
    ckd_checkpoint c;
    assert_int_equal(catalog_newest(&c, old, "a", UINT64_MAX, NULL), CKD_E_NOT_FOUND);
    writer = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(writer, "a", 1, 1);
    catalog_close(writer);
    assert_int_equal(catalog_newest(&c, old, "a", UINT64_MAX, NULL), CKD_OK);
    assert_int_equal(c.suspect, 0);
    first_number(*state, "INSERT INTO suspects SELECT key, 1 FROM checkpoints");
    assert_int_equal(catalog_newest(&c, old, "a", UINT64_MAX, NULL), CKD_OK);
    assert_int_equal(c.suspect, 1);
    catalog_close(old);
}

/*
 * A reader of a catalog of version 7 does not look at its tables of tensors. A writer drops them, and their pages are
 * used again.
 */
static void test_version_7_is_read_and_upgraded(void **state) {
    ckd_checkpoint c;
    catalog *writer = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(writer, "a", 1, 1);
    catalog_sample_add(writer, "b", 1, 50);
    catalog_close(writer);
    catalog_sample_age(*state, 7);
    catalog *old = catalog_sample_open(*state, CATALOG_READ);
    assert_int_equal(catalog_newest(&c, old, "a", UINT64_MAX, NULL), CKD_OK);
    writer = catalog_sample_open(*state, CATALOG_WRITE);
    int64_t pages = first_number(*state, "PRAGMA page_count"),
            unused = first_number(*state, "PRAGMA freelist_count");
    assert_true(unused > pages / 2);
    assert_int_equal(first_number(*state, "PRAGMA user_version"), 8);
    assert_int_equal(
        first_number(*state, "SELECT count(*) FROM sqlite_schema WHERE name IN ('shards', 'tensor_names', "
                             "'role_totals', 'tensor_totals', 'tensor_list', 'undetailed')"),
        0);
    assert_int_equal(catalog_begin(writer, NULL), CKD_OK);
    assert_int_equal(catalog_remove(writer, "b", 1, NULL), CKD_OK);
    assert_int_equal(catalog_commit(writer, NULL), CKD_OK);
    for (uint64_t step = 2; step < 40; step++) {
        catalog_sample_add(writer, "a", step, step);
    }
    assert_int_equal(catalog_check(writer, NULL), CKD_OK);
    assert_int_equal(first_number(*state, "PRAGMA page_count"), pages);
    assert_int_equal(catalog_newest(&c, old, "a", UINT64_MAX, NULL), CKD_OK);
    assert_int_equal(c.step, 39);
    catalog_close(old);
    catalog_close(writer);
}

static unsigned long steps_left;
static int fail_later(void *context, file_op step, const char *path) {
    (void)context;
    (void)path;
    bool changes =
        step == FILE_OP_WRITE || step == FILE_OP_SYNC || step == FILE_OP_DIR_SYNC || step == FILE_OP_REMOVE;
    return changes && steps_left && --steps_left == 0 ? 28 /* ENOSPC */ : 0;
}

/* If upgrading the catalog fails, the catalog is as before or upgraded, and has the times. */
static void test_upgrading_fails(void **state) {
    ckd_id store = catalog_sample_store();
    make_version_5(*state);
    unsigned long failed = 0;
    for (unsigned long at = 1;; at++) {
        catalog *c = NULL;
        steps_left = at;
        file_set_fault_hook(fail_later, NULL);
        ckd_status status =
            catalog_open(&c, catalog_sample_path(*state, "catalog.db"), CATALOG_WRITE, &store, 0, NULL);
        file_set_fault_hook(NULL, NULL);
        catalog_close(c);
        int64_t version = first_number(*state, "PRAGMA user_version");
        assert_true(version == 5 || version == 8);
        c = catalog_sample_open(*state, CATALOG_READ);
        expect_total(c, 0);
        catalog_close(c);
        if (steps_left > 0) {
            assert_int_equal(status, CKD_OK);
            break;
        }
        failed += status != CKD_OK;
        if (version == 8) {
            catalog_sample_age(*state, 5);
        }
    }
    assert_true(failed >= 2);
    assert_int_equal(first_number(*state, "PRAGMA user_version"), 8);
}

int main(void) {
#define TEST(name) tempdir_test(test_##name)
    const struct CMUnitTest tests[] = {
        TEST(by_save_rank_and_stage),         TEST(invalid_stages_are_refused),
        TEST(version_5_is_read_and_upgraded), TEST(version_6_is_read_and_upgraded),
        TEST(version_7_is_read_and_upgraded), TEST(upgrading_fails),
    };
    return cmocka_run_group_tests_name("catalog timings", tests, NULL, NULL);
}
