/*
 * Tables as aligned text or as HTML. All cells are kept until the table is printed, because each column is as wide as
 * its widest cell.
 */
#include "cli/output/output.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_COLUMNS 20

struct cli_table {
    size_t columns;
    bool right[MAX_COLUMNS];
    size_t width[MAX_COLUMNS];
    char **cells;
    size_t count, capacity;
    bool failed;
};

/* Takes ownership of the text. */
static void append(cli_table *t, char *text) {
    if (t->count == t->capacity) {
        size_t capacity = t->capacity ? 2 * t->capacity : 64;
        char **cells = realloc(t->cells, capacity * sizeof(*cells));
        if (!cells) {
            t->failed = true;
            free(text);
            return;
        }
        t->cells = cells;
        t->capacity = capacity;
    }
    size_t column = t->count % t->columns, width = cli_text_width(text);
    if (width > t->width[column]) {
        t->width[column] = width;
    }
    t->cells[t->count++] = text;
}

static void append_clean(cli_table *t, const char *text) {
    char *clean = cli_clean_copy(text);
    if (clean) {
        append(t, clean);
    } else {
        t->failed = true;
    }
}

cli_table *cli_table_new(const char *columns) {
    cli_table *t = calloc(1, sizeof(*t));
    char *names = strdup(columns);
    if (!t || !names) {
        free(t);
        free(names);
        return NULL;
    }
    char *next = names;
    for (const char *c = columns; *c; c++) {
        t->columns += *c == '|';
    }
    t->columns++;
    for (size_t i = 0; i < t->columns && i < MAX_COLUMNS; i++) {
        char *name = strsep(&next, "|");
        t->right[i] = name[0] == '>';
        append_clean(t, name + t->right[i]);
    }
    free(names);
    return t;
}

void cli_table_cell(cli_table *t, const char *format, ...) {
    if (!t || t->failed) {
        return;
    }
    char *text;
    va_list args;
    va_start(args, format);
    int length = vasprintf(&text, format, args);
    va_end(args);
    if (length < 0) {
        t->failed = true;
        return;
    }
    append_clean(t, text);
    free(text);
}

static void print_row(const cli_table *t, char *const *cells) {
    for (size_t i = 0; i < t->columns; i++) {
        int padding = (int)(t->width[i] - cli_text_width(cells[i]));
        bool last = i + 1 == t->columns;
        if (t->right[i]) {
            printf("%*s%s", padding, "", cells[i]);
        } else {
            printf("%s%*s", cells[i], last ? 0 : padding, "");
        }
        fputs(last ? "\n" : "  ", stdout);
    }
}

/* Columns aligned to the right contain numbers. */
static void print_html_row(FILE *to, const cli_table *t, char *const *cells, const char *tag) {
    fputs("<tr>", to);
    for (size_t i = 0; i < t->columns; i++) {
        fprintf(to, t->right[i] ? "<%s class=\"n\">" : "<%s>", tag);
        html_text(to, cells[i]);
        fprintf(to, "</%s>", tag);
    }
    fputs("</tr>\n", to);
}

static ckd_status free_table(cli_table *t, ckd_error *err) {
    bool failed = t->failed;
    for (size_t i = 0; i < t->count; i++) {
        free(t->cells[i]);
    }
    free(t->cells);
    free(t);
    return failed ? cli_error_nomem(err) : CKD_OK;
}

ckd_status cli_table_print_html(FILE *to, cli_table *t, ckd_error *err) {
    if (!t) {
        return cli_error_nomem(err);
    }
    if (!t->failed && t->count > t->columns) {
        fputs("<div class=\"wide\" tabindex=\"0\"><table>\n<thead>", to);
        print_html_row(to, t, t->cells, "th");
        fputs("</thead>\n<tbody>\n", to);
        for (size_t i = t->columns; i + t->columns <= t->count; i += t->columns) {
            print_html_row(to, t, t->cells + i, "td");
        }
        fputs("</tbody></table></div>\n", to);
    }
    return free_table(t, err);
}

void cli_table_checkpoint(cli_table *t, const char *run, uint64_t step) {
    cli_table_cell(t, "%s", run);
    cli_table_cell(t, "%" PRIu64, step);
}

void cli_table_sizes(cli_table *t, uint64_t raw, uint64_t stored) {
    cli_table_cell(t, "%s", cli_text_size(raw).text);
    cli_table_cell(t, "%s", cli_text_size(stored).text);
}

void cli_table_known_size(cli_table *t, uint64_t size) {
    cli_table_cell(t, "%s", size ? cli_text_size(size).text : "-");
}

ckd_status cli_table_print(cli_table *t, ckd_error *err) {
    if (!t) {
        return cli_error_nomem(err);
    }
    bool empty = t->failed || t->count <= t->columns;
    for (size_t i = 0; i + t->columns <= t->count && !empty; i += t->columns) {
        print_row(t, t->cells + i);
    }
    return free_table(t, err);
}
