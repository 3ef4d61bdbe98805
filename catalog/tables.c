/*
 * Recognises a catalog. Before a file is trusted, its identity, version and tables are compared with those of
 * schema.sql. An empty file gets these tables.
 */
#include <stdio.h>
#include <string.h>

#include "catalog/db.h"
#include "catalog_schema.h"

/* Fields that identify a catalog and its version. */
typedef struct identity {
    int64_t application, version;
    int64_t objects; /* number of tables, indexes and views; 0: an empty file */
} identity;

static int number_read(int64_t *out, sqlite3 *db, const char *sql) {
    sqlite3_stmt *stmt = NULL;
    *out = 0;
    int rc = sqlite3_prepare_v2(db, sql, -1, &stmt, NULL);
    if (rc == SQLITE_OK) {
        rc = sqlite3_step(stmt);
    }
    if (rc == SQLITE_ROW) {
        *out = sqlite3_column_int64(stmt, 0);
        rc = SQLITE_OK;
    } else if (rc == SQLITE_DONE) {
        rc = SQLITE_CORRUPT;
    }
    int end = sqlite3_finalize(stmt);
    return rc != SQLITE_OK ? rc : end;
}

static int identity_read(identity *out, sqlite3 *db) {
    int rc = number_read(&out->application, db, "PRAGMA application_id");
    if (rc == SQLITE_OK) {
        rc = number_read(&out->version, db, "PRAGMA user_version");
    }
    return rc == SQLITE_OK ? number_read(&out->objects, db, "SELECT count(*) FROM sqlite_master") : rc;
}

static bool identity_blank(const identity *i) {
    return i->application == 0 && i->version == 0 && i->objects == 0;
}

/* Does `found` return the SQL of the object in the current row (type, name, sql) of `expected`? */
static int object_same(bool *same, sqlite3_stmt *found, sqlite3_stmt *expected) {
    const unsigned char *expected_sql = sqlite3_column_text(expected, 2);
    *same = false;
    int rc = sqlite3_bind_value(found, 1, sqlite3_column_value(expected, 0));
    if (rc == SQLITE_OK) {
        rc = sqlite3_bind_value(found, 2, sqlite3_column_value(expected, 1));
    }
    if (rc == SQLITE_OK) {
        rc = sqlite3_step(found);
    }
    if (rc == SQLITE_ROW) {
        const unsigned char *have = sqlite3_column_text(found, 0);
        *same = expected_sql && have && strcmp((const char *)expected_sql, (const char *)have) == 0;
        rc = SQLITE_OK;
    } else if (rc == SQLITE_DONE) {
        rc = SQLITE_OK;
    }
    int end = sqlite3_reset(found);
    return rc != SQLITE_OK ? rc : end;
}

/* Tables that catalogs of older versions lack. Such catalogs are usable and get upgraded. */
static const struct added_table {
    int64_t version; /* the first with this table */
    const char *name, *columns;
} added_tables[] = {{6, "rank_timings", "checkpoint, rank, stage, begin_ns, end_ns, work_ns, bytes"},
                    {7, "suspects", "checkpoint INTEGER PRIMARY KEY, reasons"}};
enum { ADDED_TABLES = sizeof(added_tables) / sizeof(added_tables[0]) };

/* Objects of catalogs before version 8. A writer drops them in this order, as rows refer to tensor_names. */
static const char dropped_objects[] =
    "DROP VIEW IF EXISTS tensor_list; DROP INDEX IF EXISTS undetailed; DROP TABLE IF EXISTS shards;"
    "DROP TABLE IF EXISTS role_totals; DROP TABLE IF EXISTS tensor_totals; DROP TABLE IF EXISTS tensor_names;";

static bool is_older(int64_t version) {
    enum { OLDEST = 5, PRESENT = 8 };
    return version >= OLDEST && version < PRESENT;
}

/* May a catalog of this version lack the table? */
static bool may_lack(int64_t version, const char *table) {
    for (size_t i = 0; i < ADDED_TABLES; i++) {
        if (version < added_tables[i].version && strcmp(table, added_tables[i].name) == 0) {
            return is_older(version);
        }
    }
    return false;
}

/*
 * Does `db`, a catalog of this version, have all its tables, indexes and views, word for word? Other objects are
 * ignored, such as ANALYZE statistics or an index added by hand.
 */
static int schema_same(bool *same, sqlite3 *db, sqlite3 *reference, int64_t version) {
    sqlite3_stmt *expected = NULL, *found = NULL;
    *same = true;
    int rc = sqlite3_prepare_v2(reference, "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL",
                                -1, &expected, NULL);
    if (rc == SQLITE_OK) {
        rc = sqlite3_prepare_v2(db, "SELECT sql FROM sqlite_master WHERE type = ?1 AND name = ?2", -1, &found,
                                NULL);
    }
    while (rc == SQLITE_OK && *same && (rc = sqlite3_step(expected)) == SQLITE_ROW) {
        const char *name = (const char *)sqlite3_column_text(expected, 1);
        bool needed = !name || !may_lack(version, name);
        rc = needed ? object_same(same, found, expected) : SQLITE_OK;
    }
    rc = rc == SQLITE_DONE ? SQLITE_OK : rc;
    int end = sqlite3_finalize(found);
    (void)sqlite3_finalize(expected);
    return rc != SQLITE_OK ? rc : end;
}

/* Opens an in-memory database with the tables of schema.sql, for comparison. */
static int reference_open(sqlite3 **out) {
    int rc = sqlite3_open_v2(":memory:", out,
                             SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, NULL);
    return rc == SQLITE_OK ? sqlite3_exec(*out, catalog_schema_sql, NULL, NULL, NULL) : rc;
}

static ckd_status schema_verify(catalog *c, const identity *have, ckd_error *err) {
    sqlite3 *reference = NULL;
    identity expected = {0};
    bool same = true;
    int rc = reference_open(&reference);
    if (rc == SQLITE_OK) {
        rc = identity_read(&expected, reference);
    }
    bool is_catalog = rc == SQLITE_OK && have->application == expected.application;
    c->is_older = is_catalog && is_older(have->version);
    if (is_catalog && (have->version >= expected.version || c->is_older)) {
        rc = schema_same(&same, c->db, reference, have->version);
    }
    (void)sqlite3_close(reference);
    if (rc != SQLITE_OK) {
        return catalog_fail(c, rc, "open the catalog", err);
    }
    if (!is_catalog) {
        return catalog_damaged(c, err, "it is not a ckptdelta catalog");
    }
    if (have->version > expected.version && same) {
        return catalog_damaged(c, err, "its format number does not match its tables");
    }
    if (have->version > expected.version) {
        return err_unsupported(
            err, c->path, CKD_NO_OFFSET,
            "the catalog has format %lld, but this version of ckptdelta knows only up to %lld; use a "
            "newer one",
            (long long)have->version, (long long)expected.version);
    }
    if (have->version > 0 && have->version < expected.version && !c->is_older) {
        err_set(err, CKD_E_MISMATCH, "the catalog has the older format %lld; any save or rebuild renews it",
                (long long)have->version);
        return err_in_file(err, CKD_E_MISMATCH, c->path);
    }
    if ((have->version != expected.version && !c->is_older) || !same) {
        return catalog_damaged(c, err, "its tables are not those of ckptdelta");
    }
    return CKD_OK;
}

static void hex16(char out[33], const uint8_t id[16]) {
    for (int i = 0; i < 16; i++) {
        snprintf(out + 2 * i, 3, "%02x", id[i]);
    }
}

ckd_status catalog_meta(char out[CATALOG_META], catalog *c, const char *key, ckd_error *err) {
    query q;
    bool row = false, opened;
    out[0] = '\0';
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, S_META_GET, err);
    if (status == CKD_OK) {
        bind_text(&q, 1, key);
        status = query_next(&row, &q, err);
    }
    if (status == CKD_OK && row) {
        snprintf(out, CATALOG_META, "%s", column_text(&q, 0, 0, CATALOG_META - 1));
        status = query_row_status(&q, err);
    }
    query_end(&q);
    snapshot_end(c, opened);
    return status;
}

ckd_status catalog_set_meta(catalog *c, const char *key, const char *text, ckd_error *err) {
    query q;
    ckd_status status = need_transaction(c, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, S_NOTE_PUT, err);
    bind_text(&q, 1, key);
    bind_text(&q, 2, text);
    return query_run(&q, status, err);
}

static ckd_status meta_verify(catalog *c, const char *key, const char *expected, const char *complaint,
                              ckd_error *err) {
    query q;
    bool row = false, same = false;
    ckd_status status = query_begin(&q, c, S_META_GET, err);
    if (status == CKD_OK) {
        bind_text(&q, 1, key);
        status = query_next(&row, &q, err);
    }
    if (status == CKD_OK && row) {
        same = strcmp(column_text(&q, 0, 0, 256), expected) == 0;
        status = query_row_status(&q, err);
    }
    query_end(&q);
    if (status == CKD_OK && !same) {
        status = catalog_damaged(c, err, "%s", complaint);
    }
    return status;
}

ckd_status tables_verify(bool *blank, catalog *c, const ckd_id *store, ckd_error *err) {
    char id[33];
    identity have;
    *blank = false;
    ckd_status status = catalog_run(c, S_BEGIN_READ, err);
    if (status != CKD_OK) {
        return status;
    }
    int64_t page_size = 0;
    int rc = identity_read(&have, c->db);
    if (rc == SQLITE_OK) {
        rc = number_read(&page_size, c->db, "PRAGMA page_size");
    }
    if (rc != SQLITE_OK) {
        status = catalog_fail(c, rc, "open the catalog", err);
    } else if (identity_blank(&have)) {
        *blank = true;
    } else {
        status = schema_verify(c, &have, err);
    }
    if (status == CKD_OK && !*blank) {
        c->page_size = (uint64_t)page_size;
        hex16(id, store->bytes);
        status = meta_verify(c, "store", id, "it belongs to another store", err);
        THEN(status, meta_verify(c, "format", "1", "its tables are not those of ckptdelta", err));
    }
    snapshot_end(c, true);
    if (status == CKD_OK && !sqlite3_get_autocommit(c->db)) { /* even the rollback lacked memory */
        status = err_nomem(err, 0, "the catalog");
    }
    return status;
}

/* ---- creating ---- */

static ckd_status create_tables(catalog *c, const ckd_id *store, ckd_error *err) {
    char id[33];
    query q;
    int rc = sqlite3_exec(c->db, catalog_schema_sql, NULL, NULL, NULL);
    if (rc != SQLITE_OK) {
        return catalog_fail(c, rc, "create the catalog", err);
    }
    hex16(id, store->bytes);
    ckd_status status = query_begin(&q, c, S_META_PUT, err);
    bind_text(&q, 1, "store");
    bind_text(&q, 2, id);
    return query_run(&q, status, err);
}

ckd_status tables_create(catalog *c, const ckd_id *store, ckd_error *err) {
    identity have;
    /* An entry changes a row or two in each of many B-trees: the smaller the pages, the less a save writes. */
    int rc = sqlite3_exec(c->db, "PRAGMA page_size = 1024", NULL, NULL, NULL);
    if (rc != SQLITE_OK) {
        return catalog_fail(c, rc, "create the catalog", err);
    }
    ckd_status status = catalog_run(c, S_BEGIN_WRITE, err);
    if (status != CKD_OK) {
        return status;
    }
    /* Another process may have created the tables meanwhile. */
    rc = identity_read(&have, c->db);
    if (rc != SQLITE_OK) {
        status = catalog_fail(c, rc, "create the catalog", err);
    } else if (identity_blank(&have)) {
        status = create_tables(c, store, err);
    }
    if (status == CKD_OK) {
        return catalog_commit(c, err);
    }
    catalog_rollback(c);
    return status;
}

/* ---- upgrading ---- */

/* Runs the statement of schema.sql that creates the table. */
static int add_table(sqlite3 *db, sqlite3 *reference, const char *name) {
    sqlite3_stmt *made = NULL;
    char drop[64];
    int rc = sqlite3_prepare_v2(reference, "SELECT sql FROM sqlite_master WHERE name = ?1", -1, &made, NULL);
    rc = rc == SQLITE_OK ? sqlite3_bind_text(made, 1, name, -1, SQLITE_STATIC) : rc;
    rc = rc == SQLITE_OK ? sqlite3_step(made) : rc;
    if (rc == SQLITE_ROW) {
        snprintf(drop, sizeof(drop), "DROP TABLE IF EXISTS %s", name);
        rc = sqlite3_exec(db, drop, NULL, NULL, NULL);
        const char *sql = (const char *)sqlite3_column_text(made, 0);
        rc = rc != SQLITE_OK ? rc : !sql ? SQLITE_NOMEM : sqlite3_exec(db, sql, NULL, NULL, NULL);
    } else if (rc == SQLITE_DONE) {
        rc = SQLITE_INTERNAL;
    }
    (void)sqlite3_finalize(made);
    return rc;
}

/* Upgrades the tables from version `have`, then sets the version. SQLite reuses freed pages. */
static int change_tables(sqlite3 *db, sqlite3 *reference, int64_t have) {
    int64_t version = 0;
    char set[64];
    int rc = number_read(&version, reference, "PRAGMA user_version");
    for (size_t i = 0; i < ADDED_TABLES && rc == SQLITE_OK; i++) {
        rc = have < added_tables[i].version ? add_table(db, reference, added_tables[i].name) : SQLITE_OK;
    }
    rc = rc == SQLITE_OK ? sqlite3_exec(db, dropped_objects, NULL, NULL, NULL) : rc;
    if (rc == SQLITE_OK) {
        snprintf(set, sizeof(set), "PRAGMA user_version = %lld", (long long)version);
        rc = sqlite3_exec(db, set, NULL, NULL, NULL);
    }
    return rc;
}

ckd_status tables_upgrade(catalog *c, ckd_error *err) {
    identity have;
    sqlite3 *reference = NULL;
    ckd_status status = catalog_run(c, S_BEGIN_WRITE, err);
    if (status != CKD_OK) {
        return status;
    }
    int rc = identity_read(&have, c->db);
    if (rc == SQLITE_OK && is_older(have.version)) { /* another process may have upgraded it meanwhile */
        rc = reference_open(&reference);
        rc = rc == SQLITE_OK ? change_tables(c->db, reference, have.version) : rc;
        (void)sqlite3_close(reference);
    }
    if (rc != SQLITE_OK) {
        status = catalog_fail(c, rc, "upgrade the catalog", err);
    }
    if (status == CKD_OK) {
        return catalog_commit(c, err);
    }
    catalog_rollback(c);
    return status;
}

/* ---- reading older catalogs ---- */

ckd_status tables_stand_in(catalog *c, ckd_error *err) {
    identity have;
    int rc = identity_read(&have, c->db);
    for (size_t i = 0; i < ADDED_TABLES && rc == SQLITE_OK; i++) {
        char sql[160];
        snprintf(sql, sizeof(sql), "CREATE TEMP TABLE %s (%s)", added_tables[i].name,
                 added_tables[i].columns);
        rc = have.version < added_tables[i].version ? sqlite3_exec(c->db, sql, NULL, NULL, NULL) : SQLITE_OK;
    }
    return rc == SQLITE_OK ? CKD_OK : catalog_fail(c, rc, "open the catalog", err);
}

void tables_look_again(catalog *c) {
    int64_t version;
    if (!c->is_older || number_read(&version, c->db, "PRAGMA user_version") != SQLITE_OK ||
        is_older(version)) {
        return;
    }
    for (size_t i = 0; i < ADDED_TABLES; i++) {
        char sql[64];
        snprintf(sql, sizeof(sql), "DROP TABLE IF EXISTS temp.%s", added_tables[i].name);
        (void)sqlite3_exec(c->db, sql, NULL, NULL, NULL);
    }
    c->is_older = false;
}

/* ---- checking ---- */

static ckd_status check_integrity(catalog *c, ckd_error *err) {
    query q;
    bool row = false;
    ckd_status status = query_begin(&q, c, S_INTEGRITY, err);
    THEN(status, query_next(&row, &q, err));
    if (status == CKD_OK) {
        const char *complaint = row ? (const char *)sqlite3_column_text(q.stmt, 0) : "no answer";
        complaint = complaint ? complaint : "no answer";
        if (strcmp(complaint, "ok") != 0) {
            status = catalog_damaged(c, err, "%s", complaint);
        }
    }
    query_end(&q);
    return status;
}

static ckd_status check_references(catalog *c, ckd_error *err) {
    query q;
    bool row = false;
    ckd_status status = query_begin(&q, c, S_FOREIGN_KEYS, err);
    THEN(status, query_next(&row, &q, err));
    if (status == CKD_OK && row) {
        const char *table = column_text(&q, 0, 0, 256);
        status = catalog_damaged(c, err, "a row of %s refers to a missing row", table);
    }
    query_end(&q);
    return status;
}

ckd_status catalog_check(catalog *c, ckd_error *err) {
    bool opened;
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = check_integrity(c, err);
    THEN(status, check_references(c, err));
    snapshot_end(c, opened);
    return status;
}
