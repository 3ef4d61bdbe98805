/*
 * Copying checkpoints between stores. Internal to engine/.
 *
 *   plan.c           transfer_look reads what the destination has; transfer_plan decides what must be moved
 *   parts.c          which chunk files are copied unchanged, and which in parts: only some of their records
 *   existing_parts.c parts that the destination has already
 *   fetch.c          transfer_fetch_file brings chunk files, one by one, into data/x of the destination
 *   transfer.c       commit gives files their names and publishes manifests, for a few checkpoints at a time
 *
 * A checkpoint is copied with all records that a load of it reads, and needs no other checkpoint. While files are on
 * their way, a copy holds only its intent and the reader locks of both stores. The intent names all files to come.
 *
 * A manifest that names parts is proven in the destination before it is published: the files that it names hold
 * everything that a load reads.
 */
#ifndef ENGINE_TRANSFER_H
#define ENGINE_TRANSFER_H

#include "engine/common/hash_set.h"
#include "engine/store/manifest_set.h"
#include "engine/store/store.h"

typedef struct transfer_item {
    manifest m;       /* as in the source, except for the run */
    char source[160]; /* RUN@STEP in the source */
    ckd_copy_state state;
    bool committed;
    bool has_parts; /* its manifest names parts of files that the source's manifest names */
    uint64_t manifest_bytes, bytes;
    ckd_error left; /* of CKD_COPY_LEFT: why */
} transfer_item;

/* A checkpoint with damaged records in a file of the source. */
typedef struct damaged_part {
    ckd_id checkpoint;
    ckd_error why;
    struct damaged_part *next;
} damaged_part;

/* A checkpoint with records in a file. */
typedef struct transfer_owner {
    ckd_id checkpoint;
    uint64_t records;
    /* It has all records of the checkpoint that the source's file has. Only such a part can be an own file. */
    bool has_all;
} transfer_owner;

/* A file in the destination that has some records of a file in the source. */
typedef struct transfer_part {
    file_ref file;    /* an estimated size and no root until it is written */
    file_ref source;  /* the file that its records come from */
    hash_set records; /* by record_hash */
    transfer_owner *owners;
    size_t owner_count;
    bool is_there;    /* in data/c, from another copy; it was read through */
    bool is_complete; /* complete in data/x, from an interrupted copy */
} transfer_part;

typedef struct transfer_file {
    file_ref file;
    const transfer_part *part; /* NULL: the file is copied unchanged */
    bool there;                /* in the destination's data/c */
    bool arrived;              /* in data/x, complete and verified except for records in `damaged` */
    bool replaces;             /* the file in data/x replaces a damaged one in data/c */
    bool to_move;              /* by the plan */
    bool counted;              /* in the bytes of an item */
    bool checked;              /* the file in data/c was read through */
    damaged_part *damaged;
} transfer_file;

typedef struct transfer {
    ckd_store *to, *from; /* to: NULL if it does not exist */
    const ckd_copy_options *options;
    const ckd_id *asked; /* NULL: all */
    size_t asked_count;
    /*
     * Checkpoints of the source. They are listed before the destination is locked: another copy may go the other way
     * at the same time.
     */
    ckd_checkpoint_list source;

    ckd_checkpoint_list present; /* checkpoints of the destination */
    ckd_id *trash;               /* ids in its trash, sorted */
    size_t trash_count;
    transfer_item *items;
    size_t count, capacity;
    transfer_file *files; /* files of items that are moved, each once, sorted by id */
    size_t file_count;
    transfer_part *parts; /* parts to write, and parts that exist */
    size_t part_count, part_capacity;
    ckd_id *dead; /* wanted checkpoints that are in the destination's trash */
    size_t dead_count, dead_capacity;
    ckd_tag_list *tags; /* tags of the source, or NULL */

    uint64_t total, done; /* bytes of chunk files */
    uint64_t moved, begun_ns;
    bytes payload, header; /* scratch */
    scrubbed_files scrubbed;
    file_lock *incoming, *from_reader, *to_reader, *intent_lock;
    ckd_id writer;
    bool any_left;
    damaged_part *refused;               /* damaged in the destination's trash; they stay there */
    uint64_t mended_files, mended_bytes; /* of checkpoints that the destination had */
    bool has_intent, undecided;          /* undecided: only recovery can tell whether a manifest counts */
} transfer;

/*
 * Reads what the destination has, and drops an older plan. Unless this is a dry run, the caller holds the
 * destination's publish lock and mutex, with its catalog in step.
 */
ckd_status transfer_look(transfer *t, ckd_error *err);
/*
 * Fills items and dead from both lists. The caller holds the source's reader lock, and not the destination's mutex:
 * reading the source takes the source's mutex, and another copy may go the other way.
 */
ckd_status transfer_plan(transfer *t, ckd_error *err);
/*
 * Fills files, parts and total from the items. The caller holds the reader locks of both stores, so existing files
 * stay.
 */
ckd_status transfer_plan_files(transfer *t, ckd_error *err);
/* Sets total, and the bytes that each item adds: planned before the copy, actual after it. Errors: NOMEM. */
ckd_status transfer_count_bytes(transfer *t, ckd_error *err);
void transfer_plan_free(transfer *t); /* frees the whole plan */
transfer_file *transfer_find_file(const transfer *t, const ckd_id *id);
const transfer_item *transfer_find_item(const transfer *t, const ckd_id *id);
static inline bool transfer_moves(const transfer_item *item) {
    return item->state == CKD_COPY_MOVED;
}

/* Leaves out an item that cannot be copied; others go on. */
void transfer_leave_out(transfer *t, transfer_item *item, ckd_status status, const ckd_error *why);

/* ---- parts.c ---- */
/*
 * Reads which records the items need of files that the destination lacks. If that is less than most of a file, their
 * manifests name parts of it instead. Items with damaged records are left out. Errors: IO, NOMEM.
 */
ckd_status transfer_choose_parts(transfer *t, ckd_error *err);
const transfer_part *transfer_find_part(const transfer *t, const ckd_id *id); /* NULL: there is none */
void transfer_parts_free(transfer *t);

/* ---- fetch.c ---- */
/* Adds the item and the source to an error message about damage. */
ckd_status transfer_blame(const transfer *t, const transfer_item *item, ckd_status status, ckd_error *err);
pathname transfer_path(const transfer *t, const ckd_id *file); /* in data/x */
/*
 * Brings the file to data/x of the destination, complete, durable and verified, unless data/c has it undamaged.
 * CORRUPT: the file, or what it has of the item, is damaged.
 */
ckd_status transfer_fetch_file(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err);
/* Brings a file that is damaged or missing in data/c to data/x, whole. */
ckd_status transfer_refetch_file(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err);
/*
 * Is the file in data/c of the destination the one that its manifest names? all: checks every record; otherwise only
 * header, index and footer.
 */
ckd_status transfer_check_there(transfer *t, const transfer_file *f, bool all, ckd_error *err);
/* Does the source have this file? Checks header, index and footer. Errors: CORRUPT. */
ckd_status transfer_look_at_source(const transfer *t, const transfer_file *f, const transfer_item *item,
                                   ckd_error *err);

/* ---- destination_repair.c ---- */
/*
 * Checks the files of items in this state (PRESENT or RESTORED) in the destination, and brings those that are
 * damaged or missing there. Items whose files the source cannot replace become LEFT. The caller holds the
 * destination's reader lock, and not its publish lock. With dry_run it only counts.
 */
ckd_status transfer_repair_destination(transfer *t, ckd_copy_state state, ckd_error *err);
/* Moves the LEFT ones from t->dead to t->refused. The next plan leaves them out, too. */
ckd_status transfer_refuse_skipped(transfer *t, ckd_error *err);
/* Why the checkpoint was refused. NULL: it was not. */
const ckd_error *transfer_refused(const transfer *t, const ckd_id *checkpoint);
void transfer_refused_free(transfer *t);
/* ---- result.c ---- */
ckd_status transfer_result(ckd_copy_result **out, transfer *t, ckd_error *err);
/* Returns CKD_OK, or the error of the first checkpoint that was left out. */
ckd_status transfer_skipped(const transfer *t, ckd_error *err);

/* ---- fetch.c, too ---- */
/* Makes data/x, and excludes other copies from the same source. Errors: BUSY. */
ckd_status transfer_enter(transfer *t, ckd_error *err);
/* Ends what transfer_enter began. Removes unfinished parts, and the lock file if no other file is left. */
void transfer_leave(transfer *t);
/* Removes files in data/x that no copy has used for a week. The caller holds the publish lock. */
ckd_status transfer_recover(const ckd_store *store, ckd_error *err);

#endif
