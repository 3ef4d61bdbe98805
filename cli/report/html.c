/* report --html: one page. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/output/output.h"
#include "cli/files/files.h"
#include "cli/report/charts.h"
#include "cli/report/tables.h"

#define TENSOR_COUNT_MAX 50
#define CHECKPOINTS_MOST 50

/* ---- the top ---- */

static void tile(FILE *to, const char *what, const char *value) {
    fprintf(to, "<div><dt>%s</dt><dd>", what);
    html_text(to, value);
    fputs("</dd></div>\n", to);
}

static void print_tiles(FILE *to, const report_data *d) {
    const ckd_report *r = d->report;
    char count[32];
    snprintf(count, sizeof(count), "%zu", r->checkpoint_count);
    fputs("<dl class=\"tiles\">\n", to);
    tile(to, "Checkpoints", count);
    tile(to, "Logical", cli_text_size(r->raw_bytes).text);
    tile(to, "Stored", cli_text_size(r->stored_bytes).text);
    tile(to, "Ratio", cli_text_ratio(r->raw_bytes, r->stored_bytes).text);
    if (d->prices) {
        tile(to, "A month costs",
             cli_money_text(d->prices, cli_price_stored(d->prices, r->stored_bytes)).text);
    }
    fputs("</dl>\n", to);
}

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
    if (size && heading) {
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

/* ---- sections ---- */

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
    ckd_status status =
        section(to, "Runs", "Bytes for each checkpoint and for a day are means over the newest ones.",
                report_runs(d), err);
    THEN(status, section(to, "Roles", NULL, report_roles(d), err));
    THEN(status, section(to, "Growth", "What the newest checkpoints of each run take, on average.",
                         report_growths(d), err));
    THEN(status, section(to, "Fidelities", NULL, report_fidelities(d), err));
    return status == CKD_OK ? section(to, "Time", "When it was saved, UTC.", report_periods(d), err) : status;
}

static ckd_status print_outlook(FILE *to, const report_data *d, ckd_error *err) {
    ckd_status status = print_lines(to, report_say_pruning, d, "Retention", err);
    THEN(status, print_lines(to, report_say_cost, d, "Cost", err));
    if (status == CKD_OK && d->projection_count) {
        status = section(to, "The end of the run", "If each run continues like its newest checkpoints.",
                         report_projections(d), err);
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
                                      what_is_left_out(about, CHECKPOINTS_MOST, r->checkpoint_count, "last"),
                                      report_checkpoints(d, CHECKPOINTS_MOST), err)
                            : status;
}

static ckd_status print_page(FILE *to, const report_data *d, ckd_error *err) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    html_page_begin(to, "Checkpoint report");
    fputs("<p class=\"soft\">", to);
    html_text(to, d->store);
    fprintf(to, ", %s, ckptdelta %s</p>\n", cli_text_time((uint64_t)now.tv_sec * 1000000000u).text,
            ckd_version());
    print_tiles(to, d);
    ckd_status status = print_lines(to, report_say_totals, d, NULL, err);
    if (status == CKD_OK && d->report->checkpoint_count) {
        status = report_charts(to, d, err);
    }
    THEN(status, print_sums(to, d, err));
    THEN(status, print_outlook(to, d, err));
    THEN(status, print_lists(to, d, err));
    html_page_end(to);
    return status;
}

/* ---- the file ---- */

ckd_status report_check_html(const char *path, ckd_error *err) {
    char start[sizeof(HTML_PAGE_MARK)] = "";
    ckd_status status = cli_output_check(path, true, err);
    FILE *file = status == CKD_OK ? fopen(path, "re") : NULL;
    if (!file) {
        return status == CKD_OK && errno != ENOENT
                   ? cli_error_sys(err, errno, path, "cannot look at what is there")
                   : status;
    }
    size_t size = fread(start, 1, sizeof(start) - 1, file);
    fclose(file);
    return size == sizeof(start) - 1 && strcmp(start, HTML_PAGE_MARK) == 0
               ? CKD_OK
               : cli_error_at(err, CKD_E_EXISTS, path, CKD_NO_OFFSET,
                              "the output file exists and is not a ckptdelta report; choose another name");
}

ckd_status report_write_html(const report_data *d, const char *path, ckd_error *err) {
    char *page = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&page, &size);
    ckd_status status = to ? print_page(to, d, err) : cli_error_nomem(err);
    if (to && fclose(to) != 0 && status == CKD_OK) {
        status = cli_error_nomem(err);
    }
    THEN(status, cli_output_bytes(path, true, page, size, err));
    free(page);
    return status;
}
