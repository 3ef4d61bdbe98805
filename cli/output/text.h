/* Figures as people read them. */
#ifndef CLI_TEXT_H
#define CLI_TEXT_H

#include <stdint.h>
#include <stdio.h>

typedef struct cli_text {
    char text[48];
} cli_text;

/* "512 B", "12.3 MiB" */
cli_text cli_text_size(uint64_t bytes);
/* "1.31x"; "-" if there is nothing to compare */
cli_text cli_text_ratio(uint64_t raw, uint64_t stored);
/* "2 s", "3 min 20 s", "1 h 12 min" */
cli_text cli_text_duration(double seconds);
/* "2026-01-31T23:59:59Z" from nanoseconds since 1970 */
cli_text cli_text_time(uint64_t nanoseconds);
/* Short decimal: "0.25", "1.3e-07"; "-" for NaN */
cli_text cli_text_number(double value);

/* Columns that UTF-8 text takes, counting every code point as one. */
size_t cli_text_width(const char *text);
/*
 * Prints text with the bytes of control characters as \xNN, also of those that change the direction of writing or have no
 * width, and of what is no UTF-8: names come from files, and must not steer the terminal or look like others.
 */
void cli_print_clean(FILE *to, const char *text);
/* Hands JSON on, with such characters of its strings as \uXXXX, which mean the same to a parser. */
typedef void (*cli_put_fn)(void *to, const char *text, size_t size);
void cli_put_json(cli_put_fn put, void *to, const char *text, size_t size);
/* The same as cli_print_clean into a new string, NULL if out of memory. */
char *cli_clean_copy(const char *text);
/* The same, with these ASCII characters as they are. */
char *cli_clean_but(const char *text, const char *kept);

#endif
