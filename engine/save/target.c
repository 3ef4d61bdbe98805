/*
 * Determines the target of a save: its run, its parent, and the action if the step exists already. Also detects two
 * launches that save to one run by mistake.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/vocabulary.h"
#include "engine/save/internal.h"
#include "engine/common/common.h"

static ckd_status check_fidelity(const ckd_save_options *o, ckd_error *err) {
    bool valid = o->fidelity >= CKD_FIDELITY_DEFAULT && o->fidelity <= CKD_COARSE;
    for (size_t role = 0; role < sizeof(o->role_fidelity) / sizeof(o->role_fidelity[0]); role++) {
        valid &= o->role_fidelity[role] >= CKD_FIDELITY_DEFAULT && o->role_fidelity[role] <= CKD_COARSE;
    }
    if (!valid) {
        return err_set(err, CKD_E_UNSUPPORTED,
                       "a fidelity is unknown to this version, which has exact, near and coarse");
    }
    if (o->role_fidelity[CKD_ROLE_OTHER] > CKD_EXACT) {
        return err_set(err, CKD_E_INVALID, "tensors of role other are always saved exactly");
    }
    if (o->effort < 0 || o->effort > 9) {
        return err_set(err, CKD_E_INVALID, "effort %d is outside 1 ... 9 (0: the default)", o->effort);
    }
    if (!(o->target_bits >= 0 && o->target_bits <= 64) || !(o->target_ratio >= 0 && o->target_ratio <= 1e6) ||
        (o->target_bits > 0 && o->target_ratio > 0)) {
        return err_set(err, CKD_E_INVALID,
                       "set target_bits (0 ... 64 per parameter) or target_ratio (0 ... 10^6), not both");
    }
    if (o->step_scale != 0 && (!(o->step_scale >= 1.0 / 64) || !(o->step_scale <= 64) || o->target_bits > 0 ||
                               o->target_ratio > 0)) {
        return err_set(
            err, CKD_E_INVALID,
            "step_scale is 1/64 ... 64 (0: 1), and cannot be combined with a target, which sets the steps "
            "itself");
    }
    return !(o->max_error >= 0) || !(o->max_error < 1)
               ? err_set(err, CKD_E_INVALID,
                         "max_error is a share of a tensor's root mean square: more than 0 and less than 1")
               : CKD_OK;
}

ckd_status save_check_options(const ckd_save_options *o, ckd_error *err) {
    if (!run_name_valid(o->run)) {
        return err_set(
            err, CKD_E_INVALID,
            "'%.*s' is not a valid run name: use 1 to %d of A-Z a-z 0-9 . _ - ~, not starting with a dot or dash",
            CKD_RUN_MAX, o->run ? o->run : "", CKD_RUN_MAX);
    }
    if (o->step > INT64_MAX) {
        return err_set(err, CKD_E_INVALID, "step %llu is too large; steps go up to 2^63 - 1",
                       (unsigned long long)o->step);
    }
    ckd_status status = check_fidelity(o, err);
    if (status != CKD_OK) {
        return status;
    }
    if (o->codec < CKD_CODEC_AUTO || o->codec > CKD_CODEC_LZ4) {
        return err_set(err, CKD_E_INVALID, "unknown codec %d", (int)o->codec);
    }
    int top = o->codec == CKD_CODEC_LZ4 ? 12 : 19;
    if (o->level < 0 || o->level > top) {
        return err_set(err, CKD_E_INVALID, "level %d is outside 0 ... %d", o->level, top);
    }
    if (!(o->max_load_cost >= 0) || !(o->newest_load_cost >= 0) ||
        (o->max_load_cost > 0 && o->max_load_cost < 1) ||
        (o->newest_load_cost > 0 && o->newest_load_cost < 1)) {
        return err_set(err, CKD_E_INVALID,
                       "a load cost is at least 1 (the load of a base), or 0 for the default");
    }
    if (o->on_duplicate < CKD_DUPLICATE_ERROR || o->on_duplicate > CKD_DUPLICATE_BRANCH) {
        return err_set(err, CKD_E_INVALID, "on_duplicate %d is not known", (int)o->on_duplicate);
    }
    if (o->on_duplicate == CKD_DUPLICATE_SAME_OK && o->world > 1) {
        return err_set(
            err, CKD_E_INVALID,
            "CKD_DUPLICATE_SAME_OK is for one rank; with %u, look for the step with ckd_store_find "
            "before the ranks begin",
            (unsigned)o->world);
    }
    if (o->rank >= (o->world ? o->world : 1)) {
        return err_set(err, CKD_E_INVALID, "rank is %u, but it must be below world, %u", (unsigned)o->rank,
                       (unsigned)o->world);
    }
    if (o->metric_name && (strlen(o->metric_name) >= sizeof(((ckd_checkpoint *)0)->metric_name) ||
                           !utf8_valid(o->metric_name, strlen(o->metric_name)))) {
        return err_set(err, CKD_E_INVALID, "the metric's name is longer than 31 bytes, or not UTF-8");
    }
    return o->world > 1 && id_is_zero(&o->checkpoint_id)
               ? err_set(err, CKD_E_INVALID, "with several ranks, all must be given the same checkpoint_id")
               : CKD_OK;
}

static ckd_status newest_of(ckd_checkpoint *out, bool *found, catalog *c, const char *run, uint64_t before,
                            ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = catalog_newest(out, c, run, before, &why);
    *found = status == CKD_OK;
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

/* Finds the run's newest step by the names of manifests. An unreadable manifest counts, because its name is taken. */
static bool newest_step(uint64_t *step, const manifest_list *manifests, const char *run) {
    bool found = false;
    for (size_t i = 0; i < manifests->count; i++) {
        const manifest_name *m = &manifests->items[i];
        if (strcmp(m->run, run) == 0 && (!found || m->step > *step)) {
            *step = m->step;
            found = true;
        }
    }
    return found;
}

/* The checkpoint that the caller names as origin, if it is of this run or one of its branches; else NULL. */
static const char *given_origin(uint64_t *step, const ckd_save_options *o, const char *root) {
    char other_root[CKD_RUN_MAX + 1];
    unsigned number;
    const char *run = o->parent_run ? o->parent_run : o->resumed_from_run;
    *step = o->parent_run ? o->parent_step : o->resumed_from_step;
    if (!run || strnlen(run, CKD_RUN_MAX + 1) > CKD_RUN_MAX) {
        return NULL;
    }
    branch_root(other_root, &number, run);
    return strcmp(other_root, root) == 0 ? run : NULL;
}

/*
 * A session that asked for branches continues from its own last save, whatever other launches have saved meanwhile.
 * NULL: it has none.
 */
static const launch_record *followed(const ckd_store *store, const ckd_save_options *o) {
    const launch_record *f = store->launch;
    return f && f->own && o->on_duplicate == CKD_DUPLICATE_BRANCH && !o->parent_run ? f : NULL;
}

/*
 * Chooses the branch for a save. A rewound run continues on its newest branch. If that branch is past the step, the
 * run was rewound again, and the next branch begins. The next branch also begins if the state does not come from the
 * end of a branch; else abandoned steps would lie between the save and its origin. A state from the end of any branch
 * continues there.
 */
static ckd_status choose_branch(save_target *t, const ckd_store *store, const ckd_save_options *o,
                                ckd_error *err) {
    char root[CKD_RUN_MAX + 1], name[CKD_RUN_MAX + 1];
    unsigned number;
    manifest_list manifests;
    ckd_status status = manifests_read(&manifests, store, err);
    if (status != CKD_OK) {
        return status;
    }
    branch_root(root, &number, t->run);
    uint64_t newest = 0;
    bool exists = newest_step(&newest, &manifests, t->run);
    /* A name that is too long belongs to no run. */
    while (exists && branch_name(name, root, number + 1, NULL) == CKD_OK &&
           newest_step(&newest, &manifests, name)) {
        number++;
    }
    uint64_t from_step, end = 0;
    const char *from = given_origin(&from_step, o, root);
    const launch_record *launch = from ? NULL : followed(store, o);
    if (launch) { /* if its last save was deleted, its branch ends before that */
        from = launch->run;
        from_step = launch->step;
    }
    bool at_end = from && newest_step(&end, &manifests, from) &&
                  (from_step == CKD_LATEST || from_step == end || (launch && end < from_step));
    manifests_free(&manifests);
    if (at_end && end < t->step) {
        snprintf(t->run, sizeof(t->run), "%s", from);
        return CKD_OK;
    }
    if (exists && (newest >= t->step || from)) {
        number++;
    }
    return branch_name(t->run, root, number, err);
}

static ckd_status newest_healthy_of(ckd_checkpoint *out, bool *found, catalog *c, const char *run,
                                    uint64_t before, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = catalog_newest_healthy(out, c, run, before, &why);
    *found = status == CKD_OK;
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

typedef ckd_status (*newest_fn)(ckd_checkpoint *out, bool *found, catalog *c, const char *run,
                                uint64_t before, ckd_error *err);

/* Finds the newest checkpoint before the step, in this run or in those from which it branched off. */
static ckd_status search_branches(save_target *t, newest_fn newest, ckd_store *store, ckd_error *err) {
    char root[CKD_RUN_MAX + 1], name[CKD_RUN_MAX + 1];
    unsigned number;
    branch_root(root, &number, t->run);
    snprintf(name, sizeof(name), "%s", t->run);
    for (;;) {
        ckd_status status = newest(&t->origin, &t->has_origin, store->catalog, name, t->step, err);
        if (status != CKD_OK || t->has_origin || number <= 1) {
            return status;
        }
        status = branch_name(name, root, --number, err);
        if (status != CKD_OK) {
            return status;
        }
    }
}

/* A suspect checkpoint is taken only if there is no other. */
static ckd_status find_parent(save_target *t, ckd_store *store, ckd_error *err) {
    ckd_status status = search_branches(t, newest_healthy_of, store, err);
    return status == CKD_OK && !t->has_origin ? search_branches(t, newest_of, store, err) : status;
}

static ckd_status find_named(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step,
                             const char *what, ckd_error *err) {
    ckd_status status = step == CKD_LATEST ? catalog_newest(out, store->catalog, run, UINT64_MAX, err)
                                           : catalog_find(out, store->catalog, run, step, err);
    if (status != CKD_E_NOT_FOUND) {
        return status;
    }
    return step == CKD_LATEST ? err_set(err, status, "the %s, run '%s', has no checkpoints", what, run)
                              : err_set(err, status, "the %s %s@%llu is not in the store", what, run,
                                        (unsigned long long)step);
}

static ckd_status resolve_parent(save_target *t, ckd_store *store, const ckd_save_options *o,
                                 ckd_error *err) {
    const launch_record *launch = followed(store, o);
    if (launch && catalog_find_id(&t->origin, store->catalog, &launch->last, NULL) == CKD_OK &&
        !t->origin.suspect) {
        t->has_origin = true;
        return CKD_OK;
    }
    if (!o->parent_run) {
        return find_parent(t, store, err);
    }
    t->has_origin = true;
    return find_named(&t->origin, store, o->parent_run, o->parent_step, "parent", err);
}

static ckd_status resolve_resume(save_target *t, ckd_store *store, const ckd_save_options *o,
                                 ckd_error *err) {
    t->lossy_resumes = t->has_origin ? t->origin.lossy_resumes : 0;
    if (!o->resumed_from_run) {
        return CKD_OK;
    }
    ckd_checkpoint from;
    ckd_status status =
        find_named(&from, store, o->resumed_from_run, o->resumed_from_step, "checkpoint resumed from", err);
    if (status == CKD_OK) {
        t->resumed_from = from.id;
        t->lossy_resumes = from.lossy_resumes + (from.fidelity != CKD_EXACT);
    }
    return status;
}

ckd_status save_resolve_target(save_target *out, ckd_store *store, const ckd_save_options *o,
                               ckd_error *err) {
    memset(out, 0, sizeof(*out));
    ckd_status status = save_check_options(o, err);
    if (status != CKD_OK) {
        return status;
    }
    snprintf(out->run, sizeof(out->run), "%s", o->run);
    out->step = o->step;
    if (o->on_duplicate == CKD_DUPLICATE_BRANCH) {
        status = choose_branch(out, store, o, err);
    }
    if (status == CKD_OK) {
        ckd_error why = {0};
        status = catalog_find(&out->existing, store->catalog, out->run, out->step, &why);
        if (status == CKD_OK && o->on_duplicate != CKD_DUPLICATE_SAME_OK) {
            return err_set(
                err, CKD_E_EXISTS,
                "run '%s' already has a checkpoint at step %llu; choose another run or step, or set on_duplicate",
                out->run, (unsigned long long)out->step);
        }
        out->compare = status == CKD_OK;
        status = err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    THEN(status, resolve_parent(out, store, o, err));
    THEN(status, resolve_resume(out, store, o, err));
    if (status == CKD_OK && out->has_origin && strcmp(out->origin.run, out->run) != 0) {
        out->branch_origin = out->origin.id;
    }
    return status;
}

/* ---- the date ---- */

typedef struct date_query {
    const char *run;
    uint64_t newest_ns;
} date_query;

/* Finds the latest date of the newest checkpoints of the run and its branches. */
static ckd_status query_date(void *context, catalog *c, ckd_error *err) {
    date_query *q = context;
    char root[CKD_RUN_MAX + 1], other_root[CKD_RUN_MAX + 1];
    unsigned number;
    catalog_names runs;
    ckd_status status = catalog_runs(&runs, c, err);
    if (status != CKD_OK) {
        return status;
    }
    q->newest_ns = 0;
    branch_root(root, &number, q->run);
    for (size_t i = 0; i < runs.count && status == CKD_OK; i++) {
        ckd_checkpoint newest;
        bool found = false;
        branch_root(other_root, &number, runs.names[i]);
        if (strcmp(other_root, root) == 0) {
            status = newest_of(&newest, &found, c, runs.names[i], UINT64_MAX, err);
        }
        q->newest_ns = found && newest.created_ns > q->newest_ns ? newest.created_ns : q->newest_ns;
    }
    catalog_names_free(&runs);
    return status;
}

uint64_t save_newest_date(ckd_store *store, const char *run) {
    date_query q = {.run = run};
    return store_query(store, query_date, &q, NULL) == CKD_OK ? q.newest_ns : 0;
}

ckd_status save_date(ckd_checkpoint *c, const ckd_save *save, ckd_error *err) {
    const launch_record *f = save->store->launch;
    date_query q = {.run = c->run};
    ckd_status status = query_date(&q, save->store->catalog, err);
    uint64_t now = clock_wall_ns(), last = save->target.has_origin ? save->target.origin.created_ns : 0;
    uint64_t known = f ? f->newest_ns : 0;
    if (known && known < q.newest_ns) { /* the state is older than what others have saved meanwhile */
        now = last > known ? last + 1 : known + 1;
    } else {
        last = q.newest_ns > last ? q.newest_ns : last;
    }
    c->created_ns = now > last || last == INT64_MAX ? now : last + 1; /* INT64_MAX: the catalog's highest */
    return status;
}

/* ---- another launch ---- */

/*
 * The saves of a session form one sequence, so the run's newest checkpoint must be the session's own. Checked under the
 * publish lock, when a save begins and again before its manifest is published.
 */
static ckd_status find_newest(ckd_checkpoint *out, bool *found, const ckd_save *save, ckd_error *err) {
    return newest_of(out, found, save->store->catalog, save->target.run, UINT64_MAX, err);
}

static ckd_status another_launch(const ckd_save *save, const ckd_checkpoint *found, const char *when,
                                 ckd_error *err) {
    char hex[CKD_ID_TEXT], at[32] = "";
    struct tm utc;
    time_t seconds = (time_t)(found->created_ns / 1000000000);
    ckd_id_text(hex, &found->id);
    if (gmtime_r(&seconds, &utc)) {
        strftime(at, sizeof(at), "%Y-%m-%d %H:%M:%S", &utc);
    }
    return err_set(
        err, CKD_E_EXISTS,
        "another launch saves to run '%s': its checkpoint %s@%" PRIu64
        " (id %s, saved at %s UTC by %u ranks) is not this session's, and is newer than the one this session "
        "%s; stop one of the two, or set on_duplicate to CKD_DUPLICATE_BRANCH",
        save->target.run, found->run, found->step, hex, at, (unsigned)found->world, when);
}

ckd_status launch_check_begin(ckd_save *save, ckd_error *err) {
    const launch_record *f = save->store->launch;
    if (!f || save->target.compare) {
        return CKD_OK;
    }
    save->target.checks_launch = true;
    ckd_status status = find_newest(&save->target.newest, &save->target.has_newest, save, err);
    bool looked_at =
        save->options.on_duplicate == CKD_DUPLICATE_ERROR && strcmp(save->target.run, f->run) == 0;
    if (status != CKD_OK || !looked_at || !save->target.has_newest) {
        return status;
    }
    const ckd_checkpoint *newest = &save->target.newest;
    bool own = (f->has_last && id_equal(&newest->id, &f->last)) || id_equal(&newest->id, &f->tried);
    /* the session's last checkpoint was deleted, and older ones stayed */
    bool older = f->has_last && newest->step < f->step;
    return own || older ? CKD_OK
                        : another_launch(save, newest,
                                         f->own ? "saved or restored last" : "found when it was opened", err);
}

ckd_status launch_check_publish(const ckd_save *save, ckd_error *err) {
    ckd_checkpoint newest;
    bool found = false;
    ckd_status status = save->target.checks_launch ? find_newest(&newest, &found, save, err) : CKD_OK;
    if (status != CKD_OK || !found) {
        return status;
    }
    bool same = save->target.has_newest && id_equal(&newest.id, &save->target.newest.id);
    bool older = save->target.has_newest && newest.step < save->target.newest.step;
    return same || older ? CKD_OK : another_launch(save, &newest, "found when its save began", err);
}
