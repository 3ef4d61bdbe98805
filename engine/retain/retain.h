/* Policies, and applying them. Internal to engine/. */
#ifndef ENGINE_RETAIN_H
#define ENGINE_RETAIN_H

#include "engine/store/store.h"

/* INVALID if it keeps nothing. */
ckd_status policy_check(const ckd_policy *p, ckd_error *err);

/* What is asked of a plan. */
typedef struct prune_request {
    ckd_policy policy;
    bool stored;       /* the stored ones instead; of `policy` only the run counts, NULL: all runs */
    uint32_t at_least; /* if by the rules fewer can go, nothing is looked at further, and nothing goes */
} prune_request;
/* NULL: the stored ones. */
prune_request prune_request_of(const ckd_policy *policy);
/* undo_s: what the policy says, or with several the longest. */
ckd_status retain_plan(ckd_prune **out, uint64_t *undo_s, ckd_store *store, const prune_request *request,
                       ckd_error *err);
/* ckd_store_prune by a request. */
ckd_status retain_prune(ckd_prune **out, ckd_store *store, const prune_request *request,
                        const ckd_delete_options *options, ckd_error *err);

/*
 * Applies the stored policy of a run that was just saved to, if it says so. Failures only reach on_message, and work that would have to wait for another
 * process is left for the next time. true: it deleted something, by *applied, whose run is `run`. Without locks held.
 */
bool retain_after_commit(ckd_policy *applied, ckd_store *store, const char *run);
/* The message of such a failure. BUSY is none. */
void retain_report_failure(const ckd_store *store, const char *run, ckd_status status, const ckd_error *why);

#endif
