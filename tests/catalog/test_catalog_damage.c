/*
 * catalog: whatever the file holds and whatever fails, each call returns a status, without a crash or an
 * endless loop, and the catalog has the old state or the new one. The catalogs here are small. Every run
 * tries the same.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/file.h"
#include "base/vocabulary.h"
#include "catalog/catalog.h"
#include "tests/support/catalogs.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* ---- a catalog on disk, as bytes ---- */

typedef struct image {
    unsigned char *data;
    size_t size;
} image;

static void image_put(const image *i, const char *dir) {
    unlink(catalog_sample_path(dir, "catalog.db-journal"));
    catalog_sample_write(catalog_sample_path(dir, "catalog.db"), i->data, i->size);
}

static image image_get(const char *dir) {
    image i;
    i.data = catalog_sample_read(catalog_sample_path(dir, "catalog.db"), &i.size);
    return i;
}

/* Creates a catalog with `count` checkpoints of two runs. */
static image image_make(const char *dir, uint64_t count) {
    catalog_sample s;
    catalog *c = catalog_sample_open(dir, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    for (uint64_t k = 0; k < count; k++) {
        catalog_sample_init(&s, k % 2 ? "run" : "run~2", k, 10 + k);
        assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_OK);
        assert_int_equal(catalog_add_timing(c, &s.checkpoint.id, "encode", k, k, NULL), CKD_OK);
    }
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    catalog_close(c);
    return image_get(dir);
}

static size_t count_all(catalog *c) {
    ckd_checkpoint_list list;
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_OK);
    size_t count = list.count;
    catalog_list_free(&list);
    return count;
}

/* ---- all queries, on a damaged catalog ---- */

static void expect_one_of(const char *what, ckd_status status, const ckd_error *err,
                          const ckd_status *allowed) {
    for (; *allowed != CKD_OK; allowed++) {
        if (status == *allowed) {
            break;
        }
    }
    if (status != *allowed) {
        fail_msg("%s: %s: %s", what, ckd_status_name(status), err->message);
    }
    assert_true(status == CKD_OK || (err->status == status && err->message[0]));
}

/* The call must return one of these statuses. The list ends with OK, which is always allowed. */
#define EXPECT(call, ...)                                   \
    do {                                                    \
        static const ckd_status allowed_[] = {__VA_ARGS__}; \
        ckd_error err = {0};                                \
        status = (call);                                    \
        expect_one_of(#call, status, &err, allowed_);       \
    } while (0)

static void assert_well_formed(const ckd_checkpoint *p) {
    assert_true(p->kind >= CKD_BASE && p->kind <= CKD_LOSSY_BASE);
    assert_int_equal(p->fidelity, CKD_EXACT);
    assert_true(p->step <= INT64_MAX);
    assert_true(strnlen(p->run, sizeof(p->run)) < sizeof(p->run) && p->run[0]);
    assert_true(strnlen(p->metric_name, sizeof(p->metric_name)) < sizeof(p->metric_name));
}

static void run_queries(catalog *c) {
    ckd_status status;
    ckd_checkpoint_list list;
    ckd_checkpoint found;
    catalog_names runs;
    ckd_usage *rows;
    catalog_files files;
    size_t count;
    ckd_id id = catalog_sample_id(11);
    EXPECT(catalog_list(&list, c, NULL, &err), CKD_E_CORRUPT, CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        assert_well_formed(&list.items[i]);
    }
    catalog_list_free(&list);
    EXPECT(catalog_list(&list, c, "run", &err), CKD_E_CORRUPT, CKD_OK);
    catalog_list_free(&list);
    EXPECT(catalog_find(&found, c, "run", 1, &err), CKD_E_CORRUPT, CKD_E_NOT_FOUND, CKD_OK);
    if (status == CKD_OK) {
        assert_well_formed(&found);
    }
    EXPECT(catalog_find_id(&found, c, &id, &err), CKD_E_CORRUPT, CKD_E_NOT_FOUND, CKD_OK);
    EXPECT(catalog_newest(&found, c, "run~2", UINT64_MAX, &err), CKD_E_CORRUPT, CKD_E_NOT_FOUND, CKD_OK);
    EXPECT(catalog_runs(&runs, c, &err), CKD_E_CORRUPT, CKD_OK);
    catalog_names_free(&runs);
    catalog_file_state *states;
    EXPECT(catalog_file_states(&states, &count, c, &err), CKD_E_CORRUPT, CKD_OK);
    free(states);
    EXPECT(catalog_usage_by_run(&rows, &count, c, &err), CKD_E_CORRUPT, CKD_OK);
    free(rows);
    EXPECT(catalog_usage_files(&files, c, &err), CKD_E_CORRUPT, CKD_OK);
    EXPECT(catalog_check(c, &err), CKD_E_CORRUPT, CKD_OK);
}

static void change(catalog *c, bool commit) {
    ckd_status status;
    catalog_sample s;
    ckd_id id = catalog_sample_id(12);
    EXPECT(catalog_begin(c, &err), CKD_E_CORRUPT, CKD_OK);
    if (status != CKD_OK) {
        return;
    }
    catalog_sample_init(&s, "new", 1, 5000);
    EXPECT(catalog_add(c, &s.entry, &err), CKD_E_CORRUPT, CKD_E_EXISTS, CKD_OK);
    catalog_sample_init(&s, "run", 3, 13);
    s.checkpoint.generation = 1;
    /* An error after which SQLite cannot continue ends the transaction. */
    EXPECT(catalog_add(c, &s.entry, &err), CKD_E_CORRUPT, CKD_E_EXISTS, CKD_E_STATE, CKD_OK);
    EXPECT(catalog_remove(c, "run", 1, &err), CKD_E_CORRUPT, CKD_E_NOT_FOUND, CKD_E_STATE, CKD_OK);
    EXPECT(catalog_add_timing(c, &id, "write", 1, 1, &err), CKD_E_CORRUPT, CKD_E_NOT_FOUND, CKD_E_STATE,
           CKD_OK);
    EXPECT(catalog_set_verified(c, "f", 1, &err), CKD_E_CORRUPT, CKD_E_STATE, CKD_OK);
    if (commit) {
        EXPECT(catalog_commit(c, &err), CKD_E_CORRUPT, CKD_E_STATE, CKD_OK);
    } else {
        catalog_rollback(c);
    }
}

/* Opens the catalog in both modes, and runs all queries. Returns the status of opening it for reading. */
static ckd_status exercise(const char *dir, bool commit) {
    ckd_status status, reading;
    catalog *c;
    ckd_id store = catalog_sample_store();
    const char *path = catalog_sample_path(dir, "catalog.db");
    EXPECT(catalog_open(&c, path, CATALOG_READ, &store, 0, &err), CKD_E_CORRUPT, CKD_E_UNSUPPORTED, CKD_OK);
    reading = status;
    if (status == CKD_OK) {
        run_queries(c);
        catalog_close(c);
    }
    EXPECT(catalog_open(&c, path, CATALOG_WRITE, &store, 0, &err), CKD_E_CORRUPT, CKD_E_UNSUPPORTED, CKD_OK);
    if (status == CKD_OK) {
        change(c, commit);
        run_queries(c);
        catalog_close(c);
    }
    return reading;
}

/* ---- damaged bytes ---- */

static void test_noise(void **state) {
    static const size_t sizes[] = {1, 15, 16, 99, 100, 101, 511, 512, 4095, 4096, 4097, 65536, 100001};
    uint64_t random = 42;
    for (size_t i = 0; i < 2 * sizeof(sizes) / sizeof(sizes[0]); i++) {
        image noise = {.size = sizes[i / 2]};
        noise.data = malloc(noise.size + 16);
        assert_non_null(noise.data);
        for (size_t k = 0; k < noise.size; k++) {
            noise.data[k] = (unsigned char)(next_random(&random) >> 32);
        }
        if (i % 2 && noise.size > 16) {
            memcpy(noise.data, "SQLite format 3", 16);
        }
        image_put(&noise, *state);
        assert_int_equal(exercise(*state, true), CKD_E_CORRUPT);
        free(noise.data);
    }
}

static void test_truncation(void **state) {
    image whole = image_make(*state, 40);
    assert_true(whole.size > 8 * CATALOG_PAGE);
    for (size_t size = whole.size - 1; size > 0; size -= size > 5000 ? 1361 : size > 200 ? 97 : 1) {
        image part = {whole.data, size};
        image_put(&part, *state);
        ckd_status status = exercise(*state, false);
        /* SQLite accepts a page without its last bytes, which may have been zeros. */
        if (size + CATALOG_PAGE <= whole.size) {
            assert_int_equal(status, CKD_E_CORRUPT);
        }
        if (size < 98) {
            size = size > 3 ? size - 2 : size;
        }
    }
    free(whole.data);
}

/* Changes each byte of the header, and random bytes of the file: flipped bits, extremes, other values. */
static void test_changed_bytes(void **state) {
    static const unsigned char extremes[] = {0, 1, 2, 0x7f, 0x80, 0xff};
    uint64_t random = 7;
    size_t refused = 0;
    image good = image_make(*state, 40);
    image bad = {malloc(good.size), good.size};
    assert_non_null(bad.data);
    const unsigned long every = test_stride(3, 1, 1);
    for (size_t i = test_first("changed bytes", every) - 1; i < 500; i += every) {
        memcpy(bad.data, good.data, good.size);
        size_t changes = i < 200 ? 1 : 1 + next_random(&random) % 4;
        for (size_t k = 0; k < changes; k++) {
            size_t at = i < 200 ? i / 2 : next_random(&random) % good.size;
            uint64_t how = next_random(&random);
            if (how % 3 == 0) {
                bad.data[at] ^= (unsigned char)(1U << (how >> 8) % 8);
            } else {
                bad.data[at] =
                    how % 3 == 1 ? extremes[(how >> 8) % sizeof(extremes)] : (unsigned char)(how >> 8);
            }
        }
        image_put(&bad, *state);
        refused += exercise(*state, i % 8 == 0) != CKD_OK;
    }
    print_message("%zu of %lu did not open\n", refused, 500 / every);
    assert_true(refused > 20 / every && refused < 480 / every);
    free(bad.data);
    free(good.data);
}

/* Exchanges, repeats and zeroes whole pages. */
static void test_changed_pages(void **state) {
    uint64_t random = 99;
    image good = image_make(*state, 40);
    image bad = {malloc(good.size), good.size};
    assert_non_null(bad.data);
    size_t pages = good.size / CATALOG_PAGE;
    for (size_t i = 0; i < 120; i++) {
        memcpy(bad.data, good.data, good.size);
        size_t from = next_random(&random) % pages, to = 1 + next_random(&random) % (pages - 1);
        if (i % 4 == 0) {
            memset(bad.data + CATALOG_PAGE * to, 0, CATALOG_PAGE);
        } else {
            memcpy(bad.data + CATALOG_PAGE * to, good.data + CATALOG_PAGE * from, CATALOG_PAGE);
        }
        image_put(&bad, *state);
        exercise(*state, i % 8 == 0);
    }
    free(bad.data);
    free(good.data);
}

/* ---- trees whose pages repeat ---- */

static uint32_t be32(const unsigned char *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void put_be32(unsigned char *p, uint32_t v) {
    p[0] = (unsigned char)(v >> 24);
    p[1] = (unsigned char)(v >> 16);
    p[2] = (unsigned char)(v >> 8);
    p[3] = (unsigned char)v;
}

static uint32_t root_of(const char *dir, const char *name) {
    sqlite3 *db = NULL;
    sqlite3_stmt *stmt = NULL;
    assert_int_equal(sqlite3_open(catalog_sample_path(dir, "catalog.db"), &db), SQLITE_OK);
    assert_int_equal(
        sqlite3_prepare_v2(db, "SELECT rootpage FROM sqlite_master WHERE name = ?1", -1, &stmt, NULL),
        SQLITE_OK);
    assert_int_equal(sqlite3_bind_text(stmt, 1, name, -1, SQLITE_STATIC), SQLITE_OK);
    assert_int_equal(sqlite3_step(stmt), SQLITE_ROW);
    uint32_t root = (uint32_t)sqlite3_column_int64(stmt, 0);
    sqlite3_finalize(stmt);
    sqlite3_close(db);
    return root;
}

/* Makes all children of an inner page the same page. Returns its first child before that. */
static uint32_t point_all(unsigned char *page, uint32_t child) {
    assert_true(page[0] == 0x02 || page[0] == 0x05);
    size_t cells = (size_t)page[3] << 8 | page[4];
    assert_true(cells >= 2);
    uint32_t first = 0;
    for (size_t i = 0; i < cells; i++) {
        unsigned char *cell = page + ((size_t)page[12 + 2 * i] << 8 | page[13 + 2 * i]);
        first = i == 0 ? be32(cell) : first;
        put_be32(cell, child);
    }
    put_be32(page + 8, child);
    return first;
}

/* Gives a tree 12 more levels. All children of an inner page are the same page of the next level. */
static image multiply(const image *good, uint32_t root) {
    enum { LEVELS = 12 };
    image bad = {.size = good->size + LEVELS * CATALOG_PAGE};
    bad.data = malloc(bad.size);
    assert_non_null(bad.data);
    memcpy(bad.data, good->data, good->size);
    uint32_t pages = (uint32_t)(good->size / CATALOG_PAGE);
    unsigned char *top = bad.data + CATALOG_PAGE * (size_t)(root - 1);
    for (uint32_t level = 0; level < LEVELS; level++) {
        memcpy(bad.data + CATALOG_PAGE * (size_t)(pages + level),
               good->data + CATALOG_PAGE * (size_t)(root - 1), CATALOG_PAGE);
    }
    uint32_t leaf = point_all(top, pages + 1);
    for (uint32_t level = 0; level < LEVELS; level++) {
        unsigned char *page = bad.data + CATALOG_PAGE * (size_t)(pages + level);
        point_all(page, level + 1 < LEVELS ? pages + level + 2 : leaf);
    }
    put_be32(bad.data + 28, pages + LEVELS);
    return bad;
}

/*
 * Such a tree has far too many rows to read. Ordered lists notice that the order is wrong, and sums notice
 * that they have taken too much work.
 */
static void test_trees_that_repeat_pages(void **state) {
    static const char *const trees[] = {"checkpoints", "sqlite_autoindex_checkpoints_2", "timings", "files"};
    image good = image_make(*state, 400); /* the root of each tree then has two cells or more */
    ckd_checkpoint_list list;
    ckd_usage *rows;
    size_t count;
    for (size_t i = 0; i < sizeof(trees) / sizeof(trees[0]); i++) {
        image_put(&good, *state);
        image bad = multiply(&good, root_of(*state, trees[i]));
        image_put(&bad, *state);
        catalog *c = catalog_sample_open(*state, CATALOG_READ);
        ckd_error err = {0};
        ckd_status status = CKD_OK;
        switch (i) {
        case 0:
            status = catalog_check(c, &err);
            break;
        case 1:
            status = catalog_list(&list, c, NULL, &err);
            break;
        case 2:
            status = catalog_check(c, &err);
            break;
        default:
            status = catalog_usage_by_run(&rows, &count, c, &err);
            break;
        }
        if (status != CKD_E_CORRUPT || (i == 1 && !strstr(err.message, "out of order"))) {
            fail_msg("%s: %s: %s", trees[i], ckd_status_name(status), err.message);
        }
        run_queries(c);
        catalog_close(c);
        free(bad.data);
    }
    free(good.data);
}

/* ---- rows that the schema forbids ---- */

/* Runs SQL with all checks disabled. */
static void force(const char *dir, const char *sql) {
    sqlite3 *db = NULL;
    char *message = NULL;
    assert_int_equal(sqlite3_open(catalog_sample_path(dir, "catalog.db"), &db), SQLITE_OK);
    assert_int_equal(
        sqlite3_exec(db, "PRAGMA ignore_check_constraints = ON; PRAGMA foreign_keys = OFF", NULL, NULL, NULL),
        SQLITE_OK);
    if (sqlite3_exec(db, sql, NULL, NULL, &message) != SQLITE_OK) {
        fail_msg("%s: %s", sql, message);
    }
    assert_int_equal(sqlite3_close(db), SQLITE_OK);
}

static void expect_corrupt(const char *sql, const char *what, ckd_status status, const ckd_error *err) {
    if (status != CKD_E_CORRUPT || err->status != CKD_E_CORRUPT || !err->file[0]) {
        fail_msg("%s: %s: %s: %s", sql, what, ckd_status_name(status), err->message);
    }
}

/* Values of megabytes are not even read. */
static void expect_too_big(const char *sql, const ckd_error *err) {
    if (strstr(sql, "000000") && !strstr(err->message, "too big")) {
        fail_msg("%s: %s", sql, err->message);
    }
}

static void test_hostile_checkpoints(void **state) {
    static const char *const bad[] = {
        "UPDATE checkpoints SET kind = 0",
        "UPDATE checkpoints SET kind = 4",
        "UPDATE checkpoints SET kind = 1",
        "UPDATE checkpoints SET parent = NULL",
        "UPDATE checkpoints SET parent = x'00'",
        "UPDATE checkpoints SET resumed_from = zeroblob(17)",
        "UPDATE checkpoints SET id = zeroblob(16)",
        "UPDATE checkpoints SET id = zeroblob(3000000)",
        "UPDATE checkpoints SET fidelity = 4",
        "UPDATE checkpoints SET step = -1",
        "UPDATE checkpoints SET generation = 4294967296",
        "UPDATE checkpoints SET world = -1",
        "UPDATE checkpoints SET depth = 9223372036854775807",
        "UPDATE checkpoints SET raw_bytes = -9223372036854775808",
        "UPDATE checkpoints SET metric_name = '12345678901234567890123456789012'",
        "UPDATE checkpoints SET metric_name = CAST(x'ff' AS TEXT)",
        "UPDATE checkpoints SET metric_name = 'a' || char(0) || 'b'",
        "UPDATE checkpoints SET metric_name = CAST(zeroblob(2000000) AS TEXT)",
        "UPDATE runs SET name = '../../etc'",
        "UPDATE runs SET name = ''",
        "UPDATE runs SET name = '.hidden'",
        "UPDATE runs SET name = replace(hex(zeroblob(65)), '0', 'r')",
    };
    image good = image_make(*state, 1);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ckd_checkpoint_list list;
        catalog_names runs;
        ckd_error err = {0};
        image_put(&good, *state);
        force(*state, bad[i]);
        catalog *c = catalog_sample_open(*state, CATALOG_READ);
        expect_corrupt(bad[i], "list", catalog_list(&list, c, NULL, &err), &err);
        expect_too_big(bad[i], &err);
        assert_null(list.items);
        if (strncmp(bad[i], "UPDATE runs", 11) == 0) {
            expect_corrupt(bad[i], "runs", catalog_runs(&runs, c, &err), &err);
            assert_null(runs.names);
        }
        run_queries(c);
        catalog_close(c);
    }
    free(good.data);
}

static void test_hostile_totals(void **state) {
    static const char *const by_run[] = {
        "UPDATE files SET size = -1",
        "UPDATE checkpoints SET manifest_bytes = -1",
        "UPDATE checkpoints SET raw_bytes = 9223372036854775807",
        "UPDATE runs SET name = 'a/b' WHERE key = 1",
    };
    image good = image_make(*state, 6);
    ckd_usage *rows;
    size_t count;
    for (size_t i = 0; i < sizeof(by_run) / sizeof(by_run[0]); i++) {
        ckd_error err = {0};
        image_put(&good, *state);
        force(*state, by_run[i]);
        catalog *c = catalog_sample_open(*state, CATALOG_READ);
        expect_corrupt(by_run[i], "usage by run", catalog_usage_by_run(&rows, &count, c, &err), &err);
        assert_null(rows);
        catalog_close(c);
    }
    free(good.data);
}

/* Exchanges the rows of the second and third entry in an index of one page. Its keys stay in order. */
static void exchange_rows(image *i, uint32_t root) {
    unsigned char *page = i->data + CATALOG_PAGE * (size_t)(root - 1);
    assert_int_equal(page[0], 0x0a);
    unsigned char *a = page + ((size_t)page[10] << 8 | page[11]);
    unsigned char *b = page + ((size_t)page[12] << 8 | page[13]);
    assert_int_equal(a[0], b[0]); /* payloads have the same size; the row is in the last byte */
    unsigned char row = a[a[0]];
    a[a[0]] = b[b[0]];
    b[b[0]] = row;
}

/* The indexes by id and by step name the wrong rows. */
static void test_hostile_indexes(void **state) {
    ckd_checkpoint found;
    ckd_checkpoint_list list;
    ckd_id id = catalog_sample_id(11);
    image good = image_make(*state, 6);
    uint32_t by_id = root_of(*state, "sqlite_autoindex_checkpoints_1");
    uint32_t by_step = root_of(*state, "sqlite_autoindex_checkpoints_2");
    exchange_rows(&good, by_id);
    image_put(&good, *state);
    catalog *c = catalog_sample_open(*state, CATALOG_READ);
    assert_int_equal(catalog_find_id(&found, c, &id, NULL), CKD_E_CORRUPT);
    assert_int_equal(catalog_find(&found, c, "run", 1, NULL), CKD_OK);
    assert_int_equal(catalog_check(c, NULL), CKD_E_CORRUPT);
    catalog_close(c);
    exchange_rows(&good, by_id);

    exchange_rows(&good, by_step);
    image_put(&good, *state);
    c = catalog_sample_open(*state, CATALOG_READ);
    assert_int_equal(catalog_find_id(&found, c, &id, NULL), CKD_OK);
    assert_int_equal(catalog_find(&found, c, "run~2", 2, NULL), CKD_E_CORRUPT);
    assert_int_equal(catalog_newest(&found, c, "run~2", 3, NULL), CKD_E_CORRUPT);
    assert_int_equal(catalog_list(&list, c, NULL, NULL), CKD_E_CORRUPT);
    assert_int_equal(catalog_list(&list, c, "run~2", NULL), CKD_E_CORRUPT);
    assert_int_equal(catalog_list(&list, c, "run", NULL), CKD_OK);
    catalog_list_free(&list);
    catalog_close(c);
    free(good.data);
}

/* An index has lost its rows. The checkpoint that it no longer finds prevents adding the same one. */
static void test_index_without_rows(void **state) {
    catalog_sample s;
    image good = image_make(*state, 6);
    uint32_t by_step = root_of(*state, "sqlite_autoindex_checkpoints_2");
    memset(good.data + CATALOG_PAGE * (size_t)(by_step - 1) + 3, 0, 2);
    image_put(&good, *state);
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_init(&s, "run", 1, 11);
    s.checkpoint.generation = 7;
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, NULL), CKD_E_EXISTS);
    assert_int_equal(catalog_check(c, NULL), CKD_E_CORRUPT);
    catalog_close(c);
    free(good.data);
}

/*
 * Files without a checkpoint prevent adding a new one. What was written of it before the failure is undone.
 */
static void test_add_fails_half_way(void **state) {
    catalog_sample s;
    ckd_error err = {0};
    catalog_sample_init(&s, "other", 1, 100);
    image good = image_make(*state, 1);
    force(
        *state,
        "INSERT INTO files SELECT 2, ordinal, name, rank, size, root, verified_ns FROM files WHERE ordinal > 0");
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(catalog_begin(c, NULL), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, &err), CKD_E_CORRUPT);
    assert_int_equal(count_all(c), 1);
    assert_int_equal(catalog_commit(c, NULL), CKD_OK);
    assert_int_equal(count_all(c), 1);
    catalog_close(c);
    free(good.data);
}

/* ---- copies and replacements ---- */

static void test_older_copy(void **state) {
    image old = image_make(*state, 2);
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    catalog_sample_add(c, "later", 1, 100);
    catalog_close(c);
    image_put(&old, *state);
    c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(count_all(c), 2);
    catalog_sample_add(c, "later", 1, 100);
    assert_int_equal(count_all(c), 3);
    assert_int_equal(catalog_check(c, NULL), CKD_OK);
    catalog_close(c);
    free(old.data);
}

/* Another process has rebuilt the catalog and replaced the file. Nothing may be written to the old one. */
static void test_replaced_while_open(void **state) {
    catalog_sample s;
    ckd_error err = {0};
    catalog_sample_init(&s, "run", 99, 99);
    image good = image_make(*state, 2);
    catalog *c = catalog_sample_open(*state, CATALOG_WRITE);
    assert_int_equal(count_all(c), 2);
    assert_int_equal(
        rename(catalog_sample_path(*state, "catalog.db"), catalog_sample_path(*state, "catalog.db.old")), 0);
    image_put(&good, *state);
    assert_int_equal(catalog_begin(c, &err), CKD_OK);
    assert_int_equal(catalog_add(c, &s.entry, &err), CKD_E_CORRUPT);
    catalog_rollback(c);
    catalog_close(c);
    c = catalog_sample_open(*state, CATALOG_READ);
    assert_int_equal(count_all(c), 2);
    catalog_close(c);
    free(good.data);
}

/* ---- failures of the system ---- */

typedef struct fault {
    int at; /* counted down; the fault happens at 0 */
    file_op step;
    int result;
    bool struck;
    bool for_ever;
} fault;

static int strike(void *context, file_op step, const char *path) {
    fault *f = context;
    (void)path;
    if (step != f->step || (f->struck && !f->for_ever)) {
        return 0;
    }
    if (!f->struck && f->at-- > 0) {
        return 0;
    }
    f->struck = true;
    return f->result;
}

static ckd_status add_one(catalog *c, ckd_error *err) {
    catalog_sample s;
    catalog_sample_init(&s, "added", 1, 900);
    ckd_status status = catalog_begin(c, err);
    if (status == CKD_OK) {
        status = catalog_add(c, &s.entry, err);
        if (status != CKD_OK) {
            catalog_rollback(c);
        } else {
            status = catalog_commit(c, err);
        }
    }
    return status;
}

/* Fails step number `at` of adding a checkpoint. Returns false if there are fewer steps. */
static bool fail_step(const char *dir, const image *before, fault f, ckd_status want) {
    ckd_error err = {0};
    image_put(before, dir);
    catalog *c = catalog_sample_open(dir, CATALOG_WRITE);
    fault armed = f;
    file_set_fault_hook(strike, &armed);
    ckd_status status = add_one(c, &err);
    file_set_fault_hook(NULL, NULL);
    if (!armed.struck) {
        assert_int_equal(status, CKD_OK);
        assert_int_equal(count_all(c), 3);
        catalog_close(c);
        return false;
    }
    if (status != want && status != CKD_OK) {
        fail_msg("step %d at %d: %s: %s", f.step, f.at, ckd_status_name(status), err.message);
    }
    if (status != CKD_OK) {
        assert_string_equal(err.file, catalog_sample_path(dir, "catalog.db"));
    }
    /* This handle and a new one see the whole old state or the whole new one, and can write. */
    size_t count = count_all(c);
    assert_true(count == 3 || (status != CKD_OK && count == 2));
    ckd_status again = add_one(c, &err);
    assert_int_equal(again, count == 3 ? CKD_E_EXISTS : CKD_OK);
    catalog_close(c);
    c = catalog_sample_open(dir, CATALOG_WRITE);
    assert_int_equal(count_all(c), 3);
    assert_int_equal(catalog_check(c, &err), CKD_OK);
    catalog_close(c);
    return true;
}

static void test_failing_steps(void **state) {
    static const struct {
        fault f;
        ckd_status want;
        int least;
    } sweeps[] = {
        {{.step = FILE_OP_WRITE, .result = ENOSPC}, CKD_E_NOSPACE, 5},
        {{.step = FILE_OP_WRITE, .result = ENOSPC, .for_ever = true}, CKD_E_NOSPACE, 5},
        {{.step = FILE_OP_WRITE, .result = EDQUOT}, CKD_E_NOSPACE, 5},
        {{.step = FILE_OP_WRITE, .result = EIO}, CKD_E_IO, 5},
        {{.step = FILE_OP_WRITE, .result = -1}, CKD_E_NOSPACE, 5},
        {{.step = FILE_OP_WRITE, .result = -101}, CKD_E_NOSPACE, 5},
        {{.step = FILE_OP_SYNC, .result = EIO}, CKD_E_IO, 2},
        {{.step = FILE_OP_SYNC, .result = ENOSPC}, CKD_E_NOSPACE, 2},
        {{.step = FILE_OP_CREATE, .result = EACCES}, CKD_E_READ_ONLY, 1},
        {{.step = FILE_OP_CREATE, .result = ENOSPC}, CKD_E_NOSPACE, 1},
        {{.step = FILE_OP_CREATE, .result = EMFILE}, CKD_E_IO, 1},
        {{.step = FILE_OP_REMOVE, .result = EIO}, CKD_E_IO, 1},
        {{.step = FILE_OP_DIR_SYNC, .result = EIO}, CKD_E_IO, 1},
        {{.step = FILE_OP_READ, .result = EIO}, CKD_E_IO, 3},
        {{.step = FILE_OP_LOCK, .result = EAGAIN}, CKD_E_BUSY, 3},
        {{.step = FILE_OP_LOCK, .result = EIO}, CKD_E_IO, 3},
    };
    image before = image_make(*state, 2);
    for (size_t i = 0; i < sizeof(sweeps) / sizeof(sweeps[0]); i++) {
        fault f = sweeps[i].f;
        while (fail_step(*state, &before, f, sweeps[i].want)) {
            f.at++;
        }
        if (f.at < sweeps[i].least) {
            fail_msg("sweep %zu: only %d steps", i, f.at);
        }
    }
    free(before.data);
}

/* Creating the catalog: each step fails in turn. */
static void test_failing_creation(void **state) {
    static const struct {
        file_op step;
        int result;
        ckd_status want;
    } sweeps[] = {
        {FILE_OP_CREATE, ENOSPC, CKD_E_NOSPACE},
        {FILE_OP_WRITE, ENOSPC, CKD_E_NOSPACE},
        {FILE_OP_SYNC, EIO, CKD_E_IO},
        {FILE_OP_READ, EIO, CKD_E_IO},
    };
    ckd_id store = catalog_sample_store();
    for (size_t i = 0; i < sizeof(sweeps) / sizeof(sweeps[0]); i++) {
        for (int at = 0;; at++) {
            fault f = {.at = at, .step = sweeps[i].step, .result = sweeps[i].result};
            catalog *c = NULL;
            ckd_error err = {0};
            unlink(catalog_sample_path(*state, "catalog.db"));
            file_set_fault_hook(strike, &f);
            ckd_status status =
                catalog_open(&c, catalog_sample_path(*state, "catalog.db"), CATALOG_WRITE, &store, 0, &err);
            file_set_fault_hook(NULL, NULL);
            if (status != CKD_OK) {
                assert_null(c);
                assert_int_equal(status, sweeps[i].want);
                c = catalog_sample_open(*state, CATALOG_WRITE);
            }
            assert_int_equal(count_all(c), 0);
            catalog_close(c);
            if (!f.struck) {
                assert_true(at > 0);
                break;
            }
        }
    }
}

/* ---- processes that die ---- */

/* Kills the process at step number *context, counting steps that change files. */
static int die(void *context, file_op step, const char *path) {
    int *left = context;
    (void)path;
    if (step != FILE_OP_READ && step != FILE_OP_OPEN && step != FILE_OP_LOCK && (*left)-- == 0) {
        _exit(99);
    }
    return 0;
}

/* A child adds a checkpoint and dies at step `at`. Returns true if it survived. */
static bool child_adds(const char *dir, int at) {
    int wait_status = -1;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        catalog *c = NULL;
        ckd_id store = catalog_sample_store();
        file_set_fault_hook(die, &at);
        ckd_status status =
            catalog_open(&c, catalog_sample_path(dir, "catalog.db"), CATALOG_WRITE, &store, 0, NULL);
        if (status == CKD_OK) {
            status = add_one(c, NULL);
            catalog_close(c);
        }
        _exit(status == CKD_OK ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &wait_status, 0), child);
    assert_true(WIFEXITED(wait_status) && (WEXITSTATUS(wait_status) == 0 || WEXITSTATUS(wait_status) == 99));
    return WEXITSTATUS(wait_status) == 0;
}

static image file_or_nothing(const char *path) {
    image i = {0};
    if (file_exists(path)) {
        i.data = catalog_sample_read(path, &i.size);
    }
    return i;
}

/*
 * A reader sees the old state or the new one, or returns CORRUPT because of the journal. It changes no file.
 */
static ckd_status read_after_death(const char *dir, size_t old) {
    const char *db = catalog_sample_path(dir, "catalog.db"),
               *journal = catalog_sample_path(dir, "catalog.db-journal");
    image before[2] = {file_or_nothing(db), file_or_nothing(journal)};
    catalog *c = NULL;
    ckd_error err = {0};
    ckd_id store = catalog_sample_store();
    ckd_status status = catalog_open(&c, db, CATALOG_READ, &store, 0, &err);
    if (status == CKD_OK) {
        size_t count = count_all(c);
        assert_true(count == old || count == old + 1);
        catalog_close(c);
    } else {
        assert_true(status == CKD_E_CORRUPT || (status == CKD_E_NOT_FOUND && !before[0].data));
    }
    image after[2] = {file_or_nothing(db), file_or_nothing(journal)};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(before[i].size, after[i].size);
        assert_true(!before[i].data == !after[i].data);
        assert_true(!before[i].size || memcmp(before[i].data, after[i].data, before[i].size) == 0);
        free(before[i].data);
        free(after[i].data);
    }
    return status;
}

static void die_everywhere(const char *dir, const image *before, size_t old) {
    int hot = 0;
    for (int at = 0;; at++) {
        if (before) {
            image_put(before, dir);
        } else {
            unlink(catalog_sample_path(dir, "catalog.db"));
            unlink(catalog_sample_path(dir, "catalog.db-journal"));
        }
        bool lived = child_adds(dir, at);
        hot += read_after_death(dir, old) == CKD_E_CORRUPT;
        catalog *c = catalog_sample_open(dir, CATALOG_WRITE);
        size_t count = count_all(c);
        assert_true(count == old + 1 || (!lived && count == old));
        assert_int_equal(catalog_check(c, NULL), CKD_OK);
        assert_int_equal(add_one(c, NULL), count == old ? CKD_OK : CKD_E_EXISTS);
        catalog_close(c);
        if (lived) {
            print_message("%d steps, %d of them leave a reader nothing\n", at, hot);
            assert_true(at > 8 && hot > 0 && hot < at);
            break;
        }
    }
}

static void test_death_while_adding(void **state) {
    image before = image_make(*state, 40);
    die_everywhere(*state, &before, 40);
    free(before.data);
}

static void test_death_while_creating(void **state) {
    die_everywhere(*state, NULL, 0);
}

/* ---- no memory ---- */

static sqlite3_mem_methods real_memory;
static long allocations_left = -1; /* -1: no limit */

static bool no_memory(void) {
    if (allocations_left < 0) {
        return false;
    }
    if (allocations_left == 0) {
        return true;
    }
    allocations_left--;
    return false;
}

static void *limited_malloc(int size) {
    return no_memory() ? NULL : real_memory.xMalloc(size);
}

static void *limited_realloc(void *p, int size) {
    return no_memory() ? NULL : real_memory.xRealloc(p, size);
}

/* Once an allocation has failed, all later ones fail, too. */
static void test_out_of_memory(void **state) {
    ckd_id store = catalog_sample_store();
    image before = image_make(*state, 2);
    long n = 0;
    for (bool enough = false; !enough; n += n < 300 ? 7 : 41) {
        catalog *c = NULL;
        ckd_error err = {0};
        ckd_checkpoint_list list = {0};
        image_put(&before, *state);
        allocations_left = n;
        ckd_status status =
            catalog_open(&c, catalog_sample_path(*state, "catalog.db"), CATALOG_WRITE, &store, 0, &err);
        if (status == CKD_OK) {
            status = add_one(c, &err);
        }
        if (status == CKD_OK) {
            status = catalog_list(&list, c, NULL, &err);
        }
        enough = allocations_left > 0;
        allocations_left = -1;
        if (status != CKD_OK && status != CKD_E_NOMEM) {
            fail_msg("allocation %ld: %s: %s", n, ckd_status_name(status), err.message);
        }
        assert_true(!enough || status == CKD_OK);
        catalog_list_free(&list);
        catalog_close(c);
        c = catalog_sample_open(*state, CATALOG_WRITE);
        assert_int_equal(catalog_check(c, NULL), CKD_OK);
        size_t count = count_all(c);
        assert_true(count == 3 || (!enough && count == 2));
        catalog_close(c);
    }
    print_message("%ld allocations\n", n);
    assert_true(n > 300);
    free(before.data);
}

int main(void) {
    /*
     * Install this before SQLite starts: all of its memory is allocated here. Only test_out_of_memory limits
     * it.
     */
    if (sqlite3_config(SQLITE_CONFIG_GETMALLOC, &real_memory) != SQLITE_OK) {
        return 1;
    }
    sqlite3_mem_methods limited = real_memory;
    limited.xMalloc = limited_malloc;
    limited.xRealloc = limited_realloc;
    if (sqlite3_config(SQLITE_CONFIG_MALLOC, &limited) != SQLITE_OK) {
        return 1;
    }
#define TEST(name) tempdir_test(test_##name)
    const struct CMUnitTest tests[] = {
        TEST(noise),
        TEST(truncation),
        TEST(changed_bytes),
        TEST(changed_pages),
        TEST(trees_that_repeat_pages),
        TEST(hostile_checkpoints),
        TEST(hostile_totals),
        TEST(hostile_indexes),
        TEST(index_without_rows),
        TEST(add_fails_half_way),
        TEST(older_copy),
        TEST(replaced_while_open),
        TEST(failing_steps),
        TEST(failing_creation),
        TEST(death_while_adding),
        TEST(death_while_creating),
        TEST(out_of_memory),
    };
    return run_sampled("catalog_damage", tests, 2, NULL, NULL);
}
