/*
 * ckptdelta, what a store keeps: deleting checkpoints, taking that back, and giving their room back to the file system; pins, tags and
 * policies. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 * A deleted checkpoint is in the trash first: it is listed no more, and all its files are still there. It can be brought back until
 * its files are removed, which a collection does when its time is over.
 *
 * Pins, tags and stored policies are files of the store's own, not of its catalog. While one of them cannot be read, nothing is deleted or removed.
 */
#ifndef CKPTDELTA_RETAIN_H
#define CKPTDELTA_RETAIN_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ckd_delete_options {
    size_t struct_size;
    uint64_t
        undo_s; /* seconds for which it can be taken back; 0: a collection may remove the files at once */
} ckd_delete_options;
#define CKD_DELETE_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_delete_options), .undo_s = 24 * 3600 }

/*
 * Moves checkpoints to the trash: all of them, or none if one may not go. Those that are deltas on them load as before. Whenever this is interrupted, it can be repeated with
 * those that are left. options may be NULL. Errors: NOT_FOUND (an id that is not listed), INVALID (an id twice), STATE (one is pinned or tagged), BUSY (another process
 * has the store's lock), CORRUPT and UNSUPPORTED (a manifest, pin or tag that cannot be read: it is not known what it needs, so nothing is deleted), READ_ONLY, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_delete(ckd_store *store, const ckd_id *checkpoints, size_t count,
                                    const ckd_delete_options *options, ckd_error *err);

typedef struct ckd_trashed {
    ckd_checkpoint checkpoint;
    uint64_t deleted_ns, until_ns; /* since 1970: deleted at, can be taken back until */
} ckd_trashed;
typedef struct ckd_trash {
    size_t count;
    ckd_trashed *items;  /* by run name, then step */
    uint64_t file_bytes; /* what removing all of them would free */
} ckd_trash;
/* What is in the trash. Release with ckd_trash_free. Errors: as ckd_store_delete. */
CKD_API ckd_status ckd_store_trash(ckd_trash **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_trash_free(ckd_trash *trash);

/*
 * Lists deleted checkpoints again: all of them, or none if one cannot come back. Errors: NOT_FOUND (an id that is not in the trash, or
 * of which files are gone), EXISTS (its run and step were saved anew), and those of ckd_store_delete.
 */
CKD_API ckd_status ckd_store_undelete(ckd_store *store, const ckd_id *checkpoints, size_t count,
                                      ckd_error *err);

typedef struct ckd_collect_options {
    size_t struct_size;
    int all;     /* also what could still be taken back; if that is interrupted, recovery goes on with it */
    int dry_run; /* only count */
    int give_up; /* also what a missing file could only be rebuilt with, for one that cannot be rebuilt or is not wanted any more; else that is STATE */
} ckd_collect_options;
#define CKD_COLLECT_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_collect_options) }

typedef struct ckd_collected {
    uint64_t checkpoints, files, bytes; /* removed */
    uint64_t waiting;                   /* checkpoints that stay in the trash */
} ckd_collected;
/*
 * Removes for good what is in the trash and can no longer be taken back. Files that others need, too, stay. Waits until no load or save of any process
 * is under way, at most as long as the store's lock_timeout_ms. Whoever opens a store for writing does the same if it need not wait. out and options may
 * be NULL. Errors: BUSY, and those of ckd_store_delete.
 */
CKD_API ckd_status ckd_store_collect(ckd_collected *out, ckd_store *store, const ckd_collect_options *options,
                                     ckd_error *err);

/* -------------------------------------------------------------------------------------------- pins and tags */

#define CKD_REASON_MAX 255 /* bytes of a pin's reason */

/* A checkpoint that is pinned is not deleted before it is unpinned, and no policy lets it go. */
typedef struct ckd_pin {
    ckd_id checkpoint;
    ckd_status status; /* CKD_OK, or why the rest cannot be read; it is pinned all the same */
    uint64_t pinned_ns;
    char reason[CKD_REASON_MAX + 1]; /* "": none was given */
} ckd_pin;
typedef struct ckd_pin_list {
    size_t count;
    ckd_pin *items;
} ckd_pin_list;
/*
 * Pins a checkpoint. reason: up to CKD_REASON_MAX bytes of UTF-8; NULL: none. One that is pinned gets the new reason. Durable when it returns CKD_OK; a
 * failure may leave it pinned. Errors: NOT_FOUND (no such checkpoint), INVALID (the reason), READ_ONLY, BUSY, UNSUPPORTED (a newer version's pin is
 * there), NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_pin(ckd_store *store, const ckd_id *checkpoint, const char *reason,
                                 ckd_error *err);
/* Takes the pin away, also a damaged one, and that of a checkpoint that is gone. Errors: NOT_FOUND (it is not pinned), and those of ckd_store_pin. */
CKD_API ckd_status ckd_store_unpin(ckd_store *store, const ckd_id *checkpoint, ckd_error *err);
/* All pins, by id. Release with ckd_pin_list_free. Errors: IO, NOMEM. */
CKD_API ckd_status ckd_store_pins(ckd_pin_list **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_pin_list_free(ckd_pin_list *list);

/* A name for a checkpoint, which keeps it like a pin. A tag names one checkpoint; a checkpoint may have several. */
typedef struct ckd_tag {
    char tag[CKD_RUN_MAX + 1];
    ckd_status status; /* CKD_OK, or why the rest cannot be read */
    ckd_id checkpoint;
    uint64_t tagged_ns;
} ckd_tag;
typedef struct ckd_tag_list {
    size_t count;
    ckd_tag *items; /* by name */
} ckd_tag_list;
/*
 * Gives a checkpoint a tag, which has the characters of a run's name. move: it may be another one's, which loses it then; else that is EXISTS, and a
 * damaged one CORRUPT. Otherwise as ckd_store_pin.
 */
CKD_API ckd_status ckd_store_set_tag(ckd_store *store, const char *tag, const ckd_id *checkpoint, int move,
                                     ckd_error *err);
/* Takes the tag away, also a damaged one. Errors: NOT_FOUND (there is no such tag), and those of ckd_store_pin. */
CKD_API ckd_status ckd_store_remove_tag(ckd_store *store, const char *tag, ckd_error *err);
/* All tags. Release with ckd_tag_list_free. Errors: IO, NOMEM. */
CKD_API ckd_status ckd_store_tags(ckd_tag_list **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_tag_list_free(ckd_tag_list *list);
/* The checkpoint that has the tag. Errors: NOT_FOUND (no such tag; its checkpoint is not in the store), CORRUPT and UNSUPPORTED (the tag), IO, NOMEM. */
CKD_API ckd_status ckd_store_find_tag(ckd_checkpoint *out, ckd_store *store, const char *tag, ckd_error *err);

/* ------------------------------------------------------------------------------------------------- policies */

/* What to keep of each run, by itself. A checkpoint stays if any of these says so; what says nothing keeps nothing. */
typedef struct ckd_policy {
    size_t struct_size;
    const char *run;     /* NULL: every run */
    uint32_t keep_last;  /* so many of the newest steps */
    uint64_t keep_every; /* steps that are multiples of it */
    int keep_first;      /* the first step */
    uint32_t keep_best;  /* so many with the best metric */
    int highest_is_best; /* else the lowest is */
    uint64_t keep_new_s; /* saved so many seconds ago or less */
    /* Of a stored policy; elsewhere they are not looked at. */
    uint32_t
        automatic; /* applied to a run after each commit to it, once so many of its checkpoints can go; 0: not by itself */
    uint64_t undo_s; /* for how long what it deletes can be taken back */
    /*
     * Of an automatic one: when it has deleted something, the run is compacted if more than so many percent of its chunk files are what deleted checkpoints left (ckd_prune.compaction_bytes). 1 to 99;
     * 0: 25; CKD_NO_COMPACTION: never.
     */
    uint32_t compact_share;
    /* Further rules. Days, weeks and months are those of UTC; weeks begin on Monday. Periods without a checkpoint do not count. */
    uint64_t
        keep_within_s; /* saved at most so many seconds before the newest step was, or before now if that is earlier */
    uint32_t keep_daily; /* the newest step of each of so many days, the newest days on which any was saved */
    uint32_t keep_weekly;  /* the same of weeks */
    uint32_t keep_monthly; /* the same of months */
    int keep_tagged;       /* what has a tag, which stays in any case: a policy may have no other rule */
} ckd_policy;
#define CKD_COMPACT_SHARE 25
#define CKD_NO_COMPACTION UINT32_MAX
#define CKD_POLICY_INIT \
    { .struct_size = sizeof(ckd_policy), .undo_s = 24 * 3600 }

/* Why a checkpoint stays. Bits: they can be added. */
typedef enum ckd_kept {
    CKD_KEPT_LAST = 1,
    CKD_KEPT_EVERY = 2,
    CKD_KEPT_FIRST = 4,
    CKD_KEPT_BEST = 8,
    CKD_KEPT_NEW = 16,
    CKD_KEPT_WITHIN = 32,
    CKD_KEPT_SAFETY = 128, /* of the newest two of its run: those stay whatever a policy says */
    CKD_KEPT_PINNED = 256,
    CKD_KEPT_TAGGED = 512,
    CKD_KEPT_DAILY = 1024,
    CKD_KEPT_WEEKLY = 2048,
    CKD_KEPT_MONTHLY = 4096
} ckd_kept;
typedef struct ckd_retained {
    ckd_checkpoint checkpoint;
    unsigned kept; /* 0: it goes */
} ckd_retained;
typedef struct ckd_prune {
    size_t count;
    ckd_retained *items; /* the checkpoints of the runs asked for, by run name, then step */
    uint64_t deleted;    /* of them */
    uint64_t bytes;      /* that removing those frees at once */
    /* Of files that stay because what is left reads some of them, the bytes that are not its own: a compaction frees so many at most, those of earlier deletions included. */
    uint64_t compaction_bytes;
} ckd_prune;

/*
 * What a policy would delete. policy NULL: the stored ones, each of its runs; runs without one are left alone. Changes nothing. Release with ckd_prune_free.
 * Errors: INVALID (a policy that keeps nothing), NOT_FOUND (the run; no policy is stored), CORRUPT and UNSUPPORTED (a manifest, pin, tag or stored policy
 * that cannot be read), IO, NOMEM.
 */
CKD_API ckd_status ckd_store_plan_prune(ckd_prune **out, ckd_store *store, const ckd_policy *policy,
                                        ckd_error *err);
/*
 * Deletes what the policy does not keep (to the trash: ckd_store_delete), after the two newest checkpoints that stay of every run that
 * loses any were verified, all they depend on included: stored bytes against their checksums. What goes is decided under the lock that saves and deletions take, by what is
 * listed then; if others are the two newest by then, these are verified first. out (may be NULL): what was done; release
 * with ckd_prune_free. options may be NULL: the default, or with stored policies the longest of their times. Errors: CORRUPT (one of those is damaged, nothing was deleted), BUSY (also if others kept saving faster than the newest can be verified), those of ckd_store_plan_prune and
 * ckd_store_delete.
 */
CKD_API ckd_status ckd_store_prune(ckd_prune **out, ckd_store *store, const ckd_policy *policy,
                                   const ckd_delete_options *options, ckd_error *err);
CKD_API void ckd_prune_free(ckd_prune *prune);

/* ------------------------------------------------------------------------------------------ stored policies */

/* A policy that the store keeps: one for each run that has its own, and one for all others. */
typedef struct ckd_stored_policy {
    char run[CKD_RUN_MAX + 1]; /* "": of every run that has none of its own */
    ckd_status status;         /* CKD_OK, or why the rest cannot be read */
    uint64_t set_ns;
    ckd_policy policy; /* without its run */
} ckd_stored_policy;
typedef struct ckd_policy_list {
    size_t count;
    ckd_stored_policy *items; /* the one for all others first, then by run */
} ckd_policy_list;
/*
 * Stores a policy for policy->run, which need not exist yet; NULL: for every run that has none of its own. It takes the place of the one before, also of a damaged
 * one. Deletes nothing by itself: ckd_store_prune applies it, and with `automatic` each commit to one of its runs, on rank 0. That never makes a save fail, nor wait for
 * others: what fails is told through on_message, and tried again at the next commit. A compaction that follows (compact_share) folds what was deleted into what builds on it, and begins with no further checkpoint
 * once it has read and written as many bytes as a state has; the next commit goes on. Durable when it returns CKD_OK; a failure may leave it stored. Errors: INVALID (it keeps
 * nothing; the run), READ_ONLY, BUSY, UNSUPPORTED (a newer version's is there), NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_set_policy(ckd_store *store, const ckd_policy *policy, ckd_error *err);
/* Takes one away, also a damaged one. Errors: NOT_FOUND (there is none), and those of ckd_store_set_policy. */
CKD_API ckd_status ckd_store_clear_policy(ckd_store *store, const char *run, ckd_error *err);
/* The one that is applied to a run: its own, else that of every run. run NULL: that one. Errors: NOT_FOUND, CORRUPT, UNSUPPORTED, IO, NOMEM. */
CKD_API ckd_status ckd_store_policy(ckd_stored_policy *out, ckd_store *store, const char *run,
                                    ckd_error *err);
/* All of them. Release with ckd_policy_list_free. Errors: IO, NOMEM. */
CKD_API ckd_status ckd_store_policies(ckd_policy_list **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_policy_list_free(ckd_policy_list *list);

#ifdef __cplusplus
}
#endif
#endif
