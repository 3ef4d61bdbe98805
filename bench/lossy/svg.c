/*
 * The size ratio late in the chain (logarithmic) against the steps lost by a resume, in light or dark colours as the
 * reader prefers. There is one panel for each model, two in a row. Curves have two panels: the gap in training loss,
 * and the steps lost.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

#define MOST_SAVES 2.0 /* steps lost that a panel has room for, in steps between two saves */
enum { WIDTH = 460, HEIGHT = 340, LEFT = 76, RIGHT = 24, TOP = 46, BOTTOM = 52 };

static const char style[] =
    "  <style>\n"
    "    svg { --back: #ffffff; --ink: #1f2328; --soft: #59636e; --grid: #d8dee4; --mark: #0550ae; --band: #0550ae;\n"
    "            --one: #0550ae; --two: #1a7f37; --three: #bc4c00; }\n"
    "    @media (prefers-color-scheme: dark) {\n"
    "      svg { --back: #0d1117; --ink: #e6edf3; --soft: #9198a1; --grid: #30363d; --mark: #79c0ff; --band: #79c0ff;\n"
    "            --one: #79c0ff; --two: #7ee787; --three: #ffa657; }\n"
    "    }\n"
    "    .one { --mark: var(--one); } .two { --mark: var(--two); } .three { --mark: var(--three); }\n"
    "    .curve { fill: none; stroke: var(--mark); stroke-width: 2; } .knob { fill: var(--soft); font-size: 10px; }\n"
    "    .name { fill: var(--mark); font-weight: 600; }\n"
    "    .back { fill: var(--back); } .grid { stroke: var(--grid); } .zero { stroke: var(--soft); }\n"
    "    .mark { fill: var(--mark); } .whisker { stroke: var(--mark); stroke-width: 2; } .band { fill: var(--band); fill-opacity: .14; }\n"
    "    .other { stroke: var(--soft); stroke-dasharray: 5 4; }\n"
    "    text { fill: var(--ink); font: 12px system-ui, sans-serif; paint-order: stroke; stroke: var(--back); stroke-width: 3px; }\n"
    "    .soft { fill: var(--soft); } .title { font-weight: 600; }\n"
    "  </style>\n";

/* One panel's scales. */
typedef struct panel {
    FILE *f;
    int training;     /* the gap in training, not the steps lost */
    double left, top; /* of the panel */
    double least_ratio, most_ratio;
    double least, most, step; /* gaps; what is above is drawn at the edge */
} panel;

static double x_of(const panel *p, double ratio) {
    double share = log(fmax(ratio / p->least_ratio, 1)) / log(p->most_ratio / p->least_ratio);
    return p->left + LEFT + share * (WIDTH - LEFT - RIGHT);
}

static double y_of(const panel *p, double gap) {
    return p->top + TOP + (p->most - fmin(gap, p->most)) / (p->most - p->least) * (HEIGHT - TOP - BOTTOM);
}

static quality_figure gap_of(const panel *p, const quality_row *row) {
    return p->training ? row->training : row->steps;
}

/*
 * Of training: a resume on other batches. Steps lost are differences on equal batches, whose noise is too small to be
 * seen.
 */
static double noise_of(const panel *p, const quality_group *g, const quality_options *o) {
    return p->training ? quality_noise(g, o->orders).training : 0;
}

/* Five to ten steps of 1, 2 or 5 x 10^n. */
static double nice_step(double span) {
    double unit = pow(10, floor(log10(span / 5)));
    return span / 5 >= 5 * unit ? 5 * unit : span / 5 >= 2 * unit ? 2 * unit : unit;
}

static void set_scales(panel *p, const quality_group *g, const quality_options *o) {
    double noise = noise_of(p, g, o);
    p->least_ratio = o->mode == QUALITY_CURVES ? 10 : 1;
    p->most_ratio = 10 * p->least_ratio;
    p->least = -noise;
    p->most = noise;
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        quality_row row = quality_summary(g, (int)c, o->deltas);
        if (!quality_coders[c].unsized) {
            p->most_ratio = fmax(p->most_ratio, 2 * 96 / row.late_bits.mean);
        }
        quality_figure gap = gap_of(p, &row);
        p->least = fmin(p->least, gap.mean - gap.spread);
        p->most = fmax(p->most, gap.mean + gap.spread);
    }
    p->most = p->training ? p->most : fmin(p->most, MOST_SAVES * o->every);
    p->step = nice_step(fmax(p->most - p->least, 0.005));
    p->least = (floor(p->least / p->step) - 0.5) * p->step;
    p->most = (ceil(p->most / p->step) + 0.5) * p->step;
}

static void line(const panel *p, const char *class, double x1, double y1, double x2, double y2) {
    fprintf(p->f, "  <line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", class, x1, y1,
            x2, y2);
}

static void draw_axes(const panel *p) {
    static const int ratios[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000};
    double right = p->left + WIDTH - RIGHT, bottom = p->top + HEIGHT - BOTTOM;
    for (int i = (int)ceil(p->least / p->step); i * p->step <= p->most; i++) {
        double y = y_of(p, i * p->step);
        line(p, i ? "grid" : "zero", p->left + LEFT, y, right, y);
        fprintf(p->f, "  <text class=\"soft\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">", p->left + LEFT - 6,
                y + 4);
        if (i) {
            fprintf(p->f, "%+.*f", p->step < 0.01 ? 3 : p->step < 1 ? 2 : 0, i * p->step);
        } else {
            fprintf(p->f, "0");
        }
        fprintf(p->f, "</text>\n");
    }
    for (size_t i = 0; i < sizeof(ratios) / sizeof(ratios[0]) && ratios[i] <= p->most_ratio; i++) {
        if (ratios[i] < p->least_ratio) {
            continue;
        }
        double x = x_of(p, ratios[i]);
        line(p, "grid", x, p->top + TOP, x, bottom);
        fprintf(p->f, "  <text class=\"soft\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%dx</text>\n", x,
                bottom + 16, ratios[i]);
    }
    fprintf(
        p->f,
        "  <text class=\"soft\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">size ratio late in the chain, of fp32 W + m + v</text>\n",
        (p->left + LEFT + right) / 2, bottom + 36);
    fprintf(
        p->f,
        "  <text class=\"soft\" transform=\"translate(%.1f %.1f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
        p->left + 16, (p->top + TOP + bottom) / 2,
        p->training ? "training loss - exact resume's" : "steps lost");
}

static void draw_whisker(const panel *p, double x, quality_figure gap) {
    if (gap.spread > 0) {
        line(p, "whisker", x, y_of(p, gap.mean - gap.spread), x, y_of(p, gap.mean + gap.spread));
    }
}

static void draw_row(const panel *p, const quality_coder *coder, const quality_row *row) {
    quality_figure gap = gap_of(p, row);
    double y = y_of(p, gap.mean), right = p->left + WIDTH - RIGHT;
    if (coder->unsized) {
        line(p, "other", p->left + LEFT, y, right, y);
        fprintf(p->f, "  <text class=\"soft\" x=\"%.1f\" y=\"%.1f\">%s</text>\n",
                x_of(p, p->least_ratio > 1 ? p->most_ratio / 2.5 : 2.5), y - 5, coder->name);
        return;
    }
    double x = x_of(p, 96 / row->late_bits.mean);
    draw_whisker(p, x, gap);
    fprintf(p->f, "  <circle class=\"mark\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"/>\n", x, y);
    int leftward = x > right - 90;
    fprintf(p->f, "  <text x=\"%.1f\" y=\"%.1f\"%s>%s</text>\n", leftward ? x - 10 : x + 10, y - 6,
            leftward ? " text-anchor=\"end\"" : "", coder->name);
}

/* ---- curves ---- */

typedef struct point {
    double ratio, knob;
    quality_figure gap;
} point;

static int by_ratio(const void *left, const void *right) {
    const point *a = left, *b = right;
    return a->ratio < b->ratio ? -1 : a->ratio > b->ratio;
}

static int points_of(point *points, const panel *p, const char *curve, const quality_group *g,
                     const quality_options *o) {
    int count = 0;
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        const quality_coder *coder = &quality_coders[c];
        if (coder->curve && strcmp(coder->curve, curve) == 0) {
            quality_row row = quality_summary(g, (int)c, o->deltas);
            points[count++] = (point){96 / row.late_bits.mean, coder->knob, gap_of(p, &row)};
        }
    }
    qsort(points, (size_t)count, sizeof(*points), by_ratio);
    return count;
}

/* How a curve is drawn: its colour, what its numbers mean, and where they stand. */
typedef struct curve_style {
    const char *curve, *class, *unit;
    double dx, dy;
} curve_style;

static void draw_point(const panel *p, const curve_style *as, const point *at) {
    double x = x_of(p, at->ratio), y = y_of(p, at->gap.mean);
    draw_whisker(p, x, at->gap);
    fprintf(p->f, "  <circle class=\"mark\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\"/>\n", x, y);
    fprintf(p->f, "  <text class=\"knob\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x + as->dx, y + as->dy,
            as->dx < 0 ? "end" : "middle");
    if (at->knob > 0) {
        fprintf(p->f, "%g%s</text>\n", at->knob, as->unit);
    } else {
        fprintf(p->f, "alpha</text>\n");
    }
}

static void draw_curve(const panel *p, const curve_style *as, const quality_group *g,
                       const quality_options *o) {
    point points[QUALITY_MAX_CODERS];
    int count = points_of(points, p, as->curve, g, o);
    if (!count) {
        return;
    }
    fprintf(p->f, "  <g class=\"%s\">\n  <polyline class=\"curve\" points=\"", as->class);
    for (int i = 0; i < count; i++) {
        fprintf(p->f, "%s%.1f,%.1f", i ? " " : "", x_of(p, points[i].ratio), y_of(p, points[i].gap.mean));
    }
    fprintf(p->f, "\"/>\n");
    for (int i = 0; i < count; i++) {
        draw_point(p, as, &points[i]);
    }
    fprintf(p->f, "  </g>\n");
}

static void draw_curves(const panel *p, const quality_group *g, const quality_options *o) {
    static const curve_style styles[] = {
        {"excp", "three", "", -7, -3}, {"near", "two", "x", 0, 26}, {"coarse", "one", "x", 0, 14}};
    double x = p->left + LEFT + 14;
    for (size_t i = 0; i < sizeof(styles) / sizeof(styles[0]); i++) {
        draw_curve(p, &styles[i], g, o);
        fprintf(p->f, "  <g class=\"%s\"><text class=\"name\" x=\"%.1f\" y=\"%.1f\">%s</text></g>\n",
                styles[i].class, x, p->top + TOP + 20 + 16 * (double)i, styles[i].curve);
    }
}

/* ---- panels ---- */

static void draw_panel(panel *p, const quality_group *g, const quality_options *o) {
    set_scales(p, g, o);
    double noise = noise_of(p, g, o), top = y_of(p, noise);
    fprintf(p->f, "  <text class=\"title\" x=\"%.1f\" y=\"%.1f\">width %d, beta2 %g%s</text>\n",
            p->left + LEFT, p->top + 20, g->width, g->beta2,
            o->mode != QUALITY_CURVES ? ""
            : p->training             ? ": while training goes on"
                                      : ": steps lost");
    fprintf(p->f,
            "  <text class=\"soft\" x=\"%.1f\" y=\"%.1f\">%d seed%s, %d deltas %d steps apart%s</text>\n",
            p->left + LEFT, p->top + 36, g->seeds, g->seeds > 1 ? "s" : "", o->deltas, o->every,
            p->training ? "; band: other batch orders" : "");
    fprintf(p->f, "  <rect class=\"band\" x=\"%.1f\" y=\"%.1f\" width=\"%d\" height=\"%.1f\"/>\n",
            p->left + LEFT, top, WIDTH - LEFT - RIGHT, y_of(p, -noise) - top);
    draw_axes(p);
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        const quality_coder *coder = &quality_coders[c];
        if (o->mode != QUALITY_CURVES || coder->unsized) {
            quality_row row = quality_summary(g, (int)c, o->deltas);
            draw_row(p, coder, &row);
        }
    }
    if (o->mode == QUALITY_CURVES) {
        draw_curves(p, g, o);
    }
}

void quality_write_svg(const quality_group *groups, int count, const quality_options *o) {
    int each = o->mode == QUALITY_CURVES ? 2 : 1, panels = each * count;
    int columns = panels > 1 ? 2 : 1, rows = (panels + 1) / 2;
    FILE *f = bench_open_output(o->svg);
    fprintf(
        f,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n"
        "  <title>Size ratio of checkpoint chains against the steps lost by resuming from their ends</title>\n%s"
        "  <rect class=\"back\" width=\"100%%\" height=\"100%%\"/>\n",
        columns * WIDTH, rows * HEIGHT, columns * WIDTH, rows * HEIGHT, style);
    for (int i = 0; i < panels; i++) {
        panel p = {.f = f,
                   .training = each == 2 && i % 2 == 0,
                   .left = (double)(i % 2) * WIDTH,
                   .top = (double)(i / 2) * HEIGHT};
        draw_panel(&p, &groups[i / each], o);
    }
    fprintf(f, "</svg>\n");
    bench_close_output(f, o->svg);
}
