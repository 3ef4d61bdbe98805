/*
 * Computes the figures that a report adds to the library's sums: growth, projections, periods, costs. The printers
 * (text.c, json.c, csv.c, html.c) only format them.
 */
#include "cli/report/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SECOND      UINT64_C(1000000000)
#define GROWTH_OVER 32 /* newest checkpoints to use; the distant past of a run says little about its end */
#define DAYS_MAX    62 /* a longer time is shown by months */

/* ---- orders ---- */

static int by_time(const void *left, const void *right, void *context) {
    const ckd_checkpoint *all = context, *a = &all[*(const size_t *)left], *b = &all[*(const size_t *)right];
    return a->created_ns != b->created_ns ? (a->created_ns > b->created_ns ? 1 : -1) : (a > b) - (a < b);
}

static int by_size(const void *left, const void *right, void *context) {
    const ckd_tensor_usage *all = context, *a = &all[*(const size_t *)left],
                           *b = &all[*(const size_t *)right];
    if (a->stored_bytes != b->stored_bytes) {
        return a->stored_bytes < b->stored_bytes ? 1 : -1;
    }
    int order = strcmp(a->run, b->run);
    return order ? order : strcmp(a->name, b->name);
}

static int by_end(const void *left, const void *right) {
    const ckd_save_times *a = left, *b = right;
    return (a->created_ns > b->created_ns) - (a->created_ns < b->created_ns);
}

/* Returns the numbers 0 ... count - 1 in sorted order. NULL if out of memory. */
static size_t *sorted(size_t count, int (*compare)(const void *, const void *, void *), void *context) {
    size_t *numbers = calloc(count + 1, sizeof(*numbers));
    for (size_t i = 0; numbers && i < count; i++) {
        numbers[i] = i;
    }
    if (numbers) {
        qsort_r(numbers, count, sizeof(*numbers), compare, context);
    }
    return numbers;
}

/* ---- roles ---- */

static void add_elements(report_data *d) {
    const ckd_report *r = d->report;
    for (size_t k = 0; k < r->role_count; k++) {
        for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
            bool same_role = strcmp(ckd_role_name(role), r->by_role[k].name) == 0;
            for (size_t i = 0; same_role && i < r->checkpoint_count; i++) {
                d->role_elements[k] += r->roles[i].roles[role].elements;
            }
        }
    }
}

/* ---- growth ---- */

/* `roles`: one entry per item. */
static report_growth growth_of(const ckd_usage *run, const ckd_checkpoint *items,
                               const ckd_checkpoint_roles *roles, size_t count) {
    report_growth g = {
        .run = run, .first = items, .last = &items[count - 1], .interval = NAN, .seconds = NAN};
    size_t over = count - 1 < GROWTH_OVER ? count - 1 : GROWTH_OVER;
    size_t from = over ? count - over : 0;
    for (size_t i = from; i < count; i++) {
        g.raw += (double)items[i].raw_bytes / (double)(count - from);
        g.stored += (double)items[i].stored_bytes / (double)(count - from);
        for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
            g.roles[role].elements += roles[i].roles[role].elements;
            g.roles[role].raw_bytes += roles[i].roles[role].raw_bytes;
            g.roles[role].stored_bytes += roles[i].roles[role].stored_bytes;
        }
    }
    g.over = count - from;
    if (over) {
        const ckd_checkpoint *before = &items[count - 1 - over];
        g.interval = (double)(g.last->step - before->step) / (double)over;
        if (g.last->created_ns > before->created_ns) {
            g.seconds = (double)(g.last->created_ns - before->created_ns) / (double)SECOND / (double)over;
        }
    }
    return g;
}

static void add_growths(report_data *d) {
    const ckd_report *r = d->report;
    for (size_t run = 0, begin = 0; run < r->run_count; run++) {
        size_t count = (size_t)r->by_run[run].checkpoints;
        d->growths[run] = growth_of(&r->by_run[run], r->by_checkpoint + begin, r->roles + begin, count);
        begin += count;
    }
}

/* ---- the end of the run ---- */

/* A sum that saturates at the largest JSON integer. */
static uint64_t plus(uint64_t bytes, double increase) {
    double sum = (double)bytes + increase;
    return sum < 0x1p63 ? bytes + (uint64_t)increase : INT64_MAX;
}

static report_projection project(const report_growth *g, uint64_t until) {
    report_projection p = {g, until, 0, 0, 0, 0};
    if (until > g->last->step) {
        p.more = (uint64_t)fmin((double)(until - g->last->step) / g->interval, 0x1p62);
    }
    p.raw_bytes = plus(g->run->raw_bytes, (double)p.more * g->raw);
    p.stored_bytes = plus(g->run->stored_bytes, (double)p.more * g->stored);
    double seconds = (double)p.more * g->seconds;
    /* Estimates beyond a hundred years are meaningless. */
    if (seconds < 3.2e9) {
        p.reached_ns = g->last->created_ns + (uint64_t)(seconds * (double)SECOND);
    }
    return p;
}

static void add_projections(report_data *d, const report_query *q) {
    for (size_t i = 0; q->project && i < d->report->run_count; i++) {
        const report_growth *g = &d->growths[i];
        bool selected = !q->policy.run || strcmp(q->policy.run, g->run->name) == 0;
        if (selected && g->interval > 0) {
            d->projections[d->projection_count++] = project(g, q->until);
        }
    }
}

/* ---- time ---- */

static void label_of(char label[16], uint64_t ns, bool months) {
    time_t seconds = (time_t)(ns / SECOND);
    struct tm utc;
    if (!gmtime_r(&seconds, &utc) || !strftime(label, 16, months ? "%Y-%m" : "%Y-%m-%d", &utc)) {
        snprintf(label, 16, "?");
    }
}

static void add_periods(report_data *d) {
    const ckd_report *r = d->report;
    const ckd_checkpoint *all = r->by_checkpoint;
    size_t count = r->checkpoint_count;
    uint64_t raw = 0, stored = 0;
    bool months =
        count &&
        (all[d->by_time[count - 1]].created_ns - all[d->by_time[0]].created_ns) / SECOND / 86400 > DAYS_MAX;
    for (size_t i = 0; i < count; i++) {
        const ckd_checkpoint *c = &all[d->by_time[i]];
        char label[16];
        label_of(label, c->created_ns, months);
        if (d->period_count == 0 || strcmp(d->periods[d->period_count - 1].label, label) != 0) {
            d->periods[d->period_count++] = (report_period){0};
            memcpy(d->periods[d->period_count - 1].label, label, sizeof(label));
        }
        report_period *p = &d->periods[d->period_count - 1];
        p->checkpoints++;
        p->raw_bytes += c->raw_bytes;
        p->stored_bytes += c->stored_bytes;
        p->raw_so_far = raw += c->raw_bytes;
        p->stored_so_far = stored += c->stored_bytes;
    }
}

/* ---- written bytes ---- */

/* Both lists are by run name, then step. A save may have no checkpoint any more. */
static void add_written(report_data *d) {
    const ckd_report *r = d->report;
    for (size_t i = 0, at = 0; i < r->checkpoint_count; i++) {
        const ckd_checkpoint *c = &r->by_checkpoint[i];
        for (; at < d->timeline->count; at++) {
            const ckd_save_times *save = &d->timeline->items[at];
            int order = strcmp(save->run, c->run);
            if (order == 0 && save->step == c->step) {
                d->written[i] = save->written_bytes;
            }
            if (order > 0 || (order == 0 && save->step >= c->step)) {
                break;
            }
        }
    }
}

/* ---- loading ---- */

static ckd_status explain_load(ckd_load_explanation **out, ckd_load **load, ckd_store *store,
                               const ckd_checkpoint *c, ckd_error *err) {
    *out = NULL;
    ckd_status status = ckd_load_begin(load, store, &c->id, err);
    if (status != CKD_OK) {
        return status;
    }
    const ckd_tensor_list *tensors = ckd_load_tensors(*load);
    ckd_load_request *requests = calloc(tensors->count + 1, sizeof(*requests));
    for (size_t i = 0; requests && i < tensors->count; i++) {
        requests[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        requests[i].name = tensors->items[i].name;
    }
    status = requests ? ckd_load_explain(out, *load, requests, tensors->count, err) : cli_error_nomem(err);
    free(requests);
    return status;
}

/*
 * Adds the cost of loading the run's newest checkpoint. If that is unreadable, there is no cost: the report is about
 * sizes, and damage is for verify.
 */
static void add_loading(report_data *d, ckd_store *store, const ckd_checkpoint *c) {
    ckd_load *load = NULL;
    ckd_load_explanation *e = NULL;
    ckd_error ignored;
    const ckd_report *r = d->report;
    const cli_prices *p = d->prices;
    if (explain_load(&e, &load, store, c, &ignored) == CKD_OK) {
        double files_each = (double)r->file_count / (double)r->checkpoint_count;
        report_loading l = {c, e->all.read_bytes, (uint64_t)ceil((double)e->checkpoints * files_each), NAN};
        if (!isnan(p->egress_per_gb) || !isnan(p->per_1000_gets)) {
            l.cost = isnan(p->egress_per_gb) ? 0 : (double)l.bytes / 1e9 * p->egress_per_gb;
            l.cost += isnan(p->per_1000_gets) ? 0 : (double)l.files / 1000 * p->per_1000_gets;
        }
        d->loadings[d->loading_count++] = l;
    }
    ckd_load_explanation_free(e);
    ckd_load_end(load);
}

/* ---- the whole report ---- */

static ckd_status allocate_lists(report_data *d, ckd_error *err) {
    const ckd_report *r = d->report;
    d->by_time = sorted(r->checkpoint_count, by_time, r->by_checkpoint);
    d->by_size = sorted(r->tensor_count, by_size, r->by_tensor);
    d->role_elements = calloc(r->role_count + 1, sizeof(*d->role_elements));
    d->growths = calloc(r->run_count + 1, sizeof(*d->growths));
    d->projections = calloc(r->run_count + 1, sizeof(*d->projections));
    d->periods = calloc(r->checkpoint_count + 1, sizeof(*d->periods));
    d->loadings = calloc(r->run_count + 1, sizeof(*d->loadings));
    d->written = calloc(r->checkpoint_count + 1, sizeof(*d->written));
    return d->by_time && d->by_size && d->role_elements && d->growths && d->projections && d->periods &&
                   d->loadings && d->written
               ? CKD_OK
               : cli_error_nomem(err);
}

/*
 * Plans what the stored policies would delete. If policies, or files that they need, are unreadable, the report
 * continues without the plan.
 */
static ckd_status plan_stored(report_data *d, const char *run, ckd_store *store, ckd_error *err) {
    ckd_stored_policy found = {0};
    ckd_error why = {0};
    ckd_status status = run ? ckd_store_policy(&found, store, run, &why) : CKD_OK;
    if (status == CKD_OK) {
        found.policy.run = run;
        status = ckd_store_plan_prune(&d->prune, store, run ? &found.policy : NULL, &why);
    }
    d->stored = status == CKD_OK;
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED) {
        cli_note("cannot tell what the stored policies would delete: %s", why.message);
    } else if (status != CKD_OK && status != CKD_E_NOT_FOUND) {
        *err = why;
        return status;
    }
    return CKD_OK;
}

static ckd_status add_retention(report_data *d, const report_query *q, ckd_store *store, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = q->prune ? ckd_store_plan_prune(&d->prune, store, &q->policy, err)
                                 : plan_stored(d, q->policy.run, store, err);
    if (status != CKD_OK) {
        return status;
    }
    status = ckd_store_trash(&d->trash, store, &why);
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED) {
        cli_note("cannot read the trash: %s", why.message);
    } else if (status != CKD_OK) {
        *err = why;
        return status;
    }
    return CKD_OK;
}

ckd_status report_data_make(report_data *d, const report_query *q, ckd_store *store, ckd_error *err) {
    *d = (report_data){.store = q->store};
    ckd_status status = q->prices ? cli_prices_read(&d->prices, q->prices, err) : CKD_OK;
    THEN(status, ckd_store_report(&d->report, store, err));
    THEN(status, cli_check_run(store, q->policy.run, err));
    THEN(status, add_retention(d, q, store, err));
    THEN(status, ckd_store_timeline(&d->timeline, store, NULL, err));
    THEN(status, allocate_lists(d, err));
    if (status != CKD_OK) {
        return status;
    }
    add_written(d);
    if (d->timeline->count) {
        qsort(d->timeline->items, d->timeline->count, sizeof(*d->timeline->items), by_end);
    }
    status = report_lives_read(d, err);
    if (status != CKD_OK) {
        return status;
    }
    add_elements(d);
    add_growths(d);
    add_projections(d, q);
    add_periods(d);
    for (size_t i = 0; d->prices && i < d->report->run_count; i++) {
        add_loading(d, store, d->growths[i].last);
    }
    return q->details ? report_details_read(d, store, err) : CKD_OK;
}

void report_data_free(report_data *d) {
    ckd_report_free(d->report);
    ckd_prune_free(d->prune);
    ckd_trash_free(d->trash);
    ckd_timeline_free(d->timeline);
    report_details_free(&d->details);
    report_lives_free(&d->lives);
    cli_prices_free(d->prices);
    free(d->by_time);
    free(d->by_size);
    free(d->role_elements);
    free(d->growths);
    free(d->projections);
    free(d->periods);
    free(d->loadings);
    free(d->written);
    *d = (report_data){0};
}

double report_upload_cost(const report_data *d) {
    return (double)d->report->file_count / 1000 * d->prices->per_1000_puts;
}

report_writing report_written(const report_data *d) {
    report_writing w = {0};
    for (size_t i = 0; i < d->timeline->count; i++) {
        const ckd_save_times *save = &d->timeline->items[i];
        if (save->written_bytes) {
            w.checkpoints++;
            w.written_bytes += save->written_bytes;
            w.stored_bytes += save->stored_bytes;
        }
    }
    return w;
}

double report_bits(uint64_t stored, uint64_t elements) {
    return elements ? 8 * (double)stored / (double)elements : NAN;
}

double report_full_instead(const report_data *d) {
    const ckd_report *r = d->report;
    double newest =
        r->checkpoint_count ? (double)r->by_checkpoint[d->by_time[r->checkpoint_count - 1]].raw_bytes : 0;
    return newest > 0 ? (double)r->stored_bytes / newest : NAN;
}
