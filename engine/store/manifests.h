/* Manifests, settings and deletions of an open store, as a whole. */
#ifndef ENGINE_STORE_MANIFESTS_H
#define ENGINE_STORE_MANIFESTS_H

#include "engine/store/handle.h"

/*
 * The store's deletion mark: a random id in data/deletions that every deletion replaces before it makes a tombstone.
 *
 * A catalog records the mark when it is in step with the manifests. While both are equal, no deletion has begun since.
 * Then a row without a manifest and a tombstone means a loss. If they differ, the catalog is older than some deletion
 * and the row proves nothing, as its checkpoint may have been deleted.
 */

#define DELETION_MARK_META "deletions" /* key in the catalog's table meta */

/*
 * Reads the mark, in the form that the catalog records. "": it is missing or damaged, and then no catalog counts as
 * current. Errors: IO, NOMEM (the mark is unknown now, and may be readable later).
 */
ckd_status deletion_mark_read(char out[CATALOG_META], const ckd_store *store, ckd_error *err);

/*
 * Replaces the mark durably. On a full disk it removes the mark, so that no catalog counts as current. Under the
 * publish lock. Errors: IO, NOMEM.
 */
ckd_status deletion_mark_renew(const ckd_store *store, ckd_error *err);
/*
 * Makes a mark if there is none, as in a store of an early version or after a full disk. A failure to write it only
 * causes a message. A mark that cannot be read now stays, as a new one would make a current catalog doubtful. Under the
 * publish lock.
 */
void deletion_mark_restore(const ckd_store *store);
/*
 * Makes room for a tombstone on a full disk: removes materialized copies, or if there are none, the mark. Returns false
 * if there was neither. While a deletion is under way, under the publish lock.
 */
bool deletion_make_room(const ckd_store *store);

/*
 * Whether no deletion has begun since a catalog recorded `noted`. The caller has read, in this order: the mark, the
 * rows, the names of manifests and tombstones. Errors: IO, NOMEM; then *out is false.
 */
ckd_status deletion_mark_is_current(bool *out, const char noted[CATALOG_META], const ckd_store *store,
                                    ckd_error *err);

/*
 * All manifests of a store, including those of deleted checkpoints, and the checkpoints that writers at work read.
 */

typedef struct manifest_entry {
    manifest m;
    tombstone tombstone; /* valid if in_trash */
    bool in_trash;       /* the checkpoint is deleted */
    bool chosen;         /* by the owner of the set: to be deleted, restored, removed or kept */
    bool superseded;     /* a newer generation of the same checkpoint counts */
    bool in_use;         /* a writer at work may read its files (manifest_set_mark_in_use) */
    bool was_own_only;  /* an early version wrote it; its older files came from its dependencies' manifests */
    bool is_incomplete; /* one of its dependencies has no manifest, so some of its files are unknown */
    /* a manifest with `is_incomplete` depends on it: it is neither removed nor rewritten */
    bool is_protected;
    size_t order_index; /* scratch of a compaction */
} manifest_entry;

typedef struct manifest_set {
    manifest_entry *items; /* by checkpoint id, generations of one checkpoint together, highest first */
    size_t count;
    const char *run; /* NULL, or the run for run_in_use; set by the caller before manifest_set_mark_in_use */
    bool run_in_use; /* a save to that run, or a compaction of it, is at work */
} manifest_set;

/*
 * Reads all manifests and tombstones. Completes manifests of early versions with the files of their dependencies. Under
 * the publish lock. Errors: CORRUPT and UNSUPPORTED (a manifest cannot be read, so its needs are unknown), IO, NOMEM.
 */
ckd_status manifest_set_read(manifest_set *out, const ckd_store *store, ckd_error *err);
void manifest_set_free(manifest_set *n);

ckd_status tombstone_read(tombstone *out, const ckd_store *store, const manifest_name *name, ckd_error *err);
/*
 * Whether the checkpoint can still be restored. A grace period that was ended, or that never was, stays so, even if the
 * clock was ahead at the deletion and was set back since.
 */
bool tombstone_in_grace(const tombstone *t, uint64_t now_ns);
/*
 * Writes a tombstone durably. replaces: in place of the one with this run, step and generation; else none may exist.
 * Under the publish lock. Errors: EXISTS, IO, NOSPACE, NOMEM.
 */
ckd_status tombstone_write(const ckd_store *store, const tombstone *t, bool replaces, ckd_error *err);

/* The first generation of the checkpoint; NULL: there is none. */
manifest_entry *manifest_set_find(const manifest_set *n, const ckd_id *id);
/*
 * Chooses checkpoints, with all their generations. Errors: NOT_FOUND (a checkpoint is missing, or `in_trash` is
 * different), INVALID (an id occurs twice).
 */
ckd_status manifest_set_choose(manifest_set *n, const ckd_id *ids, size_t count, bool in_trash,
                               ckd_error *err);
/*
 * Sets in_use on every generation of the checkpoints that intents of living writers name. Their files must stay,
 * whatever happens to the checkpoints. Under the publish lock, so that no writer begins meanwhile. Errors: IO, CORRUPT
 * and UNSUPPORTED (an intent cannot be read, so what it names is unknown), NOMEM.
 */
ckd_status manifest_set_mark_in_use(manifest_set *n, const ckd_store *store, ckd_error *err);
/*
 * How long a writer waits for the lock of its new intent: a list of the trash tests the lock by holding it for a
 * moment.
 */
enum { INTENT_LOCK_MS = 5000 };

/* ---- early_manifests.c: manifests of early versions, which name own files only ---- */
/*
 * For manifest_set_read: adds the files that the newest manifests of the dependencies name, and sets was_own_only,
 * is_incomplete and is_protected. Errors: NOMEM.
 */
ckd_status manifest_set_complete(manifest_set *n, ckd_error *err);
/*
 * Publishes the manifest of x as it is now: with all files that it names, under its present run, step and generation.
 * In the trash, the old manifest is replaced. Under the publish lock; the caller updates the catalog. Errors: EXISTS,
 * IO, NOSPACE, NOMEM.
 */
ckd_status manifest_entry_publish(manifest_entry *x, const ckd_store *store, ckd_error *err);
/*
 * Publishes a manifest that names all files of x, which must not have `is_incomplete`. A listed checkpoint gets a next
 * generation; in the trash, the old manifest is replaced. Under the publish lock; the caller updates the catalog.
 * Errors: UNSUPPORTED (the last generation), IO, NOSPACE, NOMEM.
 */
ckd_status manifest_entry_upgrade(manifest_entry *x, const ckd_store *store, ckd_error *err);
/*
 * Does that for every manifest of an early version without `is_incomplete`, so that its dependencies can be rewritten.
 * Errors: as manifest_entry_upgrade.
 */
ckd_status manifest_set_upgrade_all(manifest_set *n, const ckd_store *store, ckd_error *err);
/*
 * Does that for the dependents of chosen checkpoints, so that the chosen ones can be removed. Errors: as
 * manifest_entry_upgrade.
 */
ckd_status manifest_set_upgrade_dependents(manifest_set *n, const ckd_store *store, ckd_error *err);

/* ---- bytes of chunk files that belong to no listed checkpoint ---- */
typedef struct chunk_waste {
    uint64_t bytes; /* of the files that listed checkpoints name */
    uint64_t dead;  /* part of `bytes` that belongs to no listed checkpoint */
} chunk_waste;

/*
 * Counts the files of a run's checkpoints (NULL: of all), from manifests alone. Chosen checkpoints count as gone. A
 * file stays whole while a listed checkpoint reads anything in it. A compaction can free its dead bytes, unless a
 * checkpoint in the trash names the file too; then they do not count. Errors: NOMEM.
 */
ckd_status chunk_waste_of(chunk_waste *out, const manifest_set *n, const char *run, ckd_error *err);

/*
 * Estimates the bytes of a checkpoint in one of its own files: all of it, unless its stored bytes show that other
 * checkpoints share its files.
 */
uint64_t waste_owned_bytes(const manifest *m, size_t file);

/*
 * Settings in data/n, which say what a store keeps and what parity covers: pins, tags, policies and parity settings.
 * Also runs that are being renamed. codec/FORMAT.md, "What is kept".
 *
 * Each has a name and generations. The highest generation counts even if it is unreadable, as lower ones are outdated.
 * Settings change only under the publish lock. A reader without the lock retries when a file has disappeared meanwhile.
 */

typedef struct stored_setting {
    setting_name name;
    ckd_status status; /* CKD_OK, or why it is unreadable; then only the name is valid */
    pin_setting pin;   /* name.kind says which of these is valid */
    tag_setting tag;
    policy_setting policy;
    parity_setting parity;
    rename_setting rename;
} stored_setting;

typedef struct setting_list {
    stored_setting *items; /* by kind, then name; only the highest generations */
    size_t count;
} setting_list;

/*
 * Reads all settings, unreadable ones included. Release with settings_free, also after failures. Errors: IO (the
 * folder), NOMEM.
 */
ckd_status settings_read(setting_list *out, const ckd_store *store, ckd_error *err);
/* Reads the settings of one kind only. */
ckd_status settings_read_kind(setting_list *out, const ckd_store *store, metadata_kind kind, ckd_error *err);
void settings_free(setting_list *n);
/* NULL: there is none. */
const stored_setting *settings_find(const setting_list *n, metadata_kind kind, const char *name);
/* Returns why a setting is unreadable, naming its file; CKD_OK if it is readable. */
ckd_status settings_why(const stored_setting *setting, const ckd_store *store, ckd_error *err);
/* The same for the first unreadable setting. Its effect is unknown, so nothing may be deleted. */
ckd_status settings_check(const setting_list *n, const ckd_store *store, ckd_error *err);
/* Which of CKD_KEPT_PINNED and CKD_KEPT_TAGGED apply to a checkpoint. */
unsigned settings_kept_why(const setting_list *n, const ckd_id *checkpoint);
/*
 * The policy of a run: its own, else the one for all other runs, unless it has the name of checkpoints that a repair
 * brought back (is_returned_name). Readable or not. NULL: there is none.
 */
const stored_setting *settings_policy(const setting_list *n, const char *run);
/* The same for parity settings. */
const stored_setting *settings_parity(const setting_list *n, const char *run);
/* The record of another run that is being renamed from or to this name. `own`: a record that does not count, or NULL. */
const stored_setting *settings_rename(const setting_list *n, const char *run, const stored_setting *own);
/*
 * Fails with BUSY if a rename from or to this name is not completed. A checkpoint that gets the old name meanwhile is
 * renamed with the others, and one that gets the new name may be in their way. Errors: BUSY, IO, NOMEM.
 */
ckd_status settings_check_not_renamed(const ckd_store *store, const char *run, ckd_error *err);
ckd_status settings_refuse_renamed(const stored_setting *record, ckd_error *err);
/* Fails if a chosen checkpoint is pinned or tagged, and says what to do. Errors: STATE, those of settings_check. */
ckd_status settings_check_chosen(const ckd_store *store, const manifest_set *chosen, ckd_error *err);

/*
 * Publishes the encoded setting durably, then removes lower generations. After a failure the old one counts, unless the
 * message says that the outcome is unknown. Under the publish lock.
 */
ckd_status settings_publish(const ckd_store *store, const setting_name *name, const bytes *encoded,
                            ckd_error *err);
/*
 * Removes a setting, even a damaged one. Under the publish lock. Errors: NOT_FOUND (the message leaves the
 * kind out), UNSUPPORTED (a newer version wrote it), IO, NOMEM.
 */
ckd_status settings_remove(const ckd_store *store, metadata_kind kind, const char *name, ckd_error *err);
/*
 * Sets the name of the next generation. *before is the present setting, zeroed if there is none. Errors: UNSUPPORTED
 * (the present setting is a newer version's, and must not be replaced), INVALID (no generation is left), IO, NOMEM.
 */
ckd_status settings_next(setting_name *out, stored_setting *before, const ckd_store *store,
                         metadata_kind kind, const char *name, ckd_error *err);

#endif
