#include "cli/output/output.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WIDTH  1000 /* of the drawing, before it is stretched */
#define HEIGHT 300
#define LINES  6 /* grid lines, at most */
#define LABELS "<div class=\"ys\" aria-hidden=\"true\">"

/* ---- text ---- */

static void put_escaped(FILE *to, const char *text) {
    for (; *text; text++) {
        switch (*text) {
        case '&':
            fputs("&amp;", to);
            break;
        case '<':
            fputs("&lt;", to);
            break;
        case '>':
            fputs("&gt;", to);
            break;
        case '"':
            fputs("&quot;", to);
            break;
        case '\'':
            fputs("&#39;", to);
            break;
        default:
            fputc(*text, to);
        }
    }
}

void html_text(FILE *to, const char *text) {
    char *clean = cli_clean_copy(text);
    json_t *valid = clean ? cli_json_text(clean) : NULL;
    put_escaped(to, valid ? json_string_value(valid) : "?");
    json_decref(valid);
    free(clean);
}

/* ---- the page ---- */

/* Text has a contrast of at least 4.5 to 1 with its background, in both colour schemes. */
static const char style[] =
    ":root{color-scheme:light dark;--page:#ffffff;--card:#f4f6f8;--line:#d3d9e0;--text:#1b1f24;--soft:#57606a;"
    "--s1:#1d5fd6;--s2:#a94d05;--s3:#04795a;--s4:#7434d8;--s5:#b9123b}\n"
    "@media(prefers-color-scheme:dark){:root{--page:#14171c;--card:#1d2128;--line:#3a414b;--text:#e6e9ee;--soft:#a3abb5;"
    "--s1:#7ab0ff;--s2:#f0b35c;--s3:#4fd1a5;--s4:#c4a1ff;--s5:#ff8fa3}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:72rem;background:var(--page);color:var(--text);"
    "font:1rem/1.5 system-ui,sans-serif}\n"
    "h1{font-size:1.6rem;margin:0}h2{font-size:1.15rem;margin:2.2rem 0 .6rem}\n"
    "h1,p,td,figcaption{overflow-wrap:anywhere}\n"
    "p{margin:.3rem 0}.soft,figcaption small{color:var(--soft)}\n"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.7rem;margin:1.2rem 0;padding:0}\n"
    ".tiles div{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem;min-width:0}\n"
    ".tiles dt{color:var(--soft);font-size:.85rem}.tiles dd{margin:0;font-size:1.25rem;font-weight:600;overflow-wrap:anywhere}\n"
    ".charts{margin-top:1.2rem;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1rem}\n"
    "figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem;min-width:0}\n"
    "figcaption{font-weight:600;margin-bottom:.6rem}figcaption small{display:block;font-weight:400}\n"
    ".plot{display:grid;grid-template-columns:5rem minmax(0,1fr);padding-top:.5rem}\n"
    ".ys{position:relative;font-size:.8rem;color:var(--soft)}\n"
    ".ys span{position:absolute;right:.5rem;transform:translateY(50%);white-space:nowrap}\n"
    ".plot svg{width:100%;height:14rem;display:block;overflow:visible}\n"
    ".xs{display:flex;justify-content:space-between;gap:1rem;margin:.5rem 0 0 5rem;font-size:.8rem;color:var(--soft)}\n"
    ".xs span{flex:1 1 0;min-width:0;overflow-wrap:anywhere}.xs span:last-child{text-align:right}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;margin:.6rem 0 0;padding:0;font-size:.85rem}\n"
    ".legend i{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.4em;background:currentColor}\n"
    "svg *{vector-effect:non-scaling-stroke;fill:none}\n"
    ".grid{stroke:var(--line);stroke-width:1}.dot{stroke-width:5;stroke-linecap:round}.curve{stroke-width:2;stroke-linejoin:round}\n"
    ".link{stroke:var(--soft);stroke-width:1.5}\n"
    ".s1{stroke:var(--s1)}.s2{stroke:var(--s2)}.s3{stroke:var(--s3)}.s4{stroke:var(--s4)}.s5{stroke:var(--s5)}\n"
    ".c1{color:var(--s1)}.c2{color:var(--s2)}.c3{color:var(--s3)}.c4{color:var(--s4)}.c5{color:var(--s5)}\n"
    ".lanes{position:relative}.lanes svg{width:100%;display:block;overflow:visible}\n"
    ".lanes span{position:absolute;left:0;background:var(--card);padding-right:.4em;max-width:100%;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;font-size:.85rem}\n"
    ".wide{overflow-x:auto;border:1px solid var(--line);border-radius:.5rem}\n"
    "table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}\n"
    "th,td{padding:.35rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}\n"
    "tr:last-child td{border-bottom:0}th{color:var(--soft);font-weight:600;font-size:.75rem;letter-spacing:.03em;white-space:nowrap;"
    "background:var(--card)}\n"
    "td:first-child{min-width:7rem}.n{text-align:right;white-space:nowrap}\n";

void html_page_begin(FILE *to, const char *title) {
    fputs(HTML_PAGE_MARK "<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
                         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>",
          to);
    html_text(to, title);
    fprintf(to, "</title>\n<style>\n%s</style>\n</head>\n<body>\n<h1>", style);
    html_text(to, title);
    fputs("</h1>\n", to);
}

void html_page_end(FILE *to) {
    fputs("</body>\n</html>\n", to);
}

/* ---- charts ---- */

static double x_of(const html_chart *c, size_t place) {
    return ((double)place + 0.5) / (double)c->places * WIDTH;
}

static double y_of(const html_chart *c, double value) {
    return HEIGHT - (log2(value) - c->low) / (c->high - c->low) * HEIGHT;
}

/* Chooses exponents around the values, a whole number of grid steps apart. */
static void find_axis(html_chart *c, double min, double max) {
    c->low = (int)floor(log2(min));
    c->high = (int)ceil(log2(max));
    c->high += c->high == c->low;
    c->every = (c->high - c->low + LINES - 1) / LINES;
    c->high += (c->every - (c->high - c->low) % c->every) % c->every;
}

static void print_grid(const html_chart *c) {
    for (int e = c->low; e <= c->high; e += c->every) {
        double y = y_of(c, exp2(e));
        fprintf(c->to, "<line class=\"grid\" x1=\"0\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>\n", WIDTH, y, y);
    }
}

void html_chart_begin(html_chart *c, double min, double max) {
    FILE *to = c->to;
    find_axis(c, min, max);
    fputs("<div class=\"plot\">" LABELS, to);
    for (int e = c->low; e <= c->high; e += c->every) {
        fprintf(to, "<span style=\"bottom:%.2f%%\">", 100.0 * (e - c->low) / (c->high - c->low));
        html_text(to, c->label(exp2(e)).text);
        fputs("</span>", to);
    }
    fprintf(to, "</div>\n<svg viewBox=\"0 0 %d %d\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"",
            WIDTH, HEIGHT);
    html_text(to, c->title);
    fputs("\">\n", to);
    print_grid(c);
}

void html_chart_dot(const html_chart *c, size_t place, double value, int series, const char *about) {
    if (!(value > 0)) {
        return;
    }
    double x = x_of(c, place), y = y_of(c, value);
    fprintf(c->to, "<path class=\"dot s%d\" d=\"M%.1f %.1fh0\"><title>", series, x, y);
    html_text(c->to, about);
    fputs("</title></path>\n", c->to);
}

void html_chart_line(const html_chart *c, const double *values, int series) {
    bool drawing = false, any = false;
    for (size_t i = 0; i < c->places; i++) {
        any = any || values[i] > 0;
    }
    if (!any) {
        return;
    }
    fprintf(c->to, "<path class=\"curve s%d\" d=\"", series);
    for (size_t i = 0; i < c->places; i++) {
        if (values[i] > 0) {
            double x = x_of(c, i), y = y_of(c, values[i]);
            /* A single value is a line of length zero, with round ends. */
            fprintf(c->to, drawing ? "L%.1f %.1f" : "M%.1f %.1fh0", x, y);
        }
        drawing = values[i] > 0;
    }
    fputs("\" stroke-linecap=\"round\"/>\n", c->to);
}

void html_chart_end(const html_chart *c, const char *left, const char *right) {
    fputs("</svg></div>\n<div class=\"xs\"><span>", c->to);
    html_text(c->to, left);
    fputs("</span><span>", c->to);
    html_text(c->to, right);
    fputs("</span></div>\n", c->to);
}

void html_legend(FILE *to, const char *names) {
    fputs("<ul class=\"legend\">", to);
    while (*names) {
        int length = (int)strcspn(names, "|");
        fprintf(to, "<li><i class=\"c%c\"></i>%.*s</li>", names[0], length - 1, names + 1);
        names += length;
        names += *names == '|';
    }
    fputs("</ul>\n", to);
}
