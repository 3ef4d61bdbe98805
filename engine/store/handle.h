/*
 * The open store: its identity, locks and catalog. Internal to engine/.
 *
 * Invariants:
 *  1. A checkpoint exists if and only if a valid manifest names it and no tombstone does. The catalog repeats that.
 *  2. Manifests, tombstones and the catalog change, and intents appear, only under the publish lock.
 *  3. An intent on disk names a chunk file before the file is created, and stays until a manifest names the file.
 *  4. A store opened for reading writes nothing. If its catalog does not match the manifests, a catalog in memory does.
 *  5. A chunk file that a manifest may name is never removed. A file that may be left over keeps its intent.
 */
#ifndef ENGINE_STORE_HANDLE_H
#define ENGINE_STORE_HANDLE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/threads.h"
#include "base/vocabulary.h"
#include "catalog/catalog.h"
#include "codec/metadata/metadata.h"
#include "engine/common/common.h"
#include "engine/store/paths.h"

/* ---- catalog.c: when chunk files were last read in full and found intact ---- */
typedef struct scrubbed_files {
    ckd_id *ids;
    size_t count, capacity;
    uint64_t at_ns; /* the time of that reading, the same for all files */
} scrubbed_files;

/* ---- closure.c: records whose stored bytes this handle has read in the last hour, and found intact ---- */
typedef struct intact_records {
    pthread_mutex_t mutex;
    hash_set records;  /* by file and offset */
    uint64_t since_ns; /* when the set was last emptied */
} intact_records;

/*
 * The checkpoint that a session saved or restored last. Saves of the store's handle compare it with the run, and so
 * notice another launch of the job.
 */
typedef struct launch_record {
    char run[CKD_RUN_MAX + 1];
    bool has_last; /* false: the run had no checkpoint */
    bool own; /* the session saved or restored it; false: it was the newest when the session was opened */
    ckd_id last;
    uint64_t step;
    ckd_id tried; /* a failed save of the session, which may have been committed nevertheless; zero if none */
    /*
     * for a state that is saved late: the latest date in the run and its branches at the time when it was complete; 0:
     * it is not late
     */
    uint64_t newest_ns;
} launch_record;

/* Callbacks into the rooms above; engine/open.c sets them. */
typedef struct store_hooks {
    /* Removes what dead processes left in the rooms above. Under the publish lock. */
    ckd_status (*recover)(ckd_store *store, ckd_error *err);
    /* Called after a commit to `run`, without any lock. Failures are reported through on_message. */
    void (*after_commit)(ckd_store *store, const char *run);
    /* Releases devices, references and workspace. */
    void (*close)(ckd_store *store);
} store_hooks;

struct ckd_store {
    const store_hooks *hooks;
    char *path;
    struct object_mirror *mirror; /* of a store in a bucket: `path` is its directory (engine/open.c) */
    ckd_open_mode mode;
    ckd_store_options options;
    ckd_id id;
    /* data/store is damaged or missing: `id` is the one that other files agree on */
    atomic_bool identity_lost;
    char identity_mark
        [FILE_FINGERPRINT]; /* of data/store when it was read: another file there is read again */
    thread_pool *pool;
    pthread_mutex_t mutex; /* guards the catalog, which several saves and loads of this handle may use */
    catalog *catalog; /* NULL after failures; store_query and store_refresh_catalog_locked open it again */
    bool catalog_in_memory;  /* the catalog is in memory, not the file */
    uint64_t catalog_number; /* inode of the open file: a rebuild puts another file in its place */
    /* the rows were compared with the contents of the manifests, not only with their names */
    bool catalog_compared;
    uint64_t manifests_skipped;                              /* damaged manifests found while reconciling */
    struct device_lease *devices;                            /* leases that are free; guarded by the mutex */
    struct device_reference *references;                     /* likewise (device/reference.c) */
    uint64_t device_reference_bytes, device_references_held; /* the limit, and what is held now */
    uint64_t device_references_refused; /* part of the limit that the device could not provide */
    /* devices computed other values than the host (save/self_check.h): they code nothing more */
    atomic_bool devices_differ;
    atomic_bool losses_reported;      /* by ckd_store_check_newest and store_check_unlisted */
    scrubbed_files scrubbed;          /* to be recorded with the next change of the catalog */
    intact_records intact;            /* what saves have checked of the chains on which they build */
    bool keeps_workspace;             /* sessions set it, as they save again and again */
    const launch_record *launch;      /* the session whose saves check for other launches; NULL: no check */
    struct save_workspace *workspace; /* free workspace; guarded by the mutex */
};

/* ---- handle.c ---- */
/* Makes the handle alone: nothing is read yet. ckd_store_close releases it. Errors: INVALID, NOMEM. */
ckd_status store_new(ckd_store **out, const char *root, ckd_open_mode mode, const ckd_store_options *options,
                     const store_hooks *hooks, ckd_error *err);
/* Is the store in a bucket? Then `path` is the directory of this machine's mirror. */
bool store_is_remote(const ckd_store *store);
/* Formats a message for the on_message callback, if there is one. */
void store_message(const ckd_store *store, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same for on_info. */
void store_info(const ckd_store *store, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Errors: READ_ONLY (the store is not open for writing), CORRUPT (its identity is lost). */
ckd_status store_check_writable(const ckd_store *store, ckd_error *err);
/* The same for a repair, which writes a lost identity again. Errors: READ_ONLY. */
ckd_status store_check_repairable(const ckd_store *store, ckd_error *err);

/* ---- store.c ---- */
/* Makes the folders of a store that are missing; copies and archives drop empty ones. */
ckd_status store_make_directories(const char *root, ckd_error *err);
/* Implements ckd_store_open. */
ckd_status store_open(ckd_store **out, const char *path, ckd_open_mode mode, const ckd_store_options *options,
                      const store_hooks *hooks, ckd_error *err);
/* Implements ckd_store_rebuild. */
ckd_status store_rebuild(ckd_rebuild_result *result, const char *path, const ckd_store_options *options,
                         const store_hooks *hooks, ckd_error *err);
/* Opens an existing store for writing, without its catalog. For rebuilding. */
ckd_status store_open_without_catalog(ckd_store **out, const char *path, const ckd_store_options *options,
                                      const store_hooks *hooks, ckd_error *err);

/* ---- identity.c ---- */
/*
 * Sets store->id from data/store. If that is damaged or missing, takes the id on which the store's other files agree
 * and sets identity_lost. A store that may be created is refused then, as its next step is to save. Errors: NOT_FOUND
 * (there is no store), CORRUPT (the identity is lost), UNSUPPORTED, IO, NOMEM.
 */
ckd_status identity_open(ckd_store *store, ckd_error *err);
/*
 * Returns why data/store cannot be used now; CKD_OK if it can. Errors: NOT_FOUND, CORRUPT, UNSUPPORTED, STATE (it
 * is that of another store), IO, NOMEM.
 */
ckd_status identity_condition(const ckd_store *store, ckd_error *why);
/*
 * Whether another store is at the path by now, so that nothing this handle wrote there could ever be read. False while
 * this cannot be told, and before the handle has an id. Sets err to STATE.
 */
bool identity_was_replaced(const ckd_store *store, ckd_error *err);
/*
 * Finds the id of the store in its other files. *found is false if none of them tells. Errors: CORRUPT (they disagree),
 * IO, NOMEM.
 */
ckd_status identity_derive(ckd_id *out, bool *found, const ckd_store *store, ckd_error *err);
/*
 * Whether data/store exists, or should exist because the folders have files that are made only after it. A new identity
 * would cut these off. Errors: IO, NOMEM.
 */
ckd_status identity_is_expected(bool *out, const ckd_store *store, ckd_error *err);
/* Makes a new identity, unless another process has. Under the publish lock. Errors: those of files, NOMEM. */
ckd_status identity_create(const ckd_store *store, ckd_error *err);

/* ---- locks.c ---- */
/*
 * Takes the publish lock. After a second of waiting, a message names the holder. Errors: BUSY (the store's timeout has
 * passed; the error names the holder).
 */
ckd_status store_lock_publish(file_lock **out, const ckd_store *store, ckd_error *err);
/* Takes the shared reader lock: nothing that it protects is unlinked. */
ckd_status store_lock_reader(file_lock **out, const ckd_store *store, ckd_error *err);
/* The same with a timeout; 0: does not wait. */
ckd_status store_lock_publish_within(file_lock **out, const ckd_store *store, uint32_t timeout_ms,
                                     ckd_error *err);
ckd_status store_lock_reader_within(file_lock **out, const ckd_store *store, uint32_t timeout_ms,
                                    ckd_error *err);
/*
 * Takes the reader lock exclusively, without waiting, for callers that unlink files. The caller retries with the same
 * unlinker_wait, zero-initialised, so that a message can name the holder it waits for. Errors: BUSY (a load or a save
 * is running).
 */
typedef struct unlinker_wait {
    uint64_t begun_ns;
    bool reported;
} unlinker_wait;
ckd_status store_lock_unlinker(file_lock **out, unlinker_wait *w, const ckd_store *store, ckd_error *err);

/* ---- view_cache.c ---- */
/*
 * Completes a manifest of an early version, which names only its own files, with the files of its dependencies as far
 * as the store has them (view_cache.c). Other manifests stay unchanged. Takes the mutex. Errors: IO (a manifest that
 * cannot be read may be that of a dependency), NOMEM.
 */
ckd_status manifest_complete_early(manifest *m, ckd_store *store, ckd_error *err);
/*
 * Appends all files that the manifest of this checkpoint names, whether the checkpoint is listed or deleted. Adds
 * nothing if that manifest cannot be read. Takes the mutex. Errors: those of manifest_complete_early.
 */
ckd_status manifest_add_files_of(manifest *m, ckd_store *store, const ckd_id *id, ckd_error *err);

/* ---- catalog_reconcile.c ---- */
typedef struct reconcile_result {
    bool behind;         /* the file differs and cannot be written, as the store was opened for reading */
    bool catalog_failed; /* the catalog failed, not the manifests */
    bool changed;        /* a manifest was replaced or removed between its listing and its reading */
} reconcile_result;
/*
 * Makes the open catalog agree with the manifests: adds missing rows and drops stale ones. For a writer, every
 * checkpoint in the catalog is durable afterwards. Writing the file needs the publish lock.
 */
ckd_status store_reconcile_catalog(reconcile_result *result, ckd_store *store, ckd_error *err);
/* Adds one checkpoint to the catalog, from its manifest. Inside a transaction. Errors: those of catalog_add. */
ckd_status store_ingest(ckd_store *store, const manifest *m, ckd_error *err);
/*
 * Records the current state of the folders in the catalog, so that the next open need not read all manifests. Called in
 * the transaction that adds or drops a row. Under the publish lock, after store_refresh_catalog_locked.
 */
ckd_status store_record_fingerprint(ckd_store *store, ckd_error *err);
/*
 * Stores a text in the catalog under the caller's key; "" keeps the present text. A rebuilt catalog starts without it.
 * Under the publish lock with the mutex, after store_refresh_catalog_locked.
 */
ckd_status store_record_meta(ckd_store *store, const char *key, const char *text, ckd_error *err);

/* ---- catalog.c; the mutex is held, or the handle not shared yet, except for store_query ---- */
/* Opens the catalog as the mode asks, in step with the manifests. Writers hold the publish lock. */
ckd_status store_open_catalog(ckd_store *store, ckd_error *err);
/*
 * Brings the catalog in step with the manifests. Rebuilds it if it is damaged or missing; uses a catalog in memory if
 * the file is unusable now. Writers call it under the publish lock before they rely on the catalog or change it.
 */
ckd_status store_refresh_catalog_locked(ckd_store *store, ckd_error *err);
/*
 * Brings the catalog's file in step, if it can be used as it is by now, before tombstones are removed. Does nothing
 * while somebody holds the mutex. Under the publish lock. A failure is left to the next sync. Returns whether the file
 * is in step, or missing. Otherwise it may have rows of deleted checkpoints, which only their tombstones tell from lost
 * ones.
 */
bool store_refresh_usable_catalog(ckd_store *store);
/*
 * Does the same as store_refresh_catalog_locked for callers that do not hold the publish lock: takes the lock and the
 * mutex. The catalog then has all commits of other processes, even of those that died before they changed it. Does
 * nothing for readers, whose queries look at the manifests themselves if something is not found. Errors: BUSY (as in
 * store_lock_publish).
 */
ckd_status store_refresh_catalog(ckd_store *store, ckd_error *err);
/*
 * fallback.c: as ckd_store_check_newest, for later branches (RUN~2, ...) of the run. An unreadable manifest in such a
 * branch may be that of the newest checkpoint of all, unless the catalog lists a newer one there.
 */
ckd_status store_check_later_branches(ckd_store *store, const ckd_checkpoint *newest, ckd_error *err);
/*
 * fallback.c: for a run without any listed checkpoint, in its branches either. An unreadable manifest there shows that
 * the run is not new. Errors: CORRUPT and others (of that manifest), IO, NOMEM.
 */
ckd_status store_check_unlisted(ckd_store *store, const char *run, ckd_error *err);
/*
 * Builds a new catalog file from the manifests, under the publish lock. The new file replaces the old one only when it
 * is complete, and the old one is kept as catalog.db.old. So after a failure (a full disk) the old one is unchanged.
 * Errors: IO (a chunk file cannot be read). on_request (an explicit rebuild): such a checkpoint is listed without its
 * tensors instead, and all others with theirs, however long that takes.
 */
ckd_status store_rebuild_catalog(ckd_store *store, bool on_request, ckd_error *err);
/* Leaves the file alone and works with a catalog in memory. */
ckd_status store_use_memory_catalog(ckd_store *store, ckd_error *err);
/*
 * Runs a query; takes the mutex. If the file fails or is behind, a catalog made from the manifests answers. A query may
 * be run twice, so it must release its results when it fails.
 */
typedef ckd_status (*store_query_fn)(void *context, catalog *c, ckd_error *err);
ckd_status store_query(ckd_store *store, store_query_fn query, void *context, ckd_error *err);

/* ---- catalog.c: scrub times ---- */
/*
 * Reads from the catalog when each chunk file was last verified; the caller frees the array. Never fails: what cannot
 * be read is missing from the array. Takes the mutex.
 */
catalog_file_state *scrub_times_load(size_t *count, ckd_store *store);
/* Adds the files of a manifest that was verified now to *f. Errors: NOMEM. */
ckd_status scrub_times_add(scrubbed_files *f, const manifest *m, ckd_error *err);
/*
 * Queues the times for the next change of the catalog, so that they cost no sync of their own. Takes over what *f
 * points to; takes the mutex.
 */
void scrub_times_queue(ckd_store *store, scrubbed_files *f);
/* Writes the queued times. In a transaction of the catalog, with the mutex held. */
ckd_status scrub_times_write(ckd_store *store, ckd_error *err);
void scrub_times_name(char name[64], const ckd_id *file); /* the file's name as the catalog has it */

/* ---- manifests.c ---- */
/* Reads and decodes one manifest. Errors: NOT_FOUND, CORRUPT, UNSUPPORTED. */
ckd_status store_read_manifest(manifest *out, const ckd_store *store, const char *run, uint64_t step,
                               uint32_t generation, ckd_error *err);
/* Lists the manifests in data/m that count: by run and step, then generations above the tombstone, highest first. */
typedef struct manifest_list {
    manifest_name *items;
    size_t count;
} manifest_list;
ckd_status manifests_read(manifest_list *out, const ckd_store *store, ckd_error *err);
/* The first lists all manifests, those in the trash included; the second all tombstones. Both in the same order. */
ckd_status manifests_read_all(manifest_list *out, const ckd_store *store, ckd_error *err);
ckd_status manifests_tombstones(manifest_list *out, const ckd_store *store, ckd_error *err);
bool manifests_contain(const manifest_list *list, const manifest_name *name);
/* The tombstone of the lowest generation that covers the manifest; NULL: the manifest counts. */
const manifest_name *manifests_covering_tombstone(const manifest_list *tombstones, const manifest_name *name);
/* Tells of each tombstone whether it covers one of the manifests. The caller frees *out. Errors: NOMEM. */
ckd_status manifests_mark_covering(bool **out, const manifest_list *tombstones, const manifest_list *names,
                                   ckd_error *err);
void manifests_free(manifest_list *list);
/*
 * Finds the generation for a new checkpoint at (run, step), above its tombstone. Errors: EXISTS (a manifest counts
 * there, readable or not), INVALID (no generation is left), IO, NOMEM.
 */
ckd_status manifests_new_generation(uint32_t *out, const ckd_store *store, const char *run, uint64_t step,
                                    ckd_error *err);
/* The same from lists that the caller has read: manifests that count, and tombstones. Ignores name->generation. */
ckd_status manifests_pick_generation(uint32_t *out, const ckd_store *store, const manifest_list *manifests,
                                     const manifest_list *tombstones, const manifest_name *name,
                                     ckd_error *err);
static inline bool same_checkpoint_name(const manifest_name *a, const manifest_name *b) {
    return a->step == b->step && strcmp(a->run, b->run) == 0;
}

/* ---- recovery.c ---- */
/* Removes what dead writers left. Under the publish lock. */
ckd_status store_recover(ckd_store *store, ckd_error *err);
/*
 * Recovers the store if a rename was interrupted. Returns whether one may be left, because somebody reads or something
 * is damaged. Under the publish lock, where the listing of a store in a bucket costs no request.
 */
bool store_complete_renames(ckd_store *store);

/* ---- queries.c ---- */
/* Like ckd_store_find; the error says what the store has instead. Takes the mutex. */
ckd_status store_find(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step, ckd_error *err);
ckd_status store_find_id(ckd_checkpoint *out, ckd_store *store, const ckd_id *id, ckd_error *err);
/* Like ckd_store_list; release the items with catalog_list_free. */
ckd_status store_list(ckd_checkpoint_list *out, ckd_store *store, const char *run, ckd_error *err);

static inline bool id_equal(const ckd_id *a, const ckd_id *b) {
    return memcmp(a, b, sizeof(*a)) == 0;
}
/* Compares ids, and structs that begin with one, by their bytes. For qsort and bsearch. */
static inline int id_compare(const void *a, const void *b) {
    return memcmp(a, b, sizeof(ckd_id));
}
/* ids: sorted with id_compare. */
static inline bool id_among(const ckd_id *id, const ckd_id *ids, size_t count) {
    return count > 0 && bsearch(id, ids, count, sizeof(*ids), id_compare) != NULL;
}
static inline bool id_is_zero(const ckd_id *id) {
    static const ckd_id zero;
    return id_equal(id, &zero);
}

#endif
