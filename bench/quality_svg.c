/* One panel for each model, two in a row: ratio (late in the chain, logarithmic) against the gap after the resume; light and dark by the reader's wish. */
#include <math.h>

#include "bench/quality.h"

enum { WIDTH = 460, HEIGHT = 340, LEFT = 76, RIGHT = 24, TOP = 46, BOTTOM = 52 };

static const char style[] =
    "  <style>\n"
    "    svg { --back: #ffffff; --ink: #1f2328; --soft: #59636e; --grid: #d8dee4; --mark: #0550ae; --band: #0550ae; }\n"
    "    @media (prefers-color-scheme: dark) {\n"
    "      svg { --back: #0d1117; --ink: #e6edf3; --soft: #9198a1; --grid: #30363d; --mark: #79c0ff; --band: #79c0ff; }\n"
    "    }\n"
    "    .back { fill: var(--back); } .grid { stroke: var(--grid); } .zero { stroke: var(--soft); }\n"
    "    .mark { fill: var(--mark); } .whisker { stroke: var(--mark); stroke-width: 2; } .band { fill: var(--band); fill-opacity: .14; }\n"
    "    .other { stroke: var(--soft); stroke-dasharray: 5 4; }\n"
    "    text { fill: var(--ink); font: 12px system-ui, sans-serif; paint-order: stroke; stroke: var(--back); stroke-width: 3px; }\n"
    "    .soft { fill: var(--soft); } .title { font-weight: 600; }\n"
    "  </style>\n";

/* One panel's scales. */
typedef struct panel {
    FILE *f;
    double left, top;         /* of the panel */
    double most_ratio;        /* the axis begins at 1 */
    double least, most, step; /* gaps */
} panel;

static double x_of(const panel *p, double ratio) {
    double share = log(ratio > 1 ? ratio : 1) / log(p->most_ratio);
    return p->left + LEFT + share * (WIDTH - LEFT - RIGHT);
}

static double y_of(const panel *p, double gap) {
    return p->top + TOP + (p->most - gap) / (p->most - p->least) * (HEIGHT - TOP - BOTTOM);
}

/* Five to ten steps of 1, 2 or 5 x 10^n. */
static double nice_step(double span) {
    double unit = pow(10, floor(log10(span / 5)));
    return span / 5 >= 5 * unit ? 5 * unit : span / 5 >= 2 * unit ? 2 * unit : unit;
}

static void set_scales(panel *p, const quality_group *g, const quality_options *o) {
    double noise = quality_noise(g, o->orders).after;
    p->most_ratio = 10;
    p->least = -noise;
    p->most = noise;
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        quality_row row = quality_summary(g, (int)c, o->deltas);
        if (!quality_coders[c].unsized) {
            p->most_ratio = fmax(p->most_ratio, 2 * 96 / row.late_bits.mean);
        }
        p->least = fmin(p->least, row.after.mean - row.after.spread);
        p->most = fmax(p->most, row.after.mean + row.after.spread);
    }
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
            fprintf(p->f, "%+.*f", p->step < 0.01 ? 3 : 2, i * p->step);
        } else {
            fprintf(p->f, "0");
        }
        fprintf(p->f, "</text>\n");
    }
    for (size_t i = 0; i < sizeof(ratios) / sizeof(ratios[0]) && ratios[i] <= p->most_ratio; i++) {
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
        "  <text class=\"soft\" transform=\"translate(%.1f %.1f) rotate(-90)\" text-anchor=\"middle\">validation loss - exact resume's</text>\n",
        p->left + 16, (p->top + TOP + bottom) / 2);
}

static void draw_row(const panel *p, const quality_coder *coder, const quality_row *row) {
    double y = y_of(p, row->after.mean), right = p->left + WIDTH - RIGHT;
    if (coder->unsized) {
        line(p, "other", p->left + LEFT, y, right, y);
        fprintf(p->f, "  <text class=\"soft\" x=\"%.1f\" y=\"%.1f\">%s</text>\n", x_of(p, 2.5), y - 5,
                coder->name);
        return;
    }
    double x = x_of(p, 96 / row->late_bits.mean);
    if (row->after.spread > 0) {
        line(p, "whisker", x, y_of(p, row->after.mean - row->after.spread), x,
             y_of(p, row->after.mean + row->after.spread));
    }
    fprintf(p->f, "  <circle class=\"mark\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"/>\n", x, y);
    int leftward = x > right - 90;
    fprintf(p->f, "  <text x=\"%.1f\" y=\"%.1f\"%s>%s</text>\n", leftward ? x - 10 : x + 10, y - 6,
            leftward ? " text-anchor=\"end\"" : "", coder->name);
}

static void draw_panel(panel *p, const quality_group *g, const quality_options *o) {
    set_scales(p, g, o);
    double noise = quality_noise(g, o->orders).after, top = y_of(p, noise);
    fprintf(p->f, "  <text class=\"title\" x=\"%.1f\" y=\"%.1f\">width %d, beta2 %g</text>\n", p->left + LEFT,
            p->top + 20, g->width, g->beta2);
    fprintf(
        p->f,
        "  <text class=\"soft\" x=\"%.1f\" y=\"%.1f\">%d seed%s, %d deltas; band: other batch orders</text>\n",
        p->left + LEFT, p->top + 36, g->seeds, g->seeds > 1 ? "s" : "", o->deltas);
    fprintf(p->f, "  <rect class=\"band\" x=\"%.1f\" y=\"%.1f\" width=\"%d\" height=\"%.1f\"/>\n",
            p->left + LEFT, top, WIDTH - LEFT - RIGHT, y_of(p, -noise) - top);
    draw_axes(p);
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        quality_row row = quality_summary(g, (int)c, o->deltas);
        draw_row(p, &quality_coders[c], &row);
    }
}

void quality_write_svg(const quality_group *groups, int count, const quality_options *o) {
    int columns = count > 1 ? 2 : 1, rows = (count + 1) / 2;
    FILE *f = fopen(o->svg, "w");
    if (!f) {
        quality_die(o->svg, "cannot be written");
    }
    fprintf(
        f,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n"
        "  <title>Size ratio of checkpoint chains against the loss gap after resuming from their ends</title>\n%s"
        "  <rect class=\"back\" width=\"100%%\" height=\"100%%\"/>\n",
        columns * WIDTH, rows * HEIGHT, columns * WIDTH, rows * HEIGHT, style);
    for (int i = 0; i < count; i++) {
        panel p = {.f = f, .left = (double)(i % 2) * WIDTH, .top = (double)(i / 2) * HEIGHT};
        draw_panel(&p, &groups[i], o);
    }
    fprintf(f, "</svg>\n");
    if (fclose(f) != 0) {
        quality_die(o->svg, "cannot be written");
    }
}
