/*
 * Parts of a self-contained HTML page: no scripts, no external resources, light or dark as the reader's browser
 * prefers.
 */
#ifndef CLI_HTML_H
#define CLI_HTML_H

#include <stdio.h>

#include "cli/output/text.h"

/* Escapes text from any source, for content and quoted attributes. Bytes that are not UTF-8 become '?'. */
void html_text(FILE *to, const char *text);
/*
 * Writes the page up to and including the title's <h1>, and its end. HTML_PAGE_MARK at the start identifies our pages.
 */
#define HTML_PAGE_MARK "<!doctype html>\n<!-- ckptdelta -->\n"
void html_page_begin(FILE *to, const char *title);
void html_page_end(FILE *to);

/*
 * A chart of positive values over a number of places, from left to right. The vertical axis is logarithmic, in powers
 * of two. Shapes stretch with the page; text does not.
 */
typedef cli_text (*html_label_fn)(double value);
typedef struct html_chart {
    FILE *to; /* the caller sets these four */
    const char *title;
    size_t places;
    html_label_fn label;  /* of a value on the axis */
    int low, high, every; /* the axis's exponents of two; a grid line at every `every`-th one */
} html_chart;
/* Begins a chart. least, max: range of all values to come. */
void html_chart_begin(html_chart *c, double least, double max);
/* Draws a dot of series 1 ... 5; `about` is its tooltip. */
void html_chart_dot(const html_chart *c, size_t place, double value, int series, const char *about);
/* Draws a line through the values; it is interrupted where they are 0 or NaN. */
void html_chart_line(const html_chart *c, const double *values, int series);
/* left, right: labels under the first and the last place. */
void html_chart_end(const html_chart *c, const char *left, const char *right);
/* Writes a legend of the series' colours. names: each name preceded by its series' number, as in "1base|2delta". */
void html_legend(FILE *to, const char *names);

#endif
