/* Statements, parameters and columns: the building blocks of every query. */
#include "catalog/db.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"

/* ---- statements ---- */

int work_left_count(void *handle) {
    catalog *c = handle;
    if (c->work_left == 0) {
        return 1;
    }
    c->work_left--;
    return 0;
}

ckd_status query_begin(query *q, catalog *c, statement which, ckd_error *err) {
    *q = (query){.c = c, .doing = statement_texts[which].doing, .bad_column = -1};
    c->work_left = c->work_limit;
    if (c->vfs) {
        fault_vfs_forget(c->vfs);
    }
    if (!c->stmts[which]) {
        int rc = sqlite3_prepare_v3(c->db, statement_texts[which].sql, -1, SQLITE_PREPARE_PERSISTENT,
                                    &c->stmts[which], NULL);
        if (rc != SQLITE_OK) {
            return catalog_fail(c, rc, q->doing, err);
        }
    }
    q->stmt = c->stmts[which];
    return CKD_OK;
}

ckd_status query_row_status(const query *q, ckd_error *err) {
    if (q->no_memory) {
        return err_nomem(err, 0, "a row of the catalog");
    }
    if (q->bad_column >= 0) {
        const char *name = sqlite3_column_name(q->stmt, q->bad_column);
        return catalog_damaged(q->c, err, "cannot %s: invalid value in %s", q->doing,
                               name ? name : "a column");
    }
    return CKD_OK;
}

ckd_status query_next(bool *row, query *q, ckd_error *err) {
    *row = false;
    ckd_status status = query_row_status(q, err);
    if (status != CKD_OK) {
        return status;
    }
    if (q->bound != SQLITE_OK) {
        return catalog_fail(q->c, q->bound, q->doing, err);
    }
    int rc = sqlite3_step(q->stmt);
    if (rc != SQLITE_ROW && rc != SQLITE_DONE) {
        return catalog_fail(q->c, rc, q->doing, err);
    }
    *row = rc == SQLITE_ROW;
    return CKD_OK;
}

void query_end(query *q) {
    if (q->stmt) {
        /* These return the failure of the last step, which was reported already. */
        (void)sqlite3_reset(q->stmt);
        (void)sqlite3_clear_bindings(q->stmt);
        q->stmt = NULL;
    }
}

ckd_status query_run(query *q, ckd_status begun, ckd_error *err) {
    bool row;
    THEN(begun, query_next(&row, q, err));
    query_end(q);
    return begun;
}

ckd_status query_rows(catalog *c, statement which, const char *text, row_fn row, void *context,
                      ckd_error *err) {
    query q;
    bool more;
    ckd_status status = query_begin(&q, c, which, err);
    if (status == CKD_OK && text) {
        bind_text(&q, 1, text);
    }
    while (status == CKD_OK && (status = query_next(&more, &q, err)) == CKD_OK && more) {
        status = row(context, &q, err);
    }
    query_end(&q);
    return status;
}

ckd_status catalog_run(catalog *c, statement which, ckd_error *err) {
    query q;
    return query_run(&q, query_begin(&q, c, which, err), err);
}

/* ---- snapshots ---- */

ckd_status handle_usable(const catalog *c, ckd_error *err) {
    if (c->process != getpid()) {
        err_set(err, CKD_E_STATE, "the catalog was opened before a fork: open the store again in the child");
        return err_in_file(err, CKD_E_STATE, c->path);
    }
    return CKD_OK;
}

ckd_status work_limit_set(catalog *c, ckd_error *err) {
    /* An intact catalog needs at most 0.8 instructions per byte, in the integrity check. */
    enum { PER_BYTE = 16, AT_LEAST = 2000 };
    query q;
    bool row = false;
    uint64_t pages = 0;
    ckd_status status = query_begin(&q, c, S_PAGE_COUNT, err);
    THEN(status, query_next(&row, &q, err));
    if (status == CKD_OK && row) {
        pages = column_u64(&q, 0, UINT32_MAX);
        status = query_row_status(&q, err);
    }
    query_end(&q);
    c->work_limit = AT_LEAST + pages * c->page_size / WORK_UNIT * PER_BYTE;
    return status;
}

ckd_status snapshot_begin(catalog *c, bool *opened, ckd_error *err) {
    *opened = false;
    ckd_status status = handle_usable(c, err);
    if (status == CKD_OK && sqlite3_get_autocommit(c->db)) {
        tables_look_again(c);
        status = catalog_run(c, S_BEGIN_READ, err);
        *opened = status == CKD_OK;
    }
    if (status != CKD_OK) {
        return status;
    }
    status = work_limit_set(c, err);
    if (status != CKD_OK) {
        snapshot_end(c, *opened);
        *opened = false;
    }
    return status;
}

void snapshot_end(catalog *c, bool opened) {
    if (opened && !sqlite3_get_autocommit(c->db)) {
        (void)catalog_run(c, S_ROLLBACK, NULL); /* nothing was written */
    }
}

ckd_status snapshot_rows(catalog *c, statement which, const char *text, row_fn row, void *context,
                         ckd_error *err) {
    bool opened;
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status == CKD_OK) {
        status = query_rows(c, which, text, row, context, err);
        snapshot_end(c, opened);
    }
    return status;
}

ckd_status catalog_snapshot(bool *opened, catalog *c, ckd_error *err) {
    return snapshot_begin(c, opened, err);
}

void catalog_snapshot_end(catalog *c, bool opened) {
    snapshot_end(c, opened);
}

/* ---- parameters ---- */

static void bound(query *q, int rc) {
    if (q->bound == SQLITE_OK) {
        q->bound = rc;
    }
}

void bind_u64(query *q, int at, uint64_t value) {
    bound(q, value > INT64_MAX ? SQLITE_RANGE : sqlite3_bind_int64(q->stmt, at, (sqlite3_int64)value));
}

void bind_key(query *q, int at, int64_t value) {
    bound(q, sqlite3_bind_int64(q->stmt, at, value));
}

void bind_real(query *q, int at, double value) {
    bound(q, isnan(value) ? sqlite3_bind_null(q->stmt, at) : sqlite3_bind_double(q->stmt, at, value));
}

void bind_text(query *q, int at, const char *text) {
    bound(q, sqlite3_bind_text(q->stmt, at, text, -1, SQLITE_STATIC));
}

void bind_blob16(query *q, int at, const void *data) {
    bound(q, sqlite3_bind_blob(q->stmt, at, data, 16, SQLITE_STATIC));
}

void bind_id(query *q, int at, const ckd_id *id) {
    static const ckd_id zero;
    bool null = memcmp(id, &zero, sizeof(zero)) == 0;
    bound(q, null ? sqlite3_bind_null(q->stmt, at)
                  : sqlite3_bind_blob(q->stmt, at, id->bytes, 16, SQLITE_STATIC));
}

/* ---- columns ---- */

static void bad(query *q, int at) {
    if (q->bad_column < 0) {
        q->bad_column = at;
    }
}

int64_t column_key(query *q, int at) {
    if (sqlite3_column_type(q->stmt, at) != SQLITE_INTEGER) {
        bad(q, at);
        return 0;
    }
    return sqlite3_column_int64(q->stmt, at);
}

uint64_t column_u64(query *q, int at, uint64_t max) {
    int64_t value = column_key(q, at);
    if (value < 0 || (uint64_t)value > max) {
        bad(q, at);
        return 0;
    }
    return (uint64_t)value;
}

uint32_t column_u32(query *q, int at, uint32_t min, uint32_t max) {
    uint64_t value = column_u64(q, at, max);
    if (value < min) {
        bad(q, at);
        return 0;
    }
    return (uint32_t)value;
}

double column_real(query *q, int at) {
    int type = sqlite3_column_type(q->stmt, at);
    if (type == SQLITE_NULL) {
        return NAN;
    }
    if (type != SQLITE_FLOAT && type != SQLITE_INTEGER) {
        bad(q, at);
        return 0;
    }
    return sqlite3_column_double(q->stmt, at);
}

void column_id(ckd_id *out, query *q, int at, bool may_be_null) {
    memset(out, 0, sizeof(*out));
    int type = sqlite3_column_type(q->stmt, at);
    if (type == SQLITE_NULL && may_be_null) {
        return;
    }
    const void *data = type == SQLITE_BLOB ? sqlite3_column_blob(q->stmt, at) : NULL;
    if (!data || sqlite3_column_bytes(q->stmt, at) != (int)sizeof(out->bytes)) {
        bad(q, at);
        return;
    }
    memcpy(out->bytes, data, sizeof(out->bytes));
}

const char *column_text(query *q, int at, size_t min, size_t max) {
    if (sqlite3_column_type(q->stmt, at) != SQLITE_TEXT) {
        bad(q, at);
        return "";
    }
    const char *text = (const char *)sqlite3_column_text(q->stmt, at);
    if (!text) {
        q->no_memory = true;
        return "";
    }
    size_t size = (size_t)sqlite3_column_bytes(q->stmt, at);
    if (size < min || size > max || !utf8_valid(text, size)) {
        bad(q, at);
        return "";
    }
    return text;
}

/* ---- shared helpers ---- */

ckd_status checkpoint_key(int64_t *key, catalog *c, const ckd_id *id, ckd_error *err) {
    query q;
    bool row = false;
    *key = 0;
    ckd_status status = query_begin(&q, c, S_CHECKPOINT_KEY, err);
    if (status == CKD_OK) {
        bind_blob16(&q, 1, id->bytes);
        status = query_next(&row, &q, err);
    }
    if (status == CKD_OK && row) {
        *key = column_key(&q, 0);
        status = query_row_status(&q, err);
    }
    query_end(&q);
    return status;
}
