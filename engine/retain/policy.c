/* Sets, removes and reads the policies of a store. policy_apply.c applies them. */
#include <stdio.h>
#include <stdlib.h>

#include "base/vocabulary.h"
#include "codec/metadata/metadata.h"
#include "engine/store/store.h"
#include "engine/retain/retain.h"

static ckd_policy policy_copy(const ckd_policy *p) {
    ckd_policy all = CKD_POLICY_INIT;
    /* A policy of no size keeps nothing, and policy_check refuses it. */
    (void)COPY_OPTIONS(&all, p, "ckd_policy", NULL);
    return all;
}

prune_request prune_request_of(const ckd_policy *policy) {
    return policy ? (prune_request){.policy = policy_copy(policy)} : (prune_request){.stored = true};
}

ckd_status policy_check(const ckd_policy *p, ckd_error *err) {
    return policy_keeps(p)
               ? CKD_OK
               : err_set(err, CKD_E_INVALID,
                         "the policy keeps nothing; say what to keep: the last, every, the first, the best, "
                         "new ones, one a day, week or month, tagged ones");
}

/* The name of the setting for a run. */
static ckd_status name_of(const char **out, const char *run, ckd_error *err) {
    *out = run ? run : POLICY_OF_ALL;
    return !run || run_name_valid(run) ? CKD_OK
                                       : err_set(err, CKD_E_INVALID, "'%.128s' is not a valid run name", run);
}

static ckd_status publish(ckd_store *store, const ckd_policy *p, const char *name, ckd_error *err) {
    setting_name next;
    stored_setting before;
    bytes encoded = {0};
    ckd_status status = settings_next(&next, &before, store, METADATA_POLICY, name, err);
    if (status != CKD_OK) {
        return status;
    }
    policy_setting setting = {.generation = next.generation, .set_ns = clock_wall_ns(), .policy = *p};
    snprintf(setting.run, sizeof(setting.run), "%s", p->run ? p->run : "");
    setting.policy.run = NULL;
    policy_encode(&encoded, &store->id, &setting);
    status = settings_publish(store, &next, &encoded, err);
    bytes_free(&encoded);
    return status;
}

/* Sets the run's policy; policy == NULL: removes it. */
static ckd_status change(ckd_store *store, const ckd_policy *policy, const char *run, ckd_error *err) {
    file_lock *lock;
    const char *name;
    ckd_status status = store_check_writable(store, err);
    THEN(status, name_of(&name, run, err));
    THEN(status, store_lock_publish(&lock, store, err));
    if (status != CKD_OK) {
        return status;
    }
    status = policy ? publish(store, policy, name, err) : settings_remove(store, METADATA_POLICY, name, err);
    lock_release(lock);
    return status;
}

ckd_status ckd_store_set_policy(ckd_store *store, const ckd_policy *policy, ckd_error *err) {
    ckd_policy p = policy_copy(policy);
    ckd_status status = policy_check(&p, err);
    if (status == CKD_OK && p.compact_share >= 100 && p.compact_share != CKD_NO_COMPACTION) {
        status =
            err_set(err, CKD_E_INVALID,
                    "a policy compacts when 1 to 99 %% of bytes are dead, or never; %u %% is not possible",
                    (unsigned)p.compact_share);
    }
    return status == CKD_OK ? change(store, &p, p.run, err) : status;
}

static ckd_status no_policy(const char *run, ckd_error *err) {
    return run ? err_set(err, CKD_E_NOT_FOUND, "the store has no policy for run %s", run)
               : err_set(err, CKD_E_NOT_FOUND, "the store has no policy for all runs");
}

ckd_status ckd_store_clear_policy(ckd_store *store, const char *run, ckd_error *err) {
    ckd_status status = change(store, NULL, run, err);
    return status == CKD_E_NOT_FOUND ? no_policy(run, err) : status;
}

/* ---- reading ---- */

static ckd_stored_policy stored(const stored_setting *n) {
    ckd_stored_policy out = {.status = n->status, .set_ns = n->policy.set_ns, .policy = n->policy.policy};
    bool for_all = strcmp(n->name.name, POLICY_OF_ALL) == 0;
    memcpy(out.run, for_all ? "" : n->name.name, for_all ? 1 : sizeof(out.run));
    return out;
}

ckd_status ckd_store_policy(ckd_stored_policy *out, ckd_store *store, const char *run, ckd_error *err) {
    setting_list n = {0};
    const char *name;
    *out = (ckd_stored_policy){.set_ns = 0};
    ckd_status status = name_of(&name, run, err);
    THEN(status, settings_read_kind(&n, store, METADATA_POLICY, err));
    if (status == CKD_OK) {
        const stored_setting *found = settings_policy(&n, name);
        status = found ? settings_why(found, store, err) : no_policy(run, err);
        if (status == CKD_OK) {
            *out = stored(found);
        }
    }
    settings_free(&n);
    return status;
}

ckd_status ckd_store_policies(ckd_policy_list **out, ckd_store *store, ckd_error *err) {
    setting_list n = {0};
    *out = NULL;
    ckd_policy_list *list = calloc(1, sizeof(*list));
    ckd_status status = list ? settings_read_kind(&n, store, METADATA_POLICY, err)
                             : err_nomem(err, sizeof(*list), "a list of policies");
    if (status == CKD_OK) {
        list->items = calloc(n.count + 1, sizeof(*list->items));
        status = list->items ? CKD_OK : err_nomem(err, n.count * sizeof(*list->items), "a list of policies");
    }
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        /*
         * Settings are sorted. The policy of all runs comes first: '-' sorts before anything that a run's name
         * begins with.
         */
        if (n.items[i].name.kind == METADATA_POLICY) {
            list->items[list->count++] = stored(&n.items[i]);
        }
    }
    settings_free(&n);
    if (status != CKD_OK) {
        ckd_policy_list_free(list);
        return status;
    }
    *out = list;
    return CKD_OK;
}

void ckd_policy_list_free(ckd_policy_list *list) {
    if (list) {
        free(list->items);
        free(list);
    }
}
