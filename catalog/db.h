/*
 * Inside the catalog: the handle, its statements, and rows read as if a stranger had written the file.
 *
 * Every statement the catalog runs is in one table in sql.c, prepared at its first use and finalised with the
 * handle. A query_* call takes one of them from begin to end; no other use of it may be under way in between.
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
    S_CHECKPOINT_DROP,
    S_FILES_DROP,
    S_FILE_ADD,
    S_FILE_VERIFIED,
    S_NAME_KEY,
    S_NAME_ADD,
    S_SHARDS_DROP,
    S_SHARD_ADD,
    S_TOTALS_DROP,
    S_TOTAL_ADD,
    S_TENSOR_TOTALS_ADD,
    S_TENSOR_TOTALS_SUBTRACT,
    S_TENSOR_TOTALS_DROP,
    S_TIMING_PUT,
    S_RANK_TIMING_PUT,
    S_PLACES,
    S_LIST_ALL,
    S_LIST_RUN,
    S_FIND,
    S_FIND_ID,
    S_NEWEST,
    S_UNDETAILED,
    S_DETAILED,
    S_RUNS,
    S_TENSORS,
    S_RUN_TOTALS,
    S_RUN_FILES,
    S_TIMINGS,
    S_TIMINGS_RUN,
    S_RANK_TIMINGS,
    S_RANK_TIMINGS_RUN,
    S_ALL_FILES,
    S_CHECKPOINT_ROLES,
    S_TENSOR_TOTALS,
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
    fault_vfs *vfs; /* NULL in memory */
    catalog_mode mode;
    char *path;      /* for messages */
    int64_t process; /* that opened it */
    uint64_t page_size;
    bool lacks_ranks; /* the file is of version 5: it has no rank_timings */
    uint64_t
        work_limit; /* how often a statement may call back before it is taken for endless: from the file's size */
    uint64_t work_left; /* of the statement that runs */
    sqlite3_stmt *stmts[STATEMENT_COUNT];
};

/*
 * What a failed SQLite call means to the caller, with the handle's path: FULL -> NOSPACE, BUSY and LOCKED -> BUSY,
 * CORRUPT, NOTADB and whatever shows that the tables or rows are not ours (a statement that does not fit, a broken
 * constraint) -> CORRUPT, READONLY -> READ_ONLY, NOMEM, I/O by errno. A journal that a reader may not roll back is CORRUPT. `doing` completes "cannot ...".
 */
ckd_status catalog_fail(const catalog *c, int rc, const char *doing, ckd_error *err);
/* The file holds what it cannot. CORRUPT with the handle's path. */
ckd_status catalog_damaged(const catalog *c, ckd_error *err, const char *format, ...) ERR_PRINTF(3, 4);

/*
 * STATE in a child of the process that opened the handle: the child does not hold the locks that SQLite believes it holds.
 */
ckd_status handle_usable(const catalog *c, ckd_error *err);

/*
 * One snapshot for several statements: opens a read transaction unless one of the caller's is under way, and sets the
 * work limit from the size of the file. snapshot_end closes what snapshot_begin opened.
 */
ckd_status snapshot_begin(catalog *c, bool *opened, ckd_error *err);
void snapshot_end(catalog *c, bool opened);
/* Sets the work limit alone. */
ckd_status work_limit_set(catalog *c, ckd_error *err);
/* For sqlite3_progress_handler: counts down work_left. */
int work_left_count(void *handle);
enum { WORK_UNIT = 1000 }; /* virtual machine instructions between two calls of it */

/*
 * Compares identity, version, tables and store, in one snapshot. blank: there is nothing in the file yet, and nothing was
 * verified. Errors: CORRUPT, UNSUPPORTED, and those of catalog_fail.
 */
ckd_status tables_verify(bool *blank, catalog *c, const ckd_id *store, ckd_error *err);
/* Creates the tables of a blank file, unless another process was faster. */
ckd_status tables_create(catalog *c, const ckd_id *store, ckd_error *err);
/* Adds to a catalog of version 5 what it lacks. */
ckd_status tables_renew(catalog *c, ckd_error *err);

typedef struct query {
    catalog *c;
    sqlite3_stmt *stmt;
    const char *doing;
    int bound;      /* the first bind that failed */
    int bad_column; /* the first column that held what the schema forbids, -1: none */
    bool no_memory;
} query;

/* query_end must follow, also on failure. */
ckd_status query_begin(query *q, catalog *c, statement which, ckd_error *err);
/* Steps once and ends: for statements without results. `begun` is what query_begin returned; binding before is harmless if it failed. */
ckd_status query_run(query *q, ckd_status begun, ckd_error *err);
/* Steps to the next row. On the way in it reports failed binds and bad columns of the row before. */
ckd_status query_next(bool *row, query *q, ckd_error *err);
/* Resets the statement: ends its read lock. What was read from a row is gone. */
void query_end(query *q);
/*
 * Calls `row` for each row of a statement until it fails. text: the statement's parameter; NULL: it has none. `row` ends with
 * query_row_status or a failure.
 */
typedef ckd_status (*row_fn)(void *context, query *q, ckd_error *err);
ckd_status query_rows(catalog *c, statement which, const char *text, row_fn row, void *context,
                      ckd_error *err);
/* The same in a snapshot of its own, unless one is open. */
ckd_status snapshot_rows(catalog *c, statement which, const char *text, row_fn row, void *context,
                         ckd_error *err);
/* All in one for statements without parameters and results. */
ckd_status catalog_run(catalog *c, statement which, ckd_error *err);

/* Parameters, counted from 1. Texts and ids must live until query_end. Numbers above INT64_MAX are refused. */
void bind_u64(query *q, int at, uint64_t value);
void bind_key(query *q, int at, int64_t value);
void bind_real(query *q, int at, double value); /* NaN: NULL */
void bind_text(query *q, int at, const char *text);
void bind_blob16(query *q, int at, const void *data);
void bind_id(query *q, int at, const ckd_id *id); /* zero: NULL */

/* Columns, counted from 0. A value of the wrong type or outside its limits sets bad_column and yields zeros. */
uint64_t column_u64(query *q, int at, uint64_t max);
uint32_t column_u32(query *q, int at, uint32_t least, uint32_t max);
int64_t column_key(query *q, int at);
double column_real(query *q, int at); /* NULL: NaN */
void column_id(ckd_id *out, query *q, int at, bool may_be_null);
/* Valid UTF-8 of `least` ... `max` bytes without NUL; the pointer lives until the next step. Never NULL. */
const char *column_text(query *q, int at, size_t least, size_t max);
/* The first bad column as CORRUPT, or CKD_OK. */
ckd_status query_row_status(const query *q, ckd_error *err);

enum { CODING_MAX = 31, STAGE_MAX = 63 }; /* bytes of these names */

/* Valid UTF-8 of `least` ... `max` bytes? Fits an INTEGER column? */
bool text_storable(const char *text, size_t least, size_t max);
bool number_storable(uint64_t value);

/* The shards of an entry sorted by tensor and index, and what they add up to by role; all of the entry is validated. */
typedef struct entry_plan {
    const catalog_shard **shards;
    uint64_t raw[CKD_ROLE_OTHER + 1], stored[CKD_ROLE_OTHER + 1], elements[CKD_ROLE_OTHER + 1];
    bool present[CKD_ROLE_OTHER + 1];
} entry_plan;
/* Errors: INVALID, NOMEM. entry_plan_free must follow, also on failure. */
ckd_status entry_plan_init(entry_plan *p, const catalog_entry *entry, ckd_error *err);
void entry_plan_free(entry_plan *p);

/* STATE outside a transaction, and in a child of the process that opened the handle. */
ckd_status need_transaction(const catalog *c, ckd_error *err);
/* The row of a checkpoint; 0: there is none. */
ckd_status checkpoint_key(int64_t *key, catalog *c, const ckd_id *id, ckd_error *err);

/*
 * Geometry as text that a person can read, such as '[768, 3072]'; schema.sql has it all. shape_parse returns false for any
 * other text (shape_elements says how many elements are too many), region_format where an end overflows.
 */
enum { SHAPE_TEXT = 360, REGION_TEXT = 720 };
void shape_format(char out[SHAPE_TEXT], uint32_t ndim, const uint64_t *shape);
bool shape_parse(uint32_t *ndim, uint64_t shape[CKD_MAX_DIMS], const char *text);
bool region_format(char out[REGION_TEXT], uint32_t ndim, const ckd_region *region);

#endif
