/* report as text, and its sentences. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "cli/output/output.h"
#include "cli/report/tables.h"

void report_say_saved(FILE *to, const report_data *d) {
    const ckd_report *r = d->report;
    uint64_t raw = r->raw_bytes, stored = r->stored_bytes;
    if (stored < raw) {
        fprintf(to, "saved you %s (%.0f %%): ", cli_text_size(raw - stored).text,
                floor(100 - 100 * (double)stored / (double)raw));
    }
    fprintf(to, "%zu checkpoint%s take%s %s instead of %s as full copies, %s\n", r->checkpoint_count,
            cli_plural(r->checkpoint_count), r->checkpoint_count == 1 ? "s" : "", cli_text_size(stored).text,
            cli_text_size(raw).text, cli_text_ratio(raw, stored).text);
}

static void say_unlisted(const report_data *d) {
    if (d->report->unlisted_bytes) {
        printf(
            "%s of that belong to no listed checkpoint: checkpoints in the trash, deleted ones that others still "
            "build on (ckptdelta compact frees what it can), and saves in progress\n",
            cli_text_size(d->report->unlisted_bytes).text);
    }
}

static void say_parts(const report_data *d) {
    const ckd_report *r = d->report;
    printf("stored: %s chunk files, %s manifests, %s catalog, %s materialized copies, %s parity, %s other\n",
           cli_text_size(r->chunk_bytes).text, cli_text_size(r->manifest_bytes).text,
           cli_text_size(r->catalog_bytes).text, cli_text_size(r->materialized_bytes).text,
           cli_text_size(r->parity_bytes).text, cli_text_size(r->other_bytes).text);
    report_writing w = report_written(d);
    if (w.checkpoints) {
        printf("written: %s by the saves of %" PRIu64
               " checkpoint%s, %.2f times what they take; catalog not counted\n",
               cli_text_size(w.written_bytes).text, w.checkpoints, cli_plural(w.checkpoints),
               (double)w.written_bytes / (double)w.stored_bytes);
    }
}

/* ---- projection and cost ---- */

static void say_saved(FILE *to, const report_data *d, uint64_t bytes) {
    fprintf(to, "%s", cli_text_size(bytes).text);
    if (d->prices) {
        fputs(": ", to);
        cli_print_clean(to, cli_money_text(d->prices, cli_price_stored(d->prices, bytes)).text);
        fputs(" a month", to);
    }
    fputc('\n', to);
}

static bool has_retention(const report_data *d) {
    return d->prune || (d->trash && d->trash->count);
}

void report_say_pruning(FILE *to, const report_data *d) {
    if (d->prune) {
        fprintf(to, "%s would delete %" PRIu64 " of %zu checkpoints, ",
                d->stored ? "applying the stored policies" : "the policy", d->prune->deleted,
                d->prune->count);
        say_saved(to, d, d->prune->bytes);
    }
    if (d->trash && d->trash->count) {
        fprintf(to, "the trash holds %zu deleted checkpoint%s; emptying it frees ", d->trash->count,
                cli_plural(d->trash->count));
        say_saved(to, d, d->trash->file_bytes);
    }
}

void report_say_cost(FILE *to, const report_data *d) {
    if (!d->prices) {
        return;
    }
    const cli_prices *p = d->prices;
    const ckd_report *r = d->report;
    fputs("prices of ", to);
    cli_print_clean(to, p->name);
    fprintf(to, ", %s: ", p->date);
    cli_print_clean(to, cli_money_text(p, p->per_gb_month).text);
    fprintf(to, " per 10^9 bytes a month\n");
    fprintf(to, "a month costs ");
    cli_print_clean(to, cli_money_text(p, cli_price_stored(p, r->stored_bytes)).text);
    fprintf(to, "; full checkpoints would cost ");
    cli_print_clean(to, cli_money_text(p, cli_price_stored(p, r->raw_bytes)).text);
    fputc('\n', to);
    if (!isnan(p->per_1000_puts)) {
        fprintf(to, "writing its %" PRIu64 " files costs ", r->file_count);
        cli_print_clean(to, cli_money_text(p, report_upload_cost(d)).text);
        fputs(", once\n", to);
    }
    for (size_t i = 0; i < d->loading_count; i++) {
        const report_loading *l = &d->loadings[i];
        if (!isnan(l->cost)) {
            fprintf(to, "loading %s, %s from about %" PRIu64 " file%s, costs ",
                    cli_ref_text_of(l->checkpoint).text, cli_text_size(l->bytes).text, l->files,
                    cli_plural(l->files));
            cli_print_clean(to, cli_money_text(p, l->cost).text);
            fputc('\n', to);
        }
    }
}

static ckd_status print_table(cli_table *t, ckd_error *err) {
    putchar('\n');
    return cli_table_print(t, err);
}

static ckd_status print_details(const report_data *d, ckd_error *err) {
    ckd_status status = print_table(report_growths(d, SIZE_MAX), err);
    THEN(status, print_table(report_periods(d), err));
    THEN(status, print_table(report_tensors(d, SIZE_MAX), err));
    return status == CKD_OK ? print_table(report_checkpoints(d, SIZE_MAX), err) : status;
}

static ckd_status print_projections(const report_data *d, ckd_error *err) {
    if (d->projection_count == 0) {
        puts("\nno run has two checkpoints yet, so nothing can be projected");
        return CKD_OK;
    }
    return print_table(report_projections(d, SIZE_MAX), err);
}

ckd_status report_print_text(const report_data *d, bool projected, bool verbose, ckd_error *err) {
    report_say_saved(stdout, d);
    say_unlisted(d);
    if (verbose) {
        say_parts(d);
    }
    ckd_status status = print_table(report_runs(d, SIZE_MAX), err);
    THEN(status, print_table(report_roles(d), err));
    THEN(status, print_table(report_fidelities(d), err));
    if (status == CKD_OK && verbose) {
        status = print_details(d, err);
    }
    THEN(status, d->lives.life_count ? print_table(report_attempts(d, SIZE_MAX), err) : CKD_OK);
    if (status == CKD_OK && (has_retention(d) || d->prices)) {
        putchar('\n');
        report_say_pruning(stdout, d);
        report_say_cost(stdout, d);
    }
    return status == CKD_OK && projected ? print_projections(d, err) : status;
}
