/* Maps SQLite's result codes to statuses. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "catalog/db.h"

static ckd_status status_of_errno(int sys) {
    switch (sys) {
    case ENOSPC:
    case EDQUOT:
        return CKD_E_NOSPACE;
    case EROFS:
    case EACCES:
    case EPERM:
        return CKD_E_READ_ONLY;
    case ENOMEM:
        return CKD_E_NOMEM;
    case EISDIR:
        return CKD_E_CORRUPT;
    default:
        return CKD_E_IO;
    }
}

/* The file does not open. If there is no errno, SQLite refused it: it needs the shared memory of WAL mode. */
static ckd_status status_of_cantopen(int sys) {
    switch (sys) {
    case 0:
        return CKD_E_CORRUPT;
    case ENOENT:
    case ENOTDIR:
        return CKD_E_NOT_FOUND;
    default:
        return status_of_errno(sys);
    }
}

static ckd_status status_of(int rc, int sys) {
    switch (rc) {
    case SQLITE_READONLY_ROLLBACK: /* a writer died in a commit; only a writer may roll it back */
    case SQLITE_READONLY_RECOVERY:
    case SQLITE_READONLY_DBMOVED: /* the file was replaced or removed while open */
    case SQLITE_IOERR_SHORT_READ:
    case SQLITE_IOERR_CORRUPTFS:
    case SQLITE_IOERR_DATA:
        return CKD_E_CORRUPT;
    case SQLITE_IOERR_NOMEM:
        return CKD_E_NOMEM;
    default:
        break;
    }
    switch (rc & 0xff) {
    case SQLITE_FULL:
        return CKD_E_NOSPACE;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
    case SQLITE_PROTOCOL:
        return CKD_E_BUSY;
    case SQLITE_NOMEM:
        return CKD_E_NOMEM;
    case SQLITE_READONLY:
    case SQLITE_PERM:
        return CKD_E_READ_ONLY;
    case SQLITE_CANTOPEN:
        return status_of_cantopen(sys);
    case SQLITE_RANGE:
        return CKD_E_INVALID;
    case SQLITE_CORRUPT:
    case SQLITE_CONSTRAINT: /* callers' values were validated, so the existing rows are wrong */
    case SQLITE_NOTADB:
    case SQLITE_FORMAT:
    case SQLITE_ERROR:     /* our statements are fixed, so the tables are wrong */
    case SQLITE_TOOBIG:    /* a value longer than any that the catalog stores */
    case SQLITE_INTERRUPT: /* stopped by work_left_count */
        return CKD_E_CORRUPT;
    default:
        return status_of_errno(sys);
    }
}

static const char *advice(ckd_status status) {
    switch (status) {
    case CKD_E_NOSPACE:
        return "; free some space and try again";
    case CKD_E_BUSY:
        return "; another process holds it, try again";
    case CKD_E_CORRUPT:
        return "; opening the store for writing or rebuilding the catalog repairs it";
    default:
        return "";
    }
}

/* Replaces control characters: messages of SQLite quote content of the file. */
static void make_printable(char *text) {
    for (char *p = text; *p; p++) {
        *p = (unsigned char)*p < 0x20 || *p == 0x7f ? ' ' : *p;
    }
}

ckd_status catalog_fail(const catalog *c, int rc, const char *doing, ckd_error *err) {
    const char *why = rc == SQLITE_INTERRUPT ? "the query exceeds the limit for a catalog of this size"
                      : c->db && sqlite3_extended_errcode(c->db) == rc ? sqlite3_errmsg(c->db)
                                                                       : sqlite3_errstr(rc);
    int kind = rc & 0xff;
    bool by_system = kind == SQLITE_IOERR || kind == SQLITE_CANTOPEN || kind == SQLITE_FULL;
    int sys = c->vfs && by_system ? fault_vfs_errno(c->vfs) : 0;
    ckd_status status = status_of(rc, sys);
    char reason[128] = "";
    if (sys) {
        const char *text = strerrordesc_np(sys); /* not strerror: its text depends on locale and threads */
        snprintf(reason, sizeof(reason), " (%s)", text ? text : "unknown system error");
    }
    err_set(err, status, "cannot %s: %.200s%s%s", doing, why, reason, advice(status));
    if (err) {
        err->sys_errno = sys;
        make_printable(err->message);
    }
    return err_in_file(err, status, c->path);
}

ckd_status catalog_damaged(const catalog *c, ckd_error *err, const char *format, ...) {
    char message[256];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    make_printable(message);
    return err_corrupt(err, c->path, CKD_NO_OFFSET, "the catalog is damaged: %s%s", message,
                       advice(CKD_E_CORRUPT));
}
