/*
 * Internals of the catalog: the handle, its statements, and its rows, which are untrusted input.
 *
 * All statements are in one table in sql.c. Each is prepared on first use and finalised with the handle. A query uses a
 * statement from query_begin to query_end; no other query may use that statement meanwhile.
 */
#ifndef CATALOG_DB_H
#define CATALOG_DB_H

#include <sqlite3.h>
#include <stdbool.h>

#include "base/bytes.h"
#include "base/vocabulary.h"
#include "catalog/catalog.h"
#include "catalog/fault_vfs.h"

typedef enum statement {
    S_PAGE_COUNT,
    S_BEGIN_READ,
    S_BEGIN_WRITE,
    S_COMMIT,
    S_ROLLBACK,
    S_SAVEPOINT,
    S_RELEASE,
    S_ROLLBACK_TO,
    S_META_GET,
    S_META_PUT,
    S_NOTE_PUT,
    S_RUN_KEY,
    S_RUN_ADD,
    S_RUN_DROP,
    S_CHECKPOINT_AT,
    S_CHECKPOINT_KEY,
    S_CHECKPOINT_ADD,
    S_CHECKPOINT_REPLACE,
    S_CHECKPOINT_MOVE,
    S_CHECKPOINT_DROP,
    S_SUSPECT_DROP,
    S_SUSPECT_ADD,
    S_FILES_DROP,
    S_FILE_ADD,
    S_FILE_VERIFIED,
    S_TIMING_PUT,
    S_RANK_TIMING_PUT,
    S_PLACES,
    S_LIST_ALL,
    S_LIST_RUN,
    S_FIND,
    S_FIND_ID,
    S_NEWEST,
    S_RUNS,
    S_RUN_TOTALS,
    S_RUN_FILES,
    S_TIMINGS,
    S_TIMINGS_RUN,
    S_RANK_TIMINGS,
    S_RANK_TIMINGS_RUN,
    S_ALL_FILES,
    S_FILE_STATES,
    S_INTEGRITY,
    S_FOREIGN_KEYS,
    STATEMENT_COUNT
} statement;

typedef struct statement_text {
    const char *sql;
    const char *doing; /* completes "cannot ..." */
} statement_text;
extern const statement_text statement_texts[STATEMENT_COUNT];

struct catalog {
    sqlite3 *db;
    fault_vfs *vfs; /* NULL for CATALOG_MEMORY */
    catalog_mode mode;
    char *path;      /* for messages */
    int64_t process; /* process that opened the handle */
    uint64_t page_size;
    bool
        is_older; /* the file has an older version; readers have empty temporary tables for those that it lacks */
    /* calls of work_left_count after which a statement is stopped as endless; derived from the file's size */
    uint64_t work_limit;
    uint64_t work_left; /* of the running statement */
    sqlite3_stmt *stmts[STATEMENT_COUNT];
};

/*
 * Maps a failed SQLite call to a status, with the handle's path: FULL -> NOSPACE, BUSY and LOCKED -> BUSY, READONLY ->
 * READ_ONLY, NOMEM, I/O by errno. CORRUPT, NOTADB and a journal that a reader may not roll back -> CORRUPT. Signs of
 * foreign tables or rows, such as a statement that fails or a broken constraint, are CORRUPT, too. `doing`
 * completes "cannot ...".
 */
ckd_status catalog_fail(const catalog *c, int rc, const char *doing, ckd_error *err);
/* Reports impossible content of the file: CORRUPT with the handle's path. */
ckd_status catalog_damaged(const catalog *c, ckd_error *err, const char *format, ...) ERR_PRINTF(3, 4);

/*
 * Returns STATE in a forked child of the process that opened the handle: the child does not hold the locks that SQLite
 * believes it holds.
 */
ckd_status handle_usable(const catalog *c, ckd_error *err);

/*
 * Opens a read transaction unless one is open, so that several statements see one snapshot. Sets the work limit from
 * the file's size. snapshot_end closes what snapshot_begin opened.
 */
ckd_status snapshot_begin(catalog *c, bool *opened, ckd_error *err);
void snapshot_end(catalog *c, bool opened);
/* Only sets the work limit. */
ckd_status work_limit_set(catalog *c, ckd_error *err);
/* Callback for sqlite3_progress_handler: counts down work_left. */
int work_left_count(void *handle);
enum { WORK_UNIT = 1000 }; /* virtual machine instructions between two calls of work_left_count */

/*
 * Checks identity, version, tables and store in one snapshot. blank: the file is still empty and nothing was verified.
 * Errors: CORRUPT, UNSUPPORTED, MISMATCH, and those of catalog_fail.
 */
ckd_status tables_verify(bool *blank, catalog *c, const ckd_id *store, ckd_error *err);
/* Creates the tables of a blank file, unless another process did so meanwhile. */
ckd_status tables_create(catalog *c, const ckd_id *store, ckd_error *err);
/* Upgrades a catalog of an older version. */
ckd_status tables_upgrade(catalog *c, ckd_error *err);
/* Gives a reader of an older catalog empty temporary tables in place of those that the file lacks. */
ckd_status tables_stand_in(catalog *c, ckd_error *err);
/* Drops these temporary tables if another process has upgraded the file meanwhile. */
void tables_look_again(catalog *c);

typedef struct query {
    catalog *c;
    sqlite3_stmt *stmt;
    const char *doing;
    int bound;      /* result of the first bind that failed */
    int bad_column; /* the first column with a value that the schema forbids; -1: none */
    bool no_memory;
} query;

/* Starts a query. query_end must follow, also on failure. */
ckd_status query_begin(query *q, catalog *c, statement which, ckd_error *err);
/*
 * Steps once and ends, for statements without results. `begun` is the result of query_begin; binding after its failure
 * is harmless.
 */
ckd_status query_run(query *q, ckd_status begun, ckd_error *err);
/* Steps to the next row. Also reports failed binds and bad columns of the previous row. */
ckd_status query_next(bool *row, query *q, ckd_error *err);
/* Resets the statement and ends its read lock. Pointers into its row become invalid. */
void query_end(query *q);
/*
 * Calls `row` for each row of a statement until `row` fails. text: the statement's only parameter; NULL: it has none.
 * `row` must end with query_row_status or a failure.
 */
typedef ckd_status (*row_fn)(void *context, query *q, ckd_error *err);
ckd_status query_rows(catalog *c, statement which, const char *text, row_fn row, void *context,
                      ckd_error *err);
/* As query_rows, in its own snapshot unless one is open. */
ckd_status snapshot_rows(catalog *c, statement which, const char *text, row_fn row, void *context,
                         ckd_error *err);
/* Runs a statement that has no parameters and no results. */
ckd_status catalog_run(catalog *c, statement which, ckd_error *err);

/*
 * Binds parameters, counted from 1. Texts and ids must stay valid until query_end. Numbers above INT64_MAX are refused.
 */
void bind_u64(query *q, int at, uint64_t value);
void bind_key(query *q, int at, int64_t value);
void bind_real(query *q, int at, double value); /* NaN: NULL */
void bind_text(query *q, int at, const char *text);
void bind_blob16(query *q, int at, const void *data);
void bind_id(query *q, int at, const ckd_id *id); /* zero: NULL */

/* Read columns, counted from 0. A value of the wrong type or outside its limits sets bad_column and yields zeros. */
uint64_t column_u64(query *q, int at, uint64_t max);
uint32_t column_u32(query *q, int at, uint32_t min, uint32_t max);
int64_t column_key(query *q, int at);
double column_real(query *q, int at); /* NULL: NaN */
void column_id(ckd_id *out, query *q, int at, bool may_be_null);
/* Reads valid UTF-8 of `min` ... `max` bytes without NUL. The pointer is valid until the next step and never NULL. */
const char *column_text(query *q, int at, size_t min, size_t max);
/* Reports the first bad column as CORRUPT; else returns CKD_OK. */
ckd_status query_row_status(const query *q, ckd_error *err);

enum { STAGE_MAX = 63 }; /* bytes of a name */

/* Is the text valid UTF-8 of `min` ... `max` bytes? Does the number fit an INTEGER column? */
bool text_storable(const char *text, size_t min, size_t max);
bool number_storable(uint64_t value);

/* Checks an entry before the first row is written. Errors: INVALID. */
ckd_status entry_validate(const catalog_entry *entry, ckd_error *err);

/* Returns STATE outside a transaction, and in a forked child of the process that opened the handle. */
ckd_status need_transaction(const catalog *c, ckd_error *err);
/* Finds a checkpoint's row; *key = 0: there is none. */
ckd_status checkpoint_key(int64_t *key, catalog *c, const ckd_id *id, ckd_error *err);

#endif
