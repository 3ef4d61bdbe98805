/*
 * Draws the charts of a report's page from report_data, with cli/output/html_chart.c. A chart has a few hundred points
 * at most, so pages of long runs stay small.
 */
#include "cli/report/charts.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"

#define POINTS_MAX 360 /* on all curves of a chart; if there are more checkpoints, several share a point */

typedef struct charts {
    const report_data *d;
    FILE *to;
    report_shown shown;
    uint64_t first, last; /* steps of the shown runs */
    size_t points_max;    /* of one curve */
    html_point *points;   /* POINTS_MAX twice, to draw from */
} charts;

static void begin_figure(const charts *c, const char *caption, const char *about) {
    fprintf(c->to, "<figure><figcaption>%s<small>%s</small></figcaption>\n", caption, about);
}

static void use_unit(html_chart *c, double bytes) {
    static const char *const units[] = {" B", " KiB", " MiB", " GiB", " TiB", " PiB", " EiB"};
    size_t unit = 0;
    for (c->scale = 1; bytes / c->scale >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0]); unit++) {
        c->scale *= 1024;
    }
    c->unit = units[unit];
}

/* ---- everything so far ---- */

static const ckd_checkpoint *at_time(const report_data *d, size_t i) {
    return &d->report->by_checkpoint[d->by_time[i]];
}

/* "2026-01-31 23:59" */
static cli_text minute_text(uint64_t ns) {
    cli_text out, time = cli_text_time(ns);
    snprintf(out.text, sizeof(out.text), "%.10s %.5s", time.text, time.text + 11);
    return out;
}

/* Fills `full` and `stored` with sums from the first checkpoint on. Returns how many points they have. */
static size_t sum_up(const report_data *d, html_point *full, html_point *stored) {
    size_t count = d->report->checkpoint_count, parts = count < POINTS_MAX ? count : POINTS_MAX - 1;
    html_point raw = {0, 0}, kept = {0, 0};
    full[0] = stored[0] = raw;
    for (size_t i = 0; i < count; i++) {
        raw.x = kept.x = (double)i + 1;
        raw.y += (double)at_time(d, i)->raw_bytes;
        kept.y += (double)at_time(d, i)->stored_bytes;
        full[1 + i * parts / count] = raw;
        stored[1 + i * parts / count] = kept;
    }
    return parts + 1;
}

static void print_sums(const charts *c) {
    const report_data *d = c->d;
    size_t count = d->report->checkpoint_count;
    html_point *full = c->points, *stored = full + POINTS_MAX;
    size_t points = sum_up(d, full, stored);
    html_chart chart = {.to = c->to,
                        .title = "Bytes of full copies and stored bytes, summed over checkpoints",
                        .right = (double)count,
                        .max = fmax(1, fmax(full[points - 1].y, stored[points - 1].y))};
    use_unit(&chart, chart.max);
    begin_figure(c, "Stored against full copies", "All checkpoints so far, in the order of saving.");
    html_chart_begin(&chart);
    html_chart_area(&chart, full, stored, points, "gap");
    html_chart_area(&chart, stored, NULL, points, "area");
    html_chart_line(&chart, full, points, 3);
    html_chart_line(&chart, stored, points, 1);
    html_chart_end_texts(&chart, minute_text(at_time(d, 0)->created_ns).text,
                         minute_text(at_time(d, count - 1)->created_ns).text);
    fputs("<ul class=\"legend\">", c->to);
    html_legend_item(c->to, 3, "full copies");
    html_legend_item(c->to, 1, "stored");
    fputs("</ul></figure>\n", c->to);
}

/* ---- a curve for each run ---- */

typedef struct run_chart {
    const char *caption, *about, *title;
    double (*value)(const report_data *d, size_t checkpoint); /* NaN: none */
    html_label_fn text;                                       /* of a value, in tooltips */
    html_chart chart;                                         /* its axis */
} run_chart;

/* Mean values of a run's checkpoints that share a point. `ends` gets the last checkpoint of each point. */
static size_t points_of(const charts *c, const run_chart *r, size_t run, html_point *points, size_t *ends) {
    const report_growth *g = &c->d->growths[run];
    size_t first = (size_t)(g->first - c->d->report->by_checkpoint), count = (size_t)g->run->checkpoints;
    size_t parts = count < c->points_max ? count : c->points_max, used = 0;
    for (size_t part = 0, i = 0; part < parts; part++) {
        double sum = 0, known = 0;
        for (; i < (part + 1) * count / parts; i++) {
            double value = r->value(c->d, first + i);
            if (isfinite(value) && fabs(value) < 1e100) {
                sum += value;
                known++;
                ends[used] = first + i;
            }
        }
        if (known > 0) {
            points[used].x = (double)c->d->report->by_checkpoint[ends[used]].step;
            points[used++].y = sum / known;
        }
    }
    return used;
}

static void print_dots(const charts *c, const run_chart *r, const html_point *points, const size_t *ends,
                       size_t count, int series) {
    for (size_t i = 0; i < count; i++) {
        char about[CKD_RUN_MAX + 100];
        snprintf(about, sizeof(about), "%s: %s", cli_ref_text_of(&c->d->report->by_checkpoint[ends[i]]).text,
                 r->text(points[i].y).text);
        html_chart_dot(&r->chart, points[i], series, about);
    }
}

static void print_run_legend(const charts *c) {
    fputs("<ul class=\"legend\">", c->to);
    for (size_t k = 0; k < c->shown.count; k++) {
        html_legend_item(c->to, (int)k + 1, c->d->report->by_run[c->shown.runs[k]].name);
    }
    fputs("</ul></figure>\n", c->to);
}

static void print_about(const charts *c, const run_chart *r) {
    const ckd_report *report = c->d->report;
    uint64_t longest = 0;
    for (size_t k = 0; k < c->shown.count; k++) {
        uint64_t count = report->by_run[c->shown.runs[k]].checkpoints;
        longest = count > longest ? count : longest;
    }
    fputs("<figure><figcaption>", c->to);
    html_text(c->to, r->caption);
    fprintf(c->to, "<small>%s, by step.", r->about);
    if (c->shown.count < report->run_count) {
        fprintf(c->to, " The %zu runs with most checkpoints, of %zu.", c->shown.count, report->run_count);
    }
    if (longest > c->points_max) {
        fprintf(c->to, " A dot is the mean of up to %zu checkpoints.",
                (size_t)(longest + c->points_max - 1) / c->points_max);
    }
    fputs("</small></figcaption>\n", c->to);
}

/* Finds the range of all values. False if there are none. */
static bool find_range(const charts *c, run_chart *r, size_t *ends) {
    double min = INFINITY, max = -INFINITY;
    for (size_t k = 0; k < c->shown.count; k++) {
        size_t count = points_of(c, r, c->shown.runs[k], c->points, ends);
        for (size_t i = 0; i < count; i++) {
            min = fmin(min, c->points[i].y);
            max = fmax(max, c->points[i].y);
        }
    }
    r->chart.min = r->chart.max > r->chart.min ? r->chart.min : min;
    r->chart.max = fmax(r->chart.max, max);
    return max >= min;
}

static void print_runs(const charts *c, run_chart r) {
    size_t ends[POINTS_MAX];
    r.chart.to = c->to;
    r.chart.title = r.title;
    r.chart.left = (double)c->first;
    r.chart.right = (double)c->last;
    if (!find_range(c, &r, ends)) {
        return;
    }
    print_about(c, &r);
    html_chart_begin(&r.chart);
    for (size_t k = 0; k < c->shown.count; k++) {
        size_t count = points_of(c, &r, c->shown.runs[k], c->points, ends);
        html_chart_line(&r.chart, c->points, count, (int)k + 1);
        print_dots(c, &r, c->points, ends, count, (int)k + 1);
    }
    html_chart_end(&r.chart);
    print_run_legend(c);
}

static cli_text percent_text(double value) {
    cli_text out;
    snprintf(out.text, sizeof(out.text), value < 10 ? "%.2g %%" : "%.1f %%", value);
    return out;
}

static cli_text size_text(double value) {
    return cli_text_size((uint64_t)value);
}

static cli_text number_text(double value) {
    cli_text out;
    snprintf(out.text, sizeof(out.text), "%.6g", value);
    return out;
}

static double share_of(const report_data *d, size_t checkpoint) {
    const ckd_checkpoint *c = &d->report->by_checkpoint[checkpoint];
    return c->raw_bytes ? 100.0 * (double)c->stored_bytes / (double)c->raw_bytes : NAN;
}

static double written_of(const report_data *d, size_t checkpoint) {
    return d->written[checkpoint] ? (double)d->written[checkpoint] : NAN;
}

static double error_of(const report_data *d, size_t checkpoint) {
    return 100 * d->details.weight_error[checkpoint];
}

static double metric_of(const report_data *d, size_t checkpoint) {
    const ckd_checkpoint *c = &d->report->by_checkpoint[checkpoint];
    return strcmp(c->metric_name, d->details.metric) == 0 ? c->metric : NAN;
}

/* ---- duration of saves ---- */

static cli_text seconds_label(double value) {
    cli_text out;
    snprintf(out.text, sizeof(out.text), value < 1 ? "%.3g ms" : "%.4g s", value < 1 ? 1000 * value : value);
    return out;
}

/* Mean times, in seconds, of the saves that share a point; points without a positive value are left out. */
static size_t mean_times(const ckd_timeline *t, html_point *points, bool waited) {
    size_t parts = t->count < POINTS_MAX ? t->count : POINTS_MAX, used = 0;
    for (size_t part = 0, i = 0; part < parts; part++) {
        size_t first = i, end = (part + 1) * t->count / parts;
        double sum = 0;
        for (; i < end; i++) {
            sum += (double)(waited ? t->items[i].stall_ns : t->items[i].total_ns) / 1e9;
        }
        if (sum > 0) {
            points[used++] = (html_point){(double)end, sum / (double)(end - first)};
        }
    }
    return used;
}

static void print_times(const charts *c) {
    const ckd_timeline *t = c->d->timeline;
    html_point *whole = c->points, *waited = whole + POINTS_MAX;
    size_t whole_count = mean_times(t, whole, false), waited_count = mean_times(t, waited, true);
    html_chart chart = {.to = c->to,
                        .title = "Seconds that saves took, and that training waited",
                        .left = 1,
                        .right = (double)t->count,
                        .min = INFINITY,
                        .logarithmic = true,
                        .label = seconds_label};
    for (size_t i = 0; i < whole_count + waited_count; i++) {
        double y = i < whole_count ? whole[i].y : waited[i - whole_count].y;
        chart.min = fmin(chart.min, y);
        chart.max = fmax(chart.max, y);
    }
    if (!(chart.max > 0)) {
        return;
    }
    begin_figure(
        c, "Time of saves",
        "From the beginning of a save until it was durable, and how long a session's training waited, in the order of saving.");
    html_chart_begin(&chart);
    html_chart_line(&chart, whole, whole_count, 1);
    html_chart_line(&chart, waited, waited_count, 5);
    html_chart_end_texts(&chart, minute_text(t->items[0].created_ns).text,
                         minute_text(t->items[t->count - 1].created_ns).text);
    fputs("<ul class=\"legend\">", c->to);
    html_legend_item(c->to, 1, "whole save");
    if (waited_count) {
        html_legend_item(c->to, 5, "training waited");
    }
    fputs("</ul></figure>\n", c->to);
}

/* ---- all charts ---- */

static void print_all_runs(const charts *c) {
    const html_chart percent = {.scale = 1, .unit = " %"}, bytes = {.logarithmic = true, .label = size_text};
    print_runs(c, (run_chart){.caption = "Share of a full copy",
                              .about = "Stored bytes of each checkpoint, in percent of its size",
                              .title = "Stored bytes in percent of full copies, by run and step",
                              .value = share_of,
                              .text = percent_text,
                              .chart = {.scale = 1, .unit = " %", .max = 100}});
    if (c->d->details.metric) {
        print_runs(c, (run_chart){.caption = c->d->details.metric,
                                  .about = "As recorded with the checkpoints",
                                  .title = "Recorded metric, by run and step",
                                  .value = metric_of,
                                  .text = number_text,
                                  .chart = {.scale = 1, .unit = ""}});
    }
    print_runs(c, (run_chart){.caption = "Bytes written",
                              .about = "By the save of each checkpoint",
                              .title = "Bytes written by saves, by run and step",
                              .value = written_of,
                              .text = size_text,
                              .chart = bytes});
    print_runs(c, (run_chart){.caption = "Error of lossy checkpoints",
                              .about = "Largest relative error (L2) of a weight tensor",
                              .title = "Relative error of weights, by run and step",
                              .value = error_of,
                              .text = percent_text,
                              .chart = percent});
}

ckd_status report_charts(FILE *to, const report_data *d, ckd_error *err) {
    charts c = {.d = d, .to = to, .shown = report_shown_runs(d), .first = UINT64_MAX};
    c.points_max = POINTS_MAX / c.shown.count;
    c.points = calloc(2 * (size_t)POINTS_MAX, sizeof(*c.points));
    if (!c.points) {
        return cli_error_nomem(err);
    }
    for (size_t k = 0; k < c.shown.count; k++) {
        const report_growth *g = &d->growths[c.shown.runs[k]];
        c.first = g->first->step < c.first ? g->first->step : c.first;
        c.last = g->last->step > c.last ? g->last->step : c.last;
    }
    fputs("<div class=\"charts\">\n", to);
    print_sums(&c);
    print_all_runs(&c);
    print_times(&c);
    report_heat_maps(to, d);
    ckd_status status = report_lineage(to, d, err);
    fputs("</div>\n", to);
    free(c.points);
    return status;
}
