/*
 * The catalog: an SQLite index of the checkpoints and their files, for queries. No other code uses SQLite. Everything
 * in it except timings and verification times can be rebuilt from the manifests, so no checkpoint is lost with a
 * damaged catalog. Tensors are recorded only in the chunk files.
 *
 * One process writes at a time (the engine holds the publish lock); many may read. The journal is a rollback journal,
 * not WAL: SQLite 3.40 has a known WAL-reset race, and WAL does not work on network file systems. Settings:
 * synchronous=EXTRA, trusted_schema=OFF, defensive mode; user_version is checked. One thread uses a handle at a time.
 *
 * Nothing in the file is trusted unchecked. Opening compares the tables word for word with schema.sql, and every value
 * is checked when it is read. So every call may return CORRUPT, but none crashes or runs forever, whatever the file
 * holds. SQLite cannot detect a digit that was changed in place; the manifests reveal it. Any call may also return
 * BUSY, IO and NOMEM. Numbers are stored up to 2^63 - 1; larger ones are INVALID.
 *
 * No other code may open catalog.db while this process has a handle open: closing any descriptor of a file drops the
 * locks that SQLite holds on it (POSIX). Renaming it or asking for its size is safe.
 */
#ifndef CATALOG_CATALOG_H
#define CATALOG_CATALOG_H

#include <stdbool.h>

#include "base/error.h"
#include "base/hash.h"

typedef struct catalog catalog;

typedef enum catalog_mode {
    /* the file must exist; writes nothing, and does not roll back what a dead writer left */
    CATALOG_READ,
    CATALOG_WRITE, /* creates an absent or empty file with the schema; rolls back what a dead writer left */
    CATALOG_MEMORY /* empty, in memory: readers use it when the file is missing, damaged or stale; writable */
} catalog_mode;

/*
 * Opens a catalog. path is ignored for CATALOG_MEMORY. busy_timeout_ms: how long SQLite may wait for its own locks.
 * Errors: NOT_FOUND (READ: no such file; WRITE: no such folder), CORRUPT (not a database, damaged, another store's id,
 * another schema, in WAL mode; READ: a writer died in a commit and left a journal that only a writer may roll back),
 * UNSUPPORTED (a newer user_version), MISMATCH (one too old to upgrade: rebuild it from the manifests), BUSY,
 * READ_ONLY, NOSPACE, IO, NOMEM. If a writer dies while a READ handle is open, later calls return CORRUPT, too.
 */
ckd_status catalog_open(catalog **out, const char *path, catalog_mode mode, const ckd_id *store,
                        uint32_t busy_timeout_ms, ckd_error *err);
/* Rolls back an open transaction and closes the handle. Does nothing in a forked child. Accepts NULL. */
void catalog_close(catalog *c);

/*
 * Starts a transaction (BEGIN IMMEDIATE). All writes need one, else they fail with STATE. Errors: BUSY (another process
 * writes), READ_ONLY, STATE (one is open already), CORRUPT, NOSPACE, IO, NOMEM.
 */
ckd_status catalog_begin(catalog *c, ckd_error *err);
/*
 * Commits durably; rolls back on failure. Errors: BUSY (readers did not finish in time), STATE (no transaction: an
 * earlier fatal failure rolled it back), NOSPACE, IO. After IO the transaction may still have been committed.
 */
ckd_status catalog_commit(catalog *c, ckd_error *err);
/* Does nothing without a transaction. */
void catalog_rollback(catalog *c);

typedef struct catalog_file {
    char name[64]; /* file name inside data/c */
    uint32_t rank;
    uint64_t size;
    hash128 root;
} catalog_file;

typedef struct catalog_entry {
    const ckd_checkpoint *checkpoint;
    uint64_t manifest_bytes; /* for display; checkpoint->stored_bytes already includes it */
    const catalog_file *files;
    size_t file_count;
} catalog_entry;

/*
 * Adds a checkpoint with all its rows. Replaces an older generation of the same (run, step) and id, and keeps its
 * timings. On failure none of the rows are in the transaction, which may continue unless the failure was fatal. Errors:
 * EXISTS (the same or a newer generation exists, or this (run, step) with another id, or this id elsewhere), INVALID
 * (names, numbers), STATE, NOSPACE.
 */
ckd_status catalog_add(catalog *c, const catalog_entry *entry, ckd_error *err);
/*
 * Short texts that the engine stores with the catalog under its own keys (not "store" or "format"). Examples: the state
 * of the manifest folders when the catalog agreed with them, or the fastest way to write. "" if there is none.
 */
enum { CATALOG_META = 200 };
ckd_status catalog_meta(char out[CATALOG_META], catalog *c, const char *key, ckd_error *err);
/* Needs a transaction. */
ckd_status catalog_set_meta(catalog *c, const char *key, const char *text, ckd_error *err);
/*
 * Moves a checkpoint's row to another run; its step and all its other rows stay. generation, stored_bytes and
 * manifest_bytes are those of the new manifest. Errors: NOT_FOUND (no such id), EXISTS (that run has the step), STATE,
 * NOSPACE.
 */
ckd_status catalog_move(catalog *c, const ckd_checkpoint *checkpoint, uint64_t manifest_bytes,
                        ckd_error *err);
/* Removes a checkpoint with all its rows. Errors: NOT_FOUND, STATE, NOSPACE. */
ckd_status catalog_remove(catalog *c, const char *run, uint64_t step, ckd_error *err);

/*
 * Each query sees one snapshot. Inside a transaction it also sees that transaction's writes. catalog_list_free releases
 * the items of a list (ckd_checkpoint_list_free also frees the list itself).
 */
/*
 * Makes all queries until catalog_snapshot_end see the same state. Pass `opened` to that call, which must follow unless
 * this one failed. Nothing may be written in between.
 */
ckd_status catalog_snapshot(bool *opened, catalog *c, ckd_error *err);
void catalog_snapshot_end(catalog *c, bool opened);
/*
 * Visits run, step and generation of each checkpoint, by run, then step: much cheaper than catalog_list. Stops early,
 * with CKD_OK, when `visit` returns false. The name is valid during the call.
 */
typedef bool (*catalog_place_fn)(void *context, const char *run, uint64_t step, uint32_t generation);
ckd_status catalog_places(catalog *c, catalog_place_fn visit, void *context, ckd_error *err);
/* Lists checkpoints by run, then step. run NULL: all runs. An unknown run gives an empty list. */
ckd_status catalog_list(ckd_checkpoint_list *out, catalog *c, const char *run, ckd_error *err);
void catalog_list_free(ckd_checkpoint_list *list); /* frees items only */
/* Finds a checkpoint. The message of NOT_FOUND has no advice; the engine adds it. */
ckd_status catalog_find(ckd_checkpoint *out, catalog *c, const char *run, uint64_t step, ckd_error *err);
ckd_status catalog_find_id(ckd_checkpoint *out, catalog *c, const ckd_id *id, ckd_error *err);
/* Finds the run's newest checkpoint with step < before (UINT64_MAX: the newest of all). */
ckd_status catalog_newest(ckd_checkpoint *out, catalog *c, const char *run, uint64_t before, ckd_error *err);
/* As catalog_newest, for checkpoints that are not suspect. */
ckd_status catalog_newest_healthy(ckd_checkpoint *out, catalog *c, const char *run, uint64_t before,
                                  ckd_error *err);

/* Names of the runs that have a checkpoint, in order. */
typedef struct catalog_names {
    char **names;
    size_t count;
} catalog_names;
ckd_status catalog_runs(catalog_names *out, catalog *c, ckd_error *err);
void catalog_names_free(catalog_names *names);

/*
 * Totals for the report: a row per run, by name, with its chunk files and manifests. A file counts once per run, and in
 * each run that shares it. The rows are malloc'ed (release with free); NULL if there is no run.
 */
ckd_status catalog_usage_by_run(ckd_usage **rows, size_t *count, catalog *c, ckd_error *err);

/*
 * Lists how long the saves of a run (NULL: all runs) took, and the stages of their ranks, by run name and step. Leaves
 * out saves without timings. The arrays are malloc'ed; on failure there are none.
 */
ckd_status catalog_timings(ckd_timeline *out, catalog *c, const char *run, ckd_error *err);

/* Chunk files that any checkpoint names, each counted once, and manifests. */
typedef struct catalog_files {
    uint64_t count, chunk_bytes, manifest_bytes; /* count: number of chunk files */
} catalog_files;
ckd_status catalog_usage_files(catalog_files *out, catalog *c, ckd_error *err);
/*
 * Adds a timing. Timings are advisory. Stage names are free text of 1 to 63 bytes ("encode", "write", "sync",
 * "total"). A stage added twice is replaced. Errors: NOT_FOUND (the checkpoint), INVALID, STATE.
 */
ckd_status catalog_add_timing(catalog *c, const ckd_id *id, const char *stage, uint64_t ns, uint64_t bytes,
                              ckd_error *err);

/* As catalog_add_timing, for a rank; stage->save is ignored. INVALID also if the stage ends before it begins. */
ckd_status catalog_add_stage(catalog *c, const ckd_id *id, const ckd_stage_times *stage, ckd_error *err);

/* When chunk files were last verified. This is a cache, lost with a rebuild or a checkpoint's new generation. */
typedef struct catalog_file_state {
    char name[64]; /* file name inside data/c */
    uint64_t size;
    uint64_t verified_ns; /* 0: unknown */
} catalog_file_state;
/* Lists each chunk file once, by name. malloc'ed, released with free; NULL if there is none. */
ckd_status catalog_file_states(catalog_file_state **out, size_t *count, catalog *c, ckd_error *err);
/* Records a verification time. A file unknown to the catalog is ignored. Errors: INVALID, STATE, NOSPACE. */
ckd_status catalog_set_verified(catalog *c, const char *name, uint64_t ns, ckd_error *err);

/* Runs SQLite's integrity check and the foreign key check: CORRUPT with the first complaint. */
ckd_status catalog_check(catalog *c, ckd_error *err);

#endif
