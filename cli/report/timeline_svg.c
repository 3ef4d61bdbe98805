/*
 * Draws lanes over the time since the first save began: when training waited, and what each rank did, as bars of
 * stages. Analysing, encoding and writing run at the same time and share a lane's height. For a save by an older
 * version only the shares of its stages are known; they are drawn one after the other.
 */
#include "cli/report/report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 960, LEFT = 110, RIGHT = 20, TOP = 56, BOTTOM = 58, SHARES = 5, TICKS = 6, MANY = 16 };

static const char style[] =
    "<style>text{font:12px sans-serif;fill:#222}.axis{stroke:#888}.training{fill:#c0392b}.snapshot{fill:#e59866}.analyse{fill:#2e86c1}"
    ".encode{fill:#28b463}.write{fill:#d68910}.sync{fill:#7d3c98}.wait{fill:#d5d8dc}.commit{fill:#17a2a2}.rest{fill:#909497}.paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.paper{fill:#1b1e23}.axis{stroke:#777}.wait{fill:#4d5359}}</style>\n";

typedef struct picture {
    FILE *to;
    uint64_t begin_ns;
    double seconds; /* length of the whole picture */
    uint32_t ranks;
    int lane, gap; /* heights */
} picture;

static uint64_t begin_of(const timeline_save *s) {
    uint64_t took = s->stage_count ? 0 : s->times->total_ns;
    for (size_t i = 0; i < s->stage_count; i++) {
        took = s->stages[i].end_ns > took ? s->stages[i].end_ns : took;
    }
    return s->times->created_ns > took ? s->times->created_ns - took : 0;
}

static double width_of(const picture *p, uint64_t ns) {
    return (double)ns / 1e9 / p->seconds * (WIDTH - LEFT - RIGHT);
}

static double x_of(const picture *p, uint64_t ns) {
    return LEFT + width_of(p, ns - p->begin_ns);
}

static int y_of(const picture *p, uint32_t lane) {
    return TOP + (int)lane * (p->lane + p->gap);
}

/* Begins a bar. The caller prints the tooltip text and "</title></rect>". */
static void begin_bar(const picture *p, const char *class, double x, double width, double y, double height) {
    fprintf(p->to, "<rect class=\"%s\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\"><title>", class,
            x, y, width < 0.5 ? 0.5 : width, height);
}

/* ---- the content of a lane ---- */

static void draw_waiting(const picture *p, const timeline_save *s) {
    if (s->times->stall_ns) {
        begin_bar(p, "training", x_of(p, begin_of(s)), width_of(p, s->times->stall_ns), y_of(p, 0), p->lane);
        fprintf(p->to, "step %" PRIu64 ": training waited %.3g ms</title></rect>\n", s->times->step,
                (double)s->times->stall_ns / 1e6);
    }
}

static void draw_stage(const picture *p, const timeline_save *s, const ckd_stage_times *t) {
    bool shared = t->stage >= CKD_STAGE_ANALYSE && t->stage <= CKD_STAGE_WRITE;
    double height = shared ? p->lane / 3.0 : p->lane, y = y_of(p, t->rank + 1);
    y += shared ? height * (t->stage - CKD_STAGE_ANALYSE) : 0;
    const char *name = ckd_stage_name(t->stage);
    begin_bar(p, name, x_of(p, begin_of(s) + t->begin_ns), width_of(p, t->end_ns - t->begin_ns), y, height);
    fprintf(p->to, "step %" PRIu64 ": rank %u %s %.3g ms", s->times->step, (unsigned)t->rank, name,
            (double)(t->end_ns - t->begin_ns) / 1e6);
    if (t->work_ns) {
        fprintf(p->to, t->stage == CKD_STAGE_SNAPSHOT ? ", training waited %.3g ms" : ", %.3g ms of work",
                (double)t->work_ns / 1e6);
    }
    fputs("</title></rect>\n", p->to);
}

/* The remaining time of the whole is the rest: waiting, the manifest, the catalog. */
static void draw_shares(const picture *p, const timeline_save *s) {
    const struct {
        const char *name;
        uint64_t ns;
    } parts[SHARES - 1] = {{"analyse", s->times->analyse_ns},
                           {"encode", s->times->encode_ns},
                           {"write", s->times->write_ns},
                           {"sync", s->times->sync_ns}};
    uint64_t sum = 0, total = s->times->total_ns;
    for (int i = 0; i < SHARES - 1; i++) {
        sum += parts[i].ns;
    }
    double x = x_of(p, begin_of(s)), whole = width_of(p, total);
    uint64_t rest = total > sum ? total - sum : 0;
    for (int i = 0; i < SHARES && sum + rest; i++) {
        uint64_t ns = i < SHARES - 1 ? parts[i].ns : rest;
        const char *name = i < SHARES - 1 ? parts[i].name : "rest";
        double width = whole * (double)ns / (double)(sum + rest);
        if (ns) {
            begin_bar(p, name, x, width, y_of(p, 1), p->lane);
            fprintf(p->to, "step %" PRIu64 ": %s %.3g ms</title></rect>\n", s->times->step, name,
                    (double)ns / 1e6);
        }
        x += width;
    }
}

static void draw_lane(const picture *p, uint32_t lane, const timeline_save *saves, size_t count) {
    if (lane > 0) {
        fprintf(p->to, "<g class=\"lane\" data-rank=\"%u\">\n", (unsigned)lane - 1);
    } else {
        fputs("<g class=\"lane\">\n", p->to);
    }
    if (p->lane >= 12) {
        fprintf(p->to, "<text x=\"8\" y=\"%d\">", y_of(p, lane) + p->lane / 2 + 4);
        if (lane == 0 || p->ranks == 1) {
            fputs(lane == 0 ? "training waits" : "saving", p->to);
        } else {
            fprintf(p->to, "rank %u", (unsigned)lane - 1);
        }
        fputs("</text>\n", p->to);
    }
    for (size_t i = 0; i < count; i++) {
        const timeline_save *s = &saves[i];
        if (lane == 0) {
            draw_waiting(p, s);
        } else if (lane == 1 && s->stage_count == 0) {
            draw_shares(p, s);
        }
        for (size_t k = 0; lane > 0 && k < s->stage_count; k++) {
            if (s->stages[k].rank == lane - 1) {
                draw_stage(p, s, &s->stages[k]);
            }
        }
    }
    fputs("</g>\n", p->to);
}

/* ---- axes and legend ---- */

static void draw_frame(const picture *p) {
    static const char *const words[] = {"training", "snapshot", "analyse", "encode",
                                        "write",    "sync",     "wait",    "commit"};
    int bottom = y_of(p, p->ranks + 1), height = bottom + BOTTOM;
    fprintf(
        p->to,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"saves over time\">\n%s",
        WIDTH, height, style);
    fprintf(p->to, "<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n", WIDTH, height);
    for (int i = 0; i < 8; i++) {
        fprintf(
            p->to,
            "<rect class=\"%s\" x=\"%d\" y=\"16\" width=\"12\" height=\"12\"/><text x=\"%d\" y=\"27\">%s</text>\n",
            words[i], LEFT + 104 * i, LEFT + 104 * i + 18, i == 0 ? "training waits" : words[i]);
    }
    fprintf(p->to, "<line class=\"axis\" x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\"/>\n", LEFT, bottom,
            WIDTH - RIGHT, bottom);
    for (int i = 0; i <= TICKS; i++) {
        double x = LEFT + (double)(WIDTH - LEFT - RIGHT) * i / TICKS;
        fprintf(
            p->to,
            "<line class=\"axis\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/><text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.3g s</text>\n",
            x, bottom, x, bottom + 5, x, bottom + 20, p->seconds * i / TICKS);
    }
}

static picture picture_of(const timeline_save *saves, size_t count) {
    picture p = {.begin_ns = count ? begin_of(&saves[0]) : 0, .ranks = 1};
    uint64_t end = p.begin_ns;
    for (size_t i = 0; i < count; i++) {
        const timeline_save *s = &saves[i];
        p.begin_ns = begin_of(s) < p.begin_ns ? begin_of(s) : p.begin_ns;
        end = s->times->created_ns > end ? s->times->created_ns : end;
        uint32_t last = s->stage_count ? s->stages[s->stage_count - 1].rank : 0;
        p.ranks = last >= p.ranks ? last + 1 : p.ranks;
    }
    p.seconds = end > p.begin_ns ? (double)(end - p.begin_ns) / 1e9 : 1;
    p.lane = p.ranks > MANY ? 12 : 34;
    p.gap = p.ranks > MANY ? 4 : 14;
    return p;
}

char *cli_timeline_svg(const timeline_save *saves, size_t count, size_t *size) {
    char *text = NULL;
    picture p = picture_of(saves, count);
    p.to = open_memstream(&text, size);
    if (!p.to) {
        return NULL;
    }
    draw_frame(&p);
    for (uint32_t lane = 0; lane <= p.ranks; lane++) {
        draw_lane(&p, lane, saves, count);
    }
    fputs("</svg>\n", p.to);
    bool failed = ferror(p.to);
    if (fclose(p.to) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}
