/*
 * Numbers, sizes and times for people, and names made safe to print. Names come from files, and must not control the
 * terminal.
 */
#include "cli/output/output.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

cli_text cli_text_size(uint64_t bytes) {
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    cli_text out;
    if (bytes < 1024) {
        snprintf(out.text, sizeof(out.text), "%u B", (unsigned)bytes);
        return out;
    }
    double value = (double)bytes / 1024;
    size_t unit = 0;
    /* 1023.95 would be rounded to 1024.0 */
    while (value >= 1023.95 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        value /= 1024;
        unit++;
    }
    snprintf(out.text, sizeof(out.text), "%.1f %s", value, units[unit]);
    return out;
}

const char *cli_plural(uint64_t count) {
    return count == 1 ? "" : "s";
}

cli_text cli_text_ratio(uint64_t raw, uint64_t stored) {
    cli_text out = {"-"};
    if (raw && stored) {
        double ratio = (double)raw / (double)stored;
        snprintf(out.text, sizeof(out.text), ratio < 99.995 ? "%.2fx" : "%.0fx", ratio);
    }
    return out;
}

#define DAY_S (24 * 3600.0)

cli_text cli_text_duration(double seconds) {
    cli_text out;
    if (!isfinite(seconds)) {
        snprintf(out.text, sizeof(out.text), "long");
        return out;
    }
    if (seconds >= 100 * DAY_S) {
        snprintf(out.text, sizeof(out.text), "%.0f days", seconds / DAY_S);
        return out;
    }
    unsigned long whole = (unsigned long)(seconds + 0.5);
    if (whole < 60) {
        snprintf(out.text, sizeof(out.text), "%lu s", whole);
    } else if (whole < 3600) {
        snprintf(out.text, sizeof(out.text), "%lu min %lu s", whole / 60, whole % 60);
    } else {
        snprintf(out.text, sizeof(out.text), "%lu h %lu min", whole / 3600, whole / 60 % 60);
    }
    return out;
}

cli_text cli_text_time(uint64_t nanoseconds) {
    cli_text out;
    time_t seconds = (time_t)(nanoseconds / 1000000000u);
    struct tm utc;
    if (!gmtime_r(&seconds, &utc) || strftime(out.text, sizeof(out.text), "%Y-%m-%dT%H:%M:%SZ", &utc) == 0) {
        snprintf(out.text, sizeof(out.text), "?");
    }
    return out;
}

cli_text cli_text_number(double value) {
    cli_text out = {"-"};
    if (!isnan(value)) {
        snprintf(out.text, sizeof(out.text), "%.3g", value);
    }
    return out;
}

size_t cli_text_width(const char *text) {
    size_t width = 0;
    for (; *text; text++) {
        width += ((unsigned char)*text & 0xc0) != 0x80;
    }
    return width;
}

/* Returns the number of bytes of the code point at `at`; 0 if it is not UTF-8. */
static size_t code_point(uint32_t *out, const unsigned char *at) {
    static const uint32_t min[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t size = at[0] < 0x80   ? 1
                  : at[0] < 0xc2 ? 0
                  : at[0] < 0xe0 ? 2
                  : at[0] < 0xf0 ? 3
                  : at[0] < 0xf5 ? 4
                                 : 0;
    *out = size < 2 ? at[0] : at[0] & (0x7fu >> size);
    for (size_t i = 1; i < size; i++) {
        if ((at[i] & 0xc0) != 0x80) {
            return 0;
        }
        *out = *out << 6 | (at[i] & 0x3fu);
    }
    bool surrogate = *out >= 0xd800 && *out < 0xe000;
    return size && *out >= min[size] && *out <= 0x10ffff && !surrogate ? size : 0;
}

char *cli_utf8_copy(const char *text) {
    char *copy = strdup(text);
    for (char *at = copy; at && *at;) {
        uint32_t c;
        size_t size = code_point(&c, (const unsigned char *)at);
        *at = size ? *at : '?';
        at += size ? size : 1;
    }
    return copy;
}

/*
 * Terminal controls (C0, DEL, C1), and characters that change how others are displayed: writing direction, line ends,
 * zero width.
 */
static bool is_control(uint32_t c) {
    static const struct {
        uint32_t first, last;
    } ranges[] = {{0, 0x1f},        {0x7f, 0x9f},     {0xad, 0xad},       {0x61c, 0x61c},
                  {0x180e, 0x180e}, {0x200b, 0x200f}, {0x2028, 0x202e},   {0x2060, 0x206f},
                  {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0x1d173, 0x1d17a}, {0xe0000, 0xe007f}};
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        if (c >= ranges[i].first && c <= ranges[i].last) {
            return true;
        }
    }
    return false;
}

char *cli_clean_but(const char *text, const char *allowed) {
    char *out = malloc(4 * strlen(text) + 1);
    if (!out) {
        return NULL;
    }
    char *to = out;
    for (const unsigned char *at = (const unsigned char *)text; *at;) {
        uint32_t c;
        size_t size = code_point(&c, at);
        bool shown = size && (!is_control(c) || (c < 0x80 && strchr(allowed, (int)c)));
        for (size_t i = 0; i < (size ? size : 1); i++, at++) {
            to += shown ? sprintf(to, "%c", *at) : sprintf(to, "\\x%02x", *at);
        }
    }
    *to = '\0';
    return out;
}

char *cli_clean_copy(const char *text) {
    return cli_clean_but(text, "");
}

/* jansson has escaped everything below a space, and never splits a code point between two calls. */
void cli_put_json(cli_put_fn put, void *to, const char *text, size_t size) {
    size_t begin = 0;
    for (size_t at = 0; at < size;) {
        uint32_t c;
        size_t length = code_point(&c, (const unsigned char *)text + at);
        length = length ? length : 1;
        if (c >= 0x7f && length <= size - at && is_control(c)) {
            char escaped[16];
            bool pair = c > 0xffff;
            int made = pair ? snprintf(escaped, sizeof(escaped), "\\u%04x\\u%04x",
                                       (unsigned)(0xd7c0 + (c >> 10)), (unsigned)(0xdc00 + (c & 0x3ff)))
                            : snprintf(escaped, sizeof(escaped), "\\u%04x", (unsigned)c);
            put(to, text + begin, at - begin);
            put(to, escaped, (size_t)made);
            begin = at + length;
        }
        at += length;
    }
    put(to, text + begin, size - begin);
}

void cli_print_clean(FILE *to, const char *text) {
    char *clean = cli_clean_copy(text);
    fputs(clean ? clean : "(out of memory)", to);
    free(clean);
}

void cli_print_word(FILE *to, const char *text) {
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789@%+=:,./_-";
    if (*text && !text[strspn(text, plain)]) {
        fputs(text, to);
        return;
    }
    char *clean = cli_clean_copy(text);
    fputc('\'', to);
    for (const char *at = clean ? clean : "(out of memory)"; *at; at++) {
        if (*at == '\'') {
            fputs("'\\''", to);
        } else {
            fputc(*at, to);
        }
    }
    fputc('\'', to);
    free(clean);
}
