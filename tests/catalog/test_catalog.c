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
#include "tests/support/tempdir.h"

static bool detailed; /* whether the catalog has tensors of the last checkpoint that was asked for */

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

static void assert_sample_tensors(catalog *c, const catalog_sample *s) {
    static const char *const codings[] = {"mixed", "delta", "raw", "same"};
    static const uint32_t shards[] = {2, 2, 1, 1}, depths[] = {3, 2, 0, 1}, first[] = {0, 2, 4, 5};
    static const uint64_t elements[] = {768 * 3072, 768 * 3072, 1, 0};
    const double rel_l2[] = {0.5, (double)NAN, 0, 0}, max_error[] = {1e-3, 0, 0, 0};
    ckd_tensor_list list;
    assert_int_equal(catalog_tensors(&list, &detailed, c, &s->checkpoint.id, NULL), CKD_OK);
    assert_int_equal(list.count, SAMPLE_TENSORS);
    for (size_t i = 0; i < list.count; i++) {
        const ckd_tensor_info *t = &list.items[i];
        const catalog_shard *a = &s->shards[first[i]];
        uint64_t raw = a->raw_bytes, stored = a->stored_bytes;
        for (uint32_t k = 1; k < shards[i]; k++) {
            raw += a[k].raw_bytes;
            stored += a[k].stored_bytes;
        }
        assert_string_equal(t->name, a->tensor);
        assert_int_equal(t->role, a->role);
        assert_int_equal(t->dtype, a->dtype);
        assert_int_equal(t->ndim, a->ndim);
        for (uint32_t d = 0; d < CKD_MAX_DIMS; d++) {
            assert_true(t->shape[d] == (d < a->ndim ? a->shape[d] : 0));
        }
        assert_true(t->elements == elements[i]);
        assert_int_equal(t->shards, shards[i]);
        assert_true(t->raw_bytes == raw);
        assert_true(t->stored_bytes == stored);
        assert_string_equal(t->coding, codings[i]);
        assert_int_equal(t->depth, depths[i]);
        assert_same_double(t->rel_l2, rel_l2[i]);
        assert_same_double(t->max_error, max_error[i]);
    }
    catalog_tensors_free(&list);
    assert_null(list.items);
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
    assert_sample_tensors(c, s);
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
    uint64_t shape[CKD_MAX_DIMS];
    char name[CKD_NAME_MAX + 1], run[CKD_RUN_MAX + 1];
    ckd_region flat = {.kind = CKD_REGION_FLAT, .start = INT64_MAX, .count = INT64_MAX};
    ckd_region box = {.kind = CKD_REGION_BOX};
    ckd_checkpoint got;
    ckd_tensor_list list;
    memset(run, '~', sizeof(run) - 1);
    run[sizeof(run) - 1] = '\0';
    memset(name, '\n', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    for (uint32_t d = 0; d < CKD_MAX_DIMS; d++) {
        shape[d] = d < 10 ? 16 : 1;
        box.offsets[d] = UINT64_MAX - 1;
        box.lengths[d] = 1;
    }
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
    for (int i = 0; i < 2; i++) {
        s.shards[i].tensor = name;
        s.shards[i].ordinal = s.shards[i].depth = UINT32_MAX;
        s.shards[i].index = i ? UINT32_MAX : 0;
        s.shards[i].ndim = CKD_MAX_DIMS;
        s.shards[i].shape = shape;
        s.shards[i].region = i ? &flat : &box;
        s.shards[i].elements = CKD_MAX_ELEMENTS;
        s.shards[i].raw_bytes = s.shards[i].stored_bytes = INT64_MAX / 2;
        s.shards[i].coding = "1234567890123456789012345678901";
    }
    s.entry.shard_count = 2;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    assert_int_equal(catalog_find(&got, c, run, INT64_MAX, NULL), CKD_OK);
    assert_same_checkpoint(&got, &s.checkpoint);
    assert_int_equal(catalog_tensors(&list, &detailed, c, &got.id, NULL), CKD_OK);
    assert_int_equal(list.count, 1);
    assert_string_equal(list.items[0].name, name);
    assert_int_equal(list.items[0].ndim, CKD_MAX_DIMS);
    assert_memory_equal(list.items[0].shape, shape, sizeof(shape));
    assert_true(list.items[0].elements == CKD_MAX_ELEMENTS);
    assert_true(list.items[0].raw_bytes == INT64_MAX - 1);
    assert_string_equal(list.items[0].coding, s.shards[0].coding);
    catalog_tensors_free(&list);
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
        *state, "SELECT group_concat(shape || ' ' || region, '; ') FROM (SELECT * FROM tensor_list)",
        "[768, 3072] box [0:384, 0:3072]; [768, 3072] box [384:768, 0:3072]; [768, 3072] flat 0+1000000; "
        "[768, 3072] flat 1000000+1359296; [] whole; [0, 5] whole");
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
    expect_column(*state, "PRAGMA user_version", "7");
    for (int i = CKD_F64; i <= CKD_BOOL; i++) {
        snprintf(sql, sizeof(sql), "SELECT word FROM vocabulary WHERE what = 'dtype' AND number = %d", i);
        expect_column(*state, sql, ckd_dtype_name((ckd_dtype)i));
    }
    for (int i = CKD_ROLE_WEIGHT; i <= CKD_ROLE_OTHER; i++) {
        snprintf(sql, sizeof(sql), "SELECT word FROM vocabulary WHERE what = 'role' AND number = %d", i);
        expect_column(*state, sql, ckd_role_name((ckd_role)i));
    }
    for (int i = CKD_BASE; i <= CKD_LOSSY_BASE; i++) {
        snprintf(sql, sizeof(sql), "SELECT word FROM vocabulary WHERE what = 'kind' AND number = %d", i);
        expect_column(*state, sql, ckd_kind_name((ckd_kind)i));
    }
    for (int i = CKD_EXACT; i <= CKD_COARSE; i++) {
        snprintf(sql, sizeof(sql), "SELECT word FROM vocabulary WHERE what = 'fidelity' AND number = %d", i);
        expect_column(*state, sql, ckd_fidelity_name((ckd_fidelity)i));
    }
    expect_column(*state, "SELECT count(*) FROM vocabulary", "26");
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
    ckd_tensor_list tensors;
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
    memset(&tensors, 'Z', sizeof(tensors));
    assert_int_equal(catalog_tensors(&tensors, &detailed, c, &unknown, NULL), CKD_E_NOT_FOUND);
    assert_null(tensors.items);
    assert_int_equal(tensors.count, 0);
    catalog_close(c);
}

static void test_checkpoint_without_tensors(void **state) {
    catalog_sample s;
    ckd_tensor_list tensors;
    catalog_sample_init(&s, "run", 1, 5);
    s.entry.shard_count = s.entry.file_count = 0;
    s.entry.shards = NULL;
    s.entry.files = NULL;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(catalog_tensors(&tensors, &detailed, c, &s.checkpoint.id, NULL), CKD_OK);
    assert_int_equal(tensors.count, 0);
    catalog_tensors_free(&tensors);
    catalog_close(c);
}

/*
 * A checkpoint may be added without its tensors, if another place holds them. A newer generation may add
 * them.
 */
static void test_tensors_that_are_not_indexed(void **state) {
    catalog_sample s[3];
    ckd_checkpoint_list list;
    ckd_checkpoint got;
    ckd_tensor_list tensors;
    ckd_tensor_usage *usage;
    size_t *places, count;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    for (int i = 2; i >= 0; i--) {
        catalog_sample_init(&s[i], i ? "run" : "first", 7 - (uint64_t)i, 100 + 10 * (uint64_t)i);
        s[i].entry.not_indexed = i != 1;
        assert_int_equal(catalog_add(c, &s[i].entry, NULL), i == 1 ? CKD_OK : CKD_E_INVALID);
        s[i].entry.shard_count = i == 1 ? SAMPLE_SHARDS : 0;
        assert_int_equal(catalog_add(c, &s[i].entry, NULL), i == 1 ? CKD_E_EXISTS : CKD_OK);
    }
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(catalog_find(&got, c, "first", 7, NULL), CKD_OK);
    assert_same_checkpoint(&got, &s[0].checkpoint);
    assert_int_equal(catalog_tensors(&tensors, &detailed, c, &s[0].checkpoint.id, NULL), CKD_OK);
    assert_true(tensors.count == 0 && !detailed);
    assert_sample_tensors(c, &s[1]);
    assert_true(detailed);
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    assert_int_equal(catalog_not_indexed(&places, &count, &list, c, NULL), CKD_OK);
    assert_int_equal(count, 2);
    assert_true(places[0] == 0 && places[1] == 1); /* the list has first@7, run@5, run@6 */
    free(places);
    list.count = 1;
    assert_int_equal(catalog_not_indexed(&places, &count, &list, c, NULL), CKD_E_CORRUPT);
    assert_null(places);
    list.count = 3;
    catalog_list_free(&list);

    s[2].checkpoint.generation++;
    s[2].entry.not_indexed = false;
    s[2].entry.shard_count = SAMPLE_SHARDS;
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s[2].entry, NULL), CKD_OK);
    assert_int_equal(catalog_remove(c, "first", 7, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_sample_tensors(c, &s[2]);
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    assert_int_equal(catalog_not_indexed(&places, &count, &list, c, NULL), CKD_OK);
    assert_int_equal(count, 0);
    assert_null(places);
    catalog_list_free(&list);
    assert_int_equal(catalog_usage_by_tensor(&usage, &count, c, NULL), CKD_OK);
    assert_int_equal(count, SAMPLE_TENSORS);
    assert_int_equal(usage[0].checkpoints, 2);
    free(usage);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
}

/*
 * catalog_entry_tensors returns the same tensors for an entry in memory as catalog_tensors does for a stored
 * one.
 */
static void test_entries_give_the_same_tensors(void **state) {
    catalog_sample s;
    ckd_tensor_list want, have;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_init(&s, "run", 1, 5);
    for (size_t i = 0; i < SAMPLE_SHARDS; i++) {
        s.shards[i].value_squares = 1 + (double)i;
        s.shards[i].direction_change = 0.5 / (1 + (double)i);
        s.shards[i].nonfinite = i;
    }
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(catalog_tensors(&want, &detailed, c, &s.checkpoint.id, NULL), CKD_OK);
    for (size_t i = 0; i < SAMPLE_SHARDS / 2; i++) { /* shards may be in any order */
        catalog_shard other = s.shards[i];
        s.shards[i] = s.shards[SAMPLE_SHARDS - 1 - i];
        s.shards[SAMPLE_SHARDS - 1 - i] = other;
    }
    assert_int_equal(catalog_entry_tensors(&have, &s.entry, NULL), CKD_OK);
    assert_int_equal(have.count, want.count);
    for (size_t i = 0; i < want.count; i++) {
        ckd_tensor_info *a = &want.items[i], *b = &have.items[i];
        assert_string_equal(a->name, b->name);
        assert_string_equal(a->coding, b->coding);
        assert_memory_equal(a->shape, b->shape, sizeof(a->shape));
        assert_true(a->role == b->role && a->dtype == b->dtype && a->ndim == b->ndim &&
                    a->elements == b->elements && a->shards == b->shards && a->raw_bytes == b->raw_bytes &&
                    a->stored_bytes == b->stored_bytes && a->depth == b->depth &&
                    a->nonfinite == b->nonfinite);
        assert_same_double(a->rel_l2, b->rel_l2);
        assert_same_double(a->max_error, b->max_error);
        assert_same_double(a->direction_change, b->direction_change);
    }
    catalog_tensors_free(&want);
    catalog_tensors_free(&have);
    s.shards[0].coding = "";
    assert_int_equal(catalog_entry_tensors(&have, &s.entry, NULL), CKD_E_INVALID);
    assert_null(have.items);
    catalog_close(c);
}

/* ---- replacing and removing ---- */

static void test_generations(void **state) {
    catalog_sample s, other;
    ckd_checkpoint got;
    ckd_tensor_list tensors;
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
    other.entry.shard_count = 2;
    other.entry.file_count = 1;
    other.entry.manifest_bytes = 7;
    assert_int_equal(catalog_add(c, &other.entry, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(count_all(c), 1);
    assert_int_equal(catalog_find(&got, c, "run", 5, NULL), CKD_OK);
    assert_same_checkpoint(&got, &other.checkpoint);
    assert_int_equal(catalog_tensors(&tensors, &detailed, c, &got.id, NULL), CKD_OK);
    assert_int_equal(tensors.count, 1);
    catalog_tensors_free(&tensors);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
    expect_column(*state, "SELECT count(*) FROM files", "1");
    expect_column(*state, "SELECT count(*) FROM shards", "2");
    expect_column(*state, "SELECT count(*) FROM role_totals", "1");
    expect_column(*state, "SELECT manifest_bytes FROM checkpoints", "7");
    expect_column(*state, "SELECT stage || ns || bytes FROM timings", "encode1122");
}

static void test_remove(void **state) {
    static const char *const tables[] = {"runs", "checkpoints", "files", "shards", "role_totals", "timings"};
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

static void test_invalid_shards(void **state) {
    static const uint64_t other[] = {768, 3071}, huge[] = {UINT64_C(1) << 32, UINT64_C(1) << 32, 0};
    static const uint64_t large[] = {CKD_MAX_ELEMENTS, 2};
    ckd_region region = {.kind = CKD_REGION_BOX, .offsets = {1, 0}, .lengths = {UINT64_MAX, 1}};
    char name[CKD_NAME_MAX + 2];
    catalog_sample s;
    memset(name, 'n', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    INVALID(s.shards[1].tensor = "");
    INVALID(s.shards[1].tensor = name);
    INVALID(s.shards[1].tensor = "\xed\xa0\x80");
    INVALID(s.shards[1].role = CKD_ROLE_AUTO);
    INVALID(s.shards[1].role = (ckd_role)6);
    INVALID(s.shards[1].dtype = CKD_DTYPE_NONE);
    INVALID(s.shards[1].dtype = (ckd_dtype)16);
    INVALID(s.shards[1].ndim = CKD_MAX_DIMS + 1);
    INVALID(s.shards[1].shape = NULL);
    INVALID((s.shards[4].shape = huge, s.shards[4].ndim = 3));
    INVALID((s.shards[4].shape = large, s.shards[4].ndim = 2));
    INVALID(s.shards[1].region = NULL);
    INVALID(s.shards[1].region = &region);
    INVALID((region.kind = CKD_REGION_FLAT, region.start = 2, region.count = UINT64_MAX - 1,
             s.shards[1].region = &region));
    INVALID((region.kind = (ckd_region_kind)3, s.shards[1].region = &region));
    INVALID(s.shards[1].coding = "");
    INVALID(s.shards[1].coding = NULL);
    INVALID(s.shards[1].coding = "12345678901234567890123456789012");
    INVALID(s.shards[4].elements = 2);
    INVALID(s.shards[1].raw_bytes = UINT64_MAX);
    INVALID(s.shards[1].stored_bytes = UINT64_MAX);
    /* Shards of one tensor that contradict each other, far apart in the list. */
    INVALID((s.shards[5] = s.shards[0], s.shards[5].index = 9, s.shards[5].shape = other));
    INVALID((s.shards[5] = s.shards[0], s.shards[5].index = 9, s.shards[5].ndim = 1));
    INVALID((s.shards[5] = s.shards[0], s.shards[5].index = 9, s.shards[5].role = CKD_ROLE_OTHER));
    INVALID((s.shards[5] = s.shards[0], s.shards[5].index = 9, s.shards[5].dtype = CKD_I32));
    INVALID((s.shards[5] = s.shards[0], s.shards[5].index = 9, s.shards[5].ordinal = 5));
    INVALID(s.shards[5] = s.shards[0]);
    INVALID((s.shards[0].raw_bytes = INT64_MAX, s.shards[1].raw_bytes = INT64_MAX));
    INVALID((s.shards[0].stored_bytes = INT64_MAX, s.shards[1].stored_bytes = INT64_MAX));
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
    ckd_usage *rows, roles[8];
    size_t count = 9;
    assert_int_equal(catalog_open(&a, NULL, CATALOG_MEMORY, &store, 0, NULL), CKD_OK);
    assert_int_equal(catalog_open(&b, "ignored", CATALOG_MEMORY, &store, 0, NULL), CKD_OK);
    assert_int_equal(count_all(a), 0);
    assert_int_equal(catalog_runs(&runs, a, NULL), CKD_OK);
    assert_int_equal(runs.count, 0);
    assert_int_equal(catalog_usage_by_run(&rows, &count, a, NULL), CKD_OK);
    assert_null(rows);
    assert_int_equal(count, 0);
    count = 9;
    catalog_sample_roles(roles, &count, a);
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
    ckd_usage roles[8], *runs = NULL;
    size_t count = 0;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_init(&s, "b", 1, 100);
    catalog_sample_init(&t, "b", 2, 200);
    catalog_sample_init(&u, "a", 1, 300);
    t.files[0] = s.files[0]; /* compaction put parts of both checkpoints into one file */
    u.files[0] = s.files[0];
    u.entry.shard_count = 2; /* weights only */
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

    catalog_sample_roles(roles, &count, c);
    assert_int_equal(count, 3);
    assert_string_equal(roles[0].name, "weight");
    assert_int_equal(roles[0].checkpoints, 3);
    assert_int_equal(roles[0].raw_bytes, 3 * 9437184);
    assert_int_equal(roles[0].stored_bytes,
                     3 * 2359296 + 2 * 100 + 1 + 105 + 2 * 200 + 1 + 205 + 2 * 300 + 1);
    assert_string_equal(roles[1].name, "exp_avg");
    assert_int_equal(roles[1].checkpoints, 2);
    assert_int_equal(roles[1].raw_bytes, 2 * 9437184);
    assert_int_equal(roles[1].stored_bytes, 2 * 2359296 + 2 * (2 + 3) + 2 * 100 + 2 * 200);
    assert_string_equal(roles[2].name, "other");
    assert_int_equal(roles[2].raw_bytes, 16);
    assert_int_equal(roles[2].stored_bytes, 2 * (2 + 4) + 100 + 200);
    catalog_close(c);
}

/* Checks that the stored sums by tensor equal those of the shards. */
static void expect_tensor_totals(const char *dir, const char *rows) {
    expect_column(dir,
                  "SELECT count(*) FROM (SELECT c.run, s.tensor, s.role, count(DISTINCT s.checkpoint), "
                  "sum(s.elements), sum(s.raw_bytes), sum(s.stored_bytes) FROM shards s JOIN checkpoints c "
                  "ON c.key = s.checkpoint GROUP BY 1, 2, 3 INTERSECT SELECT run, tensor, role, checkpoints, "
                  "elements, raw_bytes, stored_bytes FROM tensor_totals)",
                  rows);
    expect_column(dir, "SELECT count(*) FROM tensor_totals", rows);
}

static void change_one(const char *dir, const catalog_entry *add, const char *run, uint64_t remove_step) {
    catalog *c = catalog_sample_open(dir, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(add ? catalog_add(c, add, NULL) : catalog_remove(c, run, remove_step, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    catalog_close(c);
}

static void test_sums_by_tensor_follow(void **state) {
    catalog_sample s, other, again;
    catalog_sample_init(&s, "b", 1, 100);
    catalog_sample_init(&other, "a", 7, 1234);
    change_one(*state, &s.entry, NULL, 0);
    expect_tensor_totals(*state, "4");
    change_one(*state, &other.entry, NULL, 0);
    expect_tensor_totals(*state, "8");
    for (uint64_t step = 2; step < 6; step++) {
        catalog_sample_init(&s, "b", step, 100 * step);
        s.entry.shard_count -= step % 2 ? 2 : 0;
        change_one(*state, &s.entry, NULL, 0);
        expect_tensor_totals(*state, "8");
    }
    /* A newer generation has other sizes, fewer tensors, and one tensor in another role. */
    catalog_sample_init(&again, "b", 2, 200);
    again.checkpoint.generation = 3;
    again.entry.shard_count = 2;
    again.shards[0].stored_bytes += 12345;
    change_one(*state, &again.entry, NULL, 0);
    expect_tensor_totals(*state, "8");
    catalog_sample_init(&again, "b", 3, 300);
    again.checkpoint.generation = 1;
    for (size_t i = 0; i < again.entry.shard_count; i++) {
        again.shards[i].role = CKD_ROLE_MASTER;
    }
    change_one(*state, &again.entry, NULL, 0);
    expect_tensor_totals(*state, "12");
    change_one(*state, NULL, "b", 3);
    expect_tensor_totals(*state, "8");
    change_one(*state, NULL, "a", 7);
    expect_tensor_totals(*state, "4");
    for (uint64_t step = 1; step < 6; step++) {
        if (step != 3) {
            change_one(*state, NULL, "b", step);
        }
    }
    expect_tensor_totals(*state, "0");
    /* Sums do not exceed the largest integer. */
    for (uint64_t step = 1; step < 4; step++) {
        catalog_sample_init(&s, "b", step, 100 * step);
        s.shards[0].raw_bytes = INT64_MAX;
        s.entry.shard_count = 1;
        change_one(*state, &s.entry, NULL, 0);
    }
    expect_column(*state, "SELECT max(raw_bytes) FROM tensor_totals", "9223372036854775807");
    expect_column(*state, "SELECT typeof(raw_bytes) FROM tensor_totals", "integer");
}

static void test_usage_in_detail(void **state) {
    catalog_sample s, u;
    ckd_checkpoint_list list;
    ckd_checkpoint_roles *roles;
    ckd_tensor_usage *tensors;
    catalog_files files;
    size_t count;
    catalog_sample_init(&s, "b", 1, 100);
    catalog_sample_init(&u, "a", 1, 300);
    u.files[0] = s.files[0];
    u.entry.shard_count = 2;
    change_one(*state, &s.entry, NULL, 0);
    change_one(*state, &u.entry, NULL, 0);
    catalog_sample_init(&s, "b", 2, 101);
    s.entry.shard_count = 0; /* no tensors of any role */
    s.entry.file_count = 0;
    change_one(*state, &s.entry, NULL, 0);

    catalog *c = catalog_sample_open(*state, CATALOG_READ);
    assert_int_equal(catalog_usage_files(&files, c, NULL), CKD_OK);
    assert_int_equal(files.count, 3);
    assert_int_equal(files.chunk_bytes, 1100 + 2100 + 2300);
    assert_int_equal(files.manifest_bytes, 612 + 812 + s.entry.manifest_bytes);

    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    assert_int_equal(catalog_usage_by_checkpoint(&roles, &list, c, NULL), CKD_OK);
    assert_int_equal(roles[0].roles[CKD_ROLE_WEIGHT].raw_bytes, 9437184);
    assert_int_equal(roles[0].roles[CKD_ROLE_WEIGHT].elements, 768 * 3072);
    assert_int_equal(roles[0].roles[CKD_ROLE_WEIGHT].stored_bytes, 2359296 + 2 * 300 + 1);
    assert_int_equal(roles[0].roles[CKD_ROLE_EXP_AVG].raw_bytes, 0);
    assert_int_equal(roles[1].roles[CKD_ROLE_EXP_AVG].raw_bytes, 9437184);
    assert_int_equal(roles[1].roles[CKD_ROLE_MASTER].elements, 0);
    assert_int_equal(roles[2].roles[CKD_ROLE_WEIGHT].raw_bytes, 0);
    free(roles);
    /* A list from another time is noticed. */
    ckd_checkpoint first = list.items[0];
    list.items[0] = list.items[1];
    list.items[1] = first;
    assert_int_equal(catalog_usage_by_checkpoint(&roles, &list, c, NULL), CKD_E_CORRUPT);
    assert_null(roles);
    catalog_list_free(&list);

    assert_int_equal(catalog_usage_by_tensor(&tensors, &count, c, NULL), CKD_OK);
    assert_int_equal(count, 5);
    uint64_t raw = 0;
    for (size_t i = 0; i < count; i++) {
        assert_string_equal(tensors[i].run, i ? "b" : "a");
        raw += tensors[i].raw_bytes;
    }
    assert_int_equal(raw, 3 * 9437184 + 8);
    assert_string_equal(tensors[0].name, "layers.0.weight");
    assert_int_equal(tensors[0].role, CKD_ROLE_WEIGHT);
    assert_int_equal(tensors[0].checkpoints, 1);
    assert_int_equal(tensors[0].elements, 768 * 3072);
    assert_int_equal(tensors[0].stored_bytes, 2359296 + 2 * 300 + 1);
    free(tensors);
    catalog_close(c);
}

/* ---- many ---- */

enum { MANY = 10000, MANY_TENSORS = 20 };

static int count_reads(void *context, file_op step, const char *path) {
    (void)path;
    *(size_t *)context += step == FILE_OP_READ;
    return 0;
}

/* Adds checkpoints of two runs by turns, in one transaction. */
static void add_some(catalog *c, uint64_t first, uint64_t behind) {
    static const uint64_t shape[] = {768, 3072};
    static const ckd_region whole = {.kind = CKD_REGION_WHOLE};
    char names[MANY_TENSORS][32];
    catalog_shard shards[MANY_TENSORS];
    catalog_sample s;
    for (uint32_t k = 0; k < MANY_TENSORS; k++) {
        snprintf(names[k], sizeof(names[k]), "layers.%u.mlp.weight", k);
        catalog_sample_init(&s, "run", 0, 1);
        shards[k] = s.shards[0];
        shards[k].tensor = names[k];
        shards[k].ordinal = k;
        shards[k].shape = shape;
        shards[k].region = &whole;
        shards[k].role = (ckd_role)(1 + k % 3);
    }
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    for (uint64_t i = first; i < behind; i++) {
        catalog_sample_init(&s, i % 2 ? "odd" : "even", i, 2 + i);
        s.entry.shards = shards;
        s.entry.shard_count = MANY_TENSORS;
        s.entry.file_count = 1;
        assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
    }
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
}

/*
 * A checkpoint with very many shards in an empty catalog: all work is on rows that were just inserted. The
 * test counts pages read, not time.
 */
static void check_very_many_shards(catalog *c) {
    enum { TENSORS = 1250, RANKS = 32 };
    static char names[TENSORS][16];
    static const uint64_t shape[2] = {RANKS, 8};
    static ckd_region regions[RANKS];
    catalog_sample s;
    ckd_tensor_list list;
    ckd_tensor_usage *usage;
    size_t count = 0;
    catalog_sample_init(&s, "wide", 1, 5);
    catalog_shard *shards = calloc((size_t)TENSORS * RANKS, sizeof(*shards));
    assert_non_null(shards);
    for (uint32_t r = 0; r < RANKS; r++) {
        regions[r] = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {r, 0}, .lengths = {1, 8}};
    }
    for (uint32_t t = 0; t < TENSORS; t++) {
        snprintf(names[t], sizeof(names[t]), "layer.%u", (unsigned)t);
        for (uint32_t r = 0; r < RANKS; r++) {
            catalog_shard *to = &shards[t * RANKS + r];
            *to = s.shards[0];
            to->tensor = names[t];
            to->ordinal = t;
            to->index = r;
            to->ndim = 2;
            to->shape = shape;
            to->region = &regions[r];
            to->elements = 8;
        }
    }
    s.entry.shards = shards;
    s.entry.shard_count = (size_t)TENSORS * RANKS;
    s.checkpoint.tensors = TENSORS;
    /* The second generation replaces the first. */
    for (uint32_t generation = 0; generation < 2; generation++) {
        s.checkpoint.generation = generation;
        ckd_error err = {0};
        assert_int_equal(catalog_begin(c, NULL), CKD_OK);
        if (catalog_add(c, &s.entry, &err) != CKD_OK) {
            fail_msg("generation %u: %s", (unsigned)generation, err.message);
        }
        assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    }
    assert_int_equal(catalog_tensors(&list, &detailed, c, &s.checkpoint.id, NULL), CKD_OK);
    assert_int_equal(list.count, TENSORS);
    assert_int_equal(list.items[TENSORS - 1].shards, RANKS);
    catalog_tensors_free(&list);
    assert_int_equal(catalog_usage_by_tensor(&usage, &count, c, NULL), CKD_OK);
    assert_int_equal(count, TENSORS);
    free(usage);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_remove(c, "wide", 1, NULL), CKD_OK);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    free(shards);
}

static void test_very_many_shards(void **state) {
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    check_very_many_shards(c);
    catalog_close(c);
    c = catalog_sample_open(*state, CATALOG_MEMORY);
    check_very_many_shards(c);
    catalog_close(c);
}

static uint64_t bytes_written(void) {
    unsigned long long count = 0;
    char line[64];
    FILE *f = fopen("/proc/self/io", "r");
    assert_non_null(f);
    while (fgets(line, sizeof(line), f) && sscanf(line, "wchar: %llu", &count) != 1) {
    }
    fclose(f);
    return count;
}

/*
 * An entry changes some 16 pages besides those that its shards fill: the last page of each table and index, and their
 * parents. A page that was there before is written twice, as the journal keeps its old content.
 */
static void test_an_entry_writes_little(void **state) {
    enum { BEFORE = 100, MEASURED = 50, PAGES = 16, PER_TENSOR = 100 };
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    add_some(c, 0, BEFORE);
    uint64_t start = bytes_written();
    for (uint64_t i = BEFORE; i < BEFORE + MEASURED; i++) {
        add_some(c, i, i + 1);
    }
    uint64_t written = (bytes_written() - start) / MEASURED;
    print_message("bytes written for an entry of %d tensors: %llu\n", MANY_TENSORS,
                  (unsigned long long)written);
    assert_true(written <= 2 * CATALOG_PAGE * PAGES + MANY_TENSORS * PER_TENSOR);
    catalog_close(c);
}

static void test_ten_thousand_checkpoints(void **state) {
    struct stat st;
    size_t reads = 0, count = 0;
    ckd_checkpoint_list list;
    ckd_checkpoint got;
    ckd_tensor_list tensors;
    ckd_usage roles[8], *runs;
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    add_some(c, 0, MANY);
    catalog_close(c);
    assert_int_equal(stat(catalog_sample_path(*state, "catalog.db"), &st), 0);
    size_t pages = (size_t)st.st_size / CATALOG_PAGE;
    print_message("%d checkpoints, %d tensors each: %zu pages\n", MANY, MANY_TENSORS, pages);
    file_set_fault_hook(count_reads, &reads);

    c = catalog_sample_open(*state, CATALOG_READ);
    reads = 0;
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    print_message("list: %zu reads\n", reads);
    assert_true(reads > 0 && reads < pages / 4);
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
    assert_true(reads > 0 && reads < pages / 4);
    assert_int_equal(count, 2);
    assert_int_equal(runs[0].checkpoints, MANY / 2);
    catalog_sample_roles(roles, &count, c);
    assert_int_equal(roles[0].checkpoints, MANY);
    assert_int_equal(roles[0].raw_bytes, UINT64_C(4718592) * 7 * MANY);
    free(runs);
    catalog_close(c);

    ckd_tensor_usage *by_tensor;
    ckd_checkpoint_roles *by_checkpoint;
    c = catalog_sample_open(*state, CATALOG_READ);
    reads = 0;
    assert_int_equal(catalog_usage_by_tensor(&by_tensor, &count, c, NULL), CKD_OK);
    print_message("sums by tensor: %zu reads\n", reads);
    assert_true(reads > 0 && reads < 40);
    assert_int_equal(count, 2 * MANY_TENSORS);
    assert_int_equal(by_tensor[0].checkpoints, MANY / 2);
    free(by_tensor);
    catalog_close(c);

    c = catalog_sample_open(*state, CATALOG_READ);
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    reads = 0;
    assert_int_equal(catalog_usage_by_checkpoint(&by_checkpoint, &list, c, NULL), CKD_OK);
    print_message("roles of each checkpoint: %zu reads\n", reads);
    assert_true(reads > 0 && reads < pages / 4);
    assert_int_equal(by_checkpoint[MANY - 1].roles[CKD_ROLE_WEIGHT].raw_bytes, UINT64_C(4718592) * 7);
    free(by_checkpoint);
    catalog_list_free(&list);
    catalog_close(c);

    c = catalog_sample_open(*state, CATALOG_READ);
    reads = 0;
    assert_int_equal(catalog_newest(&got, c, "odd", 5000, NULL), CKD_OK);
    assert_int_equal(got.step, 4999);
    assert_int_equal(catalog_tensors(&tensors, &detailed, c, &got.id, NULL), CKD_OK);
    assert_int_equal(tensors.count, MANY_TENSORS);
    catalog_tensors_free(&tensors);
    print_message("newest and its tensors: %zu reads\n", reads);
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
    change(*state, "PRAGMA user_version = 8"); /* with our tables */
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "PRAGMA user_version = 3");
    expect_open(*state, CKD_E_MISMATCH);
    change(*state, "PRAGMA user_version = 0");
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "PRAGMA user_version = -1");
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "PRAGMA user_version = 7");
    expect_open(*state, CKD_OK);
    change(*state, "ALTER TABLE meta ADD COLUMN later TEXT");
    expect_open(*state, CKD_E_CORRUPT);
    change(*state, "PRAGMA user_version = 8");
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
    ckd_usage roles[8], *runs;
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
    catalog_sample_roles(roles, &count, c);
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
        TEST(checkpoint_without_tensors),
        TEST(tensors_that_are_not_indexed),
        TEST(entries_give_the_same_tensors),
        TEST(generations),
        TEST(remove),
        TEST(timings),
        TEST(when_files_were_verified),
        TEST(invalid_checkpoints),
        TEST(invalid_shards),
        TEST(transactions),
        TEST(readers_may_not_write),
        TEST(two_handles),
        TEST(commit_waits_for_readers),
        TEST(fork),
        TEST(threads),
        TEST(memory),
        TEST(usage),
        TEST(usage_in_detail),
        TEST(sums_by_tensor_follow),
        TEST(very_many_shards),
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
