/* Parts of a page that stands alone: no scripts, nothing from outside, light or dark as the reader has it. */
#ifndef CLI_HTML_H
#define CLI_HTML_H

#include <stdio.h>

#include "cli/output/text.h"

/* Text that may come from anywhere, for content and for quoted attributes. Bytes that are not UTF-8 become '?'. */
void html_text(FILE *to, const char *text);
/* From the first byte up to the title's <h1>, and the end. What html_page_begin writes first tells such a page from other files. */
#define HTML_PAGE_MARK "<!doctype html>\n<!-- ckptdelta -->\n"
void html_page_begin(FILE *to, const char *title);
void html_page_end(FILE *to);

/*
 * A chart of values above 0 over a number of places, from left to right. Its vertical axis is logarithmic, in powers of two. Shapes stretch with the
 * page, text does not.
 */
typedef struct html_chart {
    FILE *to;
    size_t places;
    int low, high, every; /* exponents of two of the axis; lines at every so many */
} html_chart;
typedef cli_text (*html_label_fn)(double value);
/* least, most: of all values to come. left, right: what stands under the first and the last place. */
void html_chart_begin(html_chart *c, FILE *to, const char *title, size_t places, double least, double max,
                      html_label_fn label);
/* A dot of series 1 ... 5; `about` is shown when it is pointed at. */
void html_chart_dot(const html_chart *c, size_t place, double value, int series, const char *about);
/* A line through the values; where they are 0 or NaN it is interrupted. */
void html_chart_line(const html_chart *c, const double *values, int series);
void html_chart_end(const html_chart *c, const char *left, const char *right);
/* What the series' colours mean: of each name, the number stands before it, as in "1base|2delta". */
void html_legend(FILE *to, const char *names);

#endif
