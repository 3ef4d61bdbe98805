/* report --html: one page. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/output/output.h"
#include "cli/report/charts.h"
#include "cli/report/tables.h"

#define TENSOR_COUNT_MAX 50
#define CHECKPOINTS_MAX  50
#define RUNS_MAX         100

/* ---- the top ---- */

static void print_title(FILE *to, const report_data *d) {
    struct timespec now;
    char *path = realpath(d->store, NULL);
    clock_gettime(CLOCK_REALTIME, &now);
    html_page_begin(to, "Checkpoint report");
    fputs("<p class=\"soft\">", to);
    html_text(to, path ? path : d->store);
    fprintf(to, ", %s, ckptdelta %s</p>\n", cli_text_time((uint64_t)now.tv_sec * 1000000000u).text,
            ckd_version());
    free(path);
}

/* "3 runs" */
static void print_count(FILE *to, uint64_t count, const char *what) {
    fprintf(to, "%" PRIu64 " %s%s", count, what, cli_plural(count));
}

/* The headline, and a bar of what is stored. Catalog and manifests may take more than tiny checkpoints. */
static void print_headline(FILE *to, const report_data *d) {
    const ckd_report *r = d->report;
    uint64_t raw = r->raw_bytes, stored = r->stored_bytes;
    double share = raw ? 100 * (double)stored / (double)raw : 100;
    fputs("<p class=\"hero\">", to);
    if (stored < raw) {
        fprintf(to, "%s saved of %s (%.0f\xc2\xa0%%)", cli_text_size(raw - stored).text,
                cli_text_size(raw).text, floor(100 - share));
    } else {
        fputs("Nothing saved yet", to);
    }
    fputs("</p>\n<p>", to);
    print_count(to, r->checkpoint_count, "checkpoint");
    fputs(" of ", to);
    print_count(to, r->run_count, "run");
    fprintf(to, " take%s %s. Full copies would take %s.</p>\n", r->checkpoint_count == 1 ? "s" : "",
            cli_text_size(stored).text, cli_text_size(raw).text);
    if (stored < raw) {
        fprintf(
            to,
            "<div class=\"share\" role=\"img\" aria-label=\"stored: %.1f percent of full copies\">"
            "<div style=\"width:%.2f%%\"></div></div>\n<p class=\"soft\">Stored: %.1f\xc2\xa0%% of full copies</p>\n",
            share, share, share);
    }
}

static void tile(FILE *to, const char *what, const char *value) {
    fprintf(to, "<div><dt>%s</dt><dd>", what);
    html_text(to, value);
    fputs("</dd></div>\n", to);
}

static void print_tiles(FILE *to, const report_data *d) {
    const ckd_report *r = d->report;
    const cli_prices *p = d->prices ? d->prices : cli_prices_assumed();
    double stored = cli_price_stored(p, r->stored_bytes), full = cli_price_stored(p, r->raw_bytes);
    char count[32];
    snprintf(count, sizeof(count), "%zu", r->checkpoint_count);
    fputs("<dl class=\"tiles\">\n", to);
    tile(to, "Checkpoints", count);
    tile(to, "Full copies", cli_text_size(r->raw_bytes).text);
    tile(to, "Stored", cli_text_size(r->stored_bytes).text);
    tile(to, "Ratio", cli_text_ratio(r->raw_bytes, r->stored_bytes).text);
    if (full > stored) {
        tile(to, "Saved a month", cli_money_text(p, full - stored).text);
    }
    fputs("</dl>\n<p class=\"soft\">A month costs ", to);
    html_text(to, cli_money_text(p, stored).text);
    fputs(" instead of ", to);
    html_text(to, cli_money_text(p, full).text);
    fputs(d->prices ? ", at " : ", at an assumed price of ", to);
    html_text(to, cli_money_text(p, p->per_gb_month).text);
    fputs(d->prices ? " per GB (" : " per GB. <span>report --prices FILE</span> takes yours.</p>\n", to);
    if (d->prices) {
        html_text(to, p->name);
        fprintf(to, ", %s).</p>\n", p->date);
    }
}

/* ---- sections ---- */

/* Prints each line as a paragraph. */
static ckd_status print_lines(FILE *to, void (*say)(FILE *, const report_data *), const report_data *d,
                              const char *heading, ckd_error *err) {
    char *text = NULL;
    size_t size = 0;
    FILE *lines = open_memstream(&text, &size);
    if (!lines) {
        return cli_error_nomem(err);
    }
    say(lines, d);
    if (fclose(lines) != 0) {
        free(text);
        return cli_error_nomem(err);
    }
    if (size) {
        fprintf(to, "<h2>%s</h2>\n", heading);
    }
    char *rest = text, *line;
    while (size && (line = strsep(&rest, "\n")) && rest) {
        fputs("<p>", to);
        html_text(to, line);
        fputs("</p>\n", to);
    }
    free(text);
    return CKD_OK;
}

static ckd_status section(FILE *to, const char *heading, const char *about, cli_table *table,
                          ckd_error *err) {
    fprintf(to, "<h2>%s</h2>\n", heading);
    if (about) {
        fprintf(to, "<p class=\"soft\">%s</p>\n", about);
    }
    return cli_table_print_html(to, table, err);
}

static const char *what_is_left_out(char text[160], size_t shown, size_t count, const char *which) {
    if (count <= shown) {
        return NULL;
    }
    snprintf(text, 160, "The %s %zu of %zu; report --csv has all.", which, shown, count);
    return text;
}

static ckd_status print_sums(FILE *to, const report_data *d, ckd_error *err) {
    char about[160];
    size_t runs = d->report->run_count;
    const char *left_out = what_is_left_out(about, RUNS_MAX, runs, "first");
    ckd_status status =
        section(to, "Runs",
                left_out ? left_out : "Bytes of a checkpoint and of a day are means over the newest ones.",
                report_runs(d, RUNS_MAX), err);
    THEN(status, section(to, "Roles", NULL, report_roles(d), err));
    THEN(status, section(to, "Newest checkpoints", "Means over the newest checkpoints of each run, by role.",
                         report_growths(d, RUNS_MAX), err));
    THEN(status, section(to, "Fidelities", NULL, report_fidelities(d), err));
    return status == CKD_OK
               ? section(to, "Days and months", "By the time of saving, UTC.", report_periods(d), err)
               : status;
}

static ckd_status print_outlook(FILE *to, const report_data *d, ckd_error *err) {
    ckd_status status = print_lines(to, report_say_pruning, d, "Retention", err);
    THEN(status, print_lines(to, report_say_cost, d, "Cost", err));
    if (status == CKD_OK && d->projection_count) {
        status = section(to, "Projection", "If each run continues like its newest checkpoints.",
                         report_projections(d, RUNS_MAX), err);
    }
    return status;
}

static ckd_status print_lists(FILE *to, const report_data *d, ckd_error *err) {
    char about[160];
    const ckd_report *r = d->report;
    ckd_status status =
        section(to, "Tensors", what_is_left_out(about, TENSOR_COUNT_MAX, r->tensor_count, "largest"),
                report_tensors(d, TENSOR_COUNT_MAX), err);
    return status == CKD_OK ? section(to, "Checkpoints",
                                      what_is_left_out(about, CHECKPOINTS_MAX, r->checkpoint_count, "last"),
                                      report_checkpoints(d, CHECKPOINTS_MAX), err)
                            : status;
}

/* Runs that were never supervised have no attempts. */
static ckd_status print_lives(FILE *to, const report_data *d, ckd_error *err) {
    char about[160];
    const report_lives *l = &d->lives;
    if (l->life_count == 0) {
        return CKD_OK;
    }
    ckd_status status = section(to, "Attempts", what_is_left_out(about, RUNS_MAX, l->life_count, "first"),
                                report_attempts(d, RUNS_MAX), err);
    report_draw_lives(to, d);
    return status;
}

static ckd_status print_page(FILE *to, const report_data *d, ckd_error *err) {
    print_title(to, d);
    print_headline(to, d);
    print_tiles(to, d);
    ckd_status status = d->report->checkpoint_count ? report_charts(to, d, err) : CKD_OK;
    THEN(status, print_lives(to, d, err));
    THEN(status, print_sums(to, d, err));
    THEN(status, print_outlook(to, d, err));
    THEN(status, print_lists(to, d, err));
    html_page_end(to);
    return status;
}

char *report_html(const report_data *d, size_t *size, ckd_error *err) {
    char *page = NULL;
    FILE *to = open_memstream(&page, size);
    ckd_status status = to ? print_page(to, d, err) : cli_error_nomem(err);
    if (to && fclose(to) != 0 && status == CKD_OK) {
        status = cli_error_nomem(err);
    }
    if (status != CKD_OK) {
        free(page);
        page = NULL;
    }
    return page;
}
