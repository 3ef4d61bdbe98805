#include "cli/report/charts.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"

#define PLACES_MAX 200 /* per chart; if there are more checkpoints, several share a place */
#define LANES_MOST 40  /* runs in the lineage */
#define LANE       44  /* pixels */
#define LANE_LINE  32  /* position of the line in it */
#define WIDTH      1000
#define MARKS_MOST 200 /* per lane */

/* Checkpoints by time; several share a place if there are too many. */
typedef struct places {
    const report_data *d;
    FILE *to;
    size_t count;
    double *values; /* one value per place */
} places;

static size_t first_of(const places *p, size_t place) {
    return place * p->d->report->checkpoint_count / p->count;
}

static const ckd_checkpoint *at_time(const report_data *d, size_t i) {
    return &d->report->by_checkpoint[d->by_time[i]];
}

/* Ends a chart with the labels of its horizontal axis. */
static void end_chart(const places *p, const html_chart *c) {
    char ends[2][CKD_RUN_MAX + 64];
    for (int i = 0; i < 2; i++) {
        const ckd_checkpoint *at = at_time(p->d, i ? p->d->report->checkpoint_count - 1 : 0);
        cli_text day = cli_text_time(at->created_ns);
        snprintf(ends[i], sizeof(ends[i]), "%s, %.10s", cli_ref_text_of(at).text, day.text);
    }
    html_chart_end(c, ends[0], ends[1]);
}

static void begin_figure(const places *p, const char *title, const char *about) {
    size_t count = p->d->report->checkpoint_count;
    fprintf(p->to, "<figure><figcaption>%s<small>%s", title, about);
    if (count > p->count) {
        fprintf(p->to, " Each place stands for about %.0f checkpoints.", (double)count / (double)p->count);
    }
    fputs("</small></figcaption>\n", p->to);
}

static cli_text size_label(double value) {
    return cli_text_size((uint64_t)value);
}

static cli_text bits_label(double value) {
    cli_text out;
    snprintf(out.text, sizeof(out.text), "%g", value);
    return out;
}

static void widen(double *min, double *max, double value) {
    if (value > 0) {
        *min = value < *min ? value : *min;
        *max = value > *max ? value : *max;
    }
}

/* ---- size per checkpoint ---- */

static void print_size_dots(const places *p, const html_chart *c) {
    static const int series[] = {[CKD_BASE] = 1, [CKD_DELTA] = 3, [CKD_LOSSY_BASE] = 2};
    for (size_t place = 0; place < p->count; place++) {
        size_t first = first_of(p, place), end = first_of(p, place + 1);
        for (ckd_kind kind = CKD_BASE; kind <= CKD_LOSSY_BASE; kind++) {
            double sum = 0;
            size_t count = 0, last = 0;
            for (size_t i = first; i < end; i++) {
                const ckd_checkpoint *at = at_time(p->d, i);
                sum += at->kind == kind ? (double)at->stored_bytes : 0;
                count += at->kind == kind;
                last = at->kind == kind ? i : last;
            }
            if (count) {
                char about[CKD_RUN_MAX + 160];
                const ckd_checkpoint *at = at_time(p->d, last);
                snprintf(about, sizeof(about),
                         count == 1 ? "%s, %s: %s" : "%s, %s and others before: %s each",
                         cli_ref_text_of(at).text, ckd_kind_name(kind), size_label(sum / (double)count).text);
                html_chart_dot(c, place, sum / (double)count, series[kind], about);
            }
        }
    }
}

static void print_sizes(const places *p) {
    html_chart c;
    double min = INFINITY, max = 1;
    for (size_t i = 0; i < p->d->report->checkpoint_count; i++) {
        widen(&min, &max, (double)at_time(p->d, i)->stored_bytes);
    }
    begin_figure(p, "Size of each checkpoint", "Stored bytes, in the order in which they were saved.");
    c = (html_chart){
        .to = p->to, .title = "Stored bytes of each checkpoint", .places = p->count, .label = size_label};
    html_chart_begin(&c, fmin(min, max), max);
    print_size_dots(p, &c);
    end_chart(p, &c);
    html_legend(p->to, "1base|3delta|2lossy base");
    fputs("</figure>\n", p->to);
}

/* ---- total size ---- */

static void print_sums(const places *p) {
    html_chart c;
    const report_data *d = p->d;
    double raw = 0, stored = 0, *logical = p->values, *used = p->values + p->count;
    for (size_t place = 0, i = 0; place < p->count; place++) {
        for (; i < first_of(p, place + 1); i++) {
            raw += (double)at_time(d, i)->raw_bytes;
            stored += (double)at_time(d, i)->stored_bytes;
        }
        logical[place] = raw;
        used[place] = stored;
    }
    double min = INFINITY, max = 1;
    for (size_t i = 0; i < 2 * p->count; i++) {
        widen(&min, &max, p->values[i]);
    }
    begin_figure(p, "All checkpoints so far", "What full copies would take, and what is stored.");
    c = (html_chart){
        .to = p->to, .title = "Logical and stored bytes so far", .places = p->count, .label = size_label};
    html_chart_begin(&c, fmin(min, max), max);
    html_chart_line(&c, logical, 2);
    html_chart_line(&c, used, 1);
    end_chart(p, &c);
    html_legend(p->to, "2logical|1stored");
    fputs("</figure>\n", p->to);
}

/* ---- bits by role ---- */

static double bits_of(const places *p, size_t place, ckd_role role) {
    uint64_t stored = 0, elements = 0;
    for (size_t i = first_of(p, place); i < first_of(p, place + 1); i++) {
        const ckd_role_bytes *b = &p->d->report->roles[p->d->by_time[i]].roles[role];
        stored += b->stored_bytes;
        elements += b->elements;
    }
    return report_bits(stored, elements);
}

static void print_bits(const places *p) {
    html_chart c;
    char legend[128] = "";
    double min = INFINITY, max = 0;
    for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
        double *values = p->values + (size_t)(role - CKD_ROLE_WEIGHT) * p->count;
        double highest = 0;
        for (size_t place = 0; place < p->count; place++) {
            values[place] = bits_of(p, place, role);
            widen(&min, &highest, values[place]);
        }
        max = highest > max ? highest : max;
        if (highest > 0) {
            size_t used = strlen(legend);
            snprintf(legend + used, sizeof(legend) - used, "%s%d%s", used ? "|" : "", (int)role,
                     ckd_role_name(role));
        }
    }
    if (!(max > 0)) {
        return;
    }
    begin_figure(p, "Bits for each element",
                 "Stored bits of a checkpoint by the elements of its tensors, for each role.");
    c = (html_chart){.to = p->to,
                     .title = "Stored bits for each element, by role",
                     .places = p->count,
                     .label = bits_label};
    html_chart_begin(&c, min, max);
    for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
        html_chart_line(&c, p->values + (size_t)(role - CKD_ROLE_WEIGHT) * p->count, (int)role);
    }
    end_chart(p, &c);
    html_legend(p->to, legend);
    fputs("</figure>\n", p->to);
}

/* ---- duration of saves ---- */

static cli_text seconds_label(double value) {
    cli_text out;
    snprintf(out.text, sizeof(out.text), value < 1 ? "%.3g ms" : "%.4g s", value < 1 ? 1000 * value : value);
    return out;
}

/* Computes the mean times, in seconds, of the saves that share a place; 0: none is known. */
static void mean_times(const ckd_timeline *t, size_t count, double *waited, double *whole) {
    for (size_t place = 0, i = 0; place < count; place++) {
        size_t first = i, end = (place + 1) * t->count / count;
        for (waited[place] = whole[place] = 0; i < end; i++) {
            waited[place] += (double)t->items[i].stall_ns / 1e9 / (double)(end - first);
            whole[place] += (double)t->items[i].total_ns / 1e9 / (double)(end - first);
        }
    }
}

static void print_times(const places *p) {
    html_chart c;
    const ckd_timeline *t = p->d->timeline;
    size_t count = t->count < p->count ? t->count : p->count;
    double *waited = p->values, *whole = p->values + count, min = INFINITY, max = 0;
    mean_times(t, count, waited, whole);
    for (size_t i = 0; i < 2 * count; i++) {
        widen(&min, &max, p->values[i]);
    }
    if (!(max > 0)) {
        return;
    }
    fputs(
        "<figure><figcaption>Time of saves<small>From the beginning of a save until it was durable, and how long training waited, as far as sessions recorded it.</small></figcaption>\n",
        p->to);
    c = (html_chart){.to = p->to,
                     .title = "Seconds that saves took, and that training waited",
                     .places = count,
                     .label = seconds_label};
    html_chart_begin(&c, min, max);
    html_chart_line(&c, whole, 1);
    html_chart_line(&c, waited, 5);
    html_chart_end(&c, cli_text_time(t->items[0].created_ns).text,
                   cli_text_time(t->items[t->count - 1].created_ns).text);
    html_legend(p->to, "1whole save|5training waited");
    fputs("</figure>\n", p->to);
}

/* ---- lineage ---- */

typedef struct lineage {
    const report_data *d;
    FILE *to;
    size_t lanes;
    uint64_t first, last; /* steps */
} lineage;

static double step_x(const lineage *l, uint64_t step) {
    return l->last > l->first ? (double)(step - l->first) / (double)(l->last - l->first) * WIDTH
                              : WIDTH / 2.0;
}

static double lane_y(size_t lane) {
    return (double)lane * LANE + LANE_LINE;
}

/* Marks for exact bases take precedence, then those for lossy bases. */
static int rank_of(ckd_kind kind) {
    return kind == CKD_BASE ? 2 : kind == CKD_LOSSY_BASE ? 1 : 0;
}

/* Draws a run's marks. Marks at the same position become one, of the kind with the highest rank. */
static void print_marks(const lineage *l, size_t lane, const ckd_checkpoint *items, size_t count) {
    static const int series[] = {[CKD_BASE] = 1, [CKD_DELTA] = 3, [CKD_LOSSY_BASE] = 2};
    for (size_t begin = 0, end; begin < count; begin = end) {
        const ckd_checkpoint *shown = &items[begin];
        double x = step_x(l, shown->step);
        for (end = begin + 1; end < count && step_x(l, items[end].step) - x < (double)WIDTH / MARKS_MOST;
             end++) {
            shown = rank_of(items[end].kind) > rank_of(shown->kind) ? &items[end] : shown;
        }
        fprintf(l->to, "<path class=\"dot s%d\" d=\"M%.1f %.1fh0\"><title>%s, %s", series[shown->kind],
                step_x(l, shown->step), lane_y(lane), cli_ref_text_of(shown).text,
                ckd_kind_name(shown->kind));
        if (end - begin > 1) {
            fprintf(l->to, ", and %zu more here", end - begin - 1);
        }
        fputs("</title></path>\n", l->to);
    }
}

/*
 * Draws a line from the other run's checkpoint that is the parent of this run's first checkpoint, or from which its
 * training resumed.
 */
static void print_origin(const lineage *l, size_t lane, const ckd_checkpoint *first) {
    const ckd_report *r = l->d->report;
    ckd_checkpoint_list all = {r->checkpoint_count, r->by_checkpoint};
    const ckd_checkpoint *from = cli_by_id(&all, &first->parent);
    from = from ? from : cli_by_id(&all, &first->resumed_from);
    for (size_t k = 0; from && k < l->lanes; k++) {
        if (k != lane && strcmp(r->by_run[k].name, from->run) == 0) {
            double x = step_x(l, from->step), y = lane_y(k), to = step_x(l, first->step);
            fprintf(l->to, "<path class=\"link\" d=\"M%.1f %.1fL%.1f %.1fL%.1f %.1f\"/>\n", x, y, x,
                    lane_y(lane), to, lane_y(lane));
        }
    }
}

static void print_lanes(const lineage *l) {
    const ckd_report *r = l->d->report;
    fprintf(
        l->to,
        "<div class=\"lanes\"><svg viewBox=\"0 0 %d %zu\" preserveAspectRatio=\"none\" style=\"height:%zupx\" "
        "role=\"img\" aria-label=\"Runs and their checkpoints by step\">\n",
        WIDTH, l->lanes * LANE, l->lanes * LANE);
    for (size_t lane = 0; lane < l->lanes; lane++) {
        print_origin(l, lane, l->d->growths[lane].first);
    }
    for (size_t lane = 0; lane < l->lanes; lane++) {
        const report_growth *g = &l->d->growths[lane];
        fprintf(l->to, "<path class=\"link\" d=\"M%.1f %.1fH%.1f\"/>\n", step_x(l, g->first->step),
                lane_y(lane), step_x(l, g->last->step));
        print_marks(l, lane, g->first, (size_t)g->run->checkpoints);
    }
    fputs("</svg>\n", l->to);
    for (size_t lane = 0; lane < l->lanes; lane++) {
        fprintf(l->to, "<span style=\"top:%zupx\">", lane * LANE);
        html_text(l->to, r->by_run[lane].name);
        fputs("</span>", l->to);
    }
    fputs("</div>\n", l->to);
}

static void print_lineage(FILE *to, const report_data *d) {
    lineage l = {d, to, d->report->run_count < LANES_MOST ? d->report->run_count : LANES_MOST, UINT64_MAX, 0};
    for (size_t i = 0; i < l.lanes; i++) {
        l.first = d->growths[i].first->step < l.first ? d->growths[i].first->step : l.first;
        l.last = d->growths[i].last->step > l.last ? d->growths[i].last->step : l.last;
    }
    fputs("<figure><figcaption>Lineage<small>Runs and their checkpoints, by step.", to);
    if (l.lanes < d->report->run_count) {
        fprintf(to, " The first %zu of %zu runs.", l.lanes, d->report->run_count);
    }
    fputs("</small></figcaption>\n", to);
    print_lanes(&l);
    fprintf(to,
            "<div class=\"xs\" style=\"margin-left:0\"><span>step %" PRIu64 "</span><span>step %" PRIu64
            "</span></div>\n",
            l.first, l.last);
    html_legend(to, "1base|3delta|2lossy base");
    fputs("</figure>\n", to);
}

/* ---- all charts ---- */

ckd_status report_charts(FILE *to, const report_data *d, ckd_error *err) {
    places p = {.d = d, .to = to, .count = d->report->checkpoint_count};
    p.count = p.count < PLACES_MAX ? p.count : PLACES_MAX;
    p.values = calloc(CKD_ROLE_OTHER * p.count, sizeof(*p.values));
    if (!p.values) {
        return cli_error_nomem(err);
    }
    fputs("<div class=\"charts\">\n", to);
    print_sizes(&p);
    print_sums(&p);
    print_bits(&p);
    print_times(&p);
    print_lineage(to, d);
    fputs("</div>\n", to);
    free(p.values);
    return CKD_OK;
}
