/* Retention policies and their application. Internal to engine/. */
#ifndef ENGINE_RETAIN_H
#define ENGINE_RETAIN_H

#include "engine/store/store.h"

/*
 * Completes renames of runs that were interrupted. Under the publish lock. Errors: NOMEM. Other failures are reported to
 * on_message, and the work is left for another time.
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

#endif
