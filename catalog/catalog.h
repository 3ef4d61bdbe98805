/*
 * The catalog: what the store holds, for queries. SQLite, used nowhere else. Everything in it but timings and when files were verified can be made
 * anew from manifests and chunk files, so a damaged catalog loses nothing.
 *
 * Written by one process at a time (the engine holds the publish lock), read by many. Rollback journal, not WAL:
 * SQLite 3.40 has a known WAL-reset race, and WAL does not work on network file systems. synchronous=EXTRA,
 * trusted_schema=OFF, defensive mode, user_version checked. A handle is used by one thread at a time.
 *
 * What stands in the file is believed only after it was checked: its tables word for word at opening (schema.sql), every
 * value when it is read. So every call may return CORRUPT, and none crashes or runs for ever, whatever the file holds.
 * What SQLite cannot see (a digit changed in place) is for the manifests to contradict. Any call may also return BUSY, IO
 * and NOMEM. Numbers are stored up to 2^63 - 1; larger ones are INVALID.
 *
 * No other code may open catalog.db while a handle of the same process is open: closing any descriptor of a file drops
 * the locks that SQLite holds on it (POSIX). To rename it or to ask for its size is fine.
 */
#ifndef CATALOG_CATALOG_H
#define CATALOG_CATALOG_H

#include <stdbool.h>

#include "base/error.h"
#include "base/hash.h"

typedef struct catalog catalog;

typedef enum catalog_mode {
    CATALOG_READ, /* the file must exist; nothing is written, not even a journal is rolled back that another needs */
    CATALOG_WRITE, /* created with the schema if absent or of no bytes; what a writer that died left is rolled back */
    CATALOG_MEMORY /* empty, in memory: what readers use when the file is missing, damaged or stale; may be written */
} catalog_mode;

/*
 * path is ignored for CATALOG_MEMORY. busy_timeout_ms: how long SQLite may wait for its own locks.
 * Errors: NOT_FOUND (READ: no such file; WRITE: no such folder), CORRUPT (not a database, damaged, another store's id,
 * another schema, in WAL mode; READ: a writer died in a commit and left a journal that only a writer may roll back),
 * UNSUPPORTED (a newer user_version), MISMATCH (an older one: make it anew from the manifests), BUSY, READ_ONLY, NOSPACE, IO, NOMEM.
 * A READ handle meets CORRUPT in the same way later, if a writer dies while it is open.
 */
ckd_status catalog_open(catalog **out, const char *path, catalog_mode mode, const ckd_id *store,
                        uint32_t busy_timeout_ms, ckd_error *err);
/* Rolls back what was not committed; does nothing in a child of fork. Accepts NULL. */
void catalog_close(catalog *c);

/*
 * One transaction (BEGIN IMMEDIATE). Everything that writes happens inside one, else it fails with STATE. Errors: BUSY
 * (another process writes), READ_ONLY, STATE (one is open already), CORRUPT, NOSPACE, IO, NOMEM.
 */
ckd_status catalog_begin(catalog *c, ckd_error *err);
/*
 * Makes it durable; rolls back by itself on failure. Errors: BUSY (readers did not give way in time), STATE (no
 * transaction: a failure that SQLite could not survive has rolled it back before), NOSPACE, IO. After IO it may have been
 * committed all the same.
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

/* What one rank holds of one tensor. All shards of a tensor have the same ordinal, role, dtype and shape. */
typedef struct catalog_shard {
    const char *tensor;
    uint32_t ordinal; /* position of the tensor in the order saved */
    uint32_t index;   /* of the shard within the tensor */
    ckd_role role;
    ckd_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape;
    const ckd_region *region;
    uint64_t elements, raw_bytes, stored_bytes;
    const char *coding; /* 1 to 31 bytes */
    uint32_t depth;
    double rel_l2, max_error; /* NaN: not known */
    double value_squares;     /* what rel_l2 is relative to; 0 or NaN: not known */
    double direction_change;  /* NaN: not known */
    uint64_t nonfinite;
} catalog_shard;

typedef struct catalog_entry {
    const ckd_checkpoint *checkpoint;
    uint64_t manifest_bytes; /* for show; checkpoint->stored_bytes includes it already */
    const catalog_file *files;
    size_t file_count;
    const catalog_shard *shards;
    size_t shard_count;
    bool not_indexed; /* its shards are not known, and none are given: they stand in its chunk files only */
} catalog_entry;

/*
 * Adds a checkpoint with all that belongs to it; replaces an older generation of the same (run, step) and id, whose
 * timings stay. On failure nothing of it is in the transaction, which can go on unless the failure was fatal to it.
 * Errors: EXISTS (the same or a newer generation is there, or this (run, step) with another id, or this id elsewhere),
 * INVALID (names, numbers, shards that contradict each other), STATE, NOSPACE.
 */
ckd_status catalog_add(catalog *c, const catalog_entry *entry, ckd_error *err);
/*
 * Short texts that the engine keeps with the catalog under names of its own, other than "store" and "format": what its manifests' folders were like when it agreed
 * with them, how writing was fastest. "" if there is none.
 */
enum { CATALOG_META = 200 };
ckd_status catalog_meta(char out[CATALOG_META], catalog *c, const char *key, ckd_error *err);
/* In a transaction. */
ckd_status catalog_set_meta(catalog *c, const char *key, const char *text, ckd_error *err);
/* Removes a checkpoint with all that belongs to it. Errors: NOT_FOUND, STATE, NOSPACE. */
ckd_status catalog_remove(catalog *c, const char *run, uint64_t step, ckd_error *err);

/*
 * Queries see one snapshot, inside a transaction with what it has written. They fill caller-visible lists, whose items
 * are released with the functions below (ckd_checkpoint_list_free and ckd_tensor_list_free also free the list itself).
 */
/*
 * Until catalog_snapshot_end, all queries see the same; `opened` is for that call, which must follow unless this one failed. Nothing may be
 * written in between.
 */
ckd_status catalog_snapshot(bool *opened, catalog *c, ckd_error *err);
void catalog_snapshot_end(catalog *c, bool opened);
/*
 * Tells run, step and generation of each checkpoint, by run, then step: much cheaper than catalog_list. It ends early, with CKD_OK, when `visit` returns
 * false. The name is valid during the call.
 */
typedef bool (*catalog_place_fn)(void *context, const char *run, uint64_t step, uint32_t generation);
ckd_status catalog_places(catalog *c, catalog_place_fn visit, void *context, ckd_error *err);
/* By run, then step. run NULL: all runs; an unknown run: an empty list. */
ckd_status catalog_list(ckd_checkpoint_list *out, catalog *c, const char *run, ckd_error *err);
void catalog_list_free(ckd_checkpoint_list *list); /* frees items only */
/* NOT_FOUND without a message about what to do: the engine adds it. */
ckd_status catalog_find(ckd_checkpoint *out, catalog *c, const char *run, uint64_t step, ckd_error *err);
ckd_status catalog_find_id(ckd_checkpoint *out, catalog *c, const ckd_id *id, ckd_error *err);
/* The newest of the run with step < before (UINT64_MAX: the newest of all). */
ckd_status catalog_newest(ckd_checkpoint *out, catalog *c, const char *run, uint64_t before, ckd_error *err);

/*
 * Tensors of a checkpoint in the order saved, shards folded together ("mixed" coding if they differ, depth and the largest
 * error the maximum, relative ones by their weights; NaN if one is not known). *detailed false: it was added without them, and the list is empty. Errors: NOT_FOUND.
 */
ckd_status catalog_tensors(ckd_tensor_list *out, bool *detailed, catalog *c, const ckd_id *id,
                           ckd_error *err);

/* The same of shards that no catalog has: those of `entry`, in any order. Errors: INVALID, NOMEM. */
ckd_status catalog_fold(ckd_tensor_list *out, const catalog_entry *entry, ckd_error *err);
void catalog_tensors_free(ckd_tensor_list *list); /* frees items and their strings only */

/* Names, in order, of the runs that have a checkpoint. */
typedef struct catalog_names {
    char **names;
    size_t count;
} catalog_names;
ckd_status catalog_runs(catalog_names *out, catalog *c, ckd_error *err);
void catalog_names_free(catalog_names *names);

/*
 * Totals for the report. Their cost grows with checkpoints, not with shards.
 * Per run, by name: chunk files and manifests. A file that several checkpoints of the run share counts once; one that runs
 * share counts for each of them. malloc'ed rows, released with free; NULL if there is no run.
 */
ckd_status catalog_usage_by_run(ckd_usage **rows, size_t *count, catalog *c, ckd_error *err);

/*
 * How long the saves of a run (NULL: of all runs) took, by run name and step; those without timings are left out. 
 * And of each what its ranks did when. Its arrays are malloc'ed; on failure there are none.
 */
ckd_status catalog_timings(ckd_timeline *out, catalog *c, const char *run, ckd_error *err);

/* Chunk files that any checkpoint names, each counted once, and manifests. */
typedef struct catalog_files {
    uint64_t count, chunk_bytes, manifest_bytes; /* count: of chunk files */
} catalog_files;
ckd_status catalog_usage_files(catalog_files *out, catalog *c, ckd_error *err);
/*
 * Totals by role of each checkpoint of `list`, which must be all of them, as catalog_list gives them, in the same snapshot or transaction.
 * malloc'ed, list->count of them, zero where a role is missing. CORRUPT if the list is of another time.
 */
ckd_status catalog_usage_by_checkpoint(ckd_checkpoint_roles **rows, const ckd_checkpoint_list *list,
                                       catalog *c, ckd_error *err);
/*
 * Places in `list` of the checkpoints that were added without shards, whose sums by role and tensor are not here; `list` as above. malloc'ed, released with free; NULL if
 * there is none. CORRUPT if the list is of another time.
 */
ckd_status catalog_not_indexed(size_t **places, size_t *count, const ckd_checkpoint_list *list, catalog *c,
                               ckd_error *err);
/* Sums by run, tensor and role, by run name; rows and names are one piece of memory, released with free. The cost grows with tensors only. */
ckd_status catalog_usage_by_tensor(ckd_tensor_usage **rows, size_t *count, catalog *c, ckd_error *err);

/*
 * Timings are advisory: stage names are free text of 1 to 63 bytes ("encode", "write", "sync", "publish"); a stage told
 * again replaces what it was. Errors: NOT_FOUND (the checkpoint), INVALID, STATE.
 */
ckd_status catalog_add_timing(catalog *c, const ckd_id *id, const char *stage, uint64_t ns, uint64_t bytes,
                              ckd_error *err);

/* The same of a rank; stage->save is not looked at. INVALID also: it ends before it begins. */
ckd_status catalog_add_stage(catalog *c, const ckd_id *id, const ckd_stage_times *stage, ckd_error *err);

/*
 * When chunk files were last read through and found right: a cache, which a rebuild or a new generation of a checkpoint loses.
 */
typedef struct catalog_file_state {
    char name[64]; /* file name inside data/c */
    uint64_t size;
    uint64_t verified_ns; /* 0: not known */
} catalog_file_state;
/* Each chunk file once, by name. malloc'ed, released with free; NULL if there is none. */
ckd_status catalog_file_states(catalog_file_state **out, size_t *count, catalog *c, ckd_error *err);
/* A file that the catalog does not have is none to note. Errors: INVALID, STATE, NOSPACE. */
ckd_status catalog_set_verified(catalog *c, const char *name, uint64_t ns, ckd_error *err);

/* SQLite's own integrity check, and that no row refers to one that is gone: CORRUPT with the first complaint. */
ckd_status catalog_check(catalog *c, ckd_error *err);

#endif
