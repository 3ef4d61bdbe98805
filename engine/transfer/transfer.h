/*
 * Copying checkpoints between stores. Internal to engine/.
 *
 *   plan.c           transfer_read_destination reads what the destination has; transfer_plan decides what must be moved
 *   parts.c          which chunk files are copied unchanged, and which in parts: only some of their records
 *   existing_parts.c parts that the destination has already
 *   fetch.c          transfer_fetch_file copies chunk files, one by one, into data/x of the destination
 *   damage.c         damage in files with records of several checkpoints
 *   destination_repair.c  replaces damaged or missing files of checkpoints that the destination has
 *   transfer.c       commit gives files their names and publishes manifests, for a few checkpoints at a time
 *
 * A checkpoint is copied with all records that a load of it reads, so it needs no other checkpoint. While files are
 * copied, only the intent and the reader locks of both stores are held. The intent names all files to come.
 *
 * A manifest that names parts is proven in the destination before it is published: its files must hold everything that
 * a load reads.
 */
#ifndef ENGINE_TRANSFER_TRANSFER_H
#define ENGINE_TRANSFER_TRANSFER_H

#include "engine/common/common.h"
#include "engine/store/store.h"

typedef struct transfer_item {
    manifest m;       /* as in the source, except for the run */
    char source[160]; /* RUN@STEP in the source */
    ckd_copy_state state;
    bool committed;
    bool has_parts; /* its manifest names parts of files that the source's manifest names */
    uint64_t manifest_bytes, bytes;
    ckd_error left;               /* why, if state is CKD_COPY_LEFT */
    bytes owners;                 /* checkpoints whose records a load reads (closure_owners), if known */
    bool owners_known, needs_all; /* needs_all: the owners cannot be found */
} transfer_item;

/* A checkpoint with damaged records in a file. */
typedef struct damaged_part {
    ckd_id checkpoint;
    ckd_error why;
    struct damaged_part *next;
} damaged_part;

/* A checkpoint with records in a file. */
typedef struct transfer_owner {
    ckd_id checkpoint;
    uint64_t records;
    /* A part has all records of the checkpoint in the source's file. Only such a part can be an own file. */
    bool has_all;
} transfer_owner;

/* A file in the destination that has some records of a file in the source. */
typedef struct transfer_part {
    file_ref file;    /* its size is an estimate, and it has no root, until it is written */
    file_ref source;  /* the file that its records come from */
    hash_set records; /* by record_hash */
    transfer_owner *owners;
    size_t owner_count;
    bool in_place;    /* in data/c, from another copy; it was read through */
    bool is_complete; /* complete in data/x, from an interrupted copy */
} transfer_part;

typedef struct transfer_file {
    file_ref file;
    const transfer_part *part; /* NULL: the file is copied unchanged */
    bool in_place;             /* in the destination's data/c, and not known to be damaged there */
    bool arrived;              /* in data/x, complete and verified except for records in `damaged` */
    bool is_intact;            /* every record was read, and none is damaged */
    bool to_move;              /* by the plan */
    bool counted;              /* in the bytes of an item */
    bool checked;              /* the file in data/c was read through */
    damaged_part *damaged;     /* in the source's file */
    damaged_part *damaged_in_place;
} transfer_file;

typedef struct transfer {
    ckd_store *to, *from; /* to: NULL if it does not exist */
    const ckd_copy_options *options;
    const ckd_id *selected; /* NULL: all */
    size_t selected_count;
    /*
     * Checkpoints of the source. They are listed before the destination is locked: a copy in the other direction may
     * take the locks of both stores in the other order.
     */
    ckd_checkpoint_list source;

    ckd_checkpoint_list present; /* checkpoints of the destination */
    tombstone *trash;            /* of its trash, sorted by id, the highest generation first */
    size_t trash_count;
    transfer_item *items;
    size_t count, capacity;
    transfer_file *files; /* files of items that are moved, each once, sorted by id */
    size_t file_count;
    transfer_part *parts; /* parts to write, and parts that exist */
    size_t part_count, part_capacity;
    ckd_tag_list *tags; /* tags of the source, or NULL */

    uint64_t total, done; /* bytes of chunk files */
    uint64_t moved, begun_ns;
    bytes payload, header; /* scratch */
    scrubbed_files scrubbed;
    file_lock *incoming, *from_reader, *to_reader, *intent_lock;
    ckd_id writer;
    bool any_left;
    uint64_t mended_files, mended_bytes; /* of checkpoints that the destination had */
    bool has_intent, undecided;          /* undecided: only recovery can tell whether a manifest counts */
} transfer;

/* ---- fetch.c, too ---- */
/* Makes data/x, and excludes other copies from the same source. Errors: BUSY. */
ckd_status transfer_lock_incoming(transfer *t, ckd_error *err);
/* Ends what transfer_lock_incoming began. Removes unfinished parts, and the lock file if no other file is left. */
void transfer_unlock_incoming(transfer *t);
/* Removes files in data/x that no copy has used for a week. The caller holds the publish lock. */
ckd_status transfer_recover(const ckd_store *store, ckd_error *err);

#endif
