/*
 * Draws curves as SVG inside a page. Labels are HTML outside the drawing, because the drawing stretches with the page
 * and text must not.
 */
#include "cli/output/output.h"

#include <math.h>
#include <string.h>

#define WIDTH     1000 /* of the drawing, before it is stretched */
#define HEIGHT    300
#define LINES     5  /* grid lines, at most */
#define TEXT_ROOM 36 /* characters of all numbers under a narrow drawing */

/* ---- axes ---- */

double html_round_step(double range, double parts) {
    static const double round[] = {1, 2, 5, 10};
    double power = pow(10, floor(log10(range / parts)));
    for (size_t i = 0; i < sizeof(round) / sizeof(round[0]); i++) {
        if (round[i] * power * parts >= range * 0.999999) {
            return round[i] * power;
        }
    }
    return 10 * power;
}

static void find_powers(html_chart *c) {
    c->low = floor(log2(c->min));
    c->high = ceil(log2(c->max));
    c->high += c->high == c->low;
    c->every = ceil((c->high - c->low) / LINES);
    c->high = c->low + c->every * ceil((c->high - c->low) / c->every);
}

static void find_round_numbers(html_chart *c) {
    double range = c->max - c->min, size = fmax(fabs(c->min), fabs(c->max));
    /* Nearly equal values also need an axis with a range. */
    range = range > 1e-9 * size && range > 1e-200 ? range : fmax(size, c->scale) / 10;
    c->every = html_round_step(range / c->scale, LINES) * c->scale;
    c->low = floor(c->min / c->every + 1e-9) * c->every;
    c->high = ceil(c->max / c->every - 1e-9) * c->every;
    c->high += c->high > c->low ? 0 : c->every;
}

static double x_of(const html_chart *c, double x) {
    return c->right > c->left ? (x - c->left) / (c->right - c->left) * WIDTH : WIDTH / 2.0;
}

static double y_of(const html_chart *c, double y) {
    return HEIGHT - ((c->logarithmic ? log2(y) : y) - c->low) / (c->high - c->low) * HEIGHT;
}

/* The axis has this many parts. */
static int part_count(const html_chart *c) {
    return (int)lround((c->high - c->low) / c->every);
}

static void print_label(const html_chart *c, double value) {
    if (c->label) {
        html_text(c->to, c->label(value).text);
    } else {
        double shown = value / c->scale;
        fprintf(c->to, "%.6g%s", fabs(shown) < c->every / c->scale / 1000 ? 0 : shown, c->unit);
    }
}

void html_chart_begin(html_chart *c) {
    FILE *to = c->to;
    if (c->logarithmic) {
        find_powers(c);
    } else {
        find_round_numbers(c);
    }
    int parts = part_count(c);
    fputs("<div class=\"plot\"><div class=\"ys\" aria-hidden=\"true\">", to);
    for (int i = 0; i <= parts; i++) {
        double at = c->low + i * c->every;
        fprintf(to, "<span style=\"bottom:%.2f%%\">", 100.0 * i / parts);
        print_label(c, c->logarithmic ? exp2(at) : at);
        fputs("</span>", to);
    }
    fprintf(to, "</div>\n<svg viewBox=\"0 0 %d %d\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"",
            WIDTH, HEIGHT);
    html_text(to, c->title);
    fputs("\">\n", to);
    for (int i = 0; i <= parts; i++) {
        double y = HEIGHT - (double)HEIGHT * i / parts;
        fprintf(to, "<line class=\"grid\" x1=\"0\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>\n", WIDTH, y, y);
    }
}

/* ---- shapes ---- */

void html_chart_dot(const html_chart *c, html_point at, int series, const char *about) {
    fprintf(c->to, "<path class=\"dot s%d\" d=\"M%.1f %.1fh0\"><title>", series, x_of(c, at.x),
            y_of(c, at.y));
    html_text(c->to, about);
    fputs("</title></path>\n", c->to);
}

static void print_points(const html_chart *c, const html_point *points, size_t count) {
    for (size_t i = 0; i < count; i++) {
        fprintf(c->to, "%c%.1f %.1f", i ? 'L' : 'M', x_of(c, points[i].x), y_of(c, points[i].y));
    }
}

void html_chart_line(const html_chart *c, const html_point *points, size_t count, int series) {
    if (count > 1) {
        fprintf(c->to, "<path class=\"curve s%d\" d=\"", series);
        print_points(c, points, count);
        fputs("\"/>\n", c->to);
    }
}

void html_chart_area(const html_chart *c, const html_point *above, const html_point *below, size_t count,
                     const char *class) {
    fprintf(c->to, "<path class=\"%s\" d=\"", class);
    print_points(c, above, count);
    for (size_t i = count; i-- > 0;) {
        fprintf(c->to, "L%.1f %.1f", x_of(c, above[i].x), below ? y_of(c, below[i].y) : HEIGHT);
    }
    fputs("Z\"/>\n", c->to);
}

/* ---- the horizontal axis ---- */

void html_numbers(FILE *to, double left, double right) {
    char longest[64];
    int length = snprintf(longest, sizeof(longest), "%.0f", right);
    double parts = fmax(1, fmin(6, floor((double)TEXT_ROOM / length)));
    double step = right > left ? fmax(1, html_round_step(right - left, parts)) : 1;
    fputs("<div class=\"xs\" aria-hidden=\"true\">", to);
    double first = ceil(left / step) * step;
    for (int i = 0; i <= parts && first + i * step <= right && right > left; i++) {
        double at = first + i * step;
        fprintf(to, "<span style=\"left:%.2f%%\">%.0f</span>", 100 * (at - left) / (right - left), at);
    }
    if (!(right > left)) {
        fprintf(to, "<span style=\"left:50%%\">%.0f</span>", left);
    }
    fputs("</div>\n", to);
}

void html_chart_end(const html_chart *c) {
    fputs("</svg></div>\n", c->to);
    html_numbers(c->to, c->left, c->right);
}

void html_chart_end_texts(const html_chart *c, const char *left, const char *right) {
    fputs("</svg></div>\n<div class=\"ends\"><span>", c->to);
    html_text(c->to, left);
    fputs("</span><span>", c->to);
    html_text(c->to, right);
    fputs("</span></div>\n", c->to);
}

void html_legend_item(FILE *to, int series, const char *name) {
    fprintf(to, "<li><i class=\"c%d\"></i>", series);
    html_text(to, name);
    fputs("</li>", to);
}
