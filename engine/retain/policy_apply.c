/*
 * Deletes the checkpoints that a policy does not keep. policy_plan.c chooses them. Before anything is deleted, the
 * newest checkpoints that stay are read in full, to see that they are intact (store/safety_set.c). Then deletion.c
 * makes tombstones. trash.c removes files later.
 *
 * ckd_store_prune does this on request, and retain_after_commit for automatic policies, after which open.c may compact
 * the run. Begin with delete_by_policy.
 */
#include <stdlib.h>

#include "engine/store/store.h"
#include "engine/retain/retain.h"

/*
 * After a commit, files that were verified in the last seven days are not read again, because a save must not read a
 * whole chain.
 */
#define TRUSTED_S (7 * 24 * 3600)

/* timeout_ms: for locks. trusted_s: files that were verified less than this ago are not read again. */
typedef struct apply_limits {
    uint32_t timeout_ms;
    uint64_t trusted_s;
} apply_limits;

/*
 * Other processes save and delete while the safe checkpoints are read, so the newest may change. This is the number
 * of attempts; each reads only checkpoints that are new.
 */
#define ROUNDS 5

typedef struct policy_application {
    ckd_store *store;
    const prune_request *request;
    const uint64_t *undo_s; /* NULL: the policy's */
    apply_limits limits;
    ckd_prune *plan; /* the last plan; in the end the one that was carried out */
    uint64_t plan_undo_s;
    safety_reading read; /* the checkpoints that must be undamaged before anything is deleted */
    bool is_old;         /* the plan is outdated: other checkpoints must be read */
} policy_application;

static ckd_status plan_again(policy_application *a, ckd_error *err) {
    ckd_prune_free(a->plan);
    return retain_plan(&a->plan, &a->plan_undo_s, a->store, a->request, err);
}

static bool plan_deletes(const policy_application *a) {
    return a->plan->deleted && a->plan->deleted >= a->request->at_least;
}

/*
 * Chooses by the present state, if all checkpoints that must be undamaged were read. The caller holds the publish lock.
 */
static ckd_status choose_deletions(void *context, deletion_choice *out, ckd_error *err) {
    policy_application *a = context;
    ckd_status status = plan_again(a, err);
    a->is_old = status == CKD_OK && plan_deletes(a) && !safety_set_is_read(&a->read, a->plan);
    if (status != CKD_OK || !plan_deletes(a) || a->is_old) {
        return status;
    }
    out->undo_s = a->undo_s ? *a->undo_s : a->plan_undo_s;
    out->ids = calloc(a->plan->count + 1, sizeof(*out->ids));
    if (!out->ids) {
        return err_nomem(err, a->plan->count * sizeof(*out->ids), "checkpoints to delete");
    }
    for (size_t i = 0; i < a->plan->count; i++) {
        if (!a->plan->items[i].kept) {
            out->ids[out->count++] = a->plan->items[i].checkpoint.id;
        }
    }
    scrub_times_queue(a->store, &a->read.files);
    return CKD_OK;
}

/* a->plan: what was done. The caller frees it, also after a failure. */
static ckd_status delete_by_policy(policy_application *a, ckd_error *err) {
    ckd_status status = plan_again(a, err);
    a->is_old = status == CKD_OK && plan_deletes(a);
    for (int i = 0; i < ROUNDS && a->is_old && status == CKD_OK; i++) {
        status = read_safety_set(&a->read, a->store, a->plan, a->limits.trusted_s, a->limits.timeout_ms, err);
        THEN(status, delete_checkpoints(a->store, choose_deletions, a, a->limits.timeout_ms, err));
    }
    safety_reading_free(&a->read);
    return status == CKD_OK && a->is_old
               ? err_set(
                     err, CKD_E_BUSY,
                     "other processes changed the store while the checkpoints that stay were being verified; "
                     "nothing was deleted: try again")
               : status;
}

ckd_status retain_prune(ckd_prune **out, ckd_store *store, const prune_request *r,
                        const ckd_delete_options *options, ckd_error *err) {
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    policy_application a = {.store = store,
                            .request = r,
                            .undo_s = options || !r->stored ? &o.undo_s : NULL,
                            .limits = {.timeout_ms = store->options.lock_timeout_ms}};
    if (out) {
        *out = NULL;
    }
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_delete_options", err);
    if (status == CKD_OK && o.dry_run) {
        status =
            err_set(err, CKD_E_INVALID,
                    "dry_run is for ckd_store_delete; ckd_store_plan_prune says what a policy would delete");
    }
    THEN(status, store_check_writable(store, err));
    THEN(status, delete_by_policy(&a, err));
    if (status == CKD_OK && out) {
        *out = a.plan;
        return CKD_OK;
    }
    ckd_prune_free(a.plan);
    return status;
}

ckd_status ckd_store_prune(ckd_prune **out, ckd_store *store, const ckd_policy *policy,
                           const ckd_delete_options *options, ckd_error *err) {
    prune_request r = prune_request_of(policy);
    return retain_prune(out, store, &r, options, err);
}

/* ---- after a commit ---- */

/* *applies: there is an automatic policy for the run. */
static ckd_status stored_request(prune_request *out, bool *applies, const ckd_store *store, const char *run,
                                 ckd_error *err) {
    setting_list n = {0};
    *applies = false;
    ckd_status status = settings_read_kind(&n, store, METADATA_POLICY, err);
    const stored_setting *found = status == CKD_OK ? settings_policy(&n, run) : NULL;
    if (found) {
        status = settings_why(found, store, err);
    }
    if (found && status == CKD_OK) {
        *out = (prune_request){.policy = found->policy.policy, .at_least = found->policy.policy.automatic};
        out->policy.run = run;
        *applies = out->at_least > 0;
    }
    settings_free(&n);
    return status;
}

/* Removes checkpoints deleted now or earlier, if their grace period has ended and nobody holds the lock. */
static void collect_unless_locked(ckd_store *store) {
    file_lock *lock;
    if (store_lock_publish_within(&lock, store, 0, NULL) == CKD_OK) {
        trash_collect_if_no_readers(store, NULL);
        lock_release(lock);
    }
}

static ckd_status apply_stored(bool *deleted, ckd_policy *applied, ckd_store *store, const char *run,
                               ckd_error *err) {
    prune_request r;
    bool applies;
    policy_application a = {.store = store, .request = &r, .limits = {.trusted_s = TRUSTED_S}};
    ckd_status status = stored_request(&r, &applies, store, run, err);
    if (status != CKD_OK || !applies) {
        return status;
    }
    status = delete_by_policy(&a, err);
    if (status == CKD_OK && plan_deletes(&a)) {
        store_info(store, "deleted %llu checkpoint%s of %s, by its policy",
                   (unsigned long long)a.plan->deleted, a.plan->deleted == 1 ? "" : "s", run);
        collect_unless_locked(store);
        *applied = r.policy;
        *deleted = true;
    }
    ckd_prune_free(a.plan);
    return status;
}

void retain_report_failure(const ckd_store *store, const char *run, ckd_status status, const ckd_error *why) {
    /* BUSY: another process that saves or deletes holds the lock */
    if (status != CKD_OK && status != CKD_E_BUSY) {
        store_message(store, "the policy of %s was not applied: %s%s%s%s", run, why->message,
                      why->file[0] ? " (" : "", why->file, why->file[0] ? ")" : "");
    }
}

bool retain_after_commit(ckd_policy *applied, ckd_store *store, const char *run) {
    ckd_error why = {0};
    bool deleted = false;
    ckd_status status = apply_stored(&deleted, applied, store, run, &why);
    retain_report_failure(store, run, status, &why);
    return deleted;
}
