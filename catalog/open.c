/* Opening and closing a handle, and its transactions. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "catalog/db.h"

/* ---- connecting ---- */

static ckd_status handle_new(catalog **out, const char *path, catalog_mode mode, ckd_error *err) {
    *out = NULL;
    /* A relative path gets "./": SQLite gives other meanings to ":memory:" and "file:...". */
    const char *prefix = mode == CATALOG_MEMORY || path[0] == '/' ? "" : "./";
    const char *name = mode == CATALOG_MEMORY ? ":memory:" : path;
    size_t size = strlen(prefix) + strlen(name) + 1;
    catalog *c = calloc(1, sizeof(*c));
    char *copy = malloc(size);
    if (!c || !copy) {
        free(c);
        free(copy);
        return err_nomem(err, sizeof(*c) + size, "a catalog handle");
    }
    snprintf(copy, size, "%s%s", prefix, name);
    c->path = copy;
    c->mode = mode;
    c->process = getpid();
    c->work_limit = 2000;
    if (mode != CATALOG_MEMORY) {
        ckd_status status = fault_vfs_new(&c->vfs, err);
        if (status != CKD_OK) {
            catalog_close(c);
            return status;
        }
    }
    *out = c;
    return CKD_OK;
}

/* SQLite would create the file with mode 0644 whatever the umask is; other files of a store follow the umask. */
static ckd_status create_file(const char *path, ckd_error *err) {
    file_writer *f = NULL;
    if (file_exists(path)) {
        return CKD_OK;
    }
    ckd_error why = {0};
    ckd_status status = file_create(&f, path, 4096, &why);
    if (status == CKD_E_EXISTS) {
        return CKD_OK;
    }
    THEN(status, file_close(f, &why));
    if (status != CKD_OK && err) {
        *err = why;
    }
    return status;
}

/* SQLite would wait forever for a pipe, and a link may lead to a file that must not be written. */
static ckd_status check_regular(catalog *c, const char *suffix, ckd_error *err) {
    size_t size = strlen(c->path) + strlen(suffix) + 1;
    char *path = malloc(size);
    struct stat st;
    if (!path) {
        return err_nomem(err, size, "a path");
    }
    snprintf(path, size, "%s%s", c->path, suffix);
    bool wrong = lstat(path, &st) == 0 && !S_ISREG(st.st_mode);
    free(path);
    return wrong ? catalog_damaged(c, err,
                                   *suffix ? "its journal is not a regular file" : "it is not a regular file")
                 : CKD_OK;
}

static ckd_status check_files(catalog *c, ckd_error *err) {
    ckd_status status = c->mode == CATALOG_MEMORY ? CKD_OK : check_regular(c, "", err);
    return status == CKD_OK && c->mode != CATALOG_MEMORY ? check_regular(c, "-journal", err) : status;
}

static ckd_status connect_database(catalog *c, ckd_error *err) {
    int flags = SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_PRIVATECACHE | SQLITE_OPEN_EXRESCODE;
    flags |= c->mode == CATALOG_READ ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
    if (c->mode == CATALOG_WRITE) {
        ckd_status status = create_file(c->path, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    int rc = sqlite3_open_v2(c->path, &c->db, flags, c->vfs ? fault_vfs_name(c->vfs) : NULL);
    if (rc != SQLITE_OK) {
        return catalog_fail(c, rc, "open the catalog", err);
    }
    /* SQLite silently opens a file for reading if it may not write it. */
    if (c->mode == CATALOG_WRITE && sqlite3_db_readonly(c->db, "main") == 1) {
        err_set(err, CKD_E_READ_ONLY,
                "cannot open the catalog for writing: the file or its file system is read-only");
        return err_in_file(err, CKD_E_READ_ONLY, c->path);
    }
    return CKD_OK;
}

/*
 * Disables everything in the file that could run: triggers, views, functions in the schema, extensions. The limit of
 * lengths is far above that of stored values, and far below harmful ones.
 */
static ckd_status configure(catalog *c, uint32_t busy_timeout_ms, ckd_error *err) {
    static const struct {
        int option, value;
    } options[] = {
        {SQLITE_DBCONFIG_DEFENSIVE, 1},   {SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0},
        {SQLITE_DBCONFIG_ENABLE_FKEY, 1}, {SQLITE_DBCONFIG_ENABLE_TRIGGER, 0},
        {SQLITE_DBCONFIG_ENABLE_VIEW, 0}, {SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0},
        {SQLITE_DBCONFIG_DQS_DDL, 0},     {SQLITE_DBCONFIG_DQS_DML, 0},
    };
    int rc = SQLITE_OK;
    for (size_t i = 0; rc == SQLITE_OK && i < sizeof(options) / sizeof(options[0]); i++) {
        int now = -1;
        rc = sqlite3_db_config(c->db, options[i].option, options[i].value, &now);
        rc = rc == SQLITE_OK && now != options[i].value ? SQLITE_MISUSE : rc;
    }
    sqlite3_limit(c->db, SQLITE_LIMIT_LENGTH, 1 << 20);
    sqlite3_limit(c->db, SQLITE_LIMIT_ATTACHED, 0);
    sqlite3_limit(c->db, SQLITE_LIMIT_WORKER_THREADS, 0);
    sqlite3_progress_handler(c->db, WORK_UNIT, work_left_count, c);
    c->work_left = c->work_limit;
    if (rc == SQLITE_OK) {
        rc = sqlite3_busy_timeout(c->db, busy_timeout_ms > INT_MAX ? INT_MAX : (int)busy_timeout_ms);
    }
    if (rc == SQLITE_OK) {
        rc = sqlite3_exec(c->db,
                          "PRAGMA temp_store = MEMORY; PRAGMA mmap_size = 0; PRAGMA cell_size_check = ON;"
                          "PRAGMA synchronous = EXTRA;",
                          NULL, NULL, NULL);
    }
    if (rc == SQLITE_OK && c->mode == CATALOG_WRITE) {
        rc = sqlite3_exec(c->db, "PRAGMA journal_mode = DELETE", NULL, NULL, NULL);
    }
    return rc == SQLITE_OK ? CKD_OK : catalog_fail(c, rc, "open the catalog", err);
}

/* ---- the handle ---- */

ckd_status catalog_open(catalog **out, const char *path, catalog_mode mode, const ckd_id *store,
                        uint32_t busy_timeout_ms, ckd_error *err) {
    catalog *c = NULL;
    bool blank = false;
    *out = NULL;
    ckd_status status = handle_new(&c, path, mode, err);
    if (status != CKD_OK) {
        return status;
    }
    status = check_files(c, err);
    THEN(status, connect_database(c, err));
    THEN(status, configure(c, busy_timeout_ms, err));
    THEN(status, tables_verify(&blank, c, store, err));
    if (status == CKD_OK && blank && mode != CATALOG_READ) {
        status = tables_create(c, store, err);
        THEN(status, tables_verify(&blank, c, store, err));
    }
    if (status == CKD_OK && c->is_older && mode != CATALOG_READ) {
        status = tables_upgrade(c, err);
        THEN(status, tables_verify(&blank, c, store, err));
    } else if (status == CKD_OK && c->is_older) {
        status = tables_stand_in(c, err);
    }
    if (status == CKD_OK && blank) {
        status = catalog_damaged(c, err, "it is empty");
    }
    if (status == CKD_OK && mode == CATALOG_WRITE && sqlite3_db_readonly(c->db, "main") == 1) {
        status = catalog_damaged(c, err, "its header marks it as read-only");
    }
    if (status != CKD_OK) {
        catalog_close(c);
        return status;
    }
    *out = c;
    return CKD_OK;
}

void catalog_close(catalog *c) {
    /* In a forked child leave the handle alone: closing it would roll back what the parent is writing. */
    if (!c || c->process != getpid()) {
        return;
    }
    for (size_t i = 0; i < STATEMENT_COUNT; i++) {
        (void)sqlite3_finalize(c->stmts[i]); /* returns the failure of the last step again */
    }
    /* Fails only if statements are left, and there are none. If it fails, the connection still needs the VFS. */
    if (sqlite3_close(c->db) == SQLITE_OK) {
        fault_vfs_free(c->vfs);
    }
    free(c->path);
    free(c);
}

ckd_status catalog_begin(catalog *c, ckd_error *err) {
    ckd_status status = handle_usable(c, err);
    if (status != CKD_OK) {
        return status;
    }
    if (c->mode == CATALOG_READ) {
        err_set(err, CKD_E_READ_ONLY, "the catalog was opened for reading");
        return err_in_file(err, CKD_E_READ_ONLY, c->path);
    }
    if (!sqlite3_get_autocommit(c->db)) {
        return err_set(err, CKD_E_STATE, "a transaction of the catalog is under way already");
    }
    status = catalog_run(c, S_BEGIN_WRITE, err);
    if (status == CKD_OK) {
        status = work_limit_set(c, err);
        if (status != CKD_OK) {
            catalog_rollback(c);
        }
    }
    return status;
}

ckd_status catalog_commit(catalog *c, ckd_error *err) {
    ckd_status status = handle_usable(c, err);
    if (status != CKD_OK) {
        return status;
    }
    if (sqlite3_get_autocommit(c->db)) {
        return err_set(err, CKD_E_STATE,
                       "no transaction of the catalog is under way: an earlier failure ended it");
    }
    status = catalog_run(c, S_COMMIT, err);
    if (status != CKD_OK) {
        catalog_rollback(c);
    }
    return status;
}

void catalog_rollback(catalog *c) {
    /* Some failures have already rolled back. If the rollback here fails, the next writer rolls back the journal. */
    if (handle_usable(c, NULL) == CKD_OK && !sqlite3_get_autocommit(c->db)) {
        (void)catalog_run(c, S_ROLLBACK, NULL);
    }
}
