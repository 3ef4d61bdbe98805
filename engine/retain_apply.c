/*
 * Applying policies: what is left is read through, then the rest is deleted. On request, and after commits for those that are to be applied
 * by themselves.
 */
#include <stdlib.h>

#include "engine/notes.h"
#include "engine/read_through.h"
#include "engine/retain.h"
#include "engine/trash.h"

/* After commits, what was read through in the last seven days is not read again: a save must not cost a whole chain. */
#define TRUSTED_S (7 * 24 * 3600)

/* How long to wait for locks, what not to read again. */
typedef struct haste {
    uint32_t patience_ms;
    uint64_t trusted_s;
} haste;

static ckd_status delete_the_others(ckd_store *store, const ckd_prune *plan, uint64_t undo_s, const haste *h,
                                    ckd_error *err) {
    ckd_id *ids = calloc(plan->count + 1, sizeof(*ids));
    size_t count = 0;
    if (!ids) {
        return err_nomem(err, plan->count * sizeof(*ids), "checkpoints to delete");
    }
    for (size_t i = 0; i < plan->count; i++) {
        if (!plan->items[i].kept) {
            ids[count++] = plan->items[i].checkpoint.id;
        }
    }
    ckd_status status = trash_put(store, ids, count, undo_s, h->patience_ms, err);
    free(ids);
    return status;
}

static ckd_status apply_plan(ckd_store *store, const ckd_prune *plan, uint64_t undo_s, const haste *h,
                             ckd_error *err) {
    ckd_status status = read_safe_through(store, plan, h->trusted_s, h->patience_ms, err);
    return status == CKD_OK ? delete_the_others(store, plan, undo_s, h, err) : status;
}

ckd_status ckd_store_prune(ckd_prune **out, ckd_store *store, const ckd_policy *policy,
                           const ckd_delete_options *options, ckd_error *err) {
    ckd_prune *plan = NULL;
    uint64_t undo_s = 0;
    prune_request r = prune_request_of(policy);
    haste h = {.patience_ms = store->options.lock_timeout_ms};
    if (out) {
        *out = NULL;
    }
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_status status = COPY_OPTIONS(&o, options, "ckd_delete_options", err);
    status = status == CKD_OK ? store_check_writable(store, err) : status;
    if (status == CKD_OK) {
        status = retain_plan(&plan, &undo_s, store, &r, err);
    }
    if (status == CKD_OK && plan->deleted) {
        undo_s = options || policy ? o.undo_s : undo_s;
        status = apply_plan(store, plan, undo_s, &h, err);
    }
    if (status == CKD_OK && out) {
        *out = plan;
        return CKD_OK;
    }
    ckd_prune_free(plan);
    return status;
}

/* ---- after a commit ---- */

/* *applies: there is a policy that is to be applied by itself. */
static ckd_status stored_request(prune_request *out, bool *applies, const ckd_store *store, const char *run,
                                 ckd_error *err) {
    notes n = {0};
    *applies = false;
    ckd_status status = notes_read_kind(&n, store, NOTE_POLICY, err);
    const kept_note *found = status == CKD_OK ? notes_policy(&n, run) : NULL;
    if (found) {
        status = notes_why(found, store, err);
    }
    if (found && status == CKD_OK) {
        *out = (prune_request){.policy = found->policy.policy, .at_least = found->policy.policy.automatic};
        out->policy.run = run;
        *applies = out->at_least > 0;
    }
    notes_free(&n);
    return status;
}

/* What it deleted may be removed at once, and what was deleted before. */
static void collect_if_free(ckd_store *store) {
    file_lock *lock;
    if (store_lock_publish_within(&lock, store, 0, NULL) == CKD_OK) {
        trash_collect_now(store, NULL);
        lock_release(lock);
    }
}

static ckd_status apply_stored(ckd_store *store, const char *run, ckd_error *err) {
    prune_request r;
    bool applies;
    ckd_prune *plan = NULL;
    uint64_t undo_s;
    haste h = {.trusted_s = TRUSTED_S};
    ckd_status status = stored_request(&r, &applies, store, run, err);
    if (status == CKD_OK && applies) {
        status = retain_plan(&plan, &undo_s, store, &r, err);
    }
    if (status == CKD_OK && plan && plan->deleted >= r.at_least) {
        status = apply_plan(store, plan, undo_s, &h, err);
        if (status == CKD_OK) {
            store_message(store, "deleted %llu checkpoint%s of %s, by its policy",
                          (unsigned long long)plan->deleted, plan->deleted == 1 ? "" : "s", run);
            collect_if_free(store);
        }
    }
    ckd_prune_free(plan);
    return status;
}

void retain_after_commit(ckd_store *store, const char *run) {
    ckd_error why = {0};
    ckd_status status = apply_stored(store, run, &why);
    if (status != CKD_OK &&
        status != CKD_E_BUSY) { /* whom it would have had to wait for saves as well, or deletes */
        store_message(store, "the policy of %s was not applied: %s%s%s%s", run, why.message,
                      why.file[0] ? " (" : "", why.file, why.file[0] ? ")" : "");
    }
}
