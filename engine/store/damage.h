/* Damage and losses of a store, and the files that are in use. */
#ifndef ENGINE_STORE_DAMAGE_H
#define ENGINE_STORE_DAMAGE_H

#include "engine/store/view.h"

/* The damage that a verification finds: one entry per place, with every checkpoint that it makes unloadable. */

typedef struct damage_list {
    ckd_verify_result *result;
    const char *store_path; /* removed from file names */
    size_t capacity;
} damage_list;

/*
 * Adds the damage that `why` describes (file, offset, tensor, message). If the place has an entry, adds only the
 * checkpoint to it ("" for none). block: record number in the file, CKD_NO_OFFSET if unknown.
 */
ckd_status damage_add(damage_list *list, const ckd_error *why, uint64_t block, const char *checkpoint,
                      ckd_error *err);

/*
 * Whether it is damage, or a file that cannot be read (file_is_unreadable). Other failures (too many open files, no
 * memory) are the process's own.
 */
bool is_damage(ckd_status status, const ckd_error *why);
/* Adds damage to the list; returns any other failure as the error. */
ckd_status damage_record(damage_list *list, ckd_status status, const ckd_error *why, uint64_t block,
                         const char *checkpoint, ckd_error *err);

/* Adds everything in `from`, which stays as it is. Errors: NOMEM. */
ckd_status damage_add_all(damage_list *list, const damage_list *from, ckd_error *err);

/* Removes all entries of a file (a path inside the store), after its repair. */
void damage_drop_file(damage_list *list, const char *file);
/* Appends a sentence to the description of a file's damage, once. Without memory it is left out. */
void damage_append_text(damage_list *list, const char *file, const char *more);

/* Names a checkpoint in damage reports: RUN@STEP, and whether it is in the trash. */
#define CHECKPOINT_TEXT (CKD_RUN_MAX + 48)
void checkpoint_text(char out[CHECKPOINT_TEXT], const char *run, uint64_t step, bool in_trash);

/* Makes data/q, the folder for files that are put aside, and makes its name durable. Errors: IO, NOSPACE. */
ckd_status damage_make_folder(const ckd_store *store, ckd_error *err);
/*
 * Lists data/q. A missing folder counts as empty; any other failure is an error, because the folder may have files.
 * Errors: IO, NOMEM.
 */
ckd_status damage_list_folder(dir_list *out, const ckd_store *store, ckd_error *err);
/* A new name in data/q for a file. */
pathname damage_path_aside(const ckd_store *store, const char *name);
/* Moves an unusable file to data/q, durably. Under the publish lock. Errors: IO, NOSPACE. */
ckd_status damage_put_aside(pathname *aside, const ckd_store *store, const char *dir, const char *name,
                            ckd_error *err);
/*
 * Removes a file that is no longer of use. A directory of that name is moved to data/q instead: only its maker knows
 * what it is for. Under the publish lock. Errors: IO, NOSPACE.
 */
ckd_status damage_remove_or_put_aside(const ckd_store *store, const char *dir, const char *name,
                                      ckd_error *err);

/* A checkpoint, and what its manifest says it depends on. */
typedef struct dependency_info {
    ckd_id id;
    char name[CHECKPOINT_TEXT];
    ckd_id *dependencies;
    size_t dependency_count;
    file_ref *files;
    size_t file_count;
    bool in_trash;
} dependency_info;
dependency_info dependency_info_of(manifest *m, bool in_trash); /* takes over m->dependencies and m->files */
void dependency_infos_free(dependency_info *all, size_t count);
/*
 * Adds to each entry the checkpoints that depend, directly or indirectly, on those it names. Then does
 * damage_add_trash.
 */
ckd_status damage_add_dependents(damage_list *list, const dependency_info *all, size_t count, ckd_error *err);
/* Adds to each entry the checkpoints in the trash whose manifests name its file, as their values are not decoded. */
ckd_status damage_add_trash(damage_list *list, const dependency_info *all, size_t count, ckd_error *err);

/* Adds unreadable settings to the damage. They harm no checkpoint, but block deletions. Errors: IO, NOMEM. */
ckd_status settings_damage(damage_list *damage, const ckd_store *store, ckd_error *err);

/* Checks a whole chunk file for damage, for verify, scrub and repair. */

typedef struct file_check {
    const ckd_store *store;
    damage_list *damage;
    /* Name the checkpoints that need damaged records; may be empty. */
    const dependency_info *dependency_infos;
    size_t dependency_info_count;
    bytes *payload;   /* scratch */
    const char *path; /* NULL: the file under its own name; else a file that is about to get that name */
    /* Called after each record with the bytes read, unless NULL. A status other than CKD_OK ends the check. */
    ckd_status (*throttle)(void *context, uint64_t stored_bytes, ckd_error *err);
    void *throttle_context;
    thread_pool *pool; /* reads large files, without a throttle; NULL: the caller's thread alone */
} file_check;

/*
 * Opens a chunk file, at this path, that a manifest names. Errors: CORRUPT (also: another file), NOT_FOUND,
 * UNSUPPORTED, IO, NOMEM.
 */
ckd_status open_named_file(chunk **out, const ckd_store *store, const char *path, const file_ref *file,
                           ckd_error *err);

/*
 * Reads all of a chunk file that a manifest names, and compares each record with its checksum. Decodes nothing.
 * Errors: as open_named_file.
 */
ckd_status read_named_file(const ckd_store *store, const file_ref *file, ckd_error *err);
/* The same for a file at another path. */
ckd_status read_named_file_at(const ckd_store *store, const char *path, const file_ref *file, ckd_error *err);

/*
 * Checks that it is the file that the manifest names, and that its contents are intact. Adds damage to the list;
 * `checkpoint` is named if the file cannot be opened. Decodes nothing. Errors: those of throttle, IO, NOMEM.
 */
ckd_status check_named_file(const file_check *f, const file_ref *file, const char *checkpoint,
                            ckd_error *err);

/* Adds damaged intents. It is unknown which files their writers left. Errors: IO, NOMEM. */
ckd_status intents_damage(damage_list *damage, const ckd_store *store, ckd_error *err);

/*
 * The live files of a store: chunk files that a manifest names, whose checkpoint is listed or can still be restored
 * from the trash.
 */

typedef struct live_file {
    file_ref file;
    manifest_name name;  /* a checkpoint that needs it: the oldest listed one, if there is one */
    uint64_t created_ns; /* of that checkpoint */
    bool in_trash;       /* no listed checkpoint needs it */
} live_file;

typedef struct live_files {
    live_file *items; /* sorted by id, without duplicates */
    size_t count, capacity;
    dependency_info *dependency_infos;
    size_t dependency_info_count;
    uint64_t bytes;
    bool incomplete;  /* a manifest cannot be read, so the files it names are unknown */
    bool is_outdated; /* a manifest was removed while they were read */
} live_files;
/*
 * Lists the live files. Adds unreadable manifests and tombstones to the damage. Release with live_files_free, also
 * after failures. Errors: IO, NOMEM.
 */
ckd_status live_files_read(live_files *out, const ckd_store *store, damage_list *damage, ckd_error *err);
void live_files_free(live_files *f);
/* NULL: the file is not live. */
const live_file *live_files_find(const live_files *f, const ckd_id *id);
/*
 * Whether a manifest still names the file: the one in which it was found, or any other. *out is also true if some
 * manifest cannot be read. Errors: IO, NOMEM.
 */
ckd_status live_file_is_named(bool *out, const ckd_store *store, const live_file *f, ckd_error *err);
/* Names the checkpoint f->name for damage reports. */
void live_file_checkpoint(char out[CHECKPOINT_TEXT], const live_file *f);
/* Whether the file exists and has this size. */
bool live_file_exists(const ckd_store *store, const ckd_id *id, uint64_t size);
/*
 * The same, for decisions that cannot be taken back. It opens the file: an NFS client may answer other questions from
 * its cache after another node removed the file. Errors: NOT_FOUND; CORRUPT (it has another size); IO and NOMEM, which
 * do not prove that it is gone.
 */
ckd_status live_file_check(const ckd_store *store, const file_ref *file, ckd_error *err);

/*
 * Checkpoints whose manifests disappeared without a deletion.
 *
 * Two things show such a loss. First, a chunk file has a name only while an intent or a manifest names it. So a file
 * that neither names is the rest of a lost checkpoint. Second, a catalog row with neither a manifest nor a tombstone is
 * a loss if no deletion has begun since the catalog was last in step (manifests.h). The records give the checkpoint's
 * contents; the row adds run, step and lineage.
 */

/* Suffixes in data/q. Such a file, RUN.STEP.GENERATION.ID.lost, is a manifest without files. */
#define VANISHED_END ".lost"
#define DOUBTFUL_END ".doubtful"

/* A chunk file that no manifest and no intent names. */
typedef struct stray_file {
    ckd_id id;
    ckd_id *checkpoints; /* the checkpoints that it has records of; none if it cannot be read */
    size_t checkpoint_count;
    bool explained; /* a checkpoint in `items` has records in it */
    bool spare;     /* nothing is lost, and no checkpoint can need it (vanished_find) */
} stray_file;

/* Whether the rows of catalog.db are known. */
typedef enum rows_known {
    ROWS_KNOWN,
    ROWS_LATER, /* it cannot be read now: it is busy, say, or there are too many open files */
    ROWS_GONE,  /* it is missing, damaged or of an older version; a writer will make another */
} rows_known;

/* The key in the catalog's table meta that marks an intent as older than the catalog. name: of its file in data/i. */
void older_intent_key(char out[CATALOG_META], const char *name);
/* Whether the row of this writer's checkpoint is known: ROWS_GONE also if the catalog was made after the intent. */
rows_known vanished_rows_of(const ckd_store *store, const char *name);

typedef struct vanished {
    stray_file *strays; /* sorted by id */
    size_t stray_count;
    /*
     * A manifest or an intent is unreadable, and may name the strays. So they prove nothing, and none may be removed.
     */
    bool incomplete;
    ckd_checkpoint *items; /* lost checkpoints: known to a catalog, without a manifest */
    size_t count, capacity;
    ckd_checkpoint *doubtful; /* the same, but the catalog is older than some deletion: lost or deleted */
    size_t doubtful_count, doubtful_capacity;
    ckd_checkpoint *trashed; /* deleted ones that could still be restored; no row of them is left */
    size_t trashed_count, trashed_capacity;
    bool unweighed;  /* the deletion mark cannot be read now: a doubtful checkpoint may be a lost one */
    rows_known rows; /* unless they are known, more checkpoints may be lost */
} vanished;

/*
 * Finds lost checkpoints. Writers may be at work. Release with vanished_free, also after failures. Errors: IO, NOMEM.
 */
ckd_status vanished_find(vanished *out, const ckd_store *store, ckd_error *err);
void vanished_free(vanished *v);
/* Moves a doubtful checkpoint to the items. Returns false if there is none at this run and step, or on NOMEM (err). */
bool vanished_confirm(vanished *v, const char *run, uint64_t step, ckd_error *err);
/*
 * Adds them to the damage: known checkpoints under their manifests, other files under their own names. Doubtful ones
 * and spare files only cause a message. Errors: NOMEM.
 */
ckd_status vanished_add_damage(const vanished *v, const ckd_store *store, damage_list *damage,
                               ckd_error *err);
/* Adds one lost checkpoint. Two of the same name and generation are one entry. Errors: NOMEM. */
ckd_status vanished_add_lost(const ckd_checkpoint *c, const ckd_store *store, damage_list *damage,
                             ckd_error *err);

/*
 * Keeps lost checkpoints in data/q, for vanished_find, before the catalog drops rows that have neither a manifest nor a
 * tombstone. noted: the deletion mark that the catalog recorded when it was last in step. After a failure the rows must
 * stay in the catalog. Under the publish lock. Errors: NOSPACE, IO (also for a missing permission), NOMEM.
 */
ckd_status vanished_save(const ckd_store *store, const ckd_checkpoint *const *checkpoints, size_t count,
                         const char noted[CATALOG_META], ckd_error *err);

/*
 * Does the same for all that vanished_find finds, before a catalog is made from the manifests alone. Under the publish
 * lock. Errors: as vanished_save.
 */
ckd_status vanished_save_found(const ckd_store *store, ckd_error *err);

/* Removes what data/q keeps of lost checkpoints that have a manifest again. Under the publish lock. */
void vanished_forget_found(const ckd_store *store);

/*
 * Called before chunk files are rewritten. The files of a lost checkpoint must stay until it is repaired or given up,
 * but no manifest names them. Errors: STATE (data/q keeps a checkpoint whose manifest is lost).
 */
ckd_status vanished_check_none(const ckd_store *store, ckd_error *err);

/*
 * The same before chunk files are removed. A manifest may have disappeared since the catalog was last in step, so this
 * also looks for checkpoints that the catalog lists and that are lost. Under the publish lock. Errors: STATE (also if
 * the catalog or the deletion mark cannot be read now), IO, NOMEM.
 */
ckd_status vanished_check_removal(const ckd_store *store, ckd_error *err);

/* Removes what data/q keeps of a checkpoint that is listed again, or deleted. */
void vanished_forget(const ckd_store *store, const ckd_id *checkpoint);

#endif
