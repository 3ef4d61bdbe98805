/* Declarations that only the files of engine/integrity/ use. */
#ifndef ENGINE_INTEGRITY_INTERNAL_H
#define ENGINE_INTEGRITY_INTERNAL_H

#include "engine/integrity/integrity.h"

/* ---- parity_sets.c: existing groups ---- */

/* A group, as one of its files describes it. */
typedef struct parity_set {
    parity_group group;  /* its `row` is not used */
    uint32_t present;    /* bit set of the rows that exist */
    uint64_t bytes;      /* size of these */
    size_t place;        /* index among the sets */
    int redundancy_left; /* scratch of parity_status.c */
} parity_set;

typedef struct parity_membership {
    ckd_id file;
    const parity_set *set;
    size_t member;
} parity_membership;

/* A parity file whose description of its group is damaged. */
typedef struct parity_lost {
    ckd_id group; /* from the file's name */
    uint32_t row;
} parity_lost;

typedef struct parity_sets {
    parity_set **items; /* sorted by id */
    size_t count, capacity;
    uint64_t files, bytes; /* of all parity files */
    uint64_t unreadable;   /* files that do not say which group they belong to */
    parity_lost *lost;     /* the damaged ones of these */
    size_t lost_count;
    parity_membership *memberships; /* every member of every group, sorted by file */
    size_t membership_count;
} parity_sets;
/*
 * Reads the description in each parity file. A file that cannot be read, or that contradicts its name or its group,
 * is recorded as damage and left out. A group with a mark is left out, too. Release with parity_sets_free, also after
 * failures. Errors: IO, NOMEM.
 */
ckd_status parity_sets_read(parity_sets *out, const ckd_store *store, damage_list *damage, ckd_error *err);
void parity_sets_free(parity_sets *s);
/* Returns the first membership of a file, and in *count how many there are. NULL: none. */
const parity_membership *parity_sets_of(const parity_sets *s, const ckd_id *file, size_t *count);
/* Returns NULL if there is no group of this id. */
const parity_set *parity_sets_find(const parity_sets *s, const ckd_id *group);
/* Do all members exist, in their sizes? */
bool parity_members_exist(const parity_group *g, const ckd_store *store);
/*
 * Further losses that the group can take: existing rows minus missing members. Negative: lost members cannot be
 * rebuilt.
 */
int parity_set_redundancy(const parity_set *s, const ckd_store *store);
/* Opens one row. Errors: as parity_open; CORRUPT if the file is not of this group. */
ckd_status parity_set_open(parity_file **out, const parity_set *s, uint32_t row, const ckd_store *store,
                           ckd_error *err);
/*
 * Removes the files of the groups items[i] for which removed[i] is set, durably. If the process dies meanwhile, the
 * next one that takes the parity lock removes the rest. The caller holds the publish lock. Errors: IO, READ_ONLY.
 */
ckd_status parity_sets_remove(const parity_sets *s, const bool *removed, const ckd_store *store,
                              ckd_error *err);

/*
 * Takes the lock for making or using parity, removes leftovers of processes that died, and creates data/p. Errors:
 * BUSY.
 */
ckd_status parity_lock(file_lock **out, const ckd_store *store, ckd_error *err);

/* ---- parity_plan.c: groups to be made ---- */

/* How well a group protects a file, by the setting of the file's run. */
typedef enum parity_use {
    PARITY_NONE,  /* not at all */
    PARITY_SPENT, /* it can rebuild no further file; to be replaced */
    /*
     * A member is missing: this file, and a repair may bring it back; or another one, and the group still protects this
     * file.
     */
    PARITY_BROKEN,
    PARITY_PART,  /* to be replaced, if a setting says by what */
    PARITY_SMALL, /* complete, but it could have more members */
    PARITY_FULL
} parity_use;

typedef struct parity_plan {
    parity_group *items; /* to be made; without ids */
    size_t count;
    uint64_t files, file_bytes;
} parity_plan;
/* The parity that a store has, and the settings that say what it should have. */
typedef struct parity_inputs {
    const ckd_store *store;
    const live_files *files;
    const parity_sets *sets;
    const setting_list *settings;
    uint32_t data, parity; /* for files without a readable setting; 0: none */
} parity_inputs;
/*
 * Plans new groups for the files of a run (NULL: of all runs). Release with parity_plan_free, also after failures.
 * Errors: those of reading a setting, NOMEM.
 */
ckd_status parity_plan_make(parity_plan *out, const parity_inputs *inputs, const char *run, ckd_error *err);
void parity_plan_free(parity_plan *p);
/* Finds the group that protects a live file best, by names and sizes alone. NULL: none. Errors: as parity_plan_make. */
ckd_status parity_plan_best(const parity_set **out, const live_file *f, const parity_inputs *inputs,
                            ckd_error *err);
/*
 * Sets needed[i] if inputs->sets->items[i] is the best group of some live file, or has a live file that is missing.
 * Goes by names and sizes alone. Errors: as parity_plan_make.
 */
ckd_status parity_plan_needed(bool *needed, const parity_inputs *inputs, ckd_error *err);
/*
 * While a checkpoint's manifest is lost, also sets needed[i] for groups of files that it may have named: those that no
 * manifest names, and missing ones. *kept: how many were set. Errors: as vanished_find.
 */
ckd_status parity_plan_keep_lost(bool *needed, size_t *kept, const parity_inputs *inputs, ckd_error *err);

/* ---- parity_write.c ---- */
/*
 * Writes `rows` (a bit set) of a group as temporary files. They are durable, except for their names. Reads the
 * members under their final names. Takes no lock. A failure leaves no file. Errors: CORRUPT (a member has another
 * size), UNSUPPORTED, CANCELLED, NOT_FOUND, NOSPACE, IO, NOMEM.
 */
ckd_status parity_write(const ckd_store *store, const parity_group *g, uint32_t rows, rate_limiter *p,
                        ckd_error *err);
/* Removes the temporary files of parity_write. */
void parity_write_undo(const ckd_store *store, const parity_group *g, uint32_t rows);

/* Stripes to work on at a time: as many as fit 64 MiB, at least one. */
uint64_t parity_batch(const parity_group *g);

/* ---- parity_check.c ---- */
/*
 * Reads a parity file through, and records damage, also if it is missing. p: may be NULL. Errors: those of the rate
 * limiter, IO, NOMEM.
 */
ckd_status parity_check_row(const parity_set *s, uint32_t row, const ckd_store *store, damage_list *damage,
                            rate_limiter *p, ckd_error *err);
/* Reads stripes of a row. Unreadable stripes become zero, which no valid stripe is. */
void parity_read_readable(parity_file *f, const parity_group *g, uint64_t first, uint64_t count, uint8_t *to);
/* Do two rows' stripes of this number have the same hashes of the members' pieces? */
bool parity_hashes_same(const uint8_t *a, const uint8_t *b, const parity_group *g, uint64_t stripe);
/*
 * Compares the hashes in a new row, which parity_write made, with those in undamaged stripes of the rows that exist.
 * *agree is false if one differs: a member, or a row that exists, has rotted since it was read. p: may be NULL. Errors:
 * those of the rate limiter, CORRUPT (the new row), IO, NOMEM.
 */
ckd_status parity_check_new_row(bool *agree, const parity_set *s, uint32_t row, const ckd_store *store,
                                rate_limiter *p, ckd_error *err);
/*
 * Reads a member of a group through. *right: it exists and is undamaged. payload: scratch. p: may be NULL. Errors:
 * CANCELLED, NOMEM; a file that cannot be read is not right.
 */
ckd_status parity_check_member(bool *right, const parity_member *m, const ckd_store *store, bytes *payload,
                               rate_limiter *p, ckd_error *err);

/* ---- parity_renewal.c ---- */
/*
 * Gives the files that parity_write made their names, durably. *done: all members still exist, so the group is of
 * use. The caller holds the publish lock. Errors: EXISTS, IO.
 */
ckd_status parity_publish(bool *done, const ckd_store *store, const parity_group *g, ckd_error *err);
/*
 * Makes groups of these files alone, as the settings of their runs ask, or like the old group where none can be read.
 * The caller holds the publish lock and the parity lock, and has read the files and found them undamaged. *covered:
 * files with a new group, also after a failure. Errors: those of reading a setting and of parity_write.
 */
ckd_status parity_protect_again(size_t *covered, const ckd_store *store, const parity_files *selected,
                                const parity_group *old, ckd_error *err);

/* Rebuilding files. */

/* Path at which a chunk file is rebuilt: STORE/data/p/HEX.ckd.tmp */
pathname path_rebuilt(const char *store, const ckd_id *file);

/*
 * repair_publish.c: Removes everything from data/q, except records by which a checkpoint may still come back. The
 * caller holds the publish lock. Errors: IO (a directory is not empty), those of files.
 */
ckd_status repair_purge(uint64_t *files, uint64_t *file_bytes, const ckd_store *store, ckd_error *err);

/* A chunk file to rebuild from parity. */
typedef struct rebuild_request {
    const parity_set *set;
    size_t member;            /* its index in the group */
    const file_ref *expected; /* as its manifest names it, or if that is lost, its group */
    bool write;               /* false: only looks whether it is possible */
    rate_limiter *limiter;
} rebuild_request;
/*
 * repair_rebuild.c: Rebuilds a member of a group from the other members, and from what is left of it. *possible: the
 * result is the expected file; with `write` it is durable at path_rebuilt. Otherwise *why says what is missing, and
 * there is no file. Without `write` a piece of the member counts as right where all parity is damaged, as only the
 * written file shows whether it is. Errors: those of the rate limiter, NOSPACE, IO, NOMEM.
 */
ckd_status repair_rebuild(bool *possible, const ckd_store *store, const rebuild_request *q, ckd_error *why,
                          ckd_error *err);

/* A vanished checkpoint to list again. */
typedef struct manifest_request {
    const ckd_checkpoint *known; /* what a catalog knew of it */
    const vanished *vanished;    /* has the files that no manifest names */
    const live_files *live;
    bool write;          /* false: only looks whether it is possible */
    damage_list *damage; /* no longer has the stray files that the manifest names */
} manifest_request;
/*
 * repair_manifest.c: Writes the manifest of a vanished checkpoint again, as its next generation. *possible: every
 * value of it could be rebuilt; with `write` the checkpoint is listed again. Otherwise *why says what is missing.
 * Errors: BUSY, NOSPACE, IO, NOMEM.
 */
ckd_status repair_manifest(bool *possible, ckd_store *store, const manifest_request *q, ckd_error *why,
                           ckd_error *err);

/* Called for a file that was moved from `path` to `aside`. */
typedef ckd_status (*repair_moved_fn)(void *context, const char *path, const char *aside, ckd_error *err);
/*
 * repair_publish.c: Moves chunk files that no checkpoint can need to data/q (`spare` of stray_file), if nothing is
 * lost. Members of parity groups stay, as other members may need them. Takes the publish lock, under which no other
 * file becomes spare. Errors: BUSY, NOSPACE, IO, NOMEM; those of moved.
 */
ckd_status repair_put_spare_aside(ckd_store *store, const parity_sets *sets, repair_moved_fn moved,
                                  void *context, ckd_error *err);

/* ---- scrub.c ---- */

/* Looks for damage in listed chunk files, at a limited rate and without delaying collections. */
typedef struct throttled_check {
    ckd_store *store;
    damage_list *damage;
    const live_files *files;
    rate_limiter *limiter;
    bytes payload;     /* release with bytes_free */
    file_lock *reader; /* held until the file is open; NULL between calls */
} throttled_check;
/*
 * Reads a file through. *right: the file is still needed, exists and is undamaged. *listed: the file is still
 * needed. Both may be NULL. Errors: those of the rate limiter, BUSY, IO, NOMEM.
 */
ckd_status throttled_check_file(bool *right, bool *listed, throttled_check *c, const live_file *f,
                                ckd_error *err);
/*
 * Records files->at_ns in the catalog as the time when the files were verified; 0 for damaged files. Takes
 * over the list and the publish lock. Errors: BUSY; as store_refresh_catalog_locked.
 */
ckd_status scrub_record(ckd_store *store, scrubbed_files *files, uint32_t timeout_ms, ckd_error *err);

/* verify.c: Returns CORRUPT and names the file if the catalog of this store is damaged, otherwise CKD_OK. */
ckd_status catalog_condition(const ckd_store *store, ckd_error *why);

/* Chunk files that are damaged or missing, and could not be rebuilt. */
typedef struct generation_request {
    const ckd_id *bad; /* sorted */
    size_t bad_count;
    const live_files *live; /* files that were read; those not in `bad` are intact */
    bool write;             /* false: only looks whether it is possible */
} generation_request;
/*
 * repair_generation.c: Lists older generations of checkpoints again whose newest ones name such files, if the older
 * ones are whole. dropped: by index of `bad`; set for files that no checkpoint, listed or in the trash, needs any more.
 * Takes the reader lock and the publish lock. Errors: BUSY, NOSPACE, IO, NOMEM.
 */
ckd_status repair_generations(bool *dropped, ckd_store *store, const generation_request *q, ckd_error *err);

#endif
