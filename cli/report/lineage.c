/* Draws the lineage: a lane for each run, with its checkpoints by step, chains of deltas, branches, pins and tags. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/report/charts.h"

#define LANES_MAX 40
#define LANE      56 /* pixels */
#define LANE_LINE 30 /* position of the line in it */
#define TAG_PLACE 36 /* position of its tags */
#define TAGS_MAX  40
#define TAG_SPACE 12 /* percent of the width between two tags of a lane */
#define WIDTH     1000
#define MARKS_MAX 200 /* per lane */

typedef struct lineage {
    const report_data *d;
    FILE *to;
    cli_ids ids;
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

/* ---- checkpoints ---- */

static const int series[] = {[CKD_BASE] = 1, [CKD_DELTA] = 3, [CKD_LOSSY_BASE] = 2};

/* Marks for exact bases take precedence, then those for lossy bases. */
static int rank_of(ckd_kind kind) {
    return kind == CKD_BASE ? 2 : kind == CKD_LOSSY_BASE ? 1 : 0;
}

/* Draws a run's marks. Marks at the same position become one, of the kind with the highest rank. */
static void print_marks(const lineage *l, size_t lane) {
    const ckd_checkpoint *items = l->d->growths[lane].first;
    size_t count = (size_t)l->d->growths[lane].run->checkpoints;
    for (size_t begin = 0, end; begin < count; begin = end) {
        const ckd_checkpoint *shown = &items[begin];
        double x = step_x(l, shown->step);
        for (end = begin + 1; end < count && step_x(l, items[end].step) - x < (double)WIDTH / MARKS_MAX;
             end++) {
            shown = rank_of(items[end].kind) > rank_of(shown->kind) ? &items[end] : shown;
        }
        fprintf(l->to, "<path class=\"dot s%d\" d=\"M%.1f %.1fh0\"><title>%s, %s, %s of %s",
                series[shown->kind], step_x(l, shown->step), lane_y(lane), cli_ref_text_of(shown).text,
                ckd_kind_name(shown->kind), cli_text_size(shown->stored_bytes).text,
                cli_text_size(shown->raw_bytes).text);
        if (end - begin > 1) {
            fprintf(l->to, ", and %zu more here", end - begin - 1);
        }
        fputs("</title></path>\n", l->to);
    }
}

/* Draws lines from parents to children of the same run. Lines that touch, or nearly so, are drawn as one. */
static void print_chains(const lineage *l, size_t lane) {
    const ckd_checkpoint *items = l->d->growths[lane].first;
    double from = -1, to = -1;
    for (size_t i = 0; i < l->d->growths[lane].run->checkpoints; i++) {
        const ckd_checkpoint *parent = cli_ids_find(&l->ids, &items[i].parent);
        if (parent && strcmp(parent->run, items[i].run) == 0 && parent->step < items[i].step) {
            double begin = step_x(l, parent->step), end = step_x(l, items[i].step);
            if (from >= 0 && begin > to + (double)WIDTH / MARKS_MAX) {
                fprintf(l->to, "<path class=\"link\" d=\"M%.1f %.1fH%.1f\"/>\n", from, lane_y(lane), to);
                from = -1;
            }
            from = from < 0 ? begin : from;
            to = end;
        }
    }
    if (from >= 0) {
        fprintf(l->to, "<path class=\"link\" d=\"M%.1f %.1fH%.1f\"/>\n", from, lane_y(lane), to);
    }
}

/*
 * Draws a line from the other run's checkpoint that is the parent of this run's first checkpoint, or from which its
 * training resumed.
 */
static void print_origin(const lineage *l, size_t lane) {
    const ckd_report *r = l->d->report;
    const ckd_checkpoint *first = l->d->growths[lane].first;
    const ckd_checkpoint *from = cli_ids_find(&l->ids, &first->parent);
    from = from ? from : cli_ids_find(&l->ids, &first->resumed_from);
    for (size_t k = 0; from && k < l->lanes; k++) {
        if (k != lane && strcmp(r->by_run[k].name, from->run) == 0) {
            fprintf(l->to, "<path class=\"link\" d=\"M%.1f %.1fL%.1f %.1f\"/>\n", step_x(l, from->step),
                    lane_y(k), step_x(l, first->step), lane_y(lane));
        }
    }
}

static void print_drawing(const lineage *l) {
    fprintf(
        l->to,
        "<div class=\"lanes\"><svg viewBox=\"0 0 %d %zu\" preserveAspectRatio=\"none\" style=\"height:%zupx\" "
        "role=\"img\" aria-label=\"Runs and their checkpoints by step\">\n",
        WIDTH, l->lanes * LANE, l->lanes * LANE);
    for (size_t lane = 0; lane < l->lanes; lane++) {
        fprintf(l->to, "<line class=\"grid\" x1=\"0\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>\n", WIDTH,
                lane_y(lane), lane_y(lane));
        print_origin(l, lane);
    }
    for (size_t lane = 0; lane < l->lanes; lane++) {
        print_chains(l, lane);
        print_marks(l, lane);
    }
    fputs("</svg>\n", l->to);
}

/* ---- names ---- */

static void print_name(const lineage *l, size_t lane) {
    const ckd_usage *run = &l->d->report->by_run[lane];
    fprintf(l->to, "<span style=\"top:%zupx\">", lane * LANE);
    html_text(l->to, run->name);
    fprintf(l->to, ": %" PRIu64 " checkpoint%s, %s</span>\n", run->checkpoints, cli_plural(run->checkpoints),
            cli_text_size(run->stored_bytes).text);
}

/* A label below a checkpoint. `places` has the last label's place in each lane, in percent. */
static bool print_label(const lineage *l, const ckd_id *id, const char *sign, const char *text,
                        double *places) {
    const ckd_checkpoint *c = cli_ids_find(&l->ids, id);
    for (size_t lane = 0; c && lane < l->lanes; lane++) {
        double x = step_x(l, c->step) * 100 / WIDTH;
        if (strcmp(l->d->report->by_run[lane].name, c->run) == 0 &&
            (x > places[lane] + TAG_SPACE || x < places[lane] - TAG_SPACE)) {
            places[lane] = x;
            fprintf(l->to, "<span class=\"tag\" style=\"top:%zupx;left:%.1f%%%s\">%s",
                    lane * LANE + TAG_PLACE, x, x > 60 ? ";transform:translateX(-100%)" : "", sign);
            html_text(l->to, text);
            fputs("</span>\n", l->to);
            return true;
        }
    }
    return false;
}

static void print_labels(const lineage *l) {
    const cli_marks *m = &l->d->details.marks;
    double places[LANES_MAX];
    size_t count = 0;
    for (size_t lane = 0; lane < l->lanes; lane++) {
        places[lane] = -1000;
        print_name(l, lane);
    }
    for (size_t i = 0; i < m->tags->count && count < TAGS_MAX; i++) {
        const ckd_tag *t = &m->tags->items[i];
        count += t->status == CKD_OK && print_label(l, &t->checkpoint, "@", t->tag, places);
    }
    for (size_t i = 0; i < m->pins->count && count < TAGS_MAX; i++) {
        count += print_label(l, &m->pins->items[i].checkpoint, "", "pinned", places);
    }
}

ckd_status report_lineage(FILE *to, const report_data *d, ckd_error *err) {
    ckd_checkpoint_list all = {d->report->checkpoint_count, d->report->by_checkpoint};
    lineage l = {.d = d, .to = to, .first = UINT64_MAX};
    ckd_status status = cli_ids_make(&l.ids, &all, err);
    if (status != CKD_OK) {
        return status;
    }
    l.lanes = d->report->run_count < LANES_MAX ? d->report->run_count : LANES_MAX;
    for (size_t i = 0; i < l.lanes; i++) {
        l.first = d->growths[i].first->step < l.first ? d->growths[i].first->step : l.first;
        l.last = d->growths[i].last->step > l.last ? d->growths[i].last->step : l.last;
    }
    fputs(
        "<figure class=\"full\"><figcaption>Lineage<small>Checkpoints of each run, by step. A line joins deltas "
        "to what they are deltas on, and a run to the checkpoint that it began from.",
        to);
    if (l.lanes < d->report->run_count) {
        fprintf(to, " The first %zu of %zu runs.", l.lanes, d->report->run_count);
    }
    fputs("</small></figcaption>\n", to);
    print_drawing(&l);
    print_labels(&l);
    fputs("</div>\n", to);
    html_numbers(to, (double)l.first, (double)l.last);
    fputs("<ul class=\"legend\">", to);
    html_legend_item(to, series[CKD_BASE], "base");
    html_legend_item(to, series[CKD_DELTA], "delta");
    html_legend_item(to, series[CKD_LOSSY_BASE], "lossy base");
    fputs("</ul></figure>\n", to);
    cli_ids_free(&l.ids);
    return CKD_OK;
}
