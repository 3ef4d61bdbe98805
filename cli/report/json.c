/* report --json: docs/cli.md describes the fields. */
#include <math.h>
#include <stdlib.h>

#include "cli/output/output.h"
#include "cli/report/report.h"

static json_t *usage(const ckd_usage *u, const char *key) {
    return json_pack("{s:o, s:I, s:I, s:I, s:o}", key, cli_json_text(u->name), "checkpoints",
                     (json_int_t)u->checkpoints, "raw_bytes", (json_int_t)u->raw_bytes, "stored_bytes",
                     (json_int_t)u->stored_bytes, "ratio", cli_json_ratio(u->raw_bytes, u->stored_bytes));
}

static json_t *json_runs(const report_data *d) {
    json_t *array = json_array();
    for (size_t i = 0; i < d->report->run_count; i++) {
        const ckd_usage *u = &d->report->by_run[i];
        json_t *item = usage(u, "run");
        double cost = d->prices ? cli_price_stored(d->prices, u->stored_bytes) : NAN;
        json_object_set_new(item, "cost_per_month", cli_json_double(cost));
        cli_json_append(&array, item);
    }
    return array;
}

static json_t *json_roles(const report_data *d) {
    json_t *array = json_array();
    for (size_t i = 0; i < d->report->role_count; i++) {
        const ckd_usage *u = &d->report->by_role[i];
        json_t *item = usage(u, "role");
        json_object_set_new(item, "elements", json_integer((json_int_t)d->role_elements[i]));
        json_object_set_new(item, "bits_per_element",
                            cli_json_double(report_bits(u->stored_bytes, d->role_elements[i])));
        cli_json_append(&array, item);
    }
    return array;
}

static json_t *json_fidelities(const ckd_report *r) {
    json_t *array = json_array();
    for (size_t i = 0; i < r->fidelity_count; i++) {
        cli_json_append(&array, usage(&r->by_fidelity[i], "fidelity"));
    }
    return array;
}

static json_t *json_tensors(const report_data *d) {
    json_t *array = json_array();
    for (size_t i = 0; i < d->report->tensor_count; i++) {
        const ckd_tensor_usage *t = &d->report->by_tensor[d->by_size[i]];
        cli_json_append(&array, json_pack("{s:s, s:o, s:s, s:I, s:I, s:I, s:I, s:o, s:o}", "run", t->run,
                                          "tensor", cli_json_text(t->name), "role", ckd_role_name(t->role),
                                          "checkpoints", (json_int_t)t->checkpoints, "elements",
                                          (json_int_t)t->elements, "raw_bytes", (json_int_t)t->raw_bytes,
                                          "stored_bytes", (json_int_t)t->stored_bytes, "ratio",
                                          cli_json_ratio(t->raw_bytes, t->stored_bytes), "bits_per_element",
                                          cli_json_double(report_bits(t->stored_bytes, t->elements))));
    }
    return array;
}

static json_t *json_periods(const report_data *d) {
    json_t *array = json_array();
    for (size_t i = 0; i < d->period_count; i++) {
        const report_period *p = &d->periods[i];
        cli_json_append(&array,
                        json_pack("{s:s, s:I, s:I, s:I, s:I, s:I}", "period", p->label, "checkpoints",
                                  (json_int_t)p->checkpoints, "raw_bytes", (json_int_t)p->raw_bytes,
                                  "stored_bytes", (json_int_t)p->stored_bytes, "raw_so_far",
                                  (json_int_t)p->raw_so_far, "stored_so_far", (json_int_t)p->stored_so_far));
    }
    return array;
}

static json_t *json_growth_roles(const report_growth *g) {
    json_t *array = json_array();
    for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
        const ckd_role_bytes *b = &g->roles[role];
        if (b->elements || b->stored_bytes) {
            cli_json_append(&array,
                            json_pack("{s:s, s:f, s:f, s:o, s:o}", "role", ckd_role_name(role), "raw_bytes",
                                      (double)b->raw_bytes / (double)g->over, "stored_bytes",
                                      (double)b->stored_bytes / (double)g->over, "ratio",
                                      cli_json_ratio(b->raw_bytes, b->stored_bytes), "bits_per_element",
                                      cli_json_double(report_bits(b->stored_bytes, b->elements))));
        }
    }
    return array;
}

static json_t *json_growths(const report_data *d) {
    json_t *array = json_array();
    for (size_t i = 0; i < d->report->run_count; i++) {
        const report_growth *g = &d->growths[i];
        cli_json_append(&array, json_pack("{s:s, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "run",
                                          g->run->name, "over", (json_int_t)g->over, "first_step",
                                          (json_int_t)g->first->step, "last_step", (json_int_t)g->last->step,
                                          "interval", cli_json_double(g->interval), "seconds",
                                          cli_json_double(g->seconds), "raw_bytes", cli_json_double(g->raw),
                                          "stored_bytes", cli_json_double(g->stored), "ratio",
                                          g->stored > 0 ? cli_json_double(g->raw / g->stored) : json_null(),
                                          "roles", json_growth_roles(g), "stored_bytes_per_day",
                                          cli_json_double(g->stored / g->seconds * 86400)));
    }
    return array;
}

static json_t *json_projections(const report_data *d) {
    json_t *array = json_array();
    for (size_t i = 0; i < d->projection_count; i++) {
        const report_projection *p = &d->projections[i];
        double cost = d->prices ? cli_price_stored(d->prices, p->stored_bytes) : NAN;
        cli_json_append(
            &array, json_pack("{s:s, s:I, s:I, s:I, s:I, s:o, s:o, s:o}", "run", p->growth->run->name,
                              "until", (json_int_t)p->until, "checkpoints",
                              (json_int_t)(p->growth->run->checkpoints + p->more), "raw_bytes",
                              (json_int_t)p->raw_bytes, "stored_bytes", (json_int_t)p->stored_bytes, "ratio",
                              cli_json_ratio(p->raw_bytes, p->stored_bytes), "reached",
                              p->reached_ns ? json_string(cli_text_time(p->reached_ns).text) : json_null(),
                              "cost_per_month", cli_json_double(cost)));
    }
    return array;
}

static json_t *json_prune(const report_data *d) {
    if (!d->prune) {
        return json_null();
    }
    double saved = d->prices ? cli_price_stored(d->prices, d->prune->bytes) : NAN;
    return json_pack("{s:b, s:I, s:I, s:I, s:o}", "stored", d->stored, "checkpoints",
                     (json_int_t)d->prune->count, "deleted", (json_int_t)d->prune->deleted, "bytes",
                     (json_int_t)d->prune->bytes, "saved_per_month", cli_json_double(saved));
}

static json_t *json_trash(const report_data *d) {
    if (!d->trash) {
        return json_null();
    }
    double saved = d->prices ? cli_price_stored(d->prices, d->trash->file_bytes) : NAN;
    return json_pack("{s:I, s:I, s:o}", "checkpoints", (json_int_t)d->trash->count, "bytes",
                     (json_int_t)d->trash->file_bytes, "saved_per_month", cli_json_double(saved));
}

static json_t *json_prices(const cli_prices *p) {
    return p ? json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "name", cli_json_text(p->name), "date",
                         cli_json_text(p->date), "currency", cli_json_text(p->currency), "per_gb_month",
                         cli_json_double(p->per_gb_month), "per_1000_puts", cli_json_double(p->per_1000_puts),
                         "per_1000_gets", cli_json_double(p->per_1000_gets), "egress_per_gb",
                         cli_json_double(p->egress_per_gb))
             : json_null();
}

static json_t *json_cost(const report_data *d) {
    if (!d->prices) {
        return json_null();
    }
    json_t *loads = json_array();
    for (size_t i = 0; i < d->loading_count; i++) {
        const report_loading *l = &d->loadings[i];
        cli_json_append(&loads, json_pack("{s:s, s:I, s:I, s:o}", "checkpoint",
                                          cli_ref_text_of(l->checkpoint).text, "bytes", (json_int_t)l->bytes,
                                          "files", (json_int_t)l->files, "cost", cli_json_double(l->cost)));
    }
    double stored = cli_price_stored(d->prices, d->report->stored_bytes);
    double full = cli_price_stored(d->prices, d->report->raw_bytes);
    return json_pack("{s:o, s:o, s:o, s:o, s:o}", "per_month", cli_json_double(stored), "full_per_month",
                     cli_json_double(full), "saved_per_month", cli_json_double(full - stored), "upload",
                     cli_json_double(report_upload_cost(d)), "loads", loads);
}

static json_t *json_writing(const report_data *d) {
    report_writing w = report_written(d);
    return json_pack("{s:I, s:I, s:I}", "checkpoints", (json_int_t)w.checkpoints, "written_bytes",
                     (json_int_t)w.written_bytes, "stored_bytes", (json_int_t)w.stored_bytes);
}

static json_t *json_lives(const report_data *d) {
    json_t *array = json_array();
    for (size_t i = 0; i < d->lives.life_count; i++) {
        const report_life *l = &d->lives.items[i];
        const life_attempt *last = &l->attempts[l->count - 1];
        cli_json_append(
            &array,
            json_pack("{s:o, s:I, s:I, s:o, s:o, s:f, s:o, s:o, s:I, s:o, s:I, s:s, s:o, s:o}", "run",
                      cli_json_text(l->attempts->run), "attempts", (json_int_t)l->count, "reported",
                      (json_int_t)l->reported, "start", cli_json_text(cli_text_time(l->begin_ns).text), "end",
                      cli_json_text(last->end_ns ? cli_text_time(l->end_ns).text : NULL), "wall_s",
                      (double)(l->end_ns - l->begin_ns) / 1e9, "useful_s", cli_json_double(l->useful_s),
                      "goodput", cli_json_double(report_goodput(l)), "steps_lost", (json_int_t)l->steps_lost,
                      "resume_s", cli_json_double(l->resume_s), "suspect", (json_int_t)l->suspects, "ended",
                      report_life_end_name(last->end), "reason",
                      cli_json_text(last->reason[0] ? last->reason : NULL), "verdict",
                      cli_json_text(last->verdict[0] ? last->verdict : NULL)));
    }
    return array;
}

ckd_status report_print_json(const report_data *d, ckd_error *err) {
    const ckd_report *r = d->report;
    ckd_checkpoint_list all = {r->checkpoint_count, r->by_checkpoint};
    return cli_json_print_list(
        json_pack(
            "{s:i, s:I, s:o, s:I, s:I, s:o, s:o, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, "
            "s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:n}",
            "schema", 1, "checkpoints", (json_int_t)r->checkpoint_count, "written", json_writing(d),
            "raw_bytes", (json_int_t)r->raw_bytes, "stored_bytes", (json_int_t)r->stored_bytes, "ratio",
            cli_json_ratio(r->raw_bytes, r->stored_bytes), "full_instead",
            cli_json_double(report_full_instead(d)), "chunk_bytes", (json_int_t)r->chunk_bytes,
            "manifest_bytes", (json_int_t)r->manifest_bytes, "catalog_bytes", (json_int_t)r->catalog_bytes,
            "materialized_bytes", (json_int_t)r->materialized_bytes, "parity_bytes",
            (json_int_t)r->parity_bytes, "other_bytes", (json_int_t)r->other_bytes, "unlisted_bytes",
            (json_int_t)r->unlisted_bytes, "file_count", (json_int_t)r->file_count, "by_run", json_runs(d),
            "by_role", json_roles(d), "by_fidelity", json_fidelities(r), "by_tensor", json_tensors(d),
            "by_time", json_periods(d), "growth", json_growths(d), "projection", json_projections(d),
            "pruning", json_prune(d), "trash", json_trash(d), "prices", json_prices(d->prices), "cost",
            json_cost(d), "supervised", json_lives(d), "attempts_left_out", (json_int_t)d->lives.left_out,
            "by_checkpoint"),
        "by_checkpoint", &all, &all, err);
}
