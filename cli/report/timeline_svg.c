/*
 * Draws saves over time: a lane for each run, or for each rank of a run. A save is a box whose width is its duration.
 * The box is divided in proportion to the work of the stages, because stages run at the same time and their own times
 * would overlap. Waiting for other ranks and the commit come last and have their own times. Idle times between saves
 * are cut out.
 */
#include "cli/report/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/report/timeline_axis.h"

enum { LANES_LARGE = 16, STAGE_COUNT = CKD_STAGE_LAST + 1 };

static const char style[] =
    "<style>text{font:12px sans-serif;fill:#222}.soft{fill:#666}.axis{stroke:#888}.training{fill:#c0392b}.snapshot{fill:#e59866}"
    ".analyse{fill:#2e86c1}.encode{fill:#28b463}.write{fill:#d68910}.sync{fill:#7d3c98}.wait{fill:#c3c7cc}.commit{fill:#17a2a2}"
    ".rest{fill:#909497}.paper{fill:#fff}.cut{fill:#8882}.row{fill:#8881}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.soft{fill:#aaa}.paper{fill:#1b1e23}.axis{stroke:#777}.wait{fill:#5b6168}"
    ".sync{fill:#a569bd}}</style>\n";

/* The lanes of a run: one for each of its ranks. */
typedef struct run_lanes {
    const char *run;
    uint32_t ranks;
    uint32_t first; /* number of its first lane */
} run_lanes;

typedef struct picture {
    FILE *to;
    time_axis axis;
    const timeline_save *saves;
    size_t count, left_out;
    run_lanes *runs;
    size_t run_count;
    uint32_t lanes;
    int lane, pitch; /* height of a lane, and distance of two */
} picture;

static int y_of(const picture *p, uint32_t lane) {
    return AXIS_TOP + (int)lane * p->pitch + (p->pitch - p->lane) / 2;
}

/* "gpt@20, 99.0 MiB of 123.3 MiB: " */
static void print_save(const picture *p, const timeline_save *s) {
    html_text(p->to, s->times->run);
    fprintf(p->to, "@%" PRIu64 ", %s of %s: ", s->times->step, cli_text_size(s->times->stored_bytes).text,
            cli_text_size(s->times->raw_bytes).text);
}

static void begin_bar(const picture *p, const char *class, double x, double width, double y, double height) {
    fprintf(p->to, "<rect class=\"%s\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\"><title>", class,
            x, y, fmax(width, 0.5), height);
}

/* ---- boxes ---- */

typedef struct box {
    uint64_t begin_ns, end_ns; /* since 1970 */
    double work[STAGE_COUNT];  /* by stage; [0]: the rest of the total */
} box;

static void draw_box(const picture *p, const timeline_save *s, uint32_t lane, uint32_t rank, const box *b) {
    double x = axis_x(&p->axis, b->begin_ns), sum = 0, y = y_of(p, lane);
    for (int i = 0; i < STAGE_COUNT; i++) {
        sum += b->work[i];
    }
    for (int i = 1; i <= STAGE_COUNT && sum > 0; i++) {
        int stage = i % STAGE_COUNT; /* the rest comes last */
        double height = p->lane * b->work[stage] / sum;
        const char *name = stage ? ckd_stage_name((ckd_stage)stage) : "rest";
        if (b->work[stage] > 0) {
            begin_bar(p, name, x, axis_x(&p->axis, b->end_ns) - x, y, height);
            print_save(p, s);
            fprintf(p->to, "rank %u %s, %.3g ms of work, %.0f %%</title></rect>\n", (unsigned)rank, name,
                    b->work[stage] / 1e6, 100 * b->work[stage] / sum);
            y += height;
        }
    }
}

static void draw_late(const picture *p, const timeline_save *s, uint32_t lane, const ckd_stage_times *t) {
    uint64_t begin = timeline_begin(s);
    double x = axis_x(&p->axis, begin + t->begin_ns), end = axis_x(&p->axis, begin + t->end_ns);
    begin_bar(p, ckd_stage_name(t->stage), x, end - x, y_of(p, lane), p->lane);
    print_save(p, s);
    fprintf(p->to, "rank %u %s, %.3g ms</title></rect>\n", (unsigned)t->rank, ckd_stage_name(t->stage),
            (double)(t->end_ns - t->begin_ns) / 1e6);
}

/* The box ends where its rank begins to wait, or to commit. */
static void draw_rank(const picture *p, const timeline_save *s, uint32_t lane, uint32_t rank) {
    uint64_t first = UINT64_MAX, last = 0, late = UINT64_MAX, begin = timeline_begin(s);
    box b = {0};
    for (size_t i = 0; i < s->stage_count; i++) {
        const ckd_stage_times *t = &s->stages[i];
        if (t->rank == rank && t->stage < CKD_STAGE_WAIT) {
            first = t->begin_ns < first ? t->begin_ns : first;
            last = t->end_ns > last ? t->end_ns : last;
            b.work[t->stage] += (double)(t->work_ns ? t->work_ns : t->end_ns - t->begin_ns);
        } else if (t->rank == rank) {
            late = t->begin_ns < late ? t->begin_ns : late;
            draw_late(p, s, lane, t);
        }
    }
    if (first < last) {
        b.begin_ns = begin + first;
        b.end_ns = begin + (late > first && late < last ? late : last);
        draw_box(p, s, lane, rank, &b);
    }
}

/* A save by an older version: only the work of its stages is known. The rest is waiting, the manifest, the catalog. */
static void draw_old(const picture *p, const timeline_save *s, uint32_t lane) {
    const ckd_save_times *t = s->times;
    box b = {.begin_ns = timeline_begin(s), .end_ns = t->created_ns};
    b.work[CKD_STAGE_ANALYSE] = (double)t->analyse_ns;
    b.work[CKD_STAGE_ENCODE] = (double)t->encode_ns;
    b.work[CKD_STAGE_WRITE] = (double)t->write_ns;
    b.work[CKD_STAGE_SYNC] = (double)t->sync_ns;
    uint64_t sum = t->analyse_ns + t->encode_ns + t->write_ns + t->sync_ns;
    b.work[0] = t->total_ns > sum ? (double)(t->total_ns - sum) : 0;
    draw_box(p, s, lane, 0, &b);
}

/* A strip below the save. */
static void draw_waiting(const picture *p, const timeline_save *s, uint32_t lane) {
    if (s->times->stall_ns) {
        uint64_t begin = timeline_begin(s);
        double x = axis_x(&p->axis, begin), end = axis_x(&p->axis, begin + s->times->stall_ns);
        begin_bar(p, "training", x, end - x, y_of(p, lane) + p->lane + 1, p->pitch > 20 ? 5 : 2);
        print_save(p, s);
        fprintf(p->to, "training waited %.3g ms</title></rect>\n", (double)s->times->stall_ns / 1e6);
    }
}

/* ---- lanes ---- */

/* Places the label of save i, unless it would cover the one before it, which ends at *used. */
static void draw_label(const picture *p, uint32_t lane, size_t i, double *used) {
    const timeline_save *s = &p->saves[i];
    char text[CKD_RUN_MAX + 64];
    double x = axis_x(&p->axis, timeline_begin(s)), next = AXIS_WIDTH;
    for (size_t k = i + 1; k < p->count; k++) {
        if (strcmp(p->saves[k].times->run, s->times->run) == 0) {
            next = axis_x(&p->axis, timeline_begin(&p->saves[k]));
            break;
        }
    }
    int name = snprintf(text, sizeof(text), "%s@%" PRIu64, s->times->run, s->times->step);
    int whole = snprintf(text + name, sizeof(text) - (size_t)name, " %s",
                         cli_text_size(s->times->stored_bytes).text) +
                name;
    if (x + AXIS_CHARACTER * whole > next) {
        text[name] = '\0';
    }
    double width = AXIS_CHARACTER * (double)strlen(text);
    if (x >= *used && x + width <= AXIS_WIDTH) {
        fprintf(p->to, "<text class=\"label\" x=\"%.1f\" y=\"%d\">", x, y_of(p, lane) - 4);
        html_text(p->to, text);
        fputs("</text>\n", p->to);
        *used = x + width;
    }
}

static void draw_name(const picture *p, const run_lanes *r, uint32_t rank) {
    uint32_t lane = r->first + rank;
    fprintf(p->to, "<text x=\"8\" y=\"%d\">", y_of(p, lane) + p->lane / 2 + 4);
    if (rank == 0) {
        char name[CKD_RUN_MAX + 1];
        snprintf(name, sizeof(name), "%.*s", AXIS_NAME, r->run);
        html_text(p->to, name);
        fputs(strlen(r->run) > AXIS_NAME ? "..." : "", p->to);
    }
    if (r->ranks > 1) {
        fprintf(p->to, "%srank %u", rank == 0 ? ", " : "", (unsigned)rank);
    }
    fputs("<title>", p->to);
    html_text(p->to, r->run);
    fputs("</title></text>\n", p->to);
}

static void draw_lane(const picture *p, const run_lanes *r, uint32_t rank) {
    uint32_t lane = r->first + rank;
    double used = 0;
    fputs("<g class=\"lane\" data-run=\"", p->to);
    html_text(p->to, r->run);
    fprintf(p->to,
            "\" data-rank=\"%u\">\n<rect class=\"row\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/>\n",
            (unsigned)rank, AXIS_LEFT, y_of(p, lane), AXIS_WIDTH - AXIS_LEFT - AXIS_RIGHT, p->lane);
    draw_name(p, r, rank);
    for (size_t i = 0; i < p->count; i++) {
        const timeline_save *s = &p->saves[i];
        if (strcmp(s->times->run, r->run) != 0) {
            continue;
        }
        if (s->stage_count) {
            draw_rank(p, s, lane, rank);
        } else if (rank == 0) {
            draw_old(p, s, lane);
        }
        if (rank == 0) {
            draw_waiting(p, s, lane);
        }
        if (rank == 0 && p->lanes <= LANES_LARGE) {
            draw_label(p, lane, i, &used);
        }
    }
    fputs("</g>\n", p->to);
}

/* Finds the runs and how many ranks each has. Runs are in the order of their first saves. */
static bool find_lanes(picture *p) {
    p->runs = calloc(p->count + 1, sizeof(*p->runs));
    for (size_t i = 0; p->runs && i < p->count; i++) {
        const timeline_save *s = &p->saves[i];
        uint32_t ranks = 1;
        size_t k = 0;
        for (size_t j = 0; j < s->stage_count; j++) {
            ranks = s->stages[j].rank >= ranks ? s->stages[j].rank + 1 : ranks;
        }
        while (k < p->run_count && strcmp(p->runs[k].run, s->times->run) != 0) {
            k++;
        }
        p->run_count += k == p->run_count;
        p->runs[k].run = s->times->run;
        p->runs[k].ranks = ranks > p->runs[k].ranks ? ranks : p->runs[k].ranks;
    }
    for (size_t k = 0; p->runs && k < p->run_count; k++) {
        p->runs[k].first = p->lanes;
        p->lanes += p->runs[k].ranks;
    }
    p->lane = p->lanes > LANES_LARGE ? 12 : 28;
    p->pitch = p->lanes > LANES_LARGE ? 16 : 58;
    return p->runs != NULL;
}

/* ---- the frame ---- */

static bool has_stage(const picture *p, int stage) {
    for (size_t i = 0; i < p->count; i++) {
        const timeline_save *s = &p->saves[i];
        if (stage == 0 && s->times->stall_ns) {
            return true;
        }
        for (size_t k = 0; k < s->stage_count; k++) {
            if ((int)s->stages[k].stage == stage) {
                return true;
            }
        }
    }
    return false;
}

static void draw_legend(const picture *p) {
    int x = AXIS_LEFT;
    for (int stage = 0; stage < STAGE_COUNT; stage++) {
        if (has_stage(p, stage)) {
            const char *name = stage ? ckd_stage_name((ckd_stage)stage) : "training waits";
            fprintf(p->to,
                    "<rect class=\"%s\" x=\"%d\" y=\"34\" width=\"12\" height=\"12\"/><text x=\"%d\" "
                    "y=\"45\">%s</text>\n",
                    stage ? name : "training", x, x + 18, name);
            x += 40 + (int)(AXIS_CHARACTER * (double)strlen(name));
        }
    }
}

static void draw_frame(const picture *p) {
    int bottom = AXIS_TOP + (int)p->lanes * p->pitch, height = bottom + AXIS_BOTTOM;
    fprintf(
        p->to,
        SVG_MARK
        "xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" role=\"img\" "
        "aria-label=\"saves over time\">\n%s<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n",
        AXIS_WIDTH, height, AXIS_WIDTH, height, style, AXIS_WIDTH, height);
    fputs("<text x=\"8\" y=\"20\">", p->to);
    if (p->count) {
        fprintf(p->to, "Saves from %.10s on", cli_text_time(p->axis.spans[0].begin_ns).text);
    } else {
        fputs("No save has times", p->to);
    }
    if (p->left_out) {
        fprintf(p->to, ", the last %zu of %zu", p->count, p->count + p->left_out);
    }
    fputs(". A box is divided by the work of stages.</text>\n", p->to);
    draw_legend(p);
    axis_draw(p->to, &p->axis, AXIS_TOP, bottom);
}

char *cli_timeline_svg(const timeline_save *saves, size_t count, size_t *size) {
    char *text = NULL;
    picture p = {.left_out = count > AXIS_SAVES ? count - AXIS_SAVES : 0};
    p.saves = saves + p.left_out;
    p.count = count - p.left_out;
    bool made = axis_make(&p.axis, p.saves, p.count) && find_lanes(&p);
    p.to = made ? open_memstream(&text, size) : NULL;
    if (p.to) {
        draw_frame(&p);
        for (size_t k = 0; k < p.run_count; k++) {
            for (uint32_t rank = 0; rank < p.runs[k].ranks; rank++) {
                draw_lane(&p, &p.runs[k], rank);
            }
        }
        fputs("</svg>\n", p.to);
        bool failed = ferror(p.to);
        if (fclose(p.to) != 0 || failed) {
            free(text);
            text = NULL;
        }
    }
    free(p.runs);
    free(p.axis.spans);
    return text;
}
