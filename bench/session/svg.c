/*
 * The share of iterations that took longer than a time, by mode. Both axes are logarithmic, because the few long
 * iterations matter.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench/session/stall.h"
#include "bench/support/support.h"

enum { WIDTH = 640, HEIGHT = 380, LEFT = 70, RIGHT = 20, TOP = 44, BOTTOM = 46 };

static const char style[] =
    "<style>text{font:12px sans-serif;fill:#222}.axis{stroke:#888}.grid{stroke:#ddd}.paper{fill:#fff}path{fill:none;stroke-width:2}"
    ".m0{stroke:#909497}.m1{stroke:#c0392b}.m2{stroke:#2e86c1}.m3{stroke:#28b463}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.paper{fill:#1b1e23}.axis{stroke:#777}.grid{stroke:#333}}</style>\n";

typedef struct scales {
    double least_ms, most_ms, least_share;
} scales;

static double x_of(const scales *s, double ms) {
    return LEFT + log(ms / s->least_ms) / log(s->most_ms / s->least_ms) * (WIDTH - LEFT - RIGHT);
}

static double y_of(const scales *s, double share) {
    return TOP + log(share) / log(s->least_share) * (HEIGHT - TOP - BOTTOM);
}

static void draw_axes(FILE *to, const scales *s) {
    for (double share = 1; share > .99 * s->least_share; share /= 10) {
        double y = y_of(s, share);
        fprintf(
            to,
            "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n",
            LEFT, WIDTH - RIGHT, y, y, LEFT - 8, y + 4, share);
    }
    for (int i = 0; i <= 5; i++) {
        double ms = s->least_ms * pow(s->most_ms / s->least_ms, i / 5.0), x = x_of(s, ms);
        fprintf(
            to,
            "<line class=\"axis\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/><text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.3g ms</text>\n",
            x, x, HEIGHT - BOTTOM, HEIGHT - BOTTOM + 5, x, HEIGHT - BOTTOM + 20, ms);
    }
    fprintf(to, "<line class=\"axis\" x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/>\n", LEFT, WIDTH - RIGHT,
            HEIGHT - BOTTOM, HEIGHT - BOTTOM);
    fprintf(to,
            "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">share of iterations that take longer</text>\n",
            WIDTH / 2, HEIGHT - 8);
}

/* A staircase: after the i-th of n ascending times, n - i are left. */
static void draw_mode(FILE *to, const scales *s, const double *ms, int count, mode how) {
    fprintf(to, "<path class=\"m%d\" d=\"M%.1f,%.1f", (int)how, x_of(s, ms[0]), y_of(s, 1));
    for (int i = 0; i < count; i++) {
        double left = (double)(count - 1 - i) / count;
        fprintf(to, "H%.1fV%.1f", x_of(s, ms[i]), y_of(s, left > s->least_share ? left : s->least_share));
    }
    fprintf(to, "\"><title>%s</title></path>\n", stall_mode_names[how]);
    int x = LEFT + 145 * (int)how;
    fprintf(to, "<path class=\"m%d\" d=\"M%d,22H%d\"/><text x=\"%d\" y=\"26\">%s</text>\n", (int)how, x,
            x + 24, x + 30, stall_mode_names[how]);
}

static void widen(scales *s, const double *ms, int count) {
    if (count > 0) {
        s->least_ms = fmin(s->least_ms, ms[0]);
        s->most_ms = fmax(s->most_ms, ms[count - 1]);
        s->least_share = fmin(s->least_share, 1.0 / count);
    }
}

void stall_draw(const results *r, const options *o) {
    if (!o->svg) {
        return;
    }
    FILE *to = bench_open_output(o->svg);
    scales s = {INFINITY, 0, .1};
    double *ms[MODES] = {NULL};
    int counts[MODES] = {0};
    for (mode how = NONE; how < MODES; how++) {
        if (stall_has(o, how)) {
            ms[how] = stall_iterations(&counts[how], r, o, how);
            widen(&s, ms[how], counts[how]);
        }
    }
    s.most_ms = fmax(s.most_ms, 1.01 * s.least_ms);
    fprintf(
        to,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"times of iterations\">\n%s<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n",
        WIDTH, HEIGHT, style, WIDTH, HEIGHT);
    draw_axes(to, &s);
    for (mode how = NONE; how < MODES; how++) {
        if (counts[how] > 0) {
            draw_mode(to, &s, ms[how], counts[how], how);
        }
        free(ms[how]);
    }
    fputs("</svg>\n", to);
    bench_close_output(to, o->svg);
}
