/*
 * Copying checkpoints between stores. Internal to engine/.
 *
 *   transfer_plan    (transfer_plan.c)  what is asked for, what that needs, what the destination has of it, what must be moved
 *   transfer_renew.c                    what the destination has, and must get the source's newer generation of
 *   transfer_bring   (transfer_bring.c) chunk files, one by one, into data/x of the destination, where they stay until
 *   commit           (transfer.c)       they get their names, and the manifests are published, of a few checkpoints at a time
 *
 * While files are on their way only the intent and the reader locks of both stores are held. It names all files to come, and all checkpoints that must
 * not be deleted in the destination.
 */
#ifndef ENGINE_TRANSFER_H
#define ENGINE_TRANSFER_H

#include "engine/needs.h"
#include "engine/store.h"

typedef struct transfer_item {
    manifest m;       /* as the source has it, but for the run */
    char source[160]; /* RUN@STEP there */
    bool asked;
    ckd_copy_state state;
    bool committed;
    uint64_t manifest_bytes, bytes;
    ckd_error left;      /* CKD_COPY_LEFT: why */
    uint32_t generation; /* CKD_COPY_RENEWED: that the destination had when this was planned */
} transfer_item;

/* A checkpoint that is to get the source's generation, or cannot. */
typedef struct transfer_renewed {
    ckd_id id;
    bool looked_at, refused;
} transfer_renewed;

/* A checkpoint of which the source's file has something that is damaged. */
typedef struct transfer_hurt {
    ckd_id checkpoint;
    ckd_error why;
    struct transfer_hurt *next;
} transfer_hurt;

typedef struct transfer_file {
    note_file file;
    bool there;    /* in the destination's data/c */
    bool arrived;  /* in data/x, complete and verified, but for what is hurt */
    bool replaces; /* that in data/x the one in data/c, which is damaged */
    bool to_move;  /* the plan says so */
    bool counted;  /* for an item */
    transfer_hurt *hurt;
} transfer_file;

typedef struct transfer {
    ckd_store *to, *from; /* to: NULL for one that does not exist */
    const ckd_copy_options *options;
    const ckd_id *asked; /* NULL: all */
    size_t asked_count;
    ckd_checkpoint_list
        source; /* what that one lists: read before the destination is locked, as others may copy the other way at the same time */

    ckd_checkpoint_list present; /* what the destination lists */
    transfer_renewed *renewed;
    size_t renewed_count;

    transfer_item *items; /* what they depend on before them */
    size_t count, capacity;
    transfer_file *files; /* of those to be moved, each once, by id */
    size_t file_count;
    ckd_id *dead; /* in the destination's trash, and wanted */
    size_t dead_count, dead_capacity;
    ckd_tag_list *tags; /* of the source; or NULL */

    uint64_t total, done; /* bytes of chunk files */
    uint64_t moved, begun_ns;
    bytes payload, header; /* to work with */
    verified_files verified;
    file_lock *incoming, *from_reader, *to_reader, *intent_lock;
    ckd_id writer;
    bool any_left;
    bool has_intent, undecided; /* undecided: only recovery can tell whether a manifest counts */
} transfer;

/*
 * Fills items, files, dead and total, from the source's list. Of a destination that is written to under its publish lock, with its catalog in step and its mutex held; the source under its
 * reader lock.
 */
ckd_status transfer_plan(transfer *t, ckd_error *err);
void transfer_plan_free(transfer *t); /* all that it filled */
transfer_file *transfer_find_file(const transfer *t, const ckd_id *id);
const transfer_item *transfer_find_item(const transfer *t, const ckd_id *id);
/* Is it, or is a newer generation of it, to be moved? */
static inline bool transfer_moves(const transfer_item *item) {
    return item->state == CKD_COPY_MOVED || item->state == CKD_COPY_RENEWED;
}

/* ---- transfer_bring.c ---- */
pathname transfer_path(const transfer *t, const ckd_id *file); /* in data/x */
/* The file is complete, durable and verified in data/x of the destination then, or in data/c. CORRUPT: what it has of the item is damaged, or all of it. */
ckd_status transfer_bring(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err);
/*
 * transfer_renew.c: finds what must be renewed for the items of a plan. *again: something was added, and the plan is to be made anew. As transfer_plan.
 */
ckd_status transfer_find_renewed(bool *again, transfer *t, ckd_error *err);
bool transfer_is_renewed(const transfer *t, const ckd_id *id);
/* The manifests of the destination, for the next one; none, if one cannot be read. Release with needs_free. Errors: NOMEM. */
ckd_status transfer_read_needs(needs *out, const transfer *t, ckd_error *err);
/* Would all that the destination has find its links in the source's generation of this? Not if it is not known what it has. */
ckd_status transfer_check_dependents(bool *fit, const transfer *t, const needs *n, const ckd_id *id,
                                     ckd_error *err);
/*
 * transfer_links.c: does the destination have all links that the item, whose files are there or have arrived, builds on? STATE: no, and the item would not
 * load. Without the mutex.
 */
ckd_status transfer_check_links(const transfer *t, const transfer_item *item, ckd_error *err);
/* ---- transfer_result.c ---- */
ckd_status transfer_result(ckd_copy_result **out, const transfer *t, ckd_error *err);
/* CKD_OK, or why the first of those that were left was. */
ckd_status transfer_left(const transfer *t, ckd_error *err);

/* ---- transfer_bring.c, too ---- */
/* Makes data/x, and keeps other copies from the same source out. BUSY. */
ckd_status transfer_enter(transfer *t, ckd_error *err);
/* Ends that. Nothing is left if everything has arrived. */
void transfer_leave(transfer *t);
/* Removes what no copy has gone on with for a week. Under the publish lock. */
ckd_status transfer_recover(const ckd_store *store, ckd_error *err);

#endif
