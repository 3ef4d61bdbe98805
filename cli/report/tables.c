/* The tables of a report, as text and on the page. */
#include "cli/report/tables.h"

#include <inttypes.h>
#include <math.h>

#include "cli/output/output.h"

#define DAY_NEEDS 3600 /* seconds of saving that are needed to extrapolate to a day */

static void usage_cells(cli_table *t, const ckd_usage *u) {
    cli_table_cell(t, "%s", u->name);
    cli_table_cell(t, "%" PRIu64, u->checkpoints);
    cli_table_sizes(t, u->raw_bytes, u->stored_bytes);
    cli_table_cell(t, "%s", cli_text_ratio(u->raw_bytes, u->stored_bytes).text);
}

/* Rates are those of the newest checkpoints. */
cli_table *report_runs(const report_data *d, size_t max) {
    cli_table *t = cli_table_new("RUN|>CHECKPOINTS|>LOGICAL|>STORED|>RATIO|>NEWEST STEP|>EVERY|>EACH|>A DAY");
    for (size_t i = 0; i < d->report->run_count && i < max; i++) {
        const report_growth *g = &d->growths[i];
        double day = g->stored / g->seconds * 86400;
        usage_cells(t, g->run);
        cli_table_cell(t, "%" PRIu64, g->last->step);
        cli_table_cell(t, isnan(g->interval) ? "-" : g->interval < 100 ? "%.3g" : "%.0f", g->interval);
        cli_table_cell(t, "%s", cli_text_size((uint64_t)g->stored).text);
        bool long_enough = g->seconds * (double)g->over >= DAY_NEEDS;
        cli_table_cell(t, "%s", long_enough && day < 1e18 ? cli_text_size((uint64_t)day).text : "-");
    }
    return t;
}

static void seconds_cell(cli_table *t, double seconds) {
    cli_table_cell(t, "%s", isnan(seconds) ? "-" : cli_text_duration(seconds).text);
}

cli_table *report_attempts(const report_data *d, size_t max) {
    cli_table *t = cli_table_new(
        "RUN|>ATTEMPTS|>GOODPUT|>USEFUL|>OF|>STEPS LOST|>TIME TO RESUME|>SUSPECT|LAST ATTEMPT|VERDICT");
    for (size_t i = 0; i < d->lives.life_count && i < max; i++) {
        const report_life *l = &d->lives.items[i];
        const life_attempt *last = &l->attempts[l->count - 1];
        double goodput = report_goodput(l);
        cli_table_cell(t, "%s", l->attempts->run);
        cli_table_cell(t, "%zu", l->count);
        cli_table_cell(t, isnan(goodput) ? "-" : "%.1f %%", 100 * goodput);
        seconds_cell(t, l->useful_s);
        seconds_cell(t, (double)(l->end_ns - l->begin_ns) / 1e9);
        cli_table_cell(t, l->reported < l->count ? "%" PRIu64 "+" : "%" PRIu64, l->steps_lost);
        seconds_cell(t, l->resume_s);
        cli_table_cell(t, "%zu", l->suspects);
        cli_table_cell(t, "%s", last->reason[0] ? last->reason : report_life_end_name(last->end));
        cli_table_cell(t, "%s", last->verdict[0] ? last->verdict : "-");
    }
    return t;
}

cli_table *report_roles(const report_data *d) {
    cli_table *t = cli_table_new("ROLE|>CHECKPOINTS|>LOGICAL|>STORED|>RATIO|>BITS/ELEMENT");
    for (size_t i = 0; i < d->report->role_count; i++) {
        const ckd_usage *u = &d->report->by_role[i];
        usage_cells(t, u);
        cli_table_cell(t, "%s", cli_text_number(report_bits(u->stored_bytes, d->role_elements[i])).text);
    }
    return t;
}

cli_table *report_growths(const report_data *d, size_t max) {
    cli_table *t =
        cli_table_new("NEWEST OF|ROLE|>CHECKPOINTS|>LOGICAL EACH|>STORED EACH|>RATIO|>BITS/ELEMENT");
    for (size_t i = 0; i < d->report->run_count && i < max; i++) {
        const report_growth *g = &d->growths[i];
        for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
            const ckd_role_bytes *b = &g->roles[role];
            if (b->elements || b->stored_bytes) {
                cli_table_cell(t, "%s", g->run->name);
                cli_table_cell(t, "%s", ckd_role_name(role));
                cli_table_cell(t, "%" PRIu64, g->over);
                cli_table_cell(t, "%s", cli_text_size(b->raw_bytes / g->over).text);
                cli_table_cell(t, "%s", cli_text_size(b->stored_bytes / g->over).text);
                cli_table_cell(t, "%s", cli_text_ratio(b->raw_bytes, b->stored_bytes).text);
                cli_table_cell(t, "%s", cli_text_number(report_bits(b->stored_bytes, b->elements)).text);
            }
        }
    }
    return t;
}

cli_table *report_fidelities(const report_data *d) {
    cli_table *t = cli_table_new("FIDELITY|>CHECKPOINTS|>LOGICAL|>STORED|>RATIO");
    for (size_t i = 0; i < d->report->fidelity_count; i++) {
        usage_cells(t, &d->report->by_fidelity[i]);
    }
    return t;
}

cli_table *report_periods(const report_data *d) {
    cli_table *t = cli_table_new("SAVED|>CHECKPOINTS|>LOGICAL|>STORED|>LOGICAL SO FAR|>STORED SO FAR");
    for (size_t i = 0; i < d->period_count; i++) {
        const report_period *p = &d->periods[i];
        cli_table_cell(t, "%s", p->label);
        cli_table_cell(t, "%" PRIu64, p->checkpoints);
        cli_table_sizes(t, p->raw_bytes, p->stored_bytes);
        cli_table_cell(t, "%s", cli_text_size(p->raw_so_far).text);
        cli_table_cell(t, "%s", cli_text_size(p->stored_so_far).text);
    }
    return t;
}

cli_table *report_tensors(const report_data *d, size_t max) {
    cli_table *t = cli_table_new("TENSOR|RUN|ROLE|>CHECKPOINTS|>LOGICAL|>STORED|>RATIO|>BITS/ELEMENT");
    for (size_t i = 0; i < d->report->tensor_count && i < max; i++) {
        const ckd_tensor_usage *u = &d->report->by_tensor[d->by_size[i]];
        cli_table_cell(t, "%s", u->name);
        cli_table_cell(t, "%s", u->run);
        cli_table_cell(t, "%s", ckd_role_name(u->role));
        cli_table_cell(t, "%" PRIu64, u->checkpoints);
        cli_table_sizes(t, u->raw_bytes, u->stored_bytes);
        cli_table_cell(t, "%s", cli_text_ratio(u->raw_bytes, u->stored_bytes).text);
        cli_table_cell(t, "%s", cli_text_number(report_bits(u->stored_bytes, u->elements)).text);
    }
    return t;
}

cli_table *report_checkpoints(const report_data *d, size_t max) {
    const ckd_report *r = d->report;
    cli_table *t = cli_table_new("CHECKPOINT|KIND|FIDELITY|>LOGICAL|>STORED|>RATIO");
    for (size_t i = r->checkpoint_count > max ? r->checkpoint_count - max : 0; i < r->checkpoint_count; i++) {
        const ckd_checkpoint *c = &r->by_checkpoint[i];
        cli_table_cell(t, "%s", cli_ref_text_of(c).text);
        cli_table_cell(t, "%s", ckd_kind_name(c->kind));
        cli_table_cell(t, "%s", ckd_fidelity_name(c->fidelity));
        cli_table_sizes(t, c->raw_bytes, c->stored_bytes);
        cli_table_cell(t, "%s", cli_text_ratio(c->raw_bytes, c->stored_bytes).text);
    }
    return t;
}

cli_table *report_projections(const report_data *d, size_t max) {
    cli_table *t =
        cli_table_new(d->prices ? "RUN|>UNTIL STEP|REACHED|>CHECKPOINTS|>LOGICAL|>STORED|>RATIO|>A MONTH"
                                : "RUN|>UNTIL STEP|REACHED|>CHECKPOINTS|>LOGICAL|>STORED|>RATIO");
    for (size_t i = 0; i < d->projection_count && i < max; i++) {
        const report_projection *p = &d->projections[i];
        cli_table_cell(t, "%s", p->growth->run->name);
        cli_table_cell(t, "%" PRIu64, p->until);
        cli_table_cell(t, "%s", p->reached_ns ? cli_text_time(p->reached_ns).text : "-");
        cli_table_cell(t, "%" PRIu64, p->growth->run->checkpoints + p->more);
        cli_table_sizes(t, p->raw_bytes, p->stored_bytes);
        cli_table_cell(t, "%s", cli_text_ratio(p->raw_bytes, p->stored_bytes).text);
        if (d->prices) {
            cli_table_cell(t, "%s",
                           cli_money_text(d->prices, cli_price_stored(d->prices, p->stored_bytes)).text);
        }
    }
    return t;
}
