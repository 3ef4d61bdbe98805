/* Parses a layout's text: lines, words, and checks of the whole. */
#include "cli/layout/parse.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ITEMS_MAX 65536 /* rules, files, ...; a larger number is a mistake */

/* ---- errors ---- */

static ckd_status say(const layout *l, uint32_t line, ckd_error *err, ckd_status status, const char *format,
                      va_list args) {
    char message[sizeof(err->message)];
    vsnprintf(message, sizeof(message), format, args);
    size_t length = strlen(l->path), shown = length < 120 ? length : 120;
    const char *path = l->path + length - shown; /* the end of a path is the most informative part */
    return line ? cli_error(err, status, "%s:%u: %s", path, line, message)
                : cli_error(err, status, "%s: %s", path, message);
}

ckd_status layout_error(const layout *l, uint32_t line, ckd_error *err, ckd_status status, const char *format,
                        ...) {
    va_list args;
    va_start(args, format);
    say(l, line, err, status, format, args);
    va_end(args);
    return status;
}

ckd_status layout_invalid(layout_parsing *p, const char *format, ...) {
    va_list args;
    va_start(args, format);
    say(p->l, p->line, p->err, CKD_E_INVALID, format, args);
    va_end(args);
    return CKD_E_INVALID;
}

/* ---- helpers ---- */

bool layout_is_name(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        bool letter = (text[i] >= 'a' && text[i] <= 'z') || (text[i] >= 'A' && text[i] <= 'Z');
        bool other = (text[i] >= '0' && text[i] <= '9') || text[i] == '_' || text[i] == '-';
        if (!letter && !(other && i > 0)) {
            return false;
        }
    }
    return length > 0 && length < LAYOUT_NAME;
}

uint32_t layout_find_axis(const layout *l, const char *name, size_t length) {
    for (uint32_t i = 0; i < l->axis_count; i++) {
        if (strlen(l->axes[i].name) == length && memcmp(l->axes[i].name, name, length) == 0) {
            return i;
        }
    }
    return LAYOUT_AXES;
}

ckd_status layout_parse_over(layout_over *out, layout_parsing *p, const char *text) {
    *out = (layout_over){.places = 1};
    for (const char *at = text; at;) {
        const char *comma = strchr(at, ',');
        size_t length = comma ? (size_t)(comma - at) : strlen(at);
        uint32_t axis = layout_find_axis(p->l, at, length);
        if (axis == LAYOUT_AXES) {
            return layout_invalid(p, "over= names axes of the mesh; it has none called '%.*s'", (int)length,
                                  at);
        }
        for (uint32_t i = 0; i < out->count; i++) {
            if (out->axes[i] == axis) {
                return layout_invalid(p, "over= names axis %s twice", p->l->axes[axis].name);
            }
        }
        out->axes[out->count++] = (uint8_t)axis;
        out->places *= p->l->axes[axis].size;
        at = comma ? comma + 1 : NULL;
    }
    return CKD_OK;
}

bool layout_next_number(uint64_t *out, const char **text, char mark) {
    const char *at = *text;
    uint64_t value = 0;
    size_t digits = strspn(at, "0123456789");
    for (size_t i = 0; i < digits; i++) {
        if (__builtin_mul_overflow(value, 10u, &value) ||
            __builtin_add_overflow(value, (uint64_t)(at[i] - '0'), &value)) {
            return false;
        }
    }
    if (digits == 0 || (at[digits] && at[digits] != mark) || (at[digits] && !at[digits + 1])) {
        return false;
    }
    *out = value;
    *text = at + digits + (at[digits] ? 1 : 0);
    return true;
}

ckd_status layout_parse_numbers(uint64_t **out, size_t *count, layout_parsing *p, const char *option,
                                const char *text) {
    size_t capacity = 1;
    for (const char *at = text; *at; at++) {
        capacity += *at == ',';
    }
    uint64_t *numbers = calloc(capacity, sizeof(*numbers));
    if (!numbers) {
        return cli_error_nomem(p->err);
    }
    size_t n = 0;
    for (const char *at = text; n < capacity; n++) {
        if (!layout_next_number(&numbers[n], &at, ',') || numbers[n] > CKD_MAX_ELEMENTS) {
            free(numbers);
            return layout_invalid(p, "%s= is a list of numbers such as 3,3,2, not '%.100s'", option, text);
        }
    }
    free(*out);
    *out = numbers;
    *count = n;
    return CKD_OK;
}

void *layout_append(layout_parsing *p, void *array, size_t *count, size_t size) {
    void **place = array;
    if (*count >= ITEMS_MAX) {
        layout_invalid(p, "there can be at most %u of these", ITEMS_MAX);
        return NULL;
    }
    char *grown = realloc(*place, (*count + 1) * size);
    if (!grown) {
        cli_error_nomem(p->err);
        return NULL;
    }
    *place = grown;
    memset(grown + *count * size, 0, size);
    return grown + (*count)++ * size;
}

/* ---- lines ---- */

static ckd_status parse_line(layout_parsing *p) {
    static const struct {
        const char *word;
        ckd_status (*parse)(layout_parsing *p);
    } kinds[] = {{"mesh", layout_parse_mesh},
                 {"files", layout_parse_files},
                 {"state", layout_parse_state},
                 {"number", layout_parse_number},
                 {"list", layout_parse_list}};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strcmp(p->words[0], kinds[i].word) == 0) {
            if (i > 0 && p->l->axis_count == 0) {
                break;
            }
            if (p->l->rule_count > 0) {
                return layout_invalid(p, "%s must come before all rules", kinds[i].word);
            }
            return kinds[i].parse(p);
        }
    }
    if (p->l->axis_count == 0) {
        return layout_invalid(p, "the first line describes the mesh, for example: mesh pp=2 tp=4");
    }
    return layout_parse_rule(p);
}

/* Splits the line at blanks. A # at the start of a word starts a comment. */
static ckd_status split_line(layout_parsing *p, char *line) {
    p->count = 0;
    char *rest = line;
    for (char *word = strtok_r(line, " \t\r\f\v", &rest); word && *word != '#';
         word = strtok_r(NULL, " \t\r\f\v", &rest)) {
        if (p->count == LAYOUT_WORDS) {
            return layout_invalid(p, "the line has more than %d words", LAYOUT_WORDS);
        }
        p->words[p->count++] = word;
    }
    return p->count ? parse_line(p) : CKD_OK;
}

/* Adds ckptdelta's own names of states. They come after the layout's names. */
static ckd_status add_default_states(layout_parsing *p) {
    static const char *const names[] = {"exp_avg.*", "exp_avg_sq.*", "max_exp_avg_sq.*", "master.*"};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && status == CKD_OK; i++) {
        p->words[0] = (char[]){"state"};
        p->words[1] = p->words[2] = (char *)names[i];
        p->count = 3;
        status = layout_parse_state(p);
    }
    return status;
}

static ckd_status parse_text(layout_parsing *p, char *text, size_t size) {
    if (memchr(text, '\0', size)) {
        return layout_error(p->l, 0, p->err, CKD_E_INVALID, "a layout is text; this has a zero byte");
    }
    ckd_status status = CKD_OK;
    for (char *line = text; line && status == CKD_OK;) {
        char *end = strchr(line, '\n');
        if (end) {
            *end = '\0';
        }
        p->line++;
        status = split_line(p, line);
        line = end ? end + 1 : NULL;
    }
    if (status == CKD_OK && p->l->rule_count == 0) {
        status = layout_error(p->l, 0, p->err, CKD_E_INVALID,
                              "the layout has no rules; each is a line: REGEX KIND OPTIONS");
    }
    THEN(status, add_default_states(p));
    return status == CKD_OK ? layout_flat_check_states(p) : status;
}

ckd_status layout_parse(layout **out, const char *text, size_t size, const char *path, ckd_error *err) {
    *out = NULL;
    layout *l = calloc(1, sizeof(*l));
    char *copy = malloc(size + 1);
    if (l) {
        l->path = strdup(path);
    }
    if (!l || !l->path || !copy) {
        layout_release(l);
        free(copy);
        return cli_error_nomem(err);
    }
    memcpy(copy, text, size);
    copy[size] = '\0';
    layout_parsing p = {.l = l, .err = err};
    ckd_status status =
        size > LAYOUT_TEXT_MAX
            ? layout_error(l, 0, err, CKD_E_INVALID, "a layout has at most %u bytes", LAYOUT_TEXT_MAX)
            : parse_text(&p, copy, size);
    free(copy);
    if (status != CKD_OK) {
        layout_release(l);
        return status;
    }
    *out = l;
    return CKD_OK;
}

ckd_status layout_read(layout **out, const char *path, ckd_error *err) {
    *out = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return cli_error_sys(err, errno, path, "cannot open the layout");
    }
    char *text = malloc(LAYOUT_TEXT_MAX + 1);
    size_t size = 0;
    ssize_t n = 1;
    while (text && n > 0 && size < LAYOUT_TEXT_MAX + 1) {
        n = read(fd, text + size, LAYOUT_TEXT_MAX + 1 - size);
        if (n < 0 && errno == EINTR) {
            n = 1;
        } else if (n > 0) {
            size += (size_t)n;
        }
    }
    int failed = errno;
    close(fd);
    ckd_status status = !text   ? cli_error_nomem(err)
                        : n < 0 ? cli_error_sys(err, failed, path, "cannot read the layout")
                                : layout_parse(out, text, size, path, err);
    free(text);
    return status;
}

void layout_release(layout *l) {
    if (!l) {
        return;
    }
    for (size_t i = 0; i < l->file_count; i++) {
        layout_template_free(&l->files[i].end);
    }
    for (size_t i = 0; i < l->state_count; i++) {
        free(l->states[i].local_before);
        free(l->states[i].local_after);
        free(l->states[i].global_before);
        free(l->states[i].global_after);
    }
    for (size_t i = 0; i < l->number_count; i++) {
        free(l->numbers[i].numbers);
        free(l->numbers[i].begin);
    }
    for (size_t i = 0; i < l->list_count; i++) {
        layout_list_free(&l->lists[i]);
    }
    for (size_t i = 0; i < l->rule_count; i++) {
        layout_rule_free(&l->rules[i]);
    }
    free(l->files);
    free(l->states);
    free(l->numbers);
    free(l->lists);
    free(l->rules);
    free(l->path);
    free(l);
}
