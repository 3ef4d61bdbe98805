/* Numbers in human-readable form. */
#ifndef CLI_TEXT_H
#define CLI_TEXT_H

#include <stdint.h>
#include <stdio.h>

typedef struct cli_text {
    char text[48];
} cli_text;

/* "512 B", "12.3 MiB" */
cli_text cli_text_size(uint64_t bytes);
/* "1.31x"; "-" if undefined */
cli_text cli_text_ratio(uint64_t raw, uint64_t stored);
/* "2 s", "3 min 20 s", "1 h 12 min" */
cli_text cli_text_duration(double seconds);
/* "2026-01-31T23:59:59Z" from nanoseconds since 1970 */
cli_text cli_text_time(uint64_t nanoseconds);
/* Short decimal: "0.25", "1.3e-07"; "-" for NaN */
cli_text cli_text_number(double value);

/* Returns the columns that UTF-8 text takes, counting every code point as one. */
size_t cli_text_width(const char *text);
/*
 * Prints text with unsafe bytes as \xNN: control characters, characters that change the writing direction or have no
 * width, and invalid UTF-8. Names come from files; they must not steer the terminal or imitate other names.
 */
void cli_print_clean(FILE *to, const char *text);
/* Passes JSON on, with such characters in its strings as \uXXXX, which mean the same to a parser. */
typedef void (*cli_put_fn)(void *to, const char *text, size_t size);
void cli_put_json(cli_put_fn put, void *to, const char *text, size_t size);
/* As cli_print_clean, into a new string; NULL if out of memory. */
char *cli_clean_copy(const char *text);
/* As cli_clean_copy, with the ASCII characters of `kept` unchanged. */
char *cli_clean_but(const char *text, const char *kept);

#endif
