/*
 * Catalogs with any rows, without CHECK, STRICT and foreign keys; then changed bytes of the file, and
 * statements that add triggers and the like. Every call returns values that its header promises, or fails.
 * None crashes, hangs, or takes much memory.
 *
 * An input is a list of changes: a kind, and up to four bytes of place. A change of a row also has a value.
 */
#include <fcntl.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/catalogs.h"
#include "tests/support/fuzz.h"

enum { CHANGES_MAX = 32, VALUE_MAX = 200, SAMPLES = 3, TABLES_MAX = 32 };

static const struct {
    const char *table, *key, *columns[20];
} tables[] = {
    {"meta", "key", {"key", "value"}},
    {"vocabulary", "what", {"what", "number", "word"}},
    {"runs", "key", {"key", "name"}},
    {"checkpoints",
     "key",
     {"key",         "id",        "run",          "step",           "parent",    "resumed_from",
      "generation",  "kind",      "fidelity",     "lossy_resumes",  "depth",     "world",
      "tensors",     "raw_bytes", "stored_bytes", "manifest_bytes", "load_cost", "created_ns",
      "metric_name", "detailed"}},
    {"files", "checkpoint", {"checkpoint", "ordinal", "name", "rank", "size", "root", "verified_ns"}},
    {"timings", "checkpoint", {"checkpoint", "stage", "ns", "bytes"}},
    {"rank_timings", "checkpoint", {"checkpoint", "rank", "stage", "begin_ns", "end_ns", "work_ns", "bytes"}},
    {"suspects", "checkpoint", {"checkpoint", "reasons"}},
};
enum { TABLES = sizeof(tables) / sizeof(tables[0]) };

static const char *const statements[] = {
    "DELETE FROM checkpoints",
    "DELETE FROM files",
    "DELETE FROM runs",
    "DELETE FROM meta WHERE key = 'format'",
    "DROP VIEW checkpoint_list",
    "CREATE VIEW shards AS SELECT 1",
    "CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM checkpoints; END",
    "CREATE VIEW v AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
    "CREATE TABLE extra (x, y DEFAULT (randomblob(1000000000)))",
    "CREATE UNIQUE INDEX more ON files (name)",
    "PRAGMA user_version = 9",
    "PRAGMA user_version = 5",
    "PRAGMA application_id = 1",
    "UPDATE OR REPLACE files SET ordinal = ordinal + 7",
};
enum { STATEMENTS = sizeof(statements) / sizeof(statements[0]) };

static char dir[64], path[96];
static unsigned char *template;
static size_t template_size;
static char *schema[TABLES_MAX][2]; /* name and statement of each table, as the library made it */
static int schema_count;

static void require(bool holds) {
    if (!holds) {
        abort();
    }
}

/* ---- the initial catalog ---- */

static void remove_files(void) {
    static const char *const names[] = {"catalog.db", "catalog.db-journal", "catalog.db-wal",
                                        "catalog.db-shm"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        unlink(catalog_sample_path(dir, names[i]));
    }
}

static void end(void) {
    remove_files();
    rmdir(dir);
    free(template);
    for (int i = 0; i < schema_count; i++) {
        sqlite3_free(schema[i][0]);
        sqlite3_free(schema[i][1]);
    }
}

static sqlite3 *raw_open(void) {
    sqlite3 *db;
    require(sqlite3_open(path, &db) == SQLITE_OK);
    require(
        sqlite3_exec(
            db,
            "PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY; PRAGMA ignore_check_constraints = ON;"
            "PRAGMA foreign_keys = OFF; PRAGMA writable_schema = ON",
            NULL, NULL, NULL) == SQLITE_OK);
    return db;
}

static int keep_schema(void *context, int count, char **values, char **names) {
    (void)context;
    (void)count;
    (void)names;
    require(schema_count < TABLES_MAX);
    schema[schema_count][0] = sqlite3_mprintf("%s", values[0]);
    schema[schema_count++][1] = sqlite3_mprintf("%s", values[1]);
    return 0;
}

/* Keeps the tables without STRICT, so that any column can have any value. */
static void begin(void) {
    if (template) {
        return;
    }
    snprintf(dir, sizeof(dir), "%s/ckptdelta-fuzz-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    require(mkdtemp(dir) != NULL);
    snprintf(path, sizeof(path), "%s/catalog.db", dir);
    catalog *c = catalog_sample_open(dir, CATALOG_WRITE);
    for (unsigned i = 0; i < SAMPLES; i++) {
        catalog_sample_add(c, i < 2 ? "run" : "other", 10 * i, i + 1);
    }
    catalog_close(c);
    sqlite3 *db = raw_open();
    require(sqlite3_exec(db,
                         "SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND sql LIKE '%STRICT%'",
                         keep_schema, NULL, NULL) == SQLITE_OK);
    require(
        sqlite3_exec(
            db,
            "UPDATE sqlite_schema SET sql = replace(replace(sql, ' STRICT, WITHOUT', ' WITHOUT'), ' STRICT', '')",
            NULL, NULL, NULL) == SQLITE_OK);
    sqlite3_close(db);
    template = catalog_sample_read(path, &template_size);
    atexit(end);
}

/* ---- changes ---- */

typedef struct input {
    const uint8_t *at;
    size_t left;
} input;

static unsigned take(input *in) {
    if (in->left == 0) {
        return 0;
    }
    in->left--;
    return *in->at++;
}

static void bind_value(sqlite3_stmt *s, input *in) {
    static const sqlite3_int64 odd[] = {0, 1, -1, INT64_MAX, INT64_MIN, UINT32_MAX, 1LL << 32, 1LL << 40};
    unsigned type = take(in), length = take(in) % VALUE_MAX;
    length = length < in->left ? length : (unsigned)in->left;
    uint64_t number = 0;
    for (unsigned i = 0; i < 8 && i < length; i++) {
        number |= (uint64_t)in->at[i] << 8 * i;
    }
    double real;
    memcpy(&real, &number, sizeof(real));
    switch (type % 6) {
    case 0:
        sqlite3_bind_int64(s, 1, (sqlite3_int64)number);
        break;
    case 1:
        sqlite3_bind_int64(s, 1, odd[number % 8]);
        break;
    case 2:
        sqlite3_bind_text(s, 1, (const char *)in->at, (int)length, SQLITE_TRANSIENT);
        break;
    case 3:
        sqlite3_bind_blob(s, 1, in->at, (int)length, SQLITE_TRANSIENT);
        break;
    case 4:
        sqlite3_bind_double(s, 1, real);
        break;
    default:
        sqlite3_bind_null(s, 1);
    }
    in->at += length;
    in->left -= length;
}

static void change_row(sqlite3 *db, input *in) {
    unsigned table = take(in) % TABLES, column = take(in), row = take(in) % 8, columns = 0;
    while (columns < 20 && tables[table].columns[columns]) {
        columns++;
    }
    const char *t = tables[table].table, *key = tables[table].key;
    char *sql =
        sqlite3_mprintf("UPDATE OR REPLACE %s SET %s = ?1 WHERE %s = (SELECT %s FROM %s LIMIT 1 OFFSET %u)",
                        t, tables[table].columns[column % columns], key, key, t, row);
    sqlite3_stmt *s = NULL;
    if (sqlite3_prepare_v2(db, sql, -1, &s, NULL) == SQLITE_OK) {
        bind_value(s, in);
        (void)sqlite3_step(s);
    }
    sqlite3_finalize(s);
    sqlite3_free(sql);
}

static void restore_schema(sqlite3 *db) {
    sqlite3_stmt *s = NULL;
    if (sqlite3_prepare_v2(db, "UPDATE sqlite_schema SET sql = ?2 WHERE name = ?1", -1, &s, NULL) !=
        SQLITE_OK) {
        return;
    }
    for (int i = 0; i < schema_count; i++) {
        sqlite3_bind_text(s, 1, schema[i][0], -1, SQLITE_STATIC);
        sqlite3_bind_text(s, 2, schema[i][1], -1, SQLITE_STATIC);
        (void)sqlite3_step(s);
        sqlite3_reset(s);
    }
    sqlite3_finalize(s);
}

/* Changes a byte anywhere, or at the beginning of a page, where it has an effect more often. */
static void change_byte(input *in) {
    unsigned at = take(in) | take(in) << 8 | take(in) << 16, value = take(in);
    struct stat st;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    require(fd >= 0 && fstat(fd, &st) == 0);
    if (st.st_size > 0) {
        off_t place =
            at & 1 ? (off_t)(at >> 1) % st.st_size : (off_t)((at >> 9) * 4096 + (at >> 1) % 64) % st.st_size;
        uint8_t byte = (uint8_t)value;
        require(pwrite(fd, &byte, 1, place) == 1);
    }
    close(fd);
}

static void change(input *in) {
    input bytes_later = {NULL, 0};
    sqlite3 *db = raw_open();
    (void)sqlite3_exec(db, "BEGIN", NULL, NULL, NULL);
    for (int i = 0; i < CHANGES_MAX && in->left; i++) {
        unsigned kind = take(in) % 8;
        if (kind == 7) {
            bytes_later = *in; /* the rest are changes of bytes in the file */
            break;
        }
        if (kind == 6) {
            (void)sqlite3_exec(db, statements[take(in) % STATEMENTS], NULL, NULL, NULL);
        } else {
            change_row(db, in);
        }
    }
    restore_schema(db);
    (void)sqlite3_exec(db, "COMMIT", NULL, NULL, NULL);
    sqlite3_close(db);
    while (bytes_later.left) {
        change_byte(&bytes_later);
    }
}

/* ---- calls ---- */

static void check_checkpoint(const ckd_checkpoint *c) {
    require(c->run[0] && strlen(c->run) <= CKD_RUN_MAX && c->step <= INT64_MAX);
    require(c->kind >= CKD_BASE && c->kind <= CKD_LOSSY_BASE && c->fidelity >= CKD_EXACT &&
            c->fidelity <= CKD_COARSE);
    require(memchr(c->metric_name, 0, sizeof(c->metric_name)) != NULL);
}

static void query_lists(catalog *c) {
    ckd_checkpoint_list list;
    catalog_names names;
    ckd_checkpoint one;
    bool opened;
    if (catalog_snapshot(&opened, c, NULL) != CKD_OK) {
        return;
    }
    if (catalog_list(&list, c, NULL, NULL) == CKD_OK) {
        for (size_t i = 0; i < list.count; i++) {
            check_checkpoint(&list.items[i]);
        }
        catalog_list_free(&list);
    }
    if (catalog_runs(&names, c, NULL) == CKD_OK) {
        for (size_t i = 0; i < names.count; i++) {
            if (catalog_newest(&one, c, names.names[i], UINT64_MAX, NULL) == CKD_OK) {
                check_checkpoint(&one);
            }
        }
        catalog_names_free(&names);
    }
    catalog_snapshot_end(c, opened);
}

static void query_sums(catalog *c) {
    ckd_usage *by_run = NULL;
    catalog_files files;
    ckd_timeline timings = {0};
    char note[CATALOG_META];
    size_t count;
    (void)catalog_usage_by_run(&by_run, &count, c, NULL);
    (void)catalog_usage_files(&files, c, NULL);
    if (catalog_timings(&timings, c, NULL, NULL) == CKD_OK) {
        free(timings.items);
        free(timings.stages);
    }
    if (catalog_meta(note, c, "mark", NULL) == CKD_OK) {
        require(memchr(note, 0, sizeof(note)) != NULL);
    }
    free(by_run);
}

static void write_some(catalog *c) {
    catalog_sample s;
    catalog_sample_init(&s, "run", 70, 7);
    if (catalog_begin(c, NULL) != CKD_OK) {
        return;
    }
    (void)catalog_add(c, &s.entry, NULL);
    (void)catalog_remove(c, "run", 10, NULL);
    (void)catalog_set_meta(c, "mark", "x", NULL);
    (void)catalog_commit(c, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    begin();
    remove_files();
    catalog_sample_write(path, template, template_size);
    input in = {data, size};
    change(&in);
    ckd_id store = catalog_sample_store();
    for (int mode = 0; mode < 2; mode++) {
        catalog *c;
        if (catalog_open(&c, path, mode ? CATALOG_WRITE : CATALOG_READ, &store, 100, NULL) == CKD_OK) {
            query_lists(c);
            query_sums(c);
            if (mode) {
                write_some(c);
                query_lists(c);
            }
        }
        catalog_close(c);
    }
    return 0;
}
