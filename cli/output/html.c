/* The frame of an HTML page: its style, and escaped text. The style is in the page, as a page uses no other file. */
#include "cli/output/output.h"

#include <stdlib.h>
#include <string.h>

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
    "--s1:#1d5fd6;--s2:#a94d05;--s3:#04795a;--s4:#7434d8;--s5:#b9123b;--s6:#5c6500}\n"
    "@media(prefers-color-scheme:dark){:root{--page:#14171c;--card:#1d2128;--line:#3a414b;--text:#e6e9ee;--soft:#a3abb5;"
    "--s1:#7ab0ff;--s2:#f0b35c;--s3:#4fd1a5;--s4:#c4a1ff;--s5:#ff8fa3;--s6:#c9d35a}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:72rem;background:var(--page);color:var(--text);"
    "font:1rem/1.5 system-ui,sans-serif}\n"
    "h1{font-size:1.3rem;margin:0}h2{font-size:1.15rem;margin:2.2rem 0 .6rem}\n"
    "h1,p,td,figcaption{overflow-wrap:anywhere}\n"
    "p{margin:.3rem 0}.soft,figcaption small{color:var(--soft)}\n"
    ".hero{font-size:clamp(1.7rem,6vw,2.8rem);font-weight:700;line-height:1.15;margin:1.2rem 0 .3rem}\n"
    ".share{height:1.1rem;border-radius:.55rem;overflow:hidden;background:var(--line);margin:.9rem 0 .3rem}\n"
    ".share div{height:100%;background:var(--s1)}\n"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.7rem;margin:1.2rem 0;padding:0}\n"
    ".tiles div{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem;min-width:0}\n"
    ".tiles dt{color:var(--soft);font-size:.85rem}.tiles dd{margin:0;font-size:1.25rem;font-weight:600;overflow-wrap:anywhere}\n"
    ".charts{margin-top:1.2rem;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1rem}\n"
    "figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem;min-width:0}\n"
    ".full{grid-column:1/-1}\n"
    "figcaption{font-weight:600;margin-bottom:.6rem}figcaption small{display:block;font-weight:400}\n"
    ".plot{display:grid;grid-template-columns:4.8rem minmax(0,1fr);padding:.5rem .8rem 0 0}\n"
    ".ys{position:relative;font-size:.8rem;color:var(--soft)}\n"
    ".ys span{position:absolute;right:.5rem;transform:translateY(50%);white-space:nowrap}\n"
    ".plot svg{width:100%;height:14rem;display:block;overflow:visible}\n"
    ".xs{position:relative;height:1.3rem;margin:.3rem .8rem 0 4.8rem;font-size:.8rem;color:var(--soft)}\n"
    ".xs span{position:absolute;transform:translateX(-50%);white-space:nowrap}\n"
    ".ends{display:flex;justify-content:space-between;gap:1rem;margin:.3rem .8rem 0 4.8rem;font-size:.8rem;color:var(--soft)}\n"
    ".ends span{flex:1 1 0;min-width:0;overflow-wrap:anywhere}.ends span:last-child{text-align:right}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;margin:.6rem 0 0;padding:0;font-size:.85rem;overflow-wrap:anywhere}\n"
    ".legend i{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.4em;background:currentColor}\n"
    "svg *{vector-effect:non-scaling-stroke;fill:none}\n"
    ".grid{stroke:var(--line);stroke-width:1}.dot{stroke-width:5;stroke-linecap:round}.lanes .dot{stroke-width:8}.curve{stroke-width:2;stroke-linejoin:round}\n"
    ".link{stroke:var(--soft);stroke-width:1.5}.area{fill:var(--s1);fill-opacity:.45}.gap{fill:var(--s3);fill-opacity:.16}\n"
    ".s1{stroke:var(--s1)}.s2{stroke:var(--s2)}.s3{stroke:var(--s3)}.s4{stroke:var(--s4)}.s5{stroke:var(--s5)}.s6{stroke:var(--s6)}\n"
    ".c1{color:var(--s1)}.c2{color:var(--s2)}.c3{color:var(--s3)}.c4{color:var(--s4)}.c5{color:var(--s5)}.c6{color:var(--s6)}\n"
    ".heat{display:grid;grid-template-columns:fit-content(min(11rem,45%)) minmax(0,1fr);gap:.5rem}\n"
    ".heat svg{width:100%;display:block}.heat ol{list-style:none;margin:0;padding:0;font-size:.75rem;color:var(--soft)}\n"
    ".heat li{height:1.25rem;line-height:1.25rem;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;text-align:right}\n"
    ".heat+.ends{margin-left:0}.cell{fill:var(--s1)}.legend b{display:inline-block;width:1.2em;height:.8em;background:var(--s1)}\n"
    ".lanes{position:relative;margin:0 .7rem}.lanes svg{width:100%;display:block;overflow:visible}\n"
    ".lanes span{position:absolute;left:0;max-width:100%;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;font-size:.85rem}\n"
    ".lanes .tag{color:var(--s2);font-size:.75rem;max-width:40%}\n"
    ".bar{stroke-width:16}.thin{stroke-width:5}.again{stroke:var(--soft);stroke-width:4;stroke-dasharray:2 2}.save{stroke:var(--text);stroke-width:1.5}\n"
    ".done,.running{stroke:var(--s3)}.running{stroke-dasharray:1 2}.stopped{stroke:var(--s1);stroke-dasharray:9 3}"
    ".failed{stroke:var(--s5);stroke-dasharray:3 2}.hung{stroke:var(--s2);stroke-dasharray:12 2 2 2}"
    ".unhealthy{stroke:var(--s4);stroke-dasharray:6 2 2 2}.lost{stroke:var(--soft);stroke-dasharray:6 6}\n"
    ".life .tag{color:var(--soft)}.key{width:2.2rem;height:1rem;vertical-align:-.15rem;margin-right:.4rem}\n"
    ".lanes+.xs{margin-left:.7rem;margin-right:.7rem}\n"
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
