/*
 * Copying checkpoints between stores. Internal to engine/.
 *
 *   transfer_look    (plan.c)  what the destination has
 *   transfer_plan    (plan.c)  what is asked for, what the destination has of it, what must be moved
 *   parts            (parts.c) which chunk files come as they are, and of which only some records come
 *                    (existing_parts.c) parts that the destination has
 *   transfer_fetch_file   (fetch.c) chunk files, one by one, into data/x of the destination, where they stay until
 *   commit           (transfer.c)       they get their names, and the manifests are published, of a few checkpoints at a time
 *
 * A checkpoint is copied with all records that a load of it reads, and needs no other. While files are on their way only the intent and the reader locks of both
 * stores are held. The intent names all files to come.
 *
 * A manifest that names parts is proven in the destination before it is published: all that a load reads is in the files that it names.
 */
#ifndef ENGINE_TRANSFER_H
#define ENGINE_TRANSFER_H

#include "engine/common/hash_set.h"
#include "engine/store/manifest_set.h"
#include "engine/store/store.h"

typedef struct transfer_item {
    manifest m;       /* as the source has it, but for the run */
    char source[160]; /* RUN@STEP there */
    ckd_copy_state state;
    bool committed;
    bool has_parts; /* its manifest names parts of files that the source's names */
    uint64_t manifest_bytes, bytes;
    ckd_error left; /* CKD_COPY_LEFT: why */
} transfer_item;

/* A checkpoint of which the source's file has something that is damaged. */
typedef struct damaged_part {
    ckd_id checkpoint;
    ckd_error why;
    struct damaged_part *next;
} damaged_part;

/* A checkpoint that a file has records of. */
typedef struct transfer_owner {
    ckd_id checkpoint;
    uint64_t records;
    bool has_all; /* that the source's file has of it: only such a part can be its own file */
} transfer_owner;

/* A file in the destination that has some records of one in the source. */
typedef struct transfer_part {
    file_ref file;    /* the size is about right, and the root unknown, until it is written */
    file_ref source;  /* where its records come from */
    hash_set records; /* by record_hash */
    transfer_owner *owners;
    size_t owner_count;
    bool is_there;    /* in data/c: another copy brought it; it was read through */
    bool is_complete; /* in data/x: a copy that was interrupted has left it there */
} transfer_part;

typedef struct transfer_file {
    file_ref file;
    const transfer_part *part; /* NULL: it comes as it is */
    bool there;                /* in the destination's data/c */
    bool arrived;              /* in data/x, complete and verified, but for what is hurt */
    bool replaces;             /* that in data/x the one in data/c, which is damaged */
    bool to_move;              /* the plan says so */
    bool counted;              /* for an item */
    bool checked;              /* the one in data/c was read through */
    damaged_part *damaged;
} transfer_file;

typedef struct transfer {
    ckd_store *to, *from; /* to: NULL for one that does not exist */
    const ckd_copy_options *options;
    const ckd_id *asked; /* NULL: all */
    size_t asked_count;
    ckd_checkpoint_list
        source; /* what that one lists: read before the destination is locked, as others may copy the other way at the same time */

    ckd_checkpoint_list present; /* what the destination lists */
    ckd_id *trash;               /* ids of what is in its trash; sorted */
    size_t trash_count;
    transfer_item *items;
    size_t count, capacity;
    transfer_file *files; /* of those to be moved, each once, by id */
    size_t file_count;
    transfer_part *parts; /* of those, and such as are there */
    size_t part_count, part_capacity;
    ckd_id *dead; /* in the destination's trash, and wanted */
    size_t dead_count, dead_capacity;
    ckd_tag_list *tags; /* of the source; or NULL */

    uint64_t total, done; /* bytes of chunk files */
    uint64_t moved, begun_ns;
    bytes payload, header; /* to work with */
    scrubbed_files scrubbed;
    file_lock *incoming, *from_reader, *to_reader, *intent_lock;
    ckd_id writer;
    bool any_left;
    damaged_part *refused;               /* that stay in the destination's trash, as they are damaged there */
    uint64_t mended_files, mended_bytes; /* of checkpoints that were there */
    bool has_intent, undecided;          /* undecided: only recovery can tell whether a manifest counts */
} transfer;

/*
 * Reads what the destination has, and forgets an older plan. The destination's publish lock and mutex are held and its catalog is in step, unless it is a dry run.
 */
ckd_status transfer_look(transfer *t, ckd_error *err);
/*
 * Fills items and dead, from both lists. The source is under its reader lock. Without the destination's mutex: to read the source takes the source's, and somebody
 * may copy the other way at the same time.
 */
ckd_status transfer_plan(transfer *t, ckd_error *err);
/* Fills files, parts and total, from the items. Under the reader locks of both, so that what is there stays. */
ckd_status transfer_plan_files(transfer *t, ckd_error *err);
/* Sets the bytes that each item adds, and total: as planned, or as they were. Errors: NOMEM. */
ckd_status transfer_count_bytes(transfer *t, ckd_error *err);
void transfer_plan_free(transfer *t); /* all that it filled */
transfer_file *transfer_find_file(const transfer *t, const ckd_id *id);
const transfer_item *transfer_find_item(const transfer *t, const ckd_id *id);
static inline bool transfer_moves(const transfer_item *item) {
    return item->state == CKD_COPY_MOVED;
}

/* The item cannot be copied; others can. */
void transfer_leave_out(transfer *t, transfer_item *item, ckd_status status, const ckd_error *why);

/* ---- parts.c ---- */
/*
 * Reads which records of the files that the destination lacks are read by the items, and lets their manifests name parts where that is less than most of a file. Items of which something is damaged are
 * left out. Errors: IO, NOMEM.
 */
ckd_status transfer_choose_parts(transfer *t, ckd_error *err);
const transfer_part *transfer_find_part(const transfer *t, const ckd_id *id); /* NULL: there is none */
void transfer_parts_free(transfer *t);

/* ---- fetch.c ---- */
/* Names the item and the source in the message of damage. */
ckd_status transfer_blame(const transfer *t, const transfer_item *item, ckd_status status, ckd_error *err);
pathname transfer_path(const transfer *t, const ckd_id *file); /* in data/x */
/* The file is complete, durable and verified in data/x of the destination then, or in data/c. CORRUPT: what it has of the item is damaged, or all of it. */
ckd_status transfer_fetch_file(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err);
/* The same for a file that is damaged or gone in data/c: all of it, whole, in data/x. */
ckd_status transfer_refetch_file(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err);
/* Is the one in data/c of the destination what its manifest names? all: down to each record; else by header, index and footer. */
ckd_status transfer_check_there(transfer *t, const transfer_file *f, bool all, ckd_error *err);
/* Has the source that file, by header, index and footer? CORRUPT. */
ckd_status transfer_look_at_source(const transfer *t, const transfer_file *f, const transfer_item *item,
                                   ckd_error *err);

/* ---- destination_repair.c ---- */
/*
 * Looks at the files of items in this state, PRESENT or RESTORED, in the destination, and brings those that are damaged or gone there. Items whose files the source cannot
 * replace become LEFT. With the destination's reader lock, not the publish lock. With dry_run it only counts.
 */
ckd_status transfer_repair_destination(transfer *t, ckd_copy_state state, ckd_error *err);
/* Takes from t->dead those that are LEFT; the next plan leaves them, too. */
ckd_status transfer_refuse_skipped(transfer *t, ckd_error *err);
const ckd_error *transfer_refused(const transfer *t, const ckd_id *checkpoint); /* why; NULL: it was not */
void transfer_refused_free(transfer *t);
/* ---- result.c ---- */
ckd_status transfer_result(ckd_copy_result **out, transfer *t, ckd_error *err);
/* CKD_OK, or why the first of those that were left was. */
ckd_status transfer_skipped(const transfer *t, ckd_error *err);

/* ---- fetch.c, too ---- */
/* Makes data/x, and keeps other copies from the same source out. BUSY. */
ckd_status transfer_enter(transfer *t, ckd_error *err);
/* Ends that. Nothing is left if everything has arrived. */
void transfer_leave(transfer *t);
/* Removes what no copy has gone on with for a week. Under the publish lock. */
ckd_status transfer_recover(const ckd_store *store, ckd_error *err);

#endif
