/*
 * catalog: every field of what was added is read back; transactions, handles, opening. test_catalog_damage.c
 * tests damage.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <linux/capability.h>
#include <math.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "catalog/catalog.h"
#include "tests/support/catalogs.h"
#include "tests/support/counters.h"
#include "tests/support/tempdir.h"

/* ---- reading with SQLite itself ---- */

/*
 * Runs SQL on dir/catalog.db. Returns the first column of the first row, or "" if there is none. Release with
 * free.
 */
static char *first_column(const char *dir, const char *sql) {
    sqlite3 *db = NULL;
    sqlite3_stmt *stmt = NULL;
    assert_int_equal(sqlite3_open(catalog_sample_path(dir, "catalog.db"), &db), SQLITE_OK);
    if (sqlite3_prepare_v2(db, sql, -1, &stmt, NULL) != SQLITE_OK) {
        fail_msg("%s: %s", sql, sqlite3_errmsg(db));
    }
    int rc = sqlite3_step(stmt);
    const char *text = rc == SQLITE_ROW ? (const char *)sqlite3_column_text(stmt, 0) : NULL;
    char *result = strdup(text ? text : "");
    assert_true(rc == SQLITE_ROW || rc == SQLITE_DONE);
    sqlite3_finalize(stmt);
    assert_int_equal(sqlite3_close(db), SQLITE_OK);
    return result;
}

static void expect_column(const char *dir, const char *sql, const char *want) {
    char *got = first_column(dir, sql);
    if (strcmp(got, want) != 0) {
        fail_msg("%s: \"%s\", not \"%s\"", sql, got, want);
    }
    free(got);
}

/* ---- comparing ---- */

static void assert_same_double(double a, double b) {
    assert_true(isnan(a) ? isnan(b) : a == b);
}

static void assert_same_checkpoint(const ckd_checkpoint *a, const ckd_checkpoint *b) {
    assert_memory_equal(&a->id, &b->id, sizeof(a->id));
    assert_memory_equal(&a->parent, &b->parent, sizeof(a->parent));
    assert_memory_equal(&a->resumed_from, &b->resumed_from, sizeof(a->resumed_from));
    assert_string_equal(a->run, b->run);
    assert_true(a->step == b->step);
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->fidelity, b->fidelity);
    assert_int_equal(a->lossy_resumes, b->lossy_resumes);
    assert_int_equal(a->depth, b->depth);
    assert_int_equal(a->world, b->world);
    assert_true(a->tensors == b->tensors);
    assert_true(a->raw_bytes == b->raw_bytes);
    assert_true(a->stored_bytes == b->stored_bytes);
    assert_same_double(a->load_cost, b->load_cost);
    assert_true(a->created_ns == b->created_ns);
    assert_same_double(a->metric, b->metric);
    assert_string_equal(a->metric_name, b->metric_name);
}

static size_t count_all(catalog *c) {
    ckd_checkpoint_list list;
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    size_t count = list.count;
    catalog_list_free(&list);
    return count;
}

/* ---- adding and finding ---- */

static void assert_found(catalog *c, const catalog_sample *s) {
    const ckd_checkpoint *want = &s->checkpoint;
    ckd_checkpoint got;
    ckd_checkpoint_list list;
    memset(&got, 'Z', sizeof(got));
    assert_int_equal(catalog_find(&got, c, want->run, want->step, NULL), CKD_OK);
    assert_same_checkpoint(&got, want);
    memset(&got, 'Z', sizeof(got));
    assert_int_equal(catalog_find_id(&got, c, &want->id, NULL), CKD_OK);
    assert_same_checkpoint(&got, want);
    memset(&got, 'Z', sizeof(got));
    assert_int_equal(catalog_newest(&got, c, want->run, UINT64_MAX, NULL), CKD_OK);
    assert_same_checkpoint(&got, want);
    assert_int_equal(catalog_list(&list, c, want->run, NULL), CKD_OK);
    assert_int_equal(list.count, 1);
    assert_same_checkpoint(&list.items[0], want);
    catalog_list_free(&list);
}

static void test_round_trip(void **state) {
    catalog_sample s;
    catalog_sample_init(&s, "pre-train_1.~2", 12345, 77);
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_found(c, &s); /* a transaction sees what it wrote */
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_found(c, &s);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);

    c = catalog_sample_open(*state, CATALOG_READ);
    assert_found(c, &s);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
}

static void test_round_trip_of_limits(void **state) {
    catalog_sample s;
    char run[CKD_RUN_MAX + 1];
    ckd_checkpoint got;
    memset(run, '~', sizeof(run) - 1);
    run[sizeof(run) - 1] = '\0';
    catalog_sample_init(&s, run, INT64_MAX, 1);
    s.checkpoint.kind = CKD_LOSSY_BASE;
    memset(&s.checkpoint.parent, 0, sizeof(s.checkpoint.parent));
    memset(&s.checkpoint.resumed_from, 0, sizeof(s.checkpoint.resumed_from));
    s.checkpoint.generation = s.checkpoint.lossy_resumes = s.checkpoint.depth = s.checkpoint.world =
        UINT32_MAX;
    s.checkpoint.tensors = s.checkpoint.raw_bytes = s.checkpoint.stored_bytes = INT64_MAX;
    s.checkpoint.created_ns = s.entry.manifest_bytes = s.files[0].size = INT64_MAX;
    s.checkpoint.load_cost = (double)NAN;
    s.checkpoint.metric = -(double)INFINITY;
    memset(s.checkpoint.metric_name, 'm', sizeof(s.checkpoint.metric_name) - 1);
    memset(s.files[0].name, 'n', sizeof(s.files[0].name) - 1);
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    assert_int_equal(catalog_find(&got, c, run, INT64_MAX, NULL), CKD_OK);
    assert_same_checkpoint(&got, &s.checkpoint);
    catalog_close(c);
}

/* People read the catalog with the sqlite3 shell: all numbers have names, and views work. */
static void test_people_can_read_it(void **state) {
    catalog_sample s;
    char sql[160];
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_init(&s, "run", 9, 3);
    catalog_sample_add(c, "run", 9, 3);
    catalog_close(c);
    expect_column(
        *state,
        "SELECT run || step || kind || fidelity || metric_name || metric || ratio FROM checkpoint_list",
        "run9deltaexactval_loss-3.06254.0");
    expect_column(*state, "SELECT created FROM checkpoint_list", "2023-11-14 22:13:20");
    expect_column(*state, "SELECT id FROM checkpoint_list", "0300000000000000a8a9aaabacadaeaf");
    expect_column(
        *state,
        "SELECT group_concat(name || ' ' || rank || ' ' || size || ' ' || hex(root), '; ') FROM files",
        "0000000000000003.0 0 1003 01010101010101010101010101010101; "
        "0000000000000003.1 1 2003 02020202020202020202020202020202");
    expect_column(*state, "SELECT value FROM meta WHERE key = 'store'", "5753000000000000a8a9aaabacadaeaf");
    expect_column(*state, "PRAGMA application_id", "1667985508");
    expect_column(*state, "PRAGMA user_version", "8");
    for (int i = CKD_BASE; i <= CKD_LOSSY_BASE; i++) {
        snprintf(sql, sizeof(sql), "SELECT word FROM vocabulary WHERE what = 'kind' AND number = %d", i);
        expect_column(*state, sql, ckd_kind_name((ckd_kind)i));
    }
    for (int i = CKD_EXACT; i <= CKD_COARSE; i++) {
        snprintf(sql, sizeof(sql), "SELECT word FROM vocabulary WHERE what = 'fidelity' AND number = %d", i);
        expect_column(*state, sql, ckd_fidelity_name((ckd_fidelity)i));
    }
    expect_column(*state, "SELECT count(*) FROM vocabulary", "6");
}

static void test_order_and_newest(void **state) {
    static const struct {
        const char *run;
        uint64_t step;
    } sorted[] = {{"Z", 5},         {"a", 0},  {"a", 1}, {"a", 256}, {"a", UINT64_C(1) << 40},
                  {"a", INT64_MAX}, {"a.b", 2}};
    static const int added[] = {3, 6, 0, 5, 1, 4, 2};
    static const struct {
        uint64_t before, step;
    } newest[] = {
        {1, 0}, {2, 1}, {256, 1}, {257, 256}, {INT64_MAX, UINT64_C(1) << 40}, {UINT64_MAX, INT64_MAX}};
    ckd_checkpoint_list list;
    ckd_checkpoint got;
    catalog_names runs;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    for (size_t i = 0; i < 7; i++) {
        catalog_sample_add(c, sorted[added[i]].run, sorted[added[i]].step, 10 * (uint64_t)added[i] + 5);
    }
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    assert_int_equal(list.count, 7);
    for (size_t i = 0; i < 7; i++) {
        assert_string_equal(list.items[i].run, sorted[i].run);
        assert_true(list.items[i].step == sorted[i].step);
    }
    catalog_list_free(&list);
    assert_int_equal(catalog_list(&list, c, "a", NULL), CKD_OK);
    assert_int_equal(list.count, 5);
    catalog_list_free(&list);
    assert_int_equal(catalog_list(&list, c, "no such run", NULL), CKD_OK);
    assert_int_equal(list.count, 0);
    assert_int_equal(catalog_runs(&runs, c, NULL), CKD_OK);
    assert_int_equal(runs.count, 3);
    assert_string_equal(runs.names[0], "Z");
    assert_string_equal(runs.names[1], "a");
    assert_string_equal(runs.names[2], "a.b");
    catalog_names_free(&runs);
    for (size_t i = 0; i < sizeof(newest) / sizeof(newest[0]); i++) {
        assert_int_equal(catalog_newest(&got, c, "a", newest[i].before, NULL), CKD_OK);
        assert_true(got.step == newest[i].step);
    }
    assert_int_equal(catalog_newest(&got, c, "a", 0, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(catalog_newest(&got, c, "Z", 5, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(catalog_newest(&got, c, "b", UINT64_MAX, NULL), CKD_E_NOT_FOUND);
    catalog_close(c);
}

static void test_not_found(void **state) {
    ckd_checkpoint got, zero;
    ckd_id unknown = catalog_sample_id(999);
    ckd_error err = {0};
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(c, "run", 1, 5);
    memset(&zero, 0, sizeof(zero));
    static const uint64_t steps[] = {0, 2, INT64_MAX, UINT64_C(1) << 63, UINT64_MAX};
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        memset(&got, 'Z', sizeof(got));
        assert_int_equal(catalog_find(&got, c, "run", steps[i], &err), CKD_E_NOT_FOUND);
        assert_int_equal(err.status, CKD_E_NOT_FOUND);
        assert_memory_equal(&got, &zero, sizeof(got));
    }
    assert_int_equal(catalog_find(&got, c, "ru", 1, NULL), CKD_E_NOT_FOUND);
    memset(&got, 'Z', sizeof(got));
    assert_int_equal(catalog_find_id(&got, c, &unknown, NULL), CKD_E_NOT_FOUND);
    assert_memory_equal(&got, &zero, sizeof(got));
    catalog_close(c);
}

/* ---- replacing and removing ---- */

static void test_generations(void **state) {
    catalog_sample s, other;
    ckd_checkpoint got;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_init(&s, "run", 5, 50);
    s.checkpoint.generation = 3;
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_int_equal(catalog_add_timing(c, &s.checkpoint.id, "encode", 11, 22, NULL), CKD_OK);
    /*
     * The same generation, an older one, another checkpoint at this step, and this id at another step are
     * refused.
     */
    catalog_sample_init(&other, "run", 5, 50);
    other.checkpoint.generation = 3;
    assert_int_equal(catalog_add(c, &other.entry, NULL), CKD_E_EXISTS);
    other.checkpoint.generation = 2;
    assert_int_equal(catalog_add(c, &other.entry, NULL), CKD_E_EXISTS);
    other.checkpoint.generation = 4;
    other.checkpoint.id = catalog_sample_id(51);
    assert_int_equal(catalog_add(c, &other.entry, NULL), CKD_E_EXISTS);
    other.checkpoint.id = s.checkpoint.id;
    other.checkpoint.step = 6;
    assert_int_equal(catalog_add(c, &other.entry, NULL), CKD_E_EXISTS);
    assert_found(c, &s);

    other.checkpoint = s.checkpoint;
    other.checkpoint.generation = 4;
    other.checkpoint.kind = CKD_BASE;
    memset(&other.checkpoint.parent, 0, sizeof(other.checkpoint.parent));
    other.checkpoint.stored_bytes = 99;
    other.checkpoint.depth = 0;
    other.checkpoint.metric = (double)NAN;
    other.checkpoint.metric_name[0] = '\0';
    other.entry.file_count = 1;
    other.entry.manifest_bytes = 7;
    assert_int_equal(catalog_add(c, &other.entry, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(count_all(c), 1);
    assert_int_equal(catalog_find(&got, c, "run", 5, NULL), CKD_OK);
    assert_same_checkpoint(&got, &other.checkpoint);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
    expect_column(*state, "SELECT count(*) FROM files", "1");
    expect_column(*state, "SELECT manifest_bytes FROM checkpoints", "7");
    expect_column(*state, "SELECT stage || ns || bytes FROM timings", "encode1122");
}

static void test_remove(void **state) {
    static const char *const tables[] = {"runs", "checkpoints", "files", "timings"};
    char sql[64];
    ckd_id id = catalog_sample_id(1);
    catalog_names runs;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(c, "a", 1, 1);
    catalog_sample_add(c, "b", 1, 20);
    catalog_sample_add(c, "b", 2, 30);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add_timing(c, &id, "write", 1, 2, NULL), CKD_OK);
    assert_int_equal(catalog_remove(c, "a", 2, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(catalog_remove(c, "c", 1, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(catalog_remove(c, "", 1, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(catalog_remove(c, "a", UINT64_MAX, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(catalog_remove(c, "a", 1, NULL), CKD_OK);
    assert_int_equal(catalog_remove(c, "a", 1, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(catalog_remove(c, "b", 1, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(count_all(c), 1);
    assert_int_equal(catalog_runs(&runs, c, NULL), CKD_OK);
    assert_int_equal(runs.count, 1);
    assert_string_equal(runs.names[0], "b");
    catalog_names_free(&runs);
    catalog_sample_add(c, "a", 1, 1); /* it can be added again */
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_remove(c, "a", 1, NULL), CKD_OK);
    assert_int_equal(catalog_remove(c, "b", 2, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
    for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++) {
        snprintf(sql, sizeof(sql), "SELECT count(*) FROM %s", tables[i]);
        expect_column(*state, sql, "0");
    }
}

static void test_timings(void **state) {
    ckd_id id = catalog_sample_id(1), unknown = catalog_sample_id(2);
    char stage[65];
    memset(stage, 's', 64);
    stage[64] = '\0';
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(c, "a", 1, 1);
    assert_int_equal(catalog_add_timing(c, &id, "write", 1, 2, NULL), CKD_E_STATE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add_timing(c, &id, "write", 1, 2, NULL), CKD_OK);
    assert_int_equal(catalog_add_timing(c, &id, "write", 3, INT64_MAX, NULL), CKD_OK);
    assert_int_equal(catalog_add_timing(c, &id, "sync", 5, 0, NULL), CKD_OK);
    assert_int_equal(catalog_add_timing(c, &unknown, "sync", 5, 0, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(catalog_add_timing(c, &id, "", 5, 0, NULL), CKD_E_INVALID);
    assert_int_equal(catalog_add_timing(c, &id, stage, 5, 0, NULL), CKD_E_INVALID);
    assert_int_equal(catalog_add_timing(c, &id, stage + 1, 5, 0, NULL), CKD_OK);
    assert_int_equal(catalog_add_timing(c, &id, "s", UINT64_MAX, 0, NULL), CKD_E_INVALID);
    assert_int_equal(catalog_add_timing(c, &id, "s", 0, UINT64_MAX, NULL), CKD_E_INVALID);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    catalog_close(c);
    expect_column(
        *state,
        "SELECT group_concat(stage || ' ' || ns || ' ' || bytes, '; ') FROM timings WHERE stage < 't' "
        "AND length(stage) < 9",
        "sync 5 0");
    expect_column(*state, "SELECT ns || ' ' || bytes FROM timings WHERE stage = 'write'",
                  "3 9223372036854775807");
    expect_column(*state, "SELECT count(*) FROM timings", "3");
}

static void test_when_files_were_verified(void **state) {
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_file_state *states;
    size_t count;
    assert_int_equal(catalog_file_states(&states, &count, c, NULL), CKD_OK);
    assert_true(count == 0 && !states);
    catalog_sample_add(c, "a", 1, 1);
    assert_int_equal(catalog_file_states(&states, &count, c, NULL), CKD_OK);
    assert_true(count > 0);
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(states[i].verified_ns, 0);
        assert_true(states[i].size > 0 && (i == 0 || strcmp(states[i - 1].name, states[i].name) < 0));
    }
    assert_int_equal(catalog_set_verified(c, states[0].name, 7, NULL), CKD_E_STATE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_set_verified(c, states[0].name, 7, NULL), CKD_OK);
    assert_int_equal(catalog_set_verified(c, "of nobody", 7, NULL), CKD_OK);
    assert_int_equal(catalog_set_verified(c, "", 7, NULL), CKD_E_INVALID);
    assert_int_equal(catalog_set_verified(c, states[0].name, UINT64_MAX, NULL), CKD_E_INVALID);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    free(states);
    size_t before = count;
    assert_int_equal(catalog_file_states(&states, &count, c, NULL), CKD_OK);
    assert_int_equal(count, before);
    assert_int_equal(states[0].verified_ns, 7);
    free(states);
    catalog_close(c);
}

/* ---- refusing ---- */

static void expect_invalid(catalog *c, const catalog_sample *s, int line) {
    ckd_error err = {0};
    ckd_status status = catalog_add(c, &s->entry, &err);
    if (status != CKD_E_INVALID || err.status != CKD_E_INVALID || !err.message[0]) {
        fail_msg("line %d: %s (%s)", line, ckd_status_name(status), err.message);
    }
}

#define INVALID(change)                       \
    do {                                      \
        catalog_sample_init(&s, "run", 1, 5); \
        change;                               \
        expect_invalid(c, &s, __LINE__);      \
    } while (0)

static void test_invalid_checkpoints(void **state) {
    catalog_sample s;
    ckd_checkpoint *p = &s.checkpoint;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    INVALID(p->run[0] = '\0');
    INVALID(p->run[0] = '.');
    INVALID(p->run[0] = '-');
    INVALID(p->run[1] = '/');
    INVALID(p->run[1] = ' ');
    INVALID(memset(p->run, 'r', sizeof(p->run)));
    INVALID(p->step = UINT64_C(1) << 63);
    INVALID(p->step = UINT64_MAX);
    INVALID(memset(&p->id, 0, sizeof(p->id)));
    INVALID(memset(&p->parent, 0, sizeof(p->parent)));
    INVALID(p->kind = CKD_BASE);
    INVALID(p->kind = (ckd_kind)0);
    INVALID(p->kind = (ckd_kind)4);
    INVALID(p->fidelity = CKD_FIDELITY_DEFAULT);
    INVALID(p->fidelity = (ckd_fidelity)4);
    INVALID(p->tensors = UINT64_MAX);
    INVALID(p->raw_bytes = UINT64_MAX);
    INVALID(p->stored_bytes = UINT64_C(1) << 63);
    INVALID(p->created_ns = UINT64_MAX);
    INVALID(p->metric_name[0] = '\xff');
    INVALID(memset(p->metric_name, 'm', sizeof(p->metric_name)));
    INVALID(s.entry.manifest_bytes = UINT64_MAX);
    INVALID(s.files[1].name[0] = '\0');
    INVALID(strcpy(s.files[1].name, "a/b"));
    INVALID(strcpy(s.files[1].name, ".."));
    INVALID(strcpy(s.files[1].name, "\xc3("));
    INVALID(memset(s.files[1].name, 'n', sizeof(s.files[1].name)));
    INVALID(s.files[1].size = UINT64_MAX);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(count_all(c), 0);
    catalog_close(c);
}

/* ---- transactions and handles ---- */

static void test_transactions(void **state) {
    catalog_sample s, t;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_init(&s, "run", 1, 10);
    catalog_sample_init(&t, "run", 2, 20);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_E_STATE);
    assert_int_equal(catalog_remove(c, "run", 1, NULL), CKD_E_STATE);
    assert_int_equal(catalog_commit(c, NULL), CKD_E_STATE);
    catalog_rollback(c);

    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_begin(c, NULL), CKD_E_STATE);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_int_equal(count_all(c), 1);
    catalog_rollback(c);
    assert_int_equal(count_all(c), 0);

    /* A failed add leaves the transaction as it was. */
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    t.checkpoint.id = s.checkpoint.id;
    assert_int_equal(catalog_add(c, &t.entry, NULL), CKD_E_EXISTS);
    t.checkpoint.id = catalog_sample_id(20);
    assert_int_equal(catalog_add(c, &t.entry, NULL), CKD_OK);
    assert_int_equal(catalog_remove(c, "run", 1, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_found(c, &t);

    /* Closing rolls back. */
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    catalog_close(c);
    c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(count_all(c), 1);
    catalog_close(c);
}

static void test_readers_may_not_write(void **state) {
    catalog_sample s;
    ckd_error err = {0};
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_close(c);
    catalog_sample_init(&s, "run", 1, 10);
    c = catalog_sample_open(*state, CATALOG_READ);
    assert_int_equal(catalog_begin(c, &err), CKD_E_READ_ONLY);
    assert_string_equal(err.file, catalog_sample_path(*state, "catalog.db"));
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_E_STATE);
    assert_int_equal(count_all(c), 0);
    catalog_close(c);
}

static void test_two_handles(void **state) {
    catalog_sample s;
    ckd_error err = {0};
    catalog *a = catalog_sample_open(*state, CATALOG_WRITE), *b = catalog_sample_open(*state, CATALOG_WRITE);
    catalog *r = catalog_sample_open(*state, CATALOG_READ);
    catalog_sample_init(&s, "run", 1, 10);
    assert_int_equal(catalog_begin(a, NULL), CKD_OK);
    assert_int_equal(catalog_add(a, &s.entry, NULL), CKD_OK);
    assert_int_equal(catalog_begin(b, &err), CKD_E_BUSY);
    assert_string_equal(err.file, catalog_sample_path(*state, "catalog.db"));
    assert_int_equal(count_all(b), 0);
    assert_int_equal(count_all(r), 0);
    assert_int_equal(catalog_commit(a, NULL), CKD_OK);
    assert_int_equal(count_all(b), 1);
    assert_int_equal(count_all(r), 1);
    catalog_sample_add(b, "run", 2, 20);
    assert_int_equal(count_all(a), 2);
    assert_int_equal(count_all(r), 2);
    catalog_close(a);
    catalog_close(b);
    catalog_close(r);
}

/* A reader holds its lock. The commit returns BUSY and is undone, and can be repeated. */
static void test_commit_waits_for_readers(void **state) {
    catalog_sample s;
    sqlite3 *blocker = NULL;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(sqlite3_open(catalog_sample_path(*state, "catalog.db"), &blocker), SQLITE_OK);
    assert_int_equal(sqlite3_exec(blocker, "BEGIN; SELECT count(*) FROM runs", NULL, NULL, NULL), SQLITE_OK);
    catalog_sample_init(&s, "run", 1, 10);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_E_BUSY);
    assert_int_equal(catalog_commit(c, NULL), CKD_E_STATE);
    assert_int_equal(sqlite3_close(blocker), SQLITE_OK);
    assert_int_equal(count_all(c), 0);
    catalog_sample_add(c, "run", 1, 10);
    assert_int_equal(count_all(c), 1);
    catalog_close(c);
}

/* A child of fork cannot use the parent's handle. Closing it does not undo what the parent is writing. */
static void test_fork(void **state) {
    catalog_sample s;
    ckd_checkpoint_list list;
    int wait_status = -1;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_init(&s, "run", 1, 10);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int ok = catalog_list(&list, c, NULL, NULL) == CKD_E_STATE &&
                 catalog_commit(c, NULL) == CKD_E_STATE && catalog_begin(c, NULL) == CKD_E_STATE &&
                 catalog_add(c, &s.entry, NULL) == CKD_E_STATE;
        catalog_rollback(c);
        catalog_close(c);
        _exit(ok ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &wait_status, 0), child);
    assert_int_equal(wait_status, 0);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    assert_found(c, &s);
    catalog_close(c);
}

enum { THREADS = 4, THREAD_STEPS = 12 };

typedef struct worker {
    const char *path;
    int number;
    ckd_status status;
    ckd_error err;
} worker;

static ckd_status add_step(catalog *c, const worker *w, uint64_t step, ckd_error *err) {
    char run[16];
    catalog_sample s;
    snprintf(run, sizeof(run), "run%d", w->number);
    catalog_sample_init(&s, run, step, 1000 * (uint64_t)(w->number + 1) + step);
    ckd_status status = catalog_begin(c, err);
    if (status == CKD_OK) {
        status = catalog_add(c, &s.entry, err);
    }
    return status == CKD_OK ? catalog_commit(c, err) : status;
}

/* Opens a handle for each step, adds one checkpoint, and reads all of them. */
static void *work(void *context) {
    worker *w = context;
    ckd_id store = catalog_sample_store();
    for (uint64_t step = 0; w->status == CKD_OK && step < THREAD_STEPS; step++) {
        catalog *c = NULL;
        ckd_checkpoint_list list = {0};
        w->status = catalog_open(&c, w->path, CATALOG_WRITE, &store, 60000, &w->err);
        if (w->status == CKD_OK) {
            w->status = add_step(c, w, step, &w->err);
        }
        if (w->status == CKD_OK) {
            w->status = catalog_list(&list, c, NULL, &w->err);
        }
        catalog_list_free(&list);
        catalog_close(c);
    }
    return NULL;
}

static void test_threads(void **state) {
    pthread_t threads[THREADS];
    worker workers[THREADS];
    const char *path = catalog_sample_path(*state, "catalog.db");
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.path = path, .number = i};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        if (workers[i].status != CKD_OK) {
            fail_msg("thread %d: %s: %s", i, ckd_status_name(workers[i].status), workers[i].err.message);
        }
    }
    catalog *c = catalog_sample_open(*state, CATALOG_READ);
    assert_int_equal(count_all(c), THREADS * THREAD_STEPS);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
}

static void test_memory(void **state) {
    catalog *a = NULL, *b = NULL;
    ckd_id store = catalog_sample_store();
    catalog_names runs;
    ckd_usage *rows;
    size_t count = 9;
    assert_int_equal(catalog_open(&a, NULL, CATALOG_MEMORY, &store, 0, NULL), CKD_OK);
    assert_int_equal(catalog_open(&b, "ignored", CATALOG_MEMORY, &store, 0, NULL), CKD_OK);
    assert_int_equal(count_all(a), 0);
    assert_int_equal(catalog_runs(&runs, a, NULL), CKD_OK);
    assert_int_equal(runs.count, 0);
    assert_int_equal(catalog_usage_by_run(&rows, &count, a, NULL), CKD_OK);
    assert_null(rows);
    assert_int_equal(count, 0);
    catalog_sample_add(a, "run", 1, 10);
    assert_int_equal(count_all(a), 1);
    assert_int_equal(count_all(b), 0);
    assert_int_equal(catalog_check(a, NULL), CKD_OK);
    catalog_close(a);
    catalog_close(b);
    assert_false(file_exists(catalog_sample_path(*state, "ignored")));
    catalog_close(NULL);
}

/* ---- usage ---- */

static void test_usage(void **state) {
    catalog_sample s, t, u;
    ckd_usage *runs = NULL;
    catalog_files files;
    size_t count = 0;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_init(&s, "b", 1, 100);
    catalog_sample_init(&t, "b", 2, 200);
    catalog_sample_init(&u, "a", 1, 300);
    t.files[0] = s.files[0]; /* compaction put parts of both checkpoints into one file */
    u.files[0] = s.files[0];
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &t.entry, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &u.entry, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);

    assert_int_equal(catalog_usage_by_run(&runs, &count, c, NULL), CKD_OK);
    assert_int_equal(count, 2);
    assert_string_equal(runs[0].name, "a");
    assert_int_equal(runs[0].checkpoints, 1);
    assert_int_equal(runs[0].raw_bytes, u.checkpoint.raw_bytes);
    assert_int_equal(runs[0].stored_bytes, 1100 + 2300 + 812);
    assert_string_equal(runs[1].name, "b");
    assert_int_equal(runs[1].checkpoints, 2);
    assert_int_equal(runs[1].raw_bytes, s.checkpoint.raw_bytes + t.checkpoint.raw_bytes);
    assert_int_equal(runs[1].stored_bytes, 1100 + 2100 + 612 + 2200 + 712);
    free(runs);

    assert_int_equal(catalog_usage_files(&files, c, NULL), CKD_OK);
    assert_int_equal(files.count, 4);
    assert_int_equal(files.chunk_bytes, 1100 + 2100 + 2200 + 2300);
    assert_int_equal(files.manifest_bytes, 612 + 712 + 812);
    catalog_close(c);
}

static void test_usage_without_chunk_files(void **state) {
    catalog_sample s;
    catalog_files files;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(catalog_usage_files(&files, c, NULL), CKD_OK);
    assert_int_equal(files.count + files.chunk_bytes + files.manifest_bytes, 0);
    catalog_sample_init(&s, "a", 1, 100); /* every tensor is empty */
    s.entry.file_count = 0;
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(catalog_usage_files(&files, c, NULL), CKD_OK);
    assert_int_equal(files.count + files.chunk_bytes, 0);
    assert_int_equal(files.manifest_bytes, 612);
    catalog_close(c);
}

/* ---- many ---- */

enum { MANY = 10000 };

static int count_reads(void *context, file_op step, const char *path) {
    (void)path;
    *(size_t *)context += step == FILE_OP_READ;
    return 0;
}

/* Adds checkpoints of two runs by turns, in one transaction. */
static void add_some(catalog *c, uint64_t first, uint64_t behind) {
    catalog_sample s;
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    for (uint64_t i = first; i < behind; i++) {
        catalog_sample_init(&s, i % 2 ? "odd" : "even", i, 2 + i);
        s.entry.file_count = 1;
        assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    }
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
}

/*
 * An entry changes the first page, the last ones of two tables and two indexes, and now and then their parents. A page
 * that was there before is written twice, as the journal keeps its old content.
 */
static void test_an_entry_writes_little(void **state) {
    enum { BEFORE = 100, MEASURED = 50, PAGES = 8 };
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    add_some(c, 0, BEFORE);
    uint64_t start = bytes_written();
    for (uint64_t i = BEFORE; i < BEFORE + MEASURED; i++) {
        add_some(c, i, i + 1);
    }
    uint64_t written = (bytes_written() - start) / MEASURED;
    print_message("bytes written for an entry: %llu\n", (unsigned long long)written);
    assert_true(written <= 2 * CATALOG_PAGE * PAGES);
    catalog_close(c);
}

static void test_ten_thousand_checkpoints(void **state) {
    struct stat st;
    size_t reads = 0, count = 0;
    ckd_checkpoint_list list;
    ckd_checkpoint got;
    ckd_usage *runs;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    add_some(c, 0, MANY);
    catalog_close(c);
    assert_int_equal(stat(catalog_sample_path(*state, "catalog.db"), &st), 0);
    size_t pages = (size_t)st.st_size / CATALOG_PAGE;
    print_message("%d checkpoints: %zu pages\n", MANY, pages);
    file_set_fault_hook(count_reads, &reads);

    c = catalog_sample_open(*state, CATALOG_READ);
    reads = 0;
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    print_message("list: %zu reads\n", reads);
    assert_true(reads > 0 && reads <= pages);
    assert_int_equal(list.count, MANY);
    for (size_t i = 0; i < MANY; i++) {
        assert_string_equal(list.items[i].run, i < MANY / 2 ? "even" : "odd");
        assert_true(list.items[i].step == (i < MANY / 2 ? 2 * i : 2 * (i - MANY / 2) + 1));
    }
    catalog_list_free(&list);
    catalog_close(c);

    c = catalog_sample_open(*state, CATALOG_READ);
    reads = 0;
    assert_int_equal(catalog_usage_by_run(&runs, &count, c, NULL), CKD_OK);
    print_message("usage: %zu reads\n", reads);
    assert_true(reads > 0 && reads <= pages);
    assert_int_equal(count, 2);
    assert_int_equal(runs[0].checkpoints, MANY / 2);
    free(runs);
    catalog_close(c);

    c = catalog_sample_open(*state, CATALOG_READ);
    reads = 0;
    assert_int_equal(catalog_newest(&got, c, "odd", 5000, NULL), CKD_OK);
    assert_int_equal(got.step, 4999);
    print_message("newest: %zu reads\n", reads);
    assert_true(reads > 0 && reads < 40);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
}

/* ---- opening ---- */

static ckd_status try_open(const char *dir, const char *name, catalog_mode mode, ckd_error *err) {
    catalog *c = (catalog *)8;
    ckd_id store = catalog_sample_store();
    ckd_status status = catalog_open(&c, catalog_sample_path(dir, name), mode, &store, 0, err);
    if (status == CKD_OK) {
        catalog_close(c);
    } else {
        assert_null(c);
        assert_int_equal(err->status, status);
        assert_string_equal(err->file, catalog_sample_path(dir, name));
        assert_true(err->message[0] != '\0');
    }
    return status;
}

/* Opens the catalog in both modes, and expects this status from each. */
static void expect_open(const char *dir, ckd_status want) {
    ckd_error err = {0};
    for (catalog_mode mode = CATALOG_READ; mode <= CATALOG_WRITE; mode++) {
        ckd_status status = try_open(dir, "catalog.db", mode, &err);
        if (status != want) {
            fail_msg("mode %d: %s: %s", mode, ckd_status_name(status), err.message);
        }
    }
}

static void change(const char *dir, const char *sql) {
    free(first_column(dir, sql));
}

static void test_open_absent(void **state) {
    ckd_error err = {0};
    assert_int_equal(try_open(*state, "catalog.db", CATALOG_READ, &err), CKD_E_NOT_FOUND);
    assert_false(file_exists(catalog_sample_path(*state, "catalog.db")));
    assert_int_equal(try_open(*state, "no such folder/catalog.db", CATALOG_READ, &err), CKD_E_NOT_FOUND);
    assert_int_equal(try_open(*state, "no such folder/catalog.db", CATALOG_WRITE, &err), CKD_E_NOT_FOUND);
    assert_int_equal(try_open(*state, "catalog.db", CATALOG_WRITE, &err), CKD_OK);
    assert_int_equal(try_open(*state, "catalog.db", CATALOG_READ, &err), CKD_OK);
}

static void test_open_empty_file(void **state) {
    ckd_error err = {0};
    catalog_sample_write(catalog_sample_path(*state, "catalog.db"), (const unsigned char *)"", 0);
    assert_int_equal(try_open(*state, "catalog.db", CATALOG_READ, &err), CKD_E_CORRUPT);
    assert_int_equal(try_open(*state, "catalog.db", CATALOG_WRITE, &err), CKD_OK);
    assert_int_equal(try_open(*state, "catalog.db", CATALOG_READ, &err), CKD_OK);
}

static void test_open_folder(void **state) {
    assert_int_equal(mkdir(catalog_sample_path(*state, "catalog.db"), 0777), 0);
    expect_open(*state, CKD_E_CORRUPT);
}

static void test_open_other_store(void **state) {
    catalog *c = NULL;
    ckd_id other = catalog_sample_id(4711);
    assert_int_equal(
        catalog_open(&c, catalog_sample_path(*state, "catalog.db"), CATALOG_WRITE, &other, 0, NULL), CKD_OK);
    catalog_close(c);
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "DELETE FROM meta WHERE key = 'store'");
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "INSERT INTO meta VALUES ('store', '5753000000000000a8a9aaabacadaeaf')");
    expect_open(*state, CKD_OK);
    change(*state, "UPDATE meta SET value = '2' WHERE key = 'format'");
    expect_open(*state, CKD_E_CORRUPT);
}

static void test_open_other_versions(void **state) {
    catalog_close(catalog_sample_open(*state, CATALOG_WRITE));
    expect_open(*state, CKD_OK);
    change(*state, "PRAGMA user_version = 9"); /* with our tables */
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "PRAGMA user_version = 3");
    expect_open(*state, CKD_E_MISMATCH);
    change(*state, "PRAGMA user_version = 0");
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "PRAGMA user_version = -1");
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "PRAGMA user_version = 8");
    expect_open(*state, CKD_OK);
    change(*state, "ALTER TABLE meta ADD COLUMN later TEXT");
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "PRAGMA user_version = 9");
    expect_open(*state, CKD_E_UNSUPPORTED);
    change(*state, "PRAGMA application_id = 7");
    expect_open(*state, CKD_E_CORRUPT);
}

static void test_open_other_tables(void **state) {
    catalog_close(catalog_sample_open(*state, CATALOG_WRITE));
    /* Indexes and statistics that people add do no harm, and triggers do not run. */
    change(*state, "ANALYZE");
    change(*state, "CREATE INDEX by_parent ON checkpoints (parent)");
    change(*state, "CREATE TRIGGER trap AFTER INSERT ON checkpoints BEGIN DELETE FROM checkpoints; END");
    expect_open(*state, CKD_OK);
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(c, "run", 1, 5);
    assert_int_equal(count_all(c), 1);
    catalog_close(c);
    change(*state, "ALTER TABLE checkpoints ADD COLUMN more TEXT");
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "ALTER TABLE checkpoints DROP COLUMN more");
    change(*state, "DROP TABLE timings");
    expect_open(*state, CKD_E_CORRUPT);
}

/* A view has the name of a table of the catalog. */
static void test_open_view_for_table(void **state) {
    catalog_close(catalog_sample_open(*state, CATALOG_WRITE));
    change(*state, "DROP TABLE timings");
    change(*state, "CREATE VIEW timings AS SELECT 1 AS checkpoint, 'x' AS stage, 1 AS ns, 1 AS bytes");
    expect_open(*state, CKD_E_CORRUPT);
}

static void test_open_wal(void **state) {
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(c, "run", 1, 5);
    catalog_close(c);
    expect_column(*state, "PRAGMA journal_mode = WAL", "wal");
    expect_open(*state, CKD_E_CORRUPT);
    assert_false(file_exists(catalog_sample_path(*state, "catalog.db-wal")));
    expect_column(*state, "PRAGMA journal_mode = DELETE", "delete");
    expect_open(*state, CKD_OK);
}

/* These names mean something special to SQLite. For the catalog they are names of files. */
static void test_open_strange_names(void **state) {
    static const char *const names[] = {":memory:", "file:x?mode=memory", "a b%20?c#d"};
    ckd_id store = catalog_sample_store();
    char before[4096];
    assert_non_null(getcwd(before, sizeof(before)));
    assert_int_equal(chdir(*state), 0);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        catalog *c = NULL;
        assert_int_equal(catalog_open(&c, names[i], CATALOG_WRITE, &store, 0, NULL), CKD_OK);
        catalog_sample_add(c, "run", 1, 5);
        catalog_close(c);
        assert_true(file_exists(names[i]));
        assert_int_equal(catalog_open(&c, names[i], CATALOG_READ, &store, 0, NULL), CKD_OK);
        assert_int_equal(count_all(c), 1);
        catalog_close(c);
    }
    assert_int_equal(chdir(before), 0);
}

static void test_mode_follows_umask(void **state) {
    struct stat st;
    mode_t before = umask(002);
    catalog_close(catalog_sample_open(*state, CATALOG_WRITE));
    umask(before);
    assert_int_equal(stat(catalog_sample_path(*state, "catalog.db"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0664);
}

/* ---- readers change nothing ---- */

/*
 * Makes permissions apply to the superuser, too, by giving up the capability that overrides them; false
 * restores it.
 */
static void obey_permissions(bool obey) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2];
    uint32_t overrides = 1U << CAP_DAC_OVERRIDE | 1U << CAP_DAC_READ_SEARCH;
    assert_int_equal(syscall(SYS_capget, &header, sets), 0);
    if (obey) {
        sets[0].effective &= ~overrides;
    } else {
        sets[0].effective |= sets[0].permitted & overrides;
    }
    assert_int_equal(syscall(SYS_capset, &header, sets), 0);
}

static int forbid_writing(void *context, file_op step, const char *path) {
    (void)path;
    *(size_t *)context += step != FILE_OP_OPEN && step != FILE_OP_READ && step != FILE_OP_LOCK;
    return 0;
}

static void test_readers_change_nothing(void **state) {
    size_t written = 0, size = 0, size_after = 0;
    dir_list names;
    ckd_usage *runs;
    size_t count;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(c, "run", 1, 5);
    catalog_close(c);
    const char *path = catalog_sample_path(*state, "catalog.db");
    unsigned char *before = catalog_sample_read(path, &size);
    assert_int_equal(chmod(path, 0444), 0);
    assert_int_equal(chmod(*state, 0555), 0);
    file_set_fault_hook(forbid_writing, &written);
    obey_permissions(true);
    c = catalog_sample_open(*state, CATALOG_READ);
    assert_int_equal(count_all(c), 1);
    assert_int_equal(catalog_usage_by_run(&runs, &count, c, NULL), CKD_OK);
    free(runs);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
    obey_permissions(false);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(written, 0);
    assert_int_equal(dir_list_read(&names, *state, NULL), CKD_OK);
    assert_int_equal(names.count, 1);
    dir_list_free(&names);
    unsigned char *after = catalog_sample_read(catalog_sample_path(*state, "catalog.db"), &size_after);
    assert_int_equal(size, size_after);
    assert_memory_equal(before, after, size);
    free(before);
    free(after);
}

/* Writing fails if the files are read-only, even for the superuser. */
static void test_writing_what_is_read_only(void **state) {
    ckd_error err = {0};
    catalog_sample s;
    catalog_sample_init(&s, "run", 1, 5);
    catalog_close(catalog_sample_open(*state, CATALOG_WRITE));
    const char *path = catalog_sample_path(*state, "catalog.db");
    assert_int_equal(chmod(path, 0444), 0);
    obey_permissions(true);
    ckd_status read_only_file = try_open(*state, "catalog.db", CATALOG_WRITE, &err);
    obey_permissions(false);
    assert_int_equal(read_only_file, CKD_E_READ_ONLY);

    assert_int_equal(chmod(path, 0644), 0);
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(chmod(*state, 0555), 0);
    obey_permissions(true);
    ckd_status read_only_folder = catalog_begin(c, &err);
    if (read_only_folder == CKD_OK) {
        read_only_folder = catalog_add(c, &s.entry, &err);
    }
    obey_permissions(false);
    assert_int_equal(read_only_folder, CKD_E_READ_ONLY);
    catalog_close(c);
}

int main(void) {
#define TEST(name) tempdir_test(test_##name)
    const struct CMUnitTest tests[] = {
        TEST(round_trip),
        TEST(round_trip_of_limits),
        TEST(people_can_read_it),
        TEST(order_and_newest),
        TEST(not_found),
        TEST(generations),
        TEST(remove),
        TEST(timings),
        TEST(when_files_were_verified),
        TEST(invalid_checkpoints),
        TEST(transactions),
        TEST(readers_may_not_write),
        TEST(two_handles),
        TEST(commit_waits_for_readers),
        TEST(fork),
        TEST(threads),
        TEST(memory),
        TEST(usage),
        TEST(usage_without_chunk_files),
        TEST(an_entry_writes_little),
        TEST(ten_thousand_checkpoints),
        TEST(open_absent),
        TEST(open_empty_file),
        TEST(open_folder),
        TEST(open_other_store),
        TEST(open_other_versions),
        TEST(open_other_tables),
        TEST(open_view_for_table),
        TEST(open_wal),
        TEST(open_strange_names),
        TEST(mode_follows_umask),
        TEST(readers_change_nothing),
        TEST(writing_what_is_read_only),
    };
    return cmocka_run_group_tests_name("catalog", tests, NULL, NULL);
}
