/*
 * Two lanes over the time since the first save began: when training stood still, and what the saver did, as bars of stages. Stages are worked on by
 * several threads in turns; they are drawn one after the other, in the shares they have of the whole save.
 */
#include "cli/timeline_svg.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 960, LEFT = 110, RIGHT = 20, LANE = 34, TOP = 56, HEIGHT = 210, STAGES = 5, TICKS = 6 };

static const char style[] =
    "<style>text{font:12px sans-serif;fill:#222}.axis{stroke:#888}.training{fill:#c0392b}.analyse{fill:#2e86c1}.encode{fill:#28b463}"
    ".write{fill:#d68910}.sync{fill:#7d3c98}.rest{fill:#909497}.paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.paper{fill:#1b1e23}.axis{stroke:#777}}</style>\n";

typedef struct stage {
    const char *name;
    uint64_t ns;
} stage;

/* What is left of the whole goes to the rest: waiting, the manifest, the catalog. */
static void stages_of(stage out[STAGES], const ckd_save_times *s) {
    const stage known[STAGES - 1] = {
        {"analyse", s->analyse_ns}, {"encode", s->encode_ns}, {"write", s->write_ns}, {"sync", s->sync_ns}};
    uint64_t sum = 0;
    for (int i = 0; i < STAGES - 1; i++) {
        out[i] = known[i];
        sum += known[i].ns;
    }
    out[STAGES - 1] = (stage){"rest", s->total_ns > sum ? s->total_ns - sum : 0};
}

static uint64_t begin_of(const ckd_save_times *s) {
    return s->created_ns > s->total_ns ? s->created_ns - s->total_ns : 0;
}

typedef struct scale {
    uint64_t begin_ns;
    double seconds; /* of the whole picture */
} scale;

static double x_of(const scale *sc, uint64_t ns) {
    return LEFT + ((double)ns - (double)sc->begin_ns) / 1e9 / sc->seconds * (WIDTH - LEFT - RIGHT);
}

static void bar(FILE *to, const char *class, double x, double width, int lane, uint64_t step,
                const char *what, double ms) {
    fprintf(to,
            "<rect class=\"%s\" x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\"><title>step %" PRIu64
            ": %s %.3g ms</title></rect>\n",
            class, x, TOP + lane * (LANE + 14), width < 0.5 ? 0.5 : width, LANE, step, what, ms);
}

static void draw_save(FILE *to, const scale *sc, const ckd_save_times *s) {
    stage stages[STAGES];
    stages_of(stages, s);
    uint64_t sum = 0;
    for (int i = 0; i < STAGES; i++) {
        sum += stages[i].ns;
    }
    double x = x_of(sc, begin_of(s)), whole = x_of(sc, s->created_ns) - x;
    if (s->stall_ns) {
        bar(to, "training", x, (double)s->stall_ns / 1e9 / sc->seconds * (WIDTH - LEFT - RIGHT), 0, s->step,
            "training waited", (double)s->stall_ns / 1e6);
    }
    for (int i = 0; i < STAGES && sum; i++) {
        double width = whole * (double)stages[i].ns / (double)sum;
        if (stages[i].ns) {
            bar(to, stages[i].name, x, width, 1, s->step, stages[i].name, (double)stages[i].ns / 1e6);
        }
        x += width;
    }
}

static void draw_frame(FILE *to, const scale *sc) {
    static const char *const words[] = {"training", "analyse", "encode", "write", "sync", "rest"};
    static const char *const lanes[] = {"training waits", "saving"};
    fprintf(
        to,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"saves over time\">\n%s",
        WIDTH, HEIGHT, style);
    fprintf(to, "<rect class=\"paper\" width=\"%d\" height=\"%d\"/>\n", WIDTH, HEIGHT);
    for (int i = 0; i < 6; i++) {
        fprintf(
            to,
            "<rect class=\"%s\" x=\"%d\" y=\"16\" width=\"12\" height=\"12\"/><text x=\"%d\" y=\"27\">%s</text>\n",
            words[i], LEFT + 110 * i, LEFT + 110 * i + 18, words[i]);
    }
    for (int i = 0; i < 2; i++) {
        fprintf(to, "<text x=\"8\" y=\"%d\">%s</text>\n", TOP + i * (LANE + 14) + LANE / 2 + 4, lanes[i]);
    }
    int y = TOP + 2 * (LANE + 14);
    fprintf(to, "<line class=\"axis\" x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\"/>\n", LEFT, y, WIDTH - RIGHT,
            y);
    for (int i = 0; i <= TICKS; i++) {
        double x = LEFT + (double)(WIDTH - LEFT - RIGHT) * i / TICKS;
        fprintf(
            to,
            "<line class=\"axis\" x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\"/><text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.3g s</text>\n",
            x, y, x, y + 5, x, y + 20, sc->seconds * i / TICKS);
    }
}

char *cli_timeline_svg(const ckd_save_times *items, size_t count, size_t *size) {
    char *text = NULL;
    FILE *to = open_memstream(&text, size);
    if (!to) {
        return NULL;
    }
    scale sc = {.begin_ns = count ? begin_of(&items[0]) : 0};
    uint64_t end = sc.begin_ns;
    for (size_t i = 0; i < count; i++) {
        sc.begin_ns = begin_of(&items[i]) < sc.begin_ns ? begin_of(&items[i]) : sc.begin_ns;
        end = items[i].created_ns > end ? items[i].created_ns : end;
    }
    sc.seconds = end > sc.begin_ns ? (double)(end - sc.begin_ns) / 1e9 : 1;
    draw_frame(to, &sc);
    for (size_t i = 0; i < count; i++) {
        draw_save(to, &sc, &items[i]);
    }
    fputs("</svg>\n", to);
    bool failed = ferror(to);
    if (fclose(to) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}
