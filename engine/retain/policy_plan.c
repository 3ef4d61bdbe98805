/* Policies: which checkpoints stay, and why. policy_apply.c deletes the others. */
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "engine/common/common.h"
#include "engine/store/store.h"
#include "engine/retain/retain.h"

#define SAFE 2 /* how many of the newest healthy checkpoints of a run always stay */

/* The checkpoints of one run, by step. */
typedef struct run_items {
    ckd_retained *items;
    size_t count;
} run_items;

static bool better(const ckd_policy *p, const ckd_checkpoint *a, const ckd_checkpoint *b) {
    return p->highest_is_best ? a->metric > b->metric : a->metric < b->metric;
}

/* Searches for one best checkpoint after the other, because few are kept. Among equals the newest wins. */
static void keep_best(const run_items *run, const ckd_policy *p) {
    for (uint32_t k = 0; k < p->keep_best; k++) {
        ckd_retained *best = NULL;
        for (size_t i = run->count; i-- > 0;) {
            ckd_retained *r = &run->items[i];
            bool candidate = !isnan(r->checkpoint.metric) && !(r->kept & CKD_KEPT_BEST);
            if (candidate && (!best || better(p, &r->checkpoint, &best->checkpoint))) {
                best = r;
            }
        }
        if (!best) {
            return;
        }
        best->kept |= CKD_KEPT_BEST;
    }
}

/* ---- days, weeks and months ---- */

/* Numbers of periods in UTC. They grow with time. */
typedef uint64_t (*period_fn)(uint64_t seconds);

static uint64_t day_of(uint64_t seconds) {
    return seconds / (24 * 3600);
}

/* 1 January 1970 was a Thursday. */
static uint64_t week_of(uint64_t seconds) {
    return (day_of(seconds) + 3) / 7;
}

static uint64_t month_of(uint64_t seconds) {
    time_t time = (time_t)seconds;
    struct tm utc;
    return gmtime_r(&time, &utc) ? (uint64_t)utc.tm_year * 12 + (uint64_t)utc.tm_mon : 0;
}

typedef struct dated {
    uint64_t period;
    size_t index; /* of the checkpoint, by step */
} dated;

/* The newest period first, and in it the highest step. */
static int compare(const void *a, const void *b) {
    const dated *x = a, *y = b;
    if (x->period != y->period) {
        return x->period < y->period ? 1 : -1;
    }
    return (x->index < y->index) - (x->index > y->index);
}

static void keep_newest(ckd_retained *items, dated *order, size_t count, period_fn period_of,
                        uint32_t periods, unsigned why) {
    for (size_t i = 0; i < count; i++) {
        order[i] = (dated){period_of(items[i].checkpoint.created_ns / UINT64_C(1000000000)), i};
    }
    qsort(order, count, sizeof(*order), compare);
    uint32_t kept = 0;
    for (size_t i = 0; i < count && kept < periods; i++) {
        if (i == 0 || order[i].period != order[i - 1].period) {
            items[order[i].index].kept |= why;
            kept++;
        }
    }
}

/*
 * Marks the checkpoints that keep_daily, keep_weekly and keep_monthly keep. items: the checkpoints of one run, by
 * step. Each of the newest periods with any checkpoint keeps the one with the highest step.
 */
static ckd_status calendar_keep(ckd_retained *items, size_t count, const ckd_policy *p, ckd_error *err) {
    if (!p->keep_daily && !p->keep_weekly && !p->keep_monthly) {
        return CKD_OK;
    }
    dated *order = malloc((count + 1) * sizeof(*order));
    if (!order) {
        return err_nomem(err, count * sizeof(*order), "the periods of checkpoints");
    }
    keep_newest(items, order, count, day_of, p->keep_daily, CKD_KEPT_DAILY);
    keep_newest(items, order, count, week_of, p->keep_weekly, CKD_KEPT_WEEKLY);
    keep_newest(items, order, count, month_of, p->keep_monthly, CKD_KEPT_MONTHLY);
    free(order);
    return CKD_OK;
}

/* ---- all rules ---- */

/* A time in nanoseconds minus seconds; 0 if that is before 1970. */
static uint64_t seconds_before(uint64_t ns, uint64_t seconds) {
    uint64_t longest = ns / UINT64_C(1000000000);
    return ns - (seconds < longest ? seconds : longest) * UINT64_C(1000000000);
}

/* Applies the rules to checkpoints of a run, by step. There is at least one. */
static ckd_status mark_kept(const run_items *run, const ckd_policy *p, uint64_t now, ckd_error *err) {
    /* A wrong clock may date the newest checkpoint in the future. This must not make all others old. */
    uint64_t newest = run->items[run->count - 1].checkpoint.created_ns;
    uint64_t since = seconds_before(now, p->keep_new_s);
    uint64_t within = seconds_before(newest < now ? newest : now, p->keep_within_s);
    for (size_t i = 0; i < run->count; i++) {
        ckd_retained *r = &run->items[i];
        size_t age = run->count - 1 - i;
        r->kept |= age < p->keep_last ? CKD_KEPT_LAST : 0;
        r->kept |= p->keep_every && r->checkpoint.step % p->keep_every == 0 ? CKD_KEPT_EVERY : 0;
        r->kept |= p->keep_first && i == 0 ? CKD_KEPT_FIRST : 0;
        r->kept |= p->keep_new_s && r->checkpoint.created_ns >= since ? CKD_KEPT_NEW : 0;
        r->kept |= p->keep_within_s && r->checkpoint.created_ns >= within ? CKD_KEPT_WITHIN : 0;
        r->kept |= age < SAFE ? CKD_KEPT_SAFETY : 0;
    }
    keep_best(run, p);
    return calendar_keep(run->items, run->count, p, err);
}

/*
 * Suspect checkpoints count for no rule, and no rule keeps them. Otherwise a run whose values have become NaN would
 * push out its last healthy checkpoints. Only the newest of the run stays if it is suspect, until a healthy one
 * follows.
 */
static ckd_status mark_healthy(const run_items *run, const ckd_policy *p, uint64_t now, ckd_error *err) {
    ckd_retained *healthy = calloc(run->count, sizeof(*healthy));
    run_items counted = {healthy, 0};
    if (!healthy) {
        return err_nomem(err, run->count * sizeof(*healthy), "a plan");
    }
    for (size_t i = 0; i < run->count; i++) {
        if (!run->items[i].checkpoint.suspect) {
            healthy[counted.count++] = run->items[i];
        }
    }
    ckd_status status = counted.count ? mark_kept(&counted, p, now, err) : CKD_OK;
    for (size_t i = 0, at = 0; i < run->count; i++) {
        ckd_retained *r = &run->items[i];
        r->kept |= !r->checkpoint.suspect ? healthy[at++].kept : i + 1 == run->count ? CKD_KEPT_SUSPECT : 0;
    }
    free(healthy);
    return status;
}

/* policy == NULL: applies each run's stored policy. */
static ckd_status apply_to_runs(ckd_prune *plan, const ckd_policy *policy, const setting_list *n,
                                ckd_error *err) {
    uint64_t now = clock_wall_ns();
    ckd_status status = CKD_OK;
    for (size_t begin = 0, end; begin < plan->count && status == CKD_OK; begin = end) {
        const char *run = plan->items[begin].checkpoint.run;
        for (end = begin + 1; end < plan->count && strcmp(plan->items[end].checkpoint.run, run) == 0;) {
            end++;
        }
        run_items s = {plan->items + begin, end - begin};
        status = mark_healthy(&s, policy ? policy : &settings_policy(n, run)->policy.policy, now, err);
    }
    return status;
}

/* run == NULL: all runs. */
static ckd_status add_up(ckd_prune *plan, ckd_store *store, const char *run, ckd_error *err) {
    manifest_set all = {0};
    chunk_waste left = {0};
    ckd_collected freed = {0};
    for (size_t i = 0; i < plan->count; i++) {
        plan->deleted += !plan->items[i].kept;
    }
    ckd_status status = manifest_set_read(&all, store, err);
    for (size_t i = 0; i < plan->count && status == CKD_OK; i++) {
        const ckd_id *id = &plan->items[i].checkpoint.id;
        const manifest_entry *n = plan->items[i].kept ? NULL : manifest_set_find(&all, id);
        status = n && !n->in_trash ? manifest_set_choose(&all, id, 1, false, err) : CKD_OK;
    }
    THEN(status, trash_would_free(&freed, &all, err));
    THEN(status, chunk_waste_of(&left, &all, run, err));
    plan->bytes = freed.bytes;
    plan->compaction_bytes = left.dead;
    manifest_set_free(&all);
    return status;
}

/* ---- planning ---- */

/*
 * Whether only a policy that names the run applies to it. Otherwise checkpoints that a repair brought back under
 * another name would be deleted at once.
 */
static bool is_spared(const prune_request *r, const setting_list *n, const char *run) {
    return r->stored ? !settings_policy(n, run) : !r->policy.run && is_returned_name(run);
}

/* Lists the checkpoints to which the policies apply. */
static ckd_status list_items(ckd_prune *plan, ckd_store *store, const prune_request *r, const setting_list *n,
                             ckd_error *err) {
    ckd_checkpoint_list *list;
    const char *run = r->policy.run;
    ckd_status status = ckd_store_list(&list, store, run, err);
    if (status == CKD_OK && run && list->count == 0) {
        status = err_set(err, CKD_E_NOT_FOUND, "there is no run %s in this store", run);
    }
    if (status == CKD_OK) {
        plan->items = calloc(list->count + 1, sizeof(*plan->items));
        status = plan->items ? CKD_OK : err_nomem(err, list->count * sizeof(*plan->items), "a plan");
    }
    for (size_t i = 0; status == CKD_OK && i < list->count; i++) {
        if (!is_spared(r, n, list->items[i].run)) {
            plan->items[plan->count++].checkpoint = list->items[i];
        }
    }
    ckd_checkpoint_list_free(list);
    return status;
}

static ckd_status read_settings(setting_list *n, const ckd_store *store, const ckd_policy *policy,
                                ckd_error *err) {
    ckd_status status = settings_read(n, store, err);
    THEN(status, settings_check(n, store, err));
    for (size_t i = 0; i < n->count && status == CKD_OK && !policy; i++) {
        if (n->items[i].name.kind == METADATA_POLICY) {
            return CKD_OK;
        }
    }
    return status != CKD_OK || policy
               ? status
               : err_set(err, CKD_E_NOT_FOUND, "the store has no policy: set one, or say what to keep");
}

/* The longest grace period of the policies that are applied. */
static uint64_t longest_undo(const ckd_prune *plan, const setting_list *n) {
    uint64_t longest = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const stored_setting *p = settings_policy(n, plan->items[i].checkpoint.run);
        longest = p->policy.policy.undo_s > longest ? p->policy.policy.undo_s : longest;
    }
    return longest;
}

static ckd_status make_plan(ckd_prune *plan, ckd_store *store, const prune_request *r, setting_list *n,
                            ckd_error *err) {
    const ckd_policy *policy = r->stored ? NULL : &r->policy;
    ckd_status status = policy ? policy_check(policy, err) : CKD_OK;
    THEN(status, read_settings(n, store, policy, err));
    THEN(status, list_items(plan, store, r, n, err));
    THEN(status, apply_to_runs(plan, policy, n, err));
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < plan->count; i++) {
        plan->items[i].kept |= settings_kept_why(n, &plan->items[i].checkpoint.id);
    }
    size_t deleted = 0;
    for (size_t i = 0; i < plan->count; i++) {
        deleted += !plan->items[i].kept;
    }
    return deleted < r->at_least ? CKD_OK : add_up(plan, store, r->policy.run, err);
}

ckd_status retain_plan(ckd_prune **out, uint64_t *undo_s, ckd_store *store, const prune_request *request,
                       ckd_error *err) {
    *out = NULL;
    *undo_s = request->policy.undo_s;
    setting_list n = {0};
    ckd_prune *plan = calloc(1, sizeof(*plan));
    ckd_status status =
        plan ? make_plan(plan, store, request, &n, err) : err_nomem(err, sizeof(*plan), "a plan");
    if (status == CKD_OK && request->stored) {
        *undo_s = longest_undo(plan, &n);
    }
    settings_free(&n);
    if (status != CKD_OK) {
        ckd_prune_free(plan);
        return status;
    }
    *out = plan;
    return CKD_OK;
}

ckd_status ckd_store_plan_prune(ckd_prune **out, ckd_store *store, const ckd_policy *policy, ckd_error *err) {
    uint64_t undo_s;
    prune_request r = prune_request_of(policy);
    return retain_plan(out, &undo_s, store, &r, err);
}

void ckd_prune_free(ckd_prune *prune) {
    if (prune) {
        free(prune->items);
        free(prune);
    }
}
