/* Heat maps: bits per element of weights, by layer and checkpoint. */
#include <inttypes.h>
#include <math.h>

#include "cli/report/charts.h"

#define ROW    20 /* pixels */
#define SHADES 9
#define MAPS   4

static void find_range(const report_layers *l, double *min, double *max) {
    *min = INFINITY;
    *max = 0;
    for (size_t i = 0; i < l->rows * l->columns; i++) {
        if (l->bits[i] > 0) {
            *min = fmin(*min, l->bits[i]);
            *max = fmax(*max, l->bits[i]);
        }
    }
}

/* A base may take a hundred times as much as a delta, so shades follow the logarithm. */
static double shade_of(double bits, double min, double max) {
    double place = max > min * 1.001 ? log(bits / min) / log(max / min) : 0.5;
    return (1 + round(place * (SHADES - 1))) / SHADES;
}

static void print_cells(FILE *to, const report_data *d, const report_layers *l, double min, double max) {
    for (size_t row = 0; row < l->rows; row++) {
        for (size_t i = 0; i < l->columns; i++) {
            double bits = l->bits[row * l->columns + i];
            if (bits > 0) {
                fprintf(to,
                        "<rect class=\"cell\" x=\"%zu\" y=\"%zu\" width=\"1.02\" height=\"19\" "
                        "fill-opacity=\"%.2f\"><title>",
                        i, row * ROW, shade_of(bits, min, max));
                html_text(to, l->names[row]);
                fprintf(to, ", %s: %s bits</title></rect>\n",
                        cli_ref_text_of(&d->report->by_checkpoint[l->checkpoints[i]]).text,
                        cli_text_number(bits).text);
            }
        }
    }
}

static void print_legend(FILE *to, double min, double max) {
    fputs("<ul class=\"legend\"><li>", to);
    fprintf(to, "%s ", cli_text_number(min).text);
    for (int i = 1; i <= SHADES; i++) {
        fprintf(to, "<b style=\"opacity:%.2f\"></b>", (double)i / SHADES);
    }
    fprintf(to, " %s bits per element</li></ul></figure>\n", cli_text_number(max).text);
}

/* False if there are no weights to draw. */
static bool print_map(FILE *to, const report_data *d, const report_layers *l) {
    double min, max;
    find_range(l, &min, &max);
    if (!(max > 0)) {
        return false;
    }
    fputs("<figure><figcaption>Bits by layer: ", to);
    html_text(to, l->growth->run->name);
    fputs("<small>Stored bits per element of the weights, by layer and step.", to);
    if (l->columns < l->growth->run->checkpoints) {
        fprintf(to, " %zu of %" PRIu64 " checkpoints.", l->columns, l->growth->run->checkpoints);
    }
    fputs("</small></figcaption>\n<div class=\"heat\"><ol aria-hidden=\"true\">", to);
    for (size_t row = 0; row < l->rows; row++) {
        fputs("<li>", to);
        html_text(to, l->names[row]);
        fputs("</li>", to);
    }
    fprintf(
        to,
        "</ol>\n<svg viewBox=\"0 0 %zu %zu\" preserveAspectRatio=\"none\" style=\"height:%zupx\" role=\"img\" "
        "aria-label=\"Stored bits per element of weights, by layer and step\">\n",
        l->columns, l->rows * ROW, l->rows * ROW);
    print_cells(to, d, l, min, max);
    fprintf(to,
            "</svg></div>\n<div class=\"ends\"><span></span><span>step %" PRIu64 " to %" PRIu64
            "</span></div>\n",
            l->growth->first->step, l->growth->last->step);
    print_legend(to, min, max);
    return true;
}

void report_heat_maps(FILE *to, const report_data *d) {
    size_t drawn = 0;
    /* A single checkpoint has a map only if no run has more. */
    for (int columns_min = 2; columns_min > 0 && drawn == 0; columns_min--) {
        for (size_t i = 0; i < d->details.layers_count && drawn < MAPS; i++) {
            if (d->details.layers[i].columns >= (size_t)columns_min) {
                drawn += print_map(to, d, &d->details.layers[i]);
            }
        }
    }
}
