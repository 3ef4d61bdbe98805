#include "cli/text.h"

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
    /* 1023.95 would be printed as 1024.0 */
    while (value >= 1023.95 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        value /= 1024;
        unit++;
    }
    snprintf(out.text, sizeof(out.text), "%.1f %s", value, units[unit]);
    return out;
}

cli_text cli_text_ratio(uint64_t raw, uint64_t stored) {
    cli_text out = {"-"};
    if (raw && stored) {
        double ratio = (double)raw / (double)stored;
        snprintf(out.text, sizeof(out.text), ratio < 99.995 ? "%.2fx" : "%.0fx", ratio);
    }
    return out;
}

cli_text cli_text_duration(double seconds) {
    cli_text out;
    if (!(seconds < 1e9)) {
        snprintf(out.text, sizeof(out.text), "long");
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

/* C0, DEL, and the C1 range, which UTF-8 writes as c2 80 ... c2 9f. */
static bool is_control(const unsigned char *at) {
    return at[0] < 0x20 || at[0] == 0x7f || (at[0] == 0xc2 && at[1] >= 0x80 && at[1] < 0xa0);
}

char *cli_clean_copy(const char *text) {
    char *out = malloc(4 * strlen(text) + 1);
    if (!out) {
        return NULL;
    }
    char *to = out;
    for (const unsigned char *at = (const unsigned char *)text; *at; at++) {
        if (is_control(at)) {
            to += sprintf(to, "\\x%02x", *at);
            if (*at == 0xc2) {
                to += sprintf(to, "\\x%02x", *++at);
            }
        } else {
            *to++ = (char)*at;
        }
    }
    *to = '\0';
    return out;
}

void cli_print_clean(FILE *to, const char *text) {
    char *clean = cli_clean_copy(text);
    fputs(clean ? clean : "(out of memory)", to);
    free(clean);
}
