/*
 * Draws the lives of supervised runs: each attempt as a bar over time, where its training is thick; below it, training
 * that was done again; at the bottom, saves. Attempts that would be narrower than a bar can be share one.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "cli/report/charts.h"

#define WIDTH      1000
#define HEIGHT     92
#define BAR_LINE   34 /* positions */
#define AGAIN_LINE 48
#define SAVE_TOP   58
#define SAVE_END   72
#define MARK_LINE  80 /* of suspect saves */
#define BARS_MAX   250
#define SAVES_MAX  250
#define LIVES_MAX  HTML_SERIES_MAX

typedef struct life_chart {
    FILE *to;
    const report_life *life;
} life_chart;

static double x_of(const life_chart *c, uint64_t ns) {
    const report_life *l = c->life;
    uint64_t inside = ns < l->begin_ns ? l->begin_ns : ns > l->end_ns ? l->end_ns : ns;
    return l->end_ns > l->begin_ns
               ? (double)(inside - l->begin_ns) / (double)(l->end_ns - l->begin_ns) * WIDTH
               : 0;
}

/* An attempt that runs is drawn until the end. */
static uint64_t end_of(const life_chart *c, const life_attempt *a) {
    return a->end_ns ? a->end_ns : c->life->end_ns;
}

/* ---- bars ---- */

static void draw_span(const life_chart *c, const char *class, double from, double to, double y) {
    double least = (double)WIDTH / BARS_MAX / 2;
    from = fmin(from, WIDTH - least);
    fprintf(c->to, "<path class=\"%s\" d=\"M%.1f %.1fL%.1f %.1f\">", class, from, y, fmax(to, from + least),
            y);
}

static void print_title(const life_chart *c, const life_attempt *a) {
    fprintf(c->to, "<title>attempt %" PRIu64 ": ", a->number);
    html_text(c->to, a->reason[0] ? a->reason : report_life_end_name(a->end));
    fprintf(c->to, "; began %s", cli_text_time(a->begin_ns).text);
    if (a->end_ns) {
        fprintf(c->to, ", took %s", cli_text_duration((double)(a->end_ns - a->begin_ns) / 1e9).text);
    }
    if (a->from_step != CKD_LATEST) {
        fprintf(c->to, ", from step %" PRIu64, a->from_step);
    }
    if (a->first != CKD_LATEST && a->last != CKD_LATEST) {
        fprintf(c->to, ", made steps %" PRIu64 " to %" PRIu64, a->first, a->last);
    }
    if (a->hosts[0]) {
        fputs(", on ", c->to);
        html_text(c->to, a->hosts);
    }
    fputs("</title>\n", c->to);
}

/* Draws the part of the training that a later attempt had to do again, in proportion to the steps. */
static void draw_again(const life_chart *c, const life_attempt *a, uint64_t trained_ns) {
    uint64_t kept = a->kept < a->first ? a->first - 1 : a->kept;
    if (a->last > a->first && kept < a->last) {
        double share = kept < a->first ? 0 : (double)(kept - a->first) / (double)(a->last - a->first);
        uint64_t begin = a->begin_ns + a->resume_ns;
        draw_span(c, "again", x_of(c, begin + (uint64_t)(share * (double)trained_ns)),
                  x_of(c, begin + trained_ns), AGAIN_LINE);
        fprintf(c->to, "<title>steps %" PRIu64 " to %" PRIu64 " were made again</title></path>\n", kept + 1,
                a->last);
    }
}

static void draw_bar(const life_chart *c, const char *width, life_end end, double from, double to) {
    char class[48];
    snprintf(class, sizeof(class), "%s %s", width, report_life_end_name(end));
    draw_span(c, class, from, to, BAR_LINE);
    fputs("</path>\n", c->to);
}

static void draw_attempt(const life_chart *c, const life_attempt *a) {
    uint64_t end = end_of(c, a), trained = end - a->begin_ns;
    double from = x_of(c, a->begin_ns), to = x_of(c, end);
    bool known = a->first != CKD_LATEST && a->last != CKD_LATEST && a->resume_ns < trained;
    fputs("<g>\n", c->to);
    if (known) {
        uint64_t begin = a->begin_ns + a->resume_ns;
        trained -= a->resume_ns;
        trained = a->trained_ns && a->trained_ns < trained ? a->trained_ns : trained;
        draw_bar(c, "thin", a->end, from, to);
        from = x_of(c, begin);
        to = x_of(c, begin + trained);
    }
    draw_bar(c, "bar", a->end, from, to);
    print_title(c, a);
    fputs("</g>\n", c->to);
    if (known) {
        draw_again(c, a, trained);
    }
}

/* Draws attempts that share a bar. It looks like those that ended in the most frequent way. */
static void draw_several(const life_chart *c, const life_attempt *first, size_t count) {
    size_t ends[LIFE_ENDS] = {0}, most = 0;
    char class[48];
    for (size_t i = 0; i < count; i++) {
        ends[first[i].end]++;
    }
    for (size_t i = 1; i < LIFE_ENDS; i++) {
        most = ends[i] > ends[most] ? i : most;
    }
    snprintf(class, sizeof(class), "bar %s", report_life_end_name((life_end)most));
    draw_span(c, class, x_of(c, first->begin_ns), x_of(c, end_of(c, &first[count - 1])), BAR_LINE);
    fprintf(c->to, "<title>attempts %" PRIu64 " to %" PRIu64 ":", first->number, first[count - 1].number);
    for (size_t i = 0, said = 0; i < LIFE_ENDS; i++) {
        if (ends[i]) {
            fprintf(c->to, "%s %zu %s", said++ ? "," : "", ends[i], report_life_end_name((life_end)i));
        }
    }
    fprintf(c->to, "; the first began %s</title></path>\n", cli_text_time(first->begin_ns).text);
}

/* Returns how many attempts, from the first of these on, share a bar. */
static size_t share_of(const life_chart *c, size_t at) {
    const report_life *l = c->life;
    double begin = x_of(c, l->attempts[at].begin_ns);
    size_t end = at + 1;
    while (end < l->count && x_of(c, end_of(c, &l->attempts[end])) - begin < (double)WIDTH / BARS_MAX) {
        end++;
    }
    return end - at;
}

static void draw_attempts(const life_chart *c) {
    const report_life *l = c->life;
    for (size_t i = 0, count; i < l->count; i += count) {
        count = share_of(c, i);
        if (count == 1) {
            draw_attempt(c, &l->attempts[i]);
        } else {
            draw_several(c, &l->attempts[i], count);
        }
    }
}

/* ---- saves ---- */

/* Saves at the same place are one, which is suspect if one of them is. */
static void draw_saves(const life_chart *c) {
    const report_life *l = c->life;
    for (size_t i = 0, end; i < l->save_count; i = end) {
        const life_save *shown = &l->saves[i];
        double x = x_of(c, shown->created_ns);
        for (end = i + 1;
             end < l->save_count && x_of(c, l->saves[end].created_ns) - x < (double)WIDTH / SAVES_MAX;
             end++) {
            shown = l->saves[end].suspect && !shown->suspect ? &l->saves[end] : shown;
        }
        x = x_of(c, shown->created_ns);
        fprintf(c->to, "<path class=\"save\" d=\"M%.1f %dL%.1f %d\"><title>", x, SAVE_TOP, x, SAVE_END);
        fprintf(c->to, "step %" PRIu64 " saved %s", shown->step, cli_text_time(shown->created_ns).text);
        if (end - i > 1) {
            fprintf(c->to, ", and %zu more here", end - i - 1);
        }
        fputs("</title></path>\n", c->to);
        if (shown->suspect) {
            fprintf(c->to,
                    "<path class=\"dot s5\" d=\"M%.1f %dh0\"><title>step %" PRIu64
                    " is suspect</title></path>\n",
                    x, MARK_LINE, shown->step);
        }
    }
}

/* ---- labels ---- */

/* "3 failed" above a bar. Returns how much of the width it takes at most, in percent: on a narrow screen. */
static double label_of(char text[48], const life_attempt *a) {
    int length = snprintf(text, 48, "%" PRIu64 " %s", a->number, report_life_end_name(a->end));
    return 2.1 * length + 1;
}

/* The label of the last bar may have to end with the drawing. */
static double label_place(const life_chart *c, const life_attempt *a, double width) {
    return fmax(0, fmin(x_of(c, a->begin_ns) * 100 / WIDTH, 100 - width));
}

static void print_label(const life_chart *c, const char *text, double place, double width) {
    bool last = place + width >= 100;
    fprintf(c->to, "<span class=\"tag\" style=\"top:0;left:%.1f%%%s\">%s</span>\n", last ? 100 : place,
            last ? ";transform:translateX(-100%)" : "", text);
}

/* Labels the attempts that have a bar of their own, the last one first; leaves out what would cover another label. */
static void print_labels(const life_chart *c) {
    const report_life *l = c->life;
    char text[48];
    const life_attempt *last = &l->attempts[l->count - 1];
    double width = label_of(text, last), free = 0, end = label_place(c, last, width);
    print_label(c, text, end, width);
    for (size_t i = 0, count; i + 1 < l->count; i += count) {
        count = share_of(c, i);
        width = label_of(text, &l->attempts[i]);
        double place = x_of(c, l->attempts[i].begin_ns) * 100 / WIDTH;
        if (count == 1 && place >= free && place + width <= end) {
            print_label(c, text, place, width);
            free = place + width;
        }
    }
}

static const struct {
    double seconds;
    const char *names;
} units[] = {{86400, "days"}, {3600, "hours"}, {60, "minutes"}, {1, "seconds"}};

/* The largest unit of which the life has some. */
static size_t unit_of(const report_life *l) {
    size_t i = 0;
    while (i + 1 < sizeof(units) / sizeof(units[0]) &&
           (double)(l->end_ns - l->begin_ns) / 1e9 < 3 * units[i].seconds) {
        i++;
    }
    return i;
}

#define BAR_KEY "0 8L36 8"

static void print_key(FILE *to, const char *class, const char *line, const char *name) {
    fprintf(to,
            "<li><svg class=\"key\" viewBox=\"0 0 36 16\" aria-hidden=\"true\"><path class=\"%s\" "
            "d=\"M%s\"/></svg>%s</li>",
            class, line, name);
}

static void print_legend(const life_chart *c) {
    const report_life *l = c->life;
    bool ended[LIFE_ENDS] = {false}, again = false;
    for (size_t i = 0; i < l->count; i++) {
        ended[l->attempts[i].end] = true;
        again = again || l->attempts[i].kept < l->attempts[i].last;
    }
    fputs("<ul class=\"legend\">", c->to);
    for (size_t i = 0; i < LIFE_ENDS; i++) {
        if (ended[i]) {
            char class[32];
            snprintf(class, sizeof(class), "bar %s", report_life_end_name((life_end)i));
            print_key(c->to, class, BAR_KEY, report_life_end_name((life_end)i));
        }
    }
    if (again) {
        print_key(c->to, "again", BAR_KEY, "made again");
    }
    if (l->save_count) {
        print_key(c->to, "save", "18 1L18 15", "save");
    }
    if (l->suspects) {
        html_legend_item(c->to, 5, "suspect");
    }
    fputs("</ul></figure>\n", c->to);
}

/* ---- figures ---- */

static void print_caption(const life_chart *c, size_t unit) {
    const report_life *l = c->life;
    double goodput = report_goodput(l);
    fputs("<figure class=\"full\"><figcaption>Attempts: ", c->to);
    html_text(c->to, l->attempts->run);
    fputs("<small>", c->to);
    if (!isnan(goodput)) {
        fprintf(c->to, "Goodput %.1f\xc2\xa0%%. ", 100 * goodput);
    }
    fprintf(c->to, "%zu attempt%s, %" PRIu64 " step%s lost. By %s since %s.", l->count, cli_plural(l->count),
            l->steps_lost, cli_plural(l->steps_lost), units[unit].names, cli_text_time(l->begin_ns).text);
    fputs(" A thick part of a bar is training.</small></figcaption>\n", c->to);
}

static void draw_life(FILE *to, const report_life *life) {
    life_chart c = {.to = to, .life = life};
    size_t unit = unit_of(life);
    print_caption(&c, unit);
    fprintf(to,
            "<div class=\"lanes life\"><svg viewBox=\"0 0 %d %d\" preserveAspectRatio=\"none\" "
            "style=\"height:%dpx\" role=\"img\" aria-label=\"Attempts and saves over time\">\n",
            WIDTH, HEIGHT, HEIGHT);
    fprintf(to, "<line class=\"grid\" x1=\"0\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/>\n", WIDTH, BAR_LINE, BAR_LINE);
    draw_attempts(&c);
    draw_saves(&c);
    fputs("</svg>\n", to);
    print_labels(&c);
    fputs("</div>\n", to);
    html_numbers(to, 0, (double)(life->end_ns - life->begin_ns) / 1e9 / units[unit].seconds);
    print_legend(&c);
}

void report_draw_lives(FILE *to, const report_data *d) {
    const report_lives *l = &d->lives;
    if (l->life_count > LIVES_MAX || l->left_out) {
        fputs("<p class=\"soft\">", to);
        if (l->life_count > LIVES_MAX) {
            fprintf(to, "Drawn are the %d runs with most attempts. ", LIVES_MAX);
        }
        if (l->left_out) {
            fprintf(to, "The first %zu attempts of the journal are left out.", l->left_out);
        }
        fputs("</p>\n", to);
    }
    fputs("<div class=\"charts\">\n", to);
    for (size_t i = 0; i < l->life_count && i < LIVES_MAX; i++) {
        draw_life(to, &l->items[i]);
    }
    fputs("</div>\n", to);
}
