/*
 * Maps times to places on the picture of saves, and draws the axis. Long pauses between saves are cut out, so that
 * saves stay wide enough to see.
 */
#include "cli/report/timeline_axis.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#define PAUSES     20  /* a pause longer than this part of all saves' time is cut out */
#define CUT_MAX    46  /* pixels */
#define CUTS_SHARE 0.3 /* of the width, at most */
#define TICKS      8

uint64_t timeline_begin(const timeline_save *s) {
    uint64_t took = s->stage_count ? 0 : s->times->total_ns;
    for (size_t i = 0; i < s->stage_count; i++) {
        took = s->stages[i].end_ns > took ? s->stages[i].end_ns : took;
    }
    return s->times->created_ns > took ? s->times->created_ns - took : 0;
}

static int by_begin(const void *a, const void *b) {
    const time_span *x = a, *y = b;
    return (x->begin_ns > y->begin_ns) - (x->begin_ns < y->begin_ns);
}

/* Joins spans with no more than `pause` between them. */
static void join_spans(time_axis *axis, uint64_t pause) {
    size_t kept = 0;
    for (size_t i = 0; i < axis->count; i++) {
        time_span *last = &axis->spans[kept ? kept - 1 : 0];
        if (kept && axis->spans[i].begin_ns <= last->end_ns + pause) {
            last->end_ns = axis->spans[i].end_ns > last->end_ns ? axis->spans[i].end_ns : last->end_ns;
        } else {
            axis->spans[kept++] = axis->spans[i];
        }
    }
    axis->count = kept;
}

static uint64_t length_of(const time_axis *axis) {
    uint64_t sum = 0;
    for (size_t i = 0; i < axis->count; i++) {
        sum += axis->spans[i].end_ns - axis->spans[i].begin_ns;
    }
    return sum;
}

bool axis_make(time_axis *axis, const timeline_save *saves, size_t count) {
    *axis = (time_axis){.spans = calloc(count + 1, sizeof(*axis->spans)), .count = count};
    if (!axis->spans) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        uint64_t begin = timeline_begin(&saves[i]), stall = begin + saves[i].times->stall_ns;
        uint64_t end = saves[i].times->created_ns;
        axis->spans[i] = (time_span){begin, stall > end ? stall : end, 0};
    }
    if (count) {
        qsort(axis->spans, count, sizeof(*axis->spans), by_begin);
    }
    join_spans(axis, 0);
    join_spans(axis, length_of(axis) / PAUSES);
    double room = AXIS_WIDTH - AXIS_LEFT - AXIS_RIGHT, cuts = axis->count > 1 ? (double)axis->count - 1 : 0;
    axis->cut = cuts > 0 ? fmin(CUT_MAX, CUTS_SHARE * room / cuts) : 0;
    axis->scale = (room - cuts * axis->cut) / fmax(1, (double)length_of(axis));
    double x = AXIS_LEFT;
    for (size_t i = 0; i < axis->count; i++) {
        time_span *s = &axis->spans[i];
        s->x = x;
        x += (double)(s->end_ns - s->begin_ns) * axis->scale + axis->cut;
    }
    return true;
}

double axis_x(const time_axis *axis, uint64_t ns) {
    size_t at = 0;
    while (at + 1 < axis->count && axis->spans[at + 1].begin_ns <= ns) {
        at++;
    }
    const time_span *s = &axis->spans[at];
    uint64_t inside = ns < s->begin_ns ? s->begin_ns : ns > s->end_ns ? s->end_ns : ns;
    return s->x + (double)(inside - s->begin_ns) * axis->scale;
}

/* ---- drawing ---- */

/* "3 s", "12 min", "2 h" */
static cli_text short_time(double seconds) {
    static const struct {
        double seconds;
        const char *unit;
    } units[] = {{86400, "d"}, {3600, "h"}, {60, "min"}, {1, "s"}, {1e-3, "ms"}};
    cli_text out;
    size_t i = 0;
    while (i + 1 < sizeof(units) / sizeof(units[0]) && seconds < 1.5 * units[i].seconds) {
        i++;
    }
    snprintf(out.text, sizeof(out.text), "%.0f %s", seconds / units[i].seconds, units[i].unit);
    return out;
}

static void draw_cut(FILE *to, const time_axis *axis, size_t at, int top, int bottom) {
    const time_span *s = &axis->spans[at];
    double x = s[1].x - axis->cut;
    cli_text idle = short_time((double)(s[1].begin_ns - s->end_ns) / 1e9);
    fprintf(to,
            "<rect class=\"cut\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"><title>%s without a "
            "save</title></rect>\n",
            x, top, axis->cut, bottom - top, idle.text);
    if (axis->cut >= AXIS_CHARACTER * 6) {
        fprintf(to, "<text class=\"soft\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
                x + axis->cut / 2, bottom - 4, idle.text);
    }
}

static void draw_tick(FILE *to, double x, int bottom, double seconds, double step) {
    char text[64];
    if (seconds < 600) {
        snprintf(text, sizeof(text), "%.6g s", seconds);
    } else {
        double minutes = floor(seconds / 60);
        snprintf(text, sizeof(text), "%.0f:%02.0f:%0*.*f", floor(minutes / 60), fmod(minutes, 60),
                 step < 1 ? 6 : 2, step < 1 ? 3 : 0, seconds - 60 * minutes);
    }
    fprintf(to, "<text class=\"tick\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", x, bottom + 20,
            text);
}

/* Leaves out numbers and clock times that would cover the previous one. */
static void draw_ticks(FILE *to, const time_axis *axis, int bottom) {
    double step = html_round_step(fmax(1e-6, (double)length_of(axis) / 1e9), TICKS);
    double ticked = 0, clocked = 0;
    for (size_t i = 0; i < axis->count; i++) {
        const time_span *s = &axis->spans[i];
        double begin = (double)(s->begin_ns - axis->spans[0].begin_ns) / 1e9;
        double end = begin + (double)(s->end_ns - s->begin_ns) / 1e9;
        for (double k = ceil(begin / step); k * step <= end; k++) {
            double x = s->x + (k * step - begin) * 1e9 * axis->scale;
            fprintf(to, "<line class=\"axis\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/>\n", x, bottom, x,
                    bottom + 5);
            if (x > ticked + AXIS_CHARACTER * 9) {
                draw_tick(to, x, bottom, k * step, step);
                ticked = x;
            }
        }
        if (s->x > clocked && s->x < AXIS_WIDTH - AXIS_CHARACTER * 10) {
            fprintf(to, "<text class=\"soft\" x=\"%.1f\" y=\"%d\">%.8s</text>\n", s->x, bottom + 38,
                    cli_text_time(s->begin_ns).text + 11);
            clocked = s->x + AXIS_CHARACTER * 10;
        }
    }
}

void axis_draw(FILE *to, const time_axis *axis, int top, int bottom) {
    fprintf(to, "<line class=\"axis\" x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\"/>\n", AXIS_LEFT, bottom,
            AXIS_WIDTH - AXIS_RIGHT, bottom);
    for (size_t i = 0; i + 1 < axis->count; i++) {
        draw_cut(to, axis, i, top, bottom);
    }
    if (axis->count) {
        draw_ticks(to, axis, bottom);
    }
}
