/*
 * Parity groups of a store. Internal to engine/.
 *
 * Invariants:
 *  1. Whoever makes, rebuilds or removes parity files holds the parity lock; so a temporary name in data/p belongs to it, or to one that died. Only
 *     parity_forget, whose caller holds the publish lock, removes groups without it.
 *  2. Names in data/p change under the publish lock.
 *  3. Nothing depends on a parity file: whatever it says, a chunk file is published only if it is the one that its manifest names.
 */
#ifndef ENGINE_PARITY_H
#define ENGINE_PARITY_H

#include "codec/parity/parity.h"
#include "engine/store/live_files.h"
#include "engine/store/settings.h"
#include "engine/common/rate_limiter.h"

/* ---- parity_sets.c: which groups there are ---- */

/* A group, by what one of its files says. */
typedef struct parity_set {
    parity_group group;  /* its `row` means nothing */
    uint32_t present;    /* bits of the rows that are there */
    uint64_t bytes;      /* which they take */
    size_t place;        /* among the sets */
    int redundancy_left; /* scratch of parity_status.c */
} parity_set;

typedef struct parity_membership {
    ckd_id file;
    const parity_set *set;
    size_t member;
} parity_membership;

/* A parity file that is damaged so that it does not say any more what it is for. */
typedef struct parity_lost {
    ckd_id group; /* by its name */
    uint32_t row;
} parity_lost;

typedef struct parity_sets {
    parity_set **items; /* by id */
    size_t count, capacity;
    uint64_t files, bytes; /* all parity files */
    uint64_t unreadable;   /* of which it is not known what they are for */
    parity_lost *lost;     /* of these, such that are damaged */
    size_t lost_count;
    parity_membership *memberships; /* every member of every group, by file */
    size_t membership_count;
} parity_sets;
/*
 * Reads what each parity file says it is. One that cannot be read, or says something else than its name or the others of its group, is added to the damage, and left out. Release with
 * parity_sets_free, also after failures. Errors: IO, NOMEM.
 */
ckd_status parity_sets_read(parity_sets *out, const ckd_store *store, damage_list *damage, ckd_error *err);
void parity_sets_free(parity_sets *s);
/* Of covers, those of a file: the first, and how many there are; NULL: none. */
const parity_membership *parity_sets_of(const parity_sets *s, const ckd_id *file, size_t *count);
/* NULL: there is none of this id. */
const parity_set *parity_sets_find(const parity_sets *s, const ckd_id *group);
/* All its members are there, in their sizes. */
bool parity_members_there(const parity_group *g, const ckd_store *store);
/* How many more losses it can take as a whole: rows that are there, less members that are not. */
int parity_set_redundancy(const parity_set *s, const ckd_store *store);
/* Opens one row; errors as of parity_open, CORRUPT if it is no file of this group. */
ckd_status parity_set_open(parity_file **out, const parity_set *s, uint32_t row, const ckd_store *store,
                           ckd_error *err);
/* Removes all files of a group. Under the publish lock; not durable before data/p is synced. */
ckd_status parity_set_remove(const parity_set *s, const ckd_store *store, ckd_error *err);

/* The lock of whoever makes or uses parity, after which leftovers of others are removed; creates data/p. BUSY. */
ckd_status parity_lock(file_lock **out, const ckd_store *store, ckd_error *err);

/* ---- parity_plan.c: which groups there should be ---- */

/* How well a group serves a file under the setting of the file's run. */
typedef enum parity_use {
    PARITY_NONE,   /* as good as none */
    PARITY_BROKEN, /* it has lost a file that repair may bring back: it stays as it is */
    PARITY_PART,   /* it should be made anew */
    PARITY_SMALL,  /* all right, but for that it could have more members */
    PARITY_FULL
} parity_use;

typedef struct parity_plan {
    parity_group *items; /* to be made; they have no ids */
    size_t count;
    uint64_t files, file_bytes;
} parity_plan;
/*
 * run: NULL, or whose files only. Settings are those in the list. Release with parity_plan_free, also after failures. Errors: those of reading a setting, NOMEM.
 */
ckd_status parity_plan_make(parity_plan *out, const ckd_store *store, const live_files *files,
                            const parity_sets *sets, const setting_list *settings, const char *run,
                            ckd_error *err);
void parity_plan_free(parity_plan *p);
/* needed[i]: some listed file has no better group than sets->items[i]. *err as above. */
ckd_status parity_plan_needed(bool *needed, const ckd_store *store, const live_files *files,
                              const parity_sets *sets, const setting_list *settings, ckd_error *err);

/* ---- parity_write.c ---- */
/*
 * Writes `rows` (bits) of a group as temporary files, durable but for their names. The members are read under their final names. Holds no lock. Errors:
 * CORRUPT (a member's size is another one), UNSUPPORTED, CANCELLED, NOT_FOUND, NOSPACE, IO, NOMEM; nothing is left then.
 */
ckd_status parity_write(const ckd_store *store, const parity_group *g, uint32_t rows, rate_limiter *p,
                        ckd_error *err);
/* Removes these temporary files. */
void parity_write_undo(const ckd_store *store, const parity_group *g, uint32_t rows);

/* How many stripes are worked on at a time: at most 64 MiB, or one. */
uint64_t parity_batch(const parity_group *g);

/* ---- parity_check.c ---- */
/* Reads a parity file through; damage is added to the list. Errors: those of the pace (which may be NULL), IO, NOMEM. */
ckd_status parity_check_row(const parity_set *s, uint32_t row, const ckd_store *store, damage_list *damage,
                            rate_limiter *p, ckd_error *err);

/* Adds that a file of the group is missing, unless there is one that cannot be read. IO, NOMEM. */
ckd_status parity_record_missing(const parity_set *s, uint32_t row, const ckd_store *store,
                                 damage_list *damage, ckd_error *err);

/* Chunk files of a store, sorted by id. */
typedef struct parity_files {
    const ckd_id *items;
    size_t count;
} parity_files;

/* ---- parity_renewal.c ---- */
/*
 * Under the publish lock: gives what parity_write made its names, durably; *done: all members are there, so that this was of use. Errors: EXISTS, IO.
 */
ckd_status parity_publish(bool *done, const ckd_store *store, const parity_group *g, ckd_error *err);
/*
 * Under the publish lock: groups of these files alone, as the settings of their runs want them. The caller has read them, and found them right. *covered: how many were, also after a
 * failure. Errors: BUSY (somebody else makes parity), those of parity_write.
 */
ckd_status parity_renew_cover(size_t *covered, const ckd_store *store, const parity_files *wanted,
                              ckd_error *err);

/* ---- parity_removal.c ---- */
/*
 * Files that are about to be removed on purpose: groups that cannot repair anything without them go first. Members that stay are read; they get new groups before, as far as their
 * runs are to have parity, and there is a message if they cannot have them. Under the publish lock. Unreadable parity files stay. Errors: BUSY (members that stay need new groups, and somebody else makes parity or repairs: nothing was changed), STATE (one that is to stay is
 * missing or damaged, and only with a group that would go can it be rebuilt: nothing was changed; with force it is told and given up), IO, NOMEM.
 */
ckd_status parity_forget(const ckd_store *store, const parity_files *gone, const parity_files *stay,
                         bool force, ckd_error *err);

#endif
