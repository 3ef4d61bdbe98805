/*
 * ckptdelta, retention: deleting and restoring checkpoints, freeing their space; pins, tags and policies; names of
 * runs. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 * A deleted checkpoint first goes to the trash. It is no longer listed, but all its files remain, and it can be
 * restored. When its time is over, a collection removes its files for good.
 *
 * Pins, tags and stored policies are files of the store, outside its catalog. While one of them is unreadable, nothing
 * is deleted or removed.
 */
/* Before the guard, so that this header can be included alone: others of ckptdelta.h need its types. */
#include "ckptdelta.h"

#ifndef CKPTDELTA_RETAIN_H
#define CKPTDELTA_RETAIN_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ckd_delete_options {
    size_t struct_size;
    /* seconds for which the deletion can be undone; 0: a collection may remove the files at once */
    uint64_t undo_s;
    int dry_run; /* only check that all of them may go; only for ckd_store_delete, INVALID elsewhere */
} ckd_delete_options;
#define CKD_DELETE_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_delete_options), .undo_s = 24 * 3600 }

/*
 * Moves checkpoints to the trash: all of them, or none if one may not go. Deltas on them load as before. If
 * interrupted, the call can be repeated with the remaining ids. options may be NULL. Errors: NOT_FOUND (an id that is
 * not listed), INVALID (a duplicate id), STATE (one is pinned or tagged), BUSY (another process has the store's lock),
 * CORRUPT and UNSUPPORTED (an unreadable manifest, pin or tag, whose needs are unknown: nothing is deleted), READ_ONLY,
 * NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_delete(ckd_store *store, const ckd_id *checkpoints, size_t count,
                                    const ckd_delete_options *options, ckd_error *err);

typedef struct ckd_trashed {
    ckd_checkpoint checkpoint;
    uint64_t deleted_ns, until_ns; /* when it was deleted; until when it can be restored */
} ckd_trashed;
typedef struct ckd_trash {
    size_t count;
    ckd_trashed *items;  /* by run name, then step */
    uint64_t file_bytes; /* bytes that removing all of them would free */
} ckd_trash;
/* Lists the trash. Release with ckd_trash_free. Errors: as for ckd_store_delete. */
CKD_API ckd_status ckd_store_trash(ckd_trash **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_trash_free(ckd_trash *trash);

/*
 * Restores deleted checkpoints: all of them, or none if one cannot be restored. Errors: NOT_FOUND (an id is not in the
 * trash, or files of it are gone), EXISTS (its run and step were saved again), and those of ckd_store_delete.
 */
CKD_API ckd_status ckd_store_undelete(ckd_store *store, const ckd_id *checkpoints, size_t count,
                                      ckd_error *err);
/*
 * Restores the checkpoints that can be restored, and leaves the others in the trash. left: an array of `count` errors
 * that the call fills; the status is CKD_OK for a checkpoint that was restored, and otherwise NOT_FOUND or EXISTS, as
 * above. Errors: those of ckd_store_delete; nothing is restored then.
 */
CKD_API ckd_status ckd_store_undelete_each(ckd_error *left, ckd_store *store, const ckd_id *checkpoints,
                                           size_t count, ckd_error *err);

typedef struct ckd_collect_options {
    size_t struct_size;
    int all; /* also remove checkpoints that could still be restored; if interrupted, recovery continues */
    int dry_run; /* only count */
    /*
     * Also remove files that are needed only to rebuild a missing file or a checkpoint whose manifest is lost, which
     * then stays lost. Without it, such files yield STATE.
     */
    int force;
} ckd_collect_options;
#define CKD_COLLECT_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_collect_options) }

typedef struct ckd_collected {
    uint64_t checkpoints, files, bytes; /* removed */
    uint64_t waiting;                   /* checkpoints that remain in the trash */
} ckd_collected;
/*
 * Removes for good the checkpoints in the trash that can no longer be restored. Files that others need remain. Waits
 * until no load or save of any process is in progress, up to the store's lock_timeout_ms. Opening a store for writing
 * does the same if it need not wait, unless its options say keep_trash. out and options may be NULL. Errors: BUSY, and
 * those of ckd_store_delete.
 */
CKD_API ckd_status ckd_store_collect(ckd_collected *out, ckd_store *store, const ckd_collect_options *options,
                                     ckd_error *err);

/* -------------------------------------------------------------------------------------------- pins and tags */

#define CKD_REASON_MAX 255 /* bytes of a pin's reason */

/* A pinned checkpoint cannot be deleted until it is unpinned, and every policy keeps it. */
typedef struct ckd_pin {
    ckd_id checkpoint;
    ckd_status status; /* CKD_OK, or why the rest is unreadable; the checkpoint is pinned anyway */
    uint64_t pinned_ns;
    char reason[CKD_REASON_MAX + 1]; /* "" if none */
} ckd_pin;
typedef struct ckd_pin_list {
    size_t count;
    ckd_pin *items;
} ckd_pin_list;
/*
 * Pins a checkpoint. reason: up to CKD_REASON_MAX bytes of UTF-8; NULL: none. If it is pinned already, it gets the new
 * reason. Durable on CKD_OK; a failure may leave it pinned. Errors: NOT_FOUND (no such checkpoint), INVALID (the
 * reason), READ_ONLY, BUSY, UNSUPPORTED (a newer version's pin exists), NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_pin(ckd_store *store, const ckd_id *checkpoint, const char *reason,
                                 ckd_error *err);
/*
 * Removes a pin, even if it is damaged or its checkpoint is gone. Errors: NOT_FOUND (it is not pinned), and those of
 * ckd_store_pin.
 */
CKD_API ckd_status ckd_store_unpin(ckd_store *store, const ckd_id *checkpoint, ckd_error *err);
/* Lists all pins, by id. Release with ckd_pin_list_free. Errors: IO, NOMEM. */
CKD_API ckd_status ckd_store_pins(ckd_pin_list **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_pin_list_free(ckd_pin_list *list);

/*
 * A name for a checkpoint, which protects it like a pin. A tag names one checkpoint; a checkpoint may have several
 * tags.
 */
typedef struct ckd_tag {
    char tag[CKD_RUN_MAX + 1];
    ckd_status status; /* CKD_OK, or why the rest is unreadable */
    ckd_id checkpoint;
    uint64_t tagged_ns;
} ckd_tag;
typedef struct ckd_tag_list {
    size_t count;
    ckd_tag *items; /* by name */
} ckd_tag_list;
/*
 * Tags a checkpoint. A tag consists of the characters allowed in run names. move: take the tag from another checkpoint
 * if it has one. Without move, that case is EXISTS, and a damaged tag is CORRUPT. Otherwise as ckd_store_pin.
 */
CKD_API ckd_status ckd_store_set_tag(ckd_store *store, const char *tag, const ckd_id *checkpoint, int move,
                                     ckd_error *err);
/* Removes a tag, even a damaged one. Errors: NOT_FOUND (no such tag), and those of ckd_store_pin. */
CKD_API ckd_status ckd_store_remove_tag(ckd_store *store, const char *tag, ckd_error *err);
/* Lists all tags. Release with ckd_tag_list_free. Errors: IO, NOMEM. */
CKD_API ckd_status ckd_store_tags(ckd_tag_list **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_tag_list_free(ckd_tag_list *list);
/*
 * Finds the checkpoint with a tag. Errors: NOT_FOUND (no such tag, or its checkpoint is not in the store), CORRUPT and
 * UNSUPPORTED (the tag), IO, NOMEM.
 */
CKD_API ckd_status ckd_store_find_tag(ckd_checkpoint *out, ckd_store *store, const char *tag, ckd_error *err);

/* ------------------------------------------------------------------------------------------------- policies */

/*
 * Decides which checkpoints of each run are kept. Runs are treated independently. A checkpoint stays if any rule keeps
 * it; a rule that is not set keeps nothing.
 */
typedef struct ckd_policy {
    size_t struct_size;
    const char *run;     /* NULL: every run */
    uint32_t keep_last;  /* this many of the newest steps */
    uint64_t keep_every; /* steps that are multiples of this */
    int keep_first;      /* the first step */
    uint32_t keep_best;  /* this many with the best metric */
    int highest_is_best; /* non-zero: the highest metric is best; 0: the lowest */
    uint64_t keep_new_s; /* saved at most this many seconds ago */
    /* Used only in stored policies. */
    /*
     * Applies the policy to a run after a commit, once it could delete this many of the run's checkpoints. 0: never
     * automatically.
     */
    uint32_t automatic;
    uint64_t undo_s; /* how long deletions can be undone */
    /*
     * Automatic policies only: after a deletion, the run is compacted if deleted checkpoints still take more than this
     * percentage of its chunk files (ckd_prune.compaction_bytes). 1 to 99; 0: 25; CKD_NO_COMPACTION: never.
     */
    uint32_t compact_share;
    /*
     * More rules. Days, weeks and months are in UTC; weeks begin on Monday. Periods without a checkpoint do not count.
     */
    /* saved at most this many seconds before the newest step, or before now if that is earlier */
    uint64_t keep_within_s;
    uint32_t keep_daily;  /* the newest step of each of this many days, counting back over days with a save */
    uint32_t keep_weekly; /* the same for weeks */
    uint32_t keep_monthly; /* the same for months */
    int keep_tagged; /* Tagged checkpoints. They stay in any case; this lets a policy have no other rule. */
} ckd_policy;
#define CKD_COMPACT_SHARE 25
#define CKD_NO_COMPACTION UINT32_MAX
#define CKD_POLICY_INIT \
    { .struct_size = sizeof(ckd_policy), .undo_s = 24 * 3600 }

/* Why a checkpoint stays. Bits; new ones may be added. */
typedef enum ckd_kept {
    CKD_KEPT_LAST = 1,
    CKD_KEPT_EVERY = 2,
    CKD_KEPT_FIRST = 4,
    CKD_KEPT_BEST = 8,
    CKD_KEPT_NEW = 16,
    CKD_KEPT_WITHIN = 32,
    CKD_KEPT_SUSPECT = 64, /* suspect, but the newest of its run: it stays until a healthy one follows */
    CKD_KEPT_SAFETY = 128, /* one of the two newest healthy ones of its run, which always stay */
    CKD_KEPT_PINNED = 256,
    CKD_KEPT_TAGGED = 512,
    CKD_KEPT_DAILY = 1024,
    CKD_KEPT_WEEKLY = 2048,
    CKD_KEPT_MONTHLY = 4096
} ckd_kept;
typedef struct ckd_retained {
    ckd_checkpoint checkpoint;
    unsigned kept; /* ckd_kept bits; 0: it goes */
} ckd_retained;
typedef struct ckd_prune {
    size_t count;
    ckd_retained *items; /* all checkpoints of the requested runs, by run name, then step */
    uint64_t deleted;    /* how many of them go */
    uint64_t bytes;      /* freed at once when those are removed */
    /*
     * Bytes of deleted checkpoints in files that must stay because other checkpoints read parts of them. Includes
     * earlier deletions. A compaction frees at most this much.
     */
    uint64_t compaction_bytes;
} ckd_prune;

/*
 * Returns what a policy would delete. policy NULL: applies the stored policies to their runs; runs without one are left
 * alone. A policy without a run does not apply to the runs RUN.lost, which hold checkpoints that a repair brought back.
 * The call changes nothing. Release with ckd_prune_free. Errors: INVALID (a policy that keeps nothing), NOT_FOUND (the
 * run, or no policy is stored), CORRUPT and UNSUPPORTED (an unreadable manifest, pin, tag or stored policy), IO, NOMEM.
 */
CKD_API ckd_status ckd_store_plan_prune(ckd_prune **out, ckd_store *store, const ckd_policy *policy,
                                        ckd_error *err);
/*
 * Deletes the checkpoints that the policy does not keep; they go to the trash as with ckd_store_delete. First it
 * verifies the two newest healthy checkpoints of every run that loses any, with all they depend on: stored bytes
 * against their checksums. It then makes the choice among the checkpoints listed at that moment, under the lock that
 * saves and deletions take. If others have become the two newest meanwhile, they are verified first.
 *
 * out (may be NULL): what was done; release with ckd_prune_free. options NULL: the default, or with stored policies the
 * longest of their times. Errors: CORRUPT (one of those two is damaged; nothing was deleted), BUSY (also if others keep
 * saving faster than the newest can be verified), those of ckd_store_plan_prune and ckd_store_delete.
 */
CKD_API ckd_status ckd_store_prune(ckd_prune **out, ckd_store *store, const ckd_policy *policy,
                                   const ckd_delete_options *options, ckd_error *err);
CKD_API void ckd_prune_free(ckd_prune *prune);

/* ------------------------------------------------------------------------------------------ stored policies */

/* A policy that the store holds: for one run, or for all runs without their own. */
typedef struct ckd_stored_policy {
    char run[CKD_RUN_MAX + 1]; /* "": for all runs without their own */
    ckd_status status;         /* CKD_OK, or why the rest is unreadable */
    uint64_t set_ns;
    ckd_policy policy; /* its run is not set */
} ckd_stored_policy;
typedef struct ckd_policy_list {
    size_t count;
    ckd_stored_policy *items; /* the policy for all other runs first, then by run */
} ckd_policy_list;
/*
 * Stores a policy for policy->run, which need not exist yet. NULL: for all runs without their own, except the runs
 * RUN.lost, which hold checkpoints that a repair brought back. It replaces the previous policy, even a damaged one.
 * Durable on CKD_OK; a failure may leave it stored.
 *
 * Storing a policy deletes nothing. ckd_store_prune applies it, and with `automatic` so does rank 0 after each commit
 * to one of its runs. Automatic deletion never makes a save fail or wait for others: on_message receives its errors,
 * and the next commit tries again. A subsequent compaction (compact_share) folds deleted checkpoints into those that
 * build on them. Once it has read and written four times the bytes of a state, it leaves the remaining checkpoints to
 * the next commit. Merging files has a separate limit of the same size. If more than compact_share remains, on_message
 * says so once.
 *
 * Errors: INVALID (it keeps nothing; the run), READ_ONLY, BUSY, UNSUPPORTED (a newer version's policy exists), NOSPACE,
 * IO, NOMEM.
 */
CKD_API ckd_status ckd_store_set_policy(ckd_store *store, const ckd_policy *policy, ckd_error *err);
/* Removes a stored policy, even a damaged one. Errors: NOT_FOUND (there is none), and those of ckd_store_set_policy. */
CKD_API ckd_status ckd_store_clear_policy(ckd_store *store, const char *run, ckd_error *err);
/*
 * Returns the policy that applies to a run: its own, else the one for all runs. run NULL: the latter. Errors:
 * NOT_FOUND, CORRUPT, UNSUPPORTED, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_policy(ckd_stored_policy *out, ckd_store *store, const char *run,
                                    ckd_error *err);
/* Lists all stored policies. Release with ckd_policy_list_free. Errors: IO, NOMEM. */
CKD_API ckd_status ckd_store_policies(ckd_policy_list **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_policy_list_free(ckd_policy_list *list);

/* ------------------------------------------------------------------------------------------- names of runs */

typedef struct ckd_rename_options {
    size_t struct_size;
    int dry_run; /* only check and count */
} ckd_rename_options;
#define CKD_RENAME_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_rename_options) }

/*
 * Renames a run: all its listed checkpoints, its own policy and its own parity setting. Ids, steps, tags, pins and
 * values stay. Its deleted checkpoints keep the old name, and so do its branches (RUN~2), which are runs of their own.
 * The old name is then free: a save under it begins a run.
 *
 * Durable on CKD_OK. Waits up to the store's lock timeout until no load or save is in progress. If interrupted, it is
 * completed by the next writer that opens the store, saves or copies while no load or save is in progress. Until then
 * each checkpoint is listed once, under either name. *checkpoints (may be NULL): how many were renamed. options may be
 * NULL.
 *
 * Errors: NOT_FOUND (no such run), EXISTS (a run, policy or parity setting has the new name), INVALID (a name), BUSY (a
 * save, a compaction or another rename uses a run of these names, another load or save is in progress, or another
 * process has the store's lock), STATE (a checkpoint builds on one whose manifest is lost), CORRUPT and UNSUPPORTED (an
 * unreadable manifest or setting), READ_ONLY, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_rename_run(uint64_t *checkpoints, ckd_store *store, const char *from,
                                        const char *to, const ckd_rename_options *options, ckd_error *err);

#ifdef __cplusplus
}
#endif
#endif
