/* Policies: which checkpoints stay, and why. Deleting the others is retain_apply.c's. */
#include <math.h>
#include <stdlib.h>

#include "engine/notes.h"
#include "engine/retain.h"

#define SAFE 2 /* checkpoints of a run that always stay */

/* Checkpoints of one run, by step. */
typedef struct stretch {
    ckd_retained *items;
    size_t count;
} stretch;

static bool better(const ckd_policy *p, const ckd_checkpoint *a, const ckd_checkpoint *b) {
    return p->highest_is_best ? a->metric > b->metric : a->metric < b->metric;
}

/* One after the other: few are kept. Of equal ones the newest. */
static void keep_best(const stretch *run, const ckd_policy *p) {
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

static void apply(const stretch *run, const ckd_policy *p, uint64_t now) {
    uint64_t longest = now / UINT64_C(1000000000);
    uint64_t since = now - (p->keep_new_s < longest ? p->keep_new_s : longest) * UINT64_C(1000000000);
    for (size_t i = 0; i < run->count; i++) {
        ckd_retained *r = &run->items[i];
        size_t age = run->count - 1 - i;
        r->kept |= age < p->keep_last ? CKD_KEPT_LAST : 0;
        r->kept |= p->keep_every && r->checkpoint.step % p->keep_every == 0 ? CKD_KEPT_EVERY : 0;
        r->kept |= p->keep_first && i == 0 ? CKD_KEPT_FIRST : 0;
        r->kept |= p->keep_new_s && r->checkpoint.created_ns >= since ? CKD_KEPT_NEW : 0;
        r->kept |= age < SAFE ? CKD_KEPT_SAFETY : 0;
    }
    keep_best(run, p);
}

/* given: NULL, then each run's stored one. */
static void apply_to_runs(ckd_prune *plan, const ckd_policy *given, const notes *n) {
    uint64_t now = clock_wall_ns();
    for (size_t begin = 0, end; begin < plan->count; begin = end) {
        const char *run = plan->items[begin].checkpoint.run;
        for (end = begin + 1; end < plan->count && strcmp(plan->items[end].checkpoint.run, run) == 0;) {
            end++;
        }
        stretch s = {plan->items + begin, end - begin};
        apply(&s, given ? given : &notes_policy(n, run)->policy.policy, now);
    }
}

/* ---- what else must stay ---- */

/* The plan's items by id, as `chosen` needs are the kept ones. */
typedef struct keeping {
    ckd_prune *plan;
    needs all;
    size_t *item_of; /* of each need; SIZE_MAX: none */
    need **todo;     /* kept ones whose dependencies were not looked at */
    size_t todo_count;
} keeping;

static void keep(keeping *k, need *n, unsigned why) {
    size_t item = k->item_of[n - k->all.items];
    if (item != SIZE_MAX && !k->plan->items[item].kept) {
        k->plan->items[item].kept = why;
    }
    if (!n->chosen) {
        n->chosen = true;
        k->todo[k->todo_count++] = n;
    }
}

static ckd_status keep_in_use(void *context, need *used, bool named, const intent *live, ckd_error *err) {
    (void)live;
    (void)err;
    keep(context, used, named ? CKD_KEPT_IN_USE : CKD_KEPT_NEEDED);
    return CKD_OK;
}

/* Checkpoints of runs that the policy is not about all stay. */
static void keep_decided(keeping *k) {
    for (size_t i = 0; i < k->all.count; i++) {
        k->item_of[i] = SIZE_MAX;
    }
    for (size_t i = 0; i < k->plan->count; i++) {
        need *n = needs_find(&k->all, &k->plan->items[i].checkpoint.id);
        if (n) {
            k->item_of[n - k->all.items] = i;
        }
    }
    for (size_t i = 0; i < k->all.count; i++) {
        need *n = &k->all.items[i];
        size_t item = k->item_of[i];
        if (!n->is_dead && (item == SIZE_MAX ? !n->superseded : k->plan->items[item].kept != 0)) {
            keep(k, n, 0);
        }
    }
}

static ckd_status keep_needed(keeping *k, const ckd_store *store, ckd_error *err) {
    k->item_of = calloc(k->all.count + 1, sizeof(*k->item_of));
    k->todo = calloc(k->all.count + 1, sizeof(*k->todo));
    if (!k->item_of || !k->todo) {
        return err_nomem(err, k->all.count * sizeof(*k->todo), "checkpoints to keep");
    }
    keep_decided(k);
    ckd_status status = needs_visit_in_use(&k->all, store, keep_in_use, k, err);
    while (k->todo_count && status == CKD_OK) {
        const need *n = k->todo[--k->todo_count];
        for (size_t i = 0; i < n->m.dependency_count; i++) {
            need *d = needs_find(&k->all, &n->m.dependencies[i]);
            if (d) {
                keep(k, d, CKD_KEPT_NEEDED);
            }
        }
    }
    return status;
}

static void add_up(ckd_prune *plan) {
    for (size_t i = 0; i < plan->count; i++) {
        plan->deleted += !plan->items[i].kept;
        plan->bytes += plan->items[i].kept ? 0 : plan->items[i].checkpoint.stored_bytes;
    }
}

/* ---- planning ---- */

/* The checkpoints that the policies are about. */
static ckd_status list_items(ckd_prune *plan, ckd_store *store, const ckd_policy *given, const notes *n,
                             ckd_error *err) {
    ckd_checkpoint_list *list;
    const char *run = given ? given->run : NULL;
    ckd_status status = ckd_store_list(&list, store, run, err);
    if (status == CKD_OK && run && list->count == 0) {
        status = err_set(err, CKD_E_NOT_FOUND, "there is no run %s in this store", run);
    }
    if (status == CKD_OK) {
        plan->items = calloc(list->count + 1, sizeof(*plan->items));
        status = plan->items ? CKD_OK : err_nomem(err, list->count * sizeof(*plan->items), "a plan");
    }
    for (size_t i = 0; status == CKD_OK && i < list->count; i++) {
        if (given || notes_policy(n, list->items[i].run)) {
            plan->items[plan->count++].checkpoint = list->items[i];
        }
    }
    ckd_checkpoint_list_free(list);
    return status;
}

static ckd_status read_notes(notes *n, const ckd_store *store, const ckd_policy *given, ckd_error *err) {
    ckd_status status = notes_read(n, store, err);
    if (status == CKD_OK) {
        status = notes_check(n, store, err);
    }
    for (size_t i = 0; i < n->count && status == CKD_OK && !given; i++) {
        if (n->items[i].name.kind == NOTE_POLICY) {
            return CKD_OK;
        }
    }
    return status != CKD_OK || given
               ? status
               : err_set(err, CKD_E_NOT_FOUND, "the store has no policy: set one, or say what to keep");
}

/* Stays by the rules and notes, before what others need is known. */
static size_t count_free(const ckd_prune *plan) {
    size_t count = 0;
    for (size_t i = 0; i < plan->count; i++) {
        count += !plan->items[i].kept;
    }
    return count;
}

/* For how long the deletion can be taken back: the longest of the policies that are applied. */
static uint64_t longest_undo(const ckd_prune *plan, const notes *n) {
    uint64_t longest = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const kept_note *p = notes_policy(n, plan->items[i].checkpoint.run);
        longest = p->policy.policy.undo_s > longest ? p->policy.policy.undo_s : longest;
    }
    return longest;
}

static ckd_status make_plan(ckd_prune *plan, ckd_store *store, const prune_request *r, notes *n, keeping *k,
                            ckd_error *err) {
    const ckd_policy *given = r->stored ? NULL : &r->policy;
    ckd_status status = given ? policy_check(given, err) : CKD_OK;
    if (status == CKD_OK) {
        status = read_notes(n, store, given, err);
    }
    if (status == CKD_OK) {
        status = list_items(plan, store, given, n, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    apply_to_runs(plan, given, n);
    for (size_t i = 0; i < plan->count; i++) {
        plan->items[i].kept |= notes_keep(n, &plan->items[i].checkpoint.id);
    }
    if (count_free(plan) < r->at_least) {
        return CKD_OK;
    }
    status = needs_read(&k->all, store, err);
    if (status == CKD_OK) {
        status = keep_needed(k, store, err);
    }
    if (status == CKD_OK) {
        add_up(plan);
    }
    return status;
}

ckd_status retain_plan(ckd_prune **out, uint64_t *undo_s, ckd_store *store, const prune_request *request,
                       ckd_error *err) {
    *out = NULL;
    *undo_s = request->policy.undo_s;
    notes n = {0};
    ckd_prune *plan = calloc(1, sizeof(*plan));
    keeping k = {.plan = plan};
    ckd_status status =
        plan ? make_plan(plan, store, request, &n, &k, err) : err_nomem(err, sizeof(*plan), "a plan");
    if (status == CKD_OK && request->stored) {
        *undo_s = longest_undo(plan, &n);
    }
    free(k.item_of);
    free(k.todo);
    needs_free(&k.all);
    notes_free(&n);
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
