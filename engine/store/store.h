/*
 * The open store: its identity, locks and catalog. Internal to engine/.
 *
 * Invariants:
 *  1. A checkpoint exists if and only if a valid manifest names it and no tombstone does. The catalog only repeats that.
 *  2. Manifests, tombstones, intents and the catalog change only under the publish lock.
 *  3. A chunk file is named in an intent on disk before it is created, and keeps that intent until a manifest names it.
 *  4. A store opened for reading writes nothing; if its catalog does not match the manifests, a catalog in memory does.
 *  5. A chunk file that a manifest may name is never removed; one that may be left over keeps its intent.
 */
#ifndef ENGINE_STORE_H
#define ENGINE_STORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/structs.h"
#include "base/threads.h"
#include "catalog/catalog.h"
#include "codec/metadata/metadata.h"
#include "engine/store/paths.h"

/* ---- scrub_times.c: when chunk files were last read through and found right ---- */
typedef struct scrubbed_files {
    ckd_id *ids;
    size_t count, capacity;
    uint64_t at_ns; /* of all of them */
} scrubbed_files;

/* What a session saved or restored last, so that the saves of its store's handle notice another launch. */
typedef struct save_follow {
    char run[CKD_RUN_MAX + 1];
    bool has_last; /* else its run had nothing */
    bool own;      /* the last one is the session's; else it only was there when that was opened */
    ckd_id last;
    uint64_t step;
    ckd_id tried; /* of a save of its own that failed, and may be committed all the same; or zero */
} save_follow;

/* What rooms above do for a store; engine/open.c fills it in. */
typedef struct store_hooks {
    /* Removes what dead processes left there. Under the publish lock. */
    ckd_status (*recover)(ckd_store *store, ckd_error *err);
    /* Behind a commit to `run`, without any lock: what fails is told by on_message. */
    void (*after_commit)(ckd_store *store, const char *run);
    /* Releases devices, references and workspace. */
    void (*close)(ckd_store *store);
} store_hooks;

struct ckd_store {
    const store_hooks *hooks;
    char *path;
    ckd_open_mode mode;
    ckd_store_options options;
    ckd_id id;
    thread_pool *pool;
    pthread_mutex_t mutex;   /* guards the catalog, which several saves and loads of this handle may use */
    catalog *catalog;        /* NULL after failures; store_query and store_sync_catalog care for that */
    bool catalog_in_memory;  /* instead of the file */
    uint64_t catalog_number; /* of the file that is open: a rebuild puts another one in its place */
    bool
        list_unreadable; /* checkpoints whose chunk files cannot be read now: without their tensors, for good */
    bool all_tensors;    /* set while a rebuild reads those of all checkpoints, however many there are */
    bool catalog_compared;               /* with what the manifests say, not only with their names */
    uint64_t manifests_skipped;          /* damaged ones met while refreshing */
    struct device_lease *devices;        /* that nobody uses now; with the mutex */
    struct device_reference *references; /* the same (device/reference.h) */
    uint64_t device_reference_bytes, device_references_held; /* at most, and now */
    uint64_t device_references_refused; /* of what it may take, what the device did not have */
    atomic_bool
        devices_differ; /* from the host in what they compute (save/self_check.h): they code nothing more */
    scrubbed_files scrubbed;          /* that the catalog is to be told of with its next change */
    bool keeps_workspace;             /* as sessions do, which save again and again */
    const save_follow *follow;        /* a session's saves; NULL: they look at nobody */
    struct save_workspace *workspace; /* that no save has; with the mutex */
};

/* printf to the on_message callback, if any. */
void store_message(const ckd_store *store, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- foreign.c ---- */
/* CORRUPT if a folder of the store is a symbolic link. */
ckd_status store_check_folders(const ckd_store *store, ckd_error *err);
/* A message if every user of the machine may write to it. */
void store_warn_open_to_all(const ckd_store *store);

/* As ckd_store_open. */
ckd_status store_open(ckd_store **out, const char *path, ckd_open_mode mode, const ckd_store_options *options,
                      const store_hooks *hooks, ckd_error *err);
/* As ckd_store_rebuild (rebuild.c). */
ckd_status store_rebuild(ckd_rebuild_result *result, const char *path, const ckd_store_options *options,
                         const store_hooks *hooks, ckd_error *err);
/* For rebuilding: an existing store, for writing, its catalog not opened. */
ckd_status store_open_without_catalog(ckd_store **out, const char *path, const ckd_store_options *options,
                                      const store_hooks *hooks, ckd_error *err);

/* READ_ONLY unless opened for writing. */
ckd_status store_check_writable(const ckd_store *store, ckd_error *err);

/*
 * The publish lock. BUSY after the store's timeout, naming who holds it; after a second of waiting a message does that.
 */
ckd_status store_lock_publish(file_lock **out, const ckd_store *store, ckd_error *err);
/* The shared reader lock: what it protects is not unlinked. */
ckd_status store_lock_reader(file_lock **out, const ckd_store *store, ckd_error *err);
/* The same, waiting for so long; 0: not at all. */
ckd_status store_lock_publish_within(file_lock **out, const ckd_store *store, uint32_t timeout_ms,
                                     ckd_error *err);
ckd_status store_lock_reader_within(file_lock **out, const ckd_store *store, uint32_t timeout_ms,
                                    ckd_error *err);
/*
 * For whoever unlinks: the reader lock, exclusive, without waiting. It is tried again and again with one unlinker_wait,
 * zero-initialised, so that a message tells whom it waits for. BUSY while anybody loads or saves.
 */
typedef struct unlinker_wait {
    uint64_t begun_ns;
    bool told;
} unlinker_wait;
ckd_status store_lock_unlinker(file_lock **out, unlinker_wait *w, const ckd_store *store, ckd_error *err);

/* Reads and decodes one manifest. NOT_FOUND, CORRUPT, UNSUPPORTED. */
ckd_status store_read_manifest(manifest *out, const ckd_store *store, const char *run, uint64_t step,
                               uint32_t generation, ckd_error *err);

/*
 * Completes a manifest of an early version, which names its own files only, with those of what it depends on, as far as that is in the store (view_cache.c). Others stay
 * as they are. Takes the mutex. Errors: NOMEM.
 */
ckd_status manifest_name_older(manifest *m, ckd_store *store, ckd_error *err);
/* Appends all files that the manifest of the checkpoint with this id names, whether it is listed or not; none, if that cannot be read. Takes the mutex. Errors: NOMEM. */
ckd_status manifest_add_files_of(manifest *m, ckd_store *store, const ckd_id *id, ckd_error *err);

/* ---- catalog_sync.c ---- */
typedef struct reconcile_result {
    bool behind;         /* the file disagrees, and may not be written: the store was opened for reading */
    bool catalog_failed; /* the failure is the catalog's, not that of the manifests */
} reconcile_result;
/*
 * Makes the catalog that is open agree with the manifests: adds what it lacks, drops what is gone. Of a writer, what the
 * catalog lists is durable afterwards. A writer's file only under the publish lock.
 */
ckd_status store_reconcile_catalog(reconcile_result *result, ckd_store *store, ckd_error *err);
/*
 * How many rows of tensors it adds at most for checkpoints that it ingests, in all stores of the process. For tests, which have no time to make stores of so many.
 * Not while a store is open.
 */
void store_ingest_limit(size_t rows);
/*
 * In a transaction that brings the catalog in step with a manifest that was just published: notes in it what the folders are like now, so that the next
 * who opens the store need not read all manifests. Under the publish lock, after store_sync_catalog.
 */
ckd_status store_set_mark(ckd_store *store, ckd_error *err);
/*
 * Keeps a text in the catalog, under a key of the caller's; "" keeps what is there. A catalog that is made anew has none. Under the publish lock with the mutex,
 * after store_sync_catalog.
 */
ckd_status store_note(ckd_store *store, const char *key, const char *text, ckd_error *err);

/* ---- catalog.c; all but store_query with the mutex held, or before the handle is shared ---- */
/* Opens the catalog as the mode asks, in step with the manifests. For writers under the publish lock. */
ckd_status store_open_catalog(ckd_store *store, ckd_error *err);
/*
 * Writers, under the publish lock, before they rely on the catalog or change it: in step with the manifests, mended if
 * it is damaged or was taken away, in memory if it cannot be used now.
 */
ckd_status store_sync_catalog(ckd_store *store, ckd_error *err);
/*
 * Makes a new file from the manifests, under the publish lock. Only when that is complete, it takes the place of the old one,
 * which is kept as catalog.db.old: after a failure (a full disk) the old one is there, as it was. IO if a chunk file
 * cannot be read. `on_request`, a rebuild: its checkpoint is listed without its tensors then, and all others are listed with theirs, whatever time it takes.
 */
ckd_status store_rebuild_catalog(ckd_store *store, bool on_request, ckd_error *err);
/* Leaves the file alone, and works with a catalog in memory. */
ckd_status store_use_memory(ckd_store *store, ckd_error *err);
/*
 * Asks the catalog something; takes the mutex. If the file fails, or is behind, the manifests are asked. A question must
 * release what it got when it fails, as it may be asked twice.
 */
typedef ckd_status (*store_query_fn)(void *context, catalog *c, ckd_error *err);
ckd_status store_query(ckd_store *store, store_query_fn question, void *context, ckd_error *err);

/* ---- scrub_times.c ---- */
/* What the catalog remembers; both are released with free. Not to remember is no failure: nothing is there then. Takes the mutex. */
catalog_file_state *scrub_times_load(size_t *count, ckd_store *store);
/* A manifest's files were verified at `now`: *f grows. NOMEM. */
ckd_status scrub_times_add(scrubbed_files *f, const manifest *m, ckd_error *err);
/* Leaves it to the next change of the catalog, which costs no sync of its own then. Takes over what *f points to; takes the mutex. */
void scrub_times_queue(ckd_store *store, scrubbed_files *f);
/* In a transaction of the catalog, with the mutex held. */
ckd_status scrub_times_write(ckd_store *store, ckd_error *err);
void scrub_times_name(char name[64], const ckd_id *file); /* as the catalog has it */

/* ---- catalog_ingest.c ---- */
/*
 * Adds one checkpoint to the catalog, from its manifest and the indexes of its chunk files. Takes over what m points to. *last: NULL, or the view that the
 * call before left there, as the next checkpoint may be in the same files; the caller closes it in the end.
 * Inside a transaction. A checkpoint whose chunk files are damaged is added without its tensors, with a message. One whose
 * files the system does not let us read may be fine in a moment: IO, so that the file does not lack its tensors from then
 * on; without them only in memory, or if list_unreadable is set.
 */
struct view;
ckd_status store_ingest(ckd_store *store, manifest *m, struct view **last, ckd_error *err);
/* The same from the manifest alone: not_indexed.c has the tensors when somebody asks for them. */
ckd_status store_ingest_manifest(ckd_store *store, manifest *m, ckd_error *err);
void store_report_unreadable(const ckd_store *store, const ckd_checkpoint *c, const ckd_error *why);

/* ---- manifests.c ---- */
/* The manifests in data/m that count: by run and step, of each the generations above its tombstone, highest first. */
typedef struct manifest_list {
    manifest_name *items;
    size_t count;
} manifest_list;
ckd_status manifests_read(manifest_list *out, const ckd_store *store, ckd_error *err);
/* All of them, also those in the trash; and the tombstones, in the same order. */
ckd_status manifests_read_all(manifest_list *out, const ckd_store *store, ckd_error *err);
ckd_status manifests_tombstones(manifest_list *out, const ckd_store *store, ckd_error *err);
/* The tombstone of the lowest generation that says that the manifest does not count; NULL: it counts. */
const manifest_name *manifests_covering_tombstone(const manifest_list *tombstones, const manifest_name *name);
void manifests_free(manifest_list *list);
/*
 * The generation that a new checkpoint at (run, step) gets: above its tombstone. EXISTS if a manifest of it counts, whether
 * that can be read or not; INVALID if no generation is left.
 */
ckd_status manifests_new_generation(uint32_t *out, const ckd_store *store, const char *run, uint64_t step,
                                    ckd_error *err);
/* The same from lists that were read: of manifests that count, and of tombstones. */
ckd_status manifests_free_generation(uint32_t *out, const manifest_list *manifests,
                                     const manifest_list *tombstones, const char *run, uint64_t step,
                                     ckd_error *err);
static inline bool same_checkpoint_name(const manifest_name *a, const manifest_name *b) {
    return a->step == b->step && strcmp(a->run, b->run) == 0;
}

/* The folders of a store, where they are missing: copies and archives drop empty ones. */
ckd_status store_make_directories(const char *root, ckd_error *err);

/* ---- recovery.c ---- */
/* Removes what writers that died have left. Under the publish lock. */
ckd_status store_recover(ckd_store *store, ckd_error *err);

/* ---- queries.c ---- */
/* Like ckd_store_find; the messages say what there is. Takes the mutex. */
ckd_status store_find(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step, ckd_error *err);
ckd_status store_find_id(ckd_checkpoint *out, ckd_store *store, const ckd_id *id, ckd_error *err);
/* Like ckd_store_list; release the items with catalog_list_free. */
ckd_status store_list(ckd_checkpoint_list *out, ckd_store *store, const char *run, ckd_error *err);

static inline bool id_equal(const ckd_id *a, const ckd_id *b) {
    return memcmp(a, b, sizeof(*a)) == 0;
}
/* For qsort and bsearch: ids, and structs that begin with one, in the order of their bytes. */
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
