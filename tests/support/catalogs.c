#include "tests/support/catalogs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sqlite3.h>

ckd_id catalog_sample_id(uint64_t seed) {
    ckd_id id;
    for (size_t i = 0; i < sizeof(id.bytes); i++) {
        id.bytes[i] = (uint8_t)(i < 8 ? seed >> (8 * i) : 0xa0 + i);
    }
    return id;
}

void catalog_sample_init(catalog_sample *s, const char *run, uint64_t step, uint64_t seed) {
    memset(s, 0, sizeof(*s));
    s->checkpoint = (ckd_checkpoint){
        .id = catalog_sample_id(seed),
        .parent = catalog_sample_id(seed - 1),
        .resumed_from = catalog_sample_id(seed + 1000000),
        .step = step,
        .kind = CKD_DELTA,
        .fidelity = CKD_EXACT,
        .lossy_resumes = 2,
        .depth = 3,
        .world = 4,
        .tensors = 5,
        .raw_bytes = 18874376 + seed,
        .stored_bytes = 4718594 + seed,
        .load_cost = 1.75,
        .created_ns = UINT64_C(1700000000123456789) + seed,
        .metric = -3.0625,
        .metric_name = "val_loss",
    };
    snprintf(s->checkpoint.run, sizeof(s->checkpoint.run), "%s", run);
    for (uint32_t i = 0; i < SAMPLE_FILES; i++) {
        catalog_file *f = &s->files[i];
        snprintf(f->name, sizeof(f->name), "%016llx.%u", (unsigned long long)seed, i);
        f->rank = i;
        f->size = 1000 * (i + 1) + seed;
        memset(f->root.bytes, (int)(i + 1), sizeof(f->root.bytes));
    }
    s->entry = (catalog_entry){
        .checkpoint = &s->checkpoint,
        .manifest_bytes = 512 + seed,
        .files = s->files,
        .file_count = SAMPLE_FILES,
    };
}

ckd_id catalog_sample_store(void) {
    return catalog_sample_id(0x5357);
}

const char *catalog_sample_path(const char *dir, const char *name) {
    static char paths[2][1024];
    static int next;
    next = !next;
    snprintf(paths[next], sizeof(paths[next]), "%s/%s", dir, name);
    return paths[next];
}

catalog *catalog_sample_open(const char *dir, catalog_mode mode) {
    catalog *c = NULL;
    ckd_error err = {0};
    ckd_id store = catalog_sample_store();
    if (catalog_open(&c, catalog_sample_path(dir, "catalog.db"), mode, &store, 0, &err) != CKD_OK) {
        fail_msg("catalog_open: %s", err.message);
    }
    return c;
}

void catalog_sample_add(catalog *c, const char *run, uint64_t step, uint64_t seed) {
    catalog_sample s;
    ckd_error err = {0};
    catalog_sample_init(&s, run, step, seed);
    if (catalog_begin(c, &err) != CKD_OK || catalog_add(c, &s.entry, &err) != CKD_OK ||
        catalog_commit(c, &err) != CKD_OK) {
        fail_msg("adding %s@%llu: %s", run, (unsigned long long)step, err.message);
    }
}

unsigned char *catalog_sample_read(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    long end = ftell(f);
    assert_true(end >= 0);
    rewind(f);
    unsigned char *data = malloc((size_t)end + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, (size_t)end, f), (size_t)end);
    fclose(f);
    *size = (size_t)end;
    return data;
}

void catalog_sample_write(const char *path, const unsigned char *data, size_t size) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

/* Tables that version 7 had besides, with fewer columns, and the tensors of each checkpoint. */
static const char tensor_tables[] =
    "CREATE INDEX undetailed ON checkpoints (run, step) WHERE detailed = 0;"
    "CREATE TABLE tensor_names (key INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;"
    "CREATE TABLE shards (checkpoint INTEGER NOT NULL REFERENCES checkpoints (key) ON DELETE CASCADE, "
    "tensor INTEGER NOT NULL REFERENCES tensor_names (key), shard INTEGER NOT NULL, stored_bytes INTEGER NOT NULL, "
    "PRIMARY KEY (checkpoint, tensor, shard)) STRICT, WITHOUT ROWID;"
    "CREATE TABLE role_totals (checkpoint INTEGER NOT NULL REFERENCES checkpoints (key) ON DELETE CASCADE, "
    "role INTEGER NOT NULL, stored_bytes INTEGER NOT NULL, PRIMARY KEY (checkpoint, role)) STRICT, WITHOUT ROWID;"
    "CREATE TABLE tensor_totals (run INTEGER NOT NULL REFERENCES runs (key) ON DELETE CASCADE, "
    "tensor INTEGER NOT NULL REFERENCES tensor_names (key), role INTEGER NOT NULL, stored_bytes INTEGER NOT NULL, "
    "PRIMARY KEY (run, tensor, role)) STRICT, WITHOUT ROWID;"
    "CREATE VIEW tensor_list AS SELECT n.name, s.stored_bytes FROM shards s JOIN tensor_names n ON n.key = s.tensor;"
    "UPDATE checkpoints SET detailed = 1;"
    "INSERT INTO tensor_names WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200) "
    "SELECT i, 'layers.' || i || '.weight' FROM n;"
    "INSERT INTO shards SELECT c.key, n.key, 0, 1000 + n.key FROM checkpoints c, tensor_names n;"
    "INSERT INTO role_totals SELECT key, 1, 9000 FROM checkpoints;"
    "INSERT INTO tensor_totals SELECT r.key, n.key, 1, 2000 + n.key FROM runs r, tensor_names n;";

void catalog_sample_age(const char *dir, int version) {
    sqlite3 *db = NULL;
    char sql[64];
    assert_true(version >= 5 && version <= 7);
    snprintf(sql, sizeof(sql), "PRAGMA user_version = %d", version);
    assert_int_equal(sqlite3_open(catalog_sample_path(dir, "catalog.db"), &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, tensor_tables, NULL, NULL, NULL), SQLITE_OK);
    if (version < 7) {
        assert_int_equal(sqlite3_exec(db, "DROP TABLE suspects", NULL, NULL, NULL), SQLITE_OK);
    }
    if (version < 6) {
        assert_int_equal(sqlite3_exec(db, "DROP TABLE rank_timings", NULL, NULL, NULL), SQLITE_OK);
    }
    assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_close(db), SQLITE_OK);
}
