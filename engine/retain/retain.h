/* The interface of engine/retain/ for other rooms. README.md has an overview. */
#ifndef ENGINE_RETAIN_RETAIN_H
#define ENGINE_RETAIN_RETAIN_H

#include "engine/store/store.h"

/* Retention policies and their application. */

/*
 * Completes renames of runs that were interrupted, unless somebody reads. Under the publish lock. Errors: IO, NOMEM.
 * Other failures are reported to on_message, and the work is left for another time.
 */
ckd_status rename_recover(ckd_store *store, ckd_error *err);

/* Errors: INVALID if the policy keeps nothing. */
ckd_status policy_check(const ckd_policy *p, ckd_error *err);

/* The request that a plan is made for. */
typedef struct prune_request {
    ckd_policy policy;
    /* Use the stored policies. `policy` then only gives the run; NULL: all runs. */
    bool stored;
    /* If fewer checkpoints can go, the plan ends there and nothing is deleted. */
    uint32_t at_least;
} prune_request;
/* policy == NULL: the stored policies. */
prune_request prune_request_of(const ckd_policy *policy);
/* Plans which checkpoints go. *undo_s: grace period of the policy, or the longest of several policies. */
ckd_status retain_plan(ckd_prune **out, uint64_t *undo_s, ckd_store *store, const prune_request *request,
                       ckd_error *err);
/* Does what ckd_store_prune does, for a request. */
ckd_status retain_prune(ckd_prune **out, ckd_store *store, const prune_request *request,
                        const ckd_delete_options *options, ckd_error *err);

/*
 * Applies the stored policy of a run after a commit, if the policy is automatic. Failures only reach on_message.
 * Work that would have to wait for another process is left for the next time. Returns true if checkpoints were
 * deleted, by *applied, whose `run` is the parameter. The caller holds no locks.
 */
bool retain_after_commit(ckd_policy *applied, ckd_store *store, const char *run);
/* Sends the message for such a failure. BUSY is not reported. */
void retain_report_failure(const ckd_store *store, const char *run, ckd_status status, const ckd_error *why);

/* The trash: deleted checkpoints whose files still exist. */

/* Checkpoints to delete, and how long they can be restored. */
typedef struct deletion_choice {
    ckd_id *ids; /* freed by delete_checkpoints, also after a failure */
    size_t count;
    uint64_t undo_s;
} deletion_choice;
typedef ckd_status (*deletion_choose_fn)(void *context, deletion_choice *out, ckd_error *err);
/*
 * Deletes what `choose` selects, as ckd_store_delete does. `choose` is called under the publish lock, without the
 * mutex, with the catalog in step. So nobody saves or deletes between the choice and the deletion. Waits up to
 * timeout_ms for the lock. Errors: those of `choose` and ckd_store_delete.
 */
ckd_status delete_checkpoints(ckd_store *store, deletion_choose_fn choose, void *context, uint32_t timeout_ms,
                              ckd_error *err);

/*
 * Tells for each deleted checkpoint whether ckd_store_undelete would refuse it, except because files are gone. left: by
 * id, the reason, or the status CKD_OK; also for one that is not in the trash. Errors: as manifest_set_read.
 */
ckd_status undelete_check(ckd_error *left, const ckd_store *store, const ckd_id *ids, size_t count,
                          ckd_error *err);

/*
 * Removes checkpoints whose grace period has ended, if nobody reads the store now. The caller holds the publish
 * lock. Errors: NOMEM. Other failures are reported to on_message, and the work is left for another time.
 */
ckd_status trash_collect_if_no_readers(ckd_store *store, ckd_error *err);

/* Chunk files whose condition a process knows. Zero-initialised. */
typedef struct checked_files {
    hash_set intact, damaged; /* by hash64 of their ids */
    uint64_t read;            /* bytes of files that were read under the present locks */
    bool more;                /* the limit for that was reached; the rest is left for another time */
} checked_files;
void checked_files_free(checked_files *c);

/*
 * Removes generations of listed checkpoints that newer ones have replaced, if all files of the newer one exist and are
 * intact. Files that are not in `checked` are read through for that, and added. Waits at most lock_ms for the publish
 * lock, and timeout_ms for readers. *left: files that could not be removed yet, because somebody reads, or a repair
 * needs them. Files that damage keeps do not count; a message names the damage. Errors: as manifest_set_read; BUSY, IO.
 */
ckd_status trash_remove_replaced(uint64_t *left, ckd_store *store, checked_files *checked, uint32_t lock_ms,
                                 uint32_t timeout_ms, ckd_error *err);
/*
 * Counts what removing the chosen checkpoints would free: their manifests, and files that no other manifest names.
 * Errors: NOMEM.
 */
ckd_status trash_would_free(ckd_collected *out, const manifest_set *chosen, ckd_error *err);

#endif
