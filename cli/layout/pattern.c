/*
 * Patterns: POSIX extended regular expressions, in which {layer} stands for a number. as= leads to two expressions: the
 * pattern as written for the ranks' names; and for the checkpoint's names, as= with the pattern's groups inserted. Each
 * side also gets a template, filled from the captures of the other side's expression.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/layout/parse.h"

#define DEPTH_MAX 16
#define REPEAT_MAX \
    1000 /* product of all {n,m}; otherwise an expression of a few bytes could take all memory */
#define NUMBER_RE "([0-9]+)"

/* A group (parentheses) of the pattern. */
typedef struct group {
    size_t begin, end;              /* of its content in the translated text */
    uint32_t depth, capture, inner; /* inner: captures inside it */
    bool has_number, used;
} group;

typedef struct translation {
    layout_parsing *p;
    layout_rule *rule;
    const char *as;
    bool back;      /* the rank's name must be rebuilt: by as=, or from the pattern itself */
    const char *at; /* position in the pattern */
    char *text;     /* the expression so far */
    size_t used, capacity;
    uint32_t depth, open[DEPTH_MAX];
    group groups[LAYOUT_CAPTURES];
    uint32_t group_count;
    uint64_t repeats;
    bool repeated; /* the last item is a repetition */
    layout_expression *to;
} translation;

static ckd_status put(translation *t, const char *text, size_t length) {
    if (t->used + length + 1 > t->capacity) {
        size_t capacity = 2 * (t->used + length + 1);
        char *grown = realloc(t->text, capacity);
        if (!grown) {
            return cli_error_nomem(t->p->err);
        }
        t->text = grown;
        t->capacity = capacity;
    }
    memcpy(t->text + t->used, text, length);
    t->used += length;
    t->text[t->used] = '\0';
    t->repeated = false;
    return CKD_OK;
}

static ckd_status count_capture(translation *t) {
    return t->to->captures++ < LAYOUT_CAPTURES
               ? CKD_OK
               : layout_invalid(t->p, "the pattern has more than %d parentheses and numbers",
                                LAYOUT_CAPTURES);
}

/* ---- the pattern ---- */

/* With as= or in a flat buffer, text outside groups must be literal, because load has to know it. */
static ckd_status put_plain(translation *t, layout_item item, const char *text, size_t length) {
    return t->back && t->depth == 0 ? layout_template_add(&t->rule->local_name, item, text, length, t->p->err)
                                    : CKD_OK;
}

/* Checks a character that matches other characters, or none. */
static ckd_status check_plain(translation *t) {
    bool edge = (*t->at == '^' && t->used == 0) || (*t->at == '$' && !t->at[1]);
    if (!t->back || t->depth > 0 || edge) {
        return CKD_OK;
    }
    if (!t->as) {
        return layout_invalid(
            t->p,
            "a flat buffer has one name, in which only numbers such as {layer} differ: load has to write it; see '%.20s'",
            t->at);
    }
    return layout_invalid(
        t->p,
        "with as=, what differs from name to name must be in parentheses: load has to reverse it; see "
        "'%.20s'",
        t->at);
}

/* Parses *, + , ? or {2,3}. Repetitions of repetitions are refused: they add nothing and could take all memory. */
static ckd_status put_repetition(translation *t, size_t length) {
    ckd_status status = check_plain(t);
    if (status == CKD_OK && t->repeated) {
        status = layout_invalid(t->p, "a repetition cannot follow another; see '%.20s'", t->at);
    }
    THEN(status, put(t, t->at, length));
    t->at += length;
    t->repeated = true;
    return status;
}

static ckd_status open_group(translation *t) {
    if (t->back && !t->as) {
        return check_plain(t);
    }
    if (t->depth == DEPTH_MAX || t->group_count == LAYOUT_CAPTURES) {
        return layout_invalid(t->p, "the pattern has too many parentheses");
    }
    ckd_status status = count_capture(t);
    group *g = &t->groups[t->group_count];
    *g = (group){.begin = t->used + 1, .depth = t->depth, .capture = t->to->captures};
    layout_item item = {.kind = LAYOUT_GROUP, .index = t->group_count};
    THEN(status, put_plain(t, item, "", 0));
    t->open[t->depth++] = t->group_count++;
    return status == CKD_OK ? put(t, t->at++, 1) : status;
}

static ckd_status close_group(translation *t) {
    if (t->depth == 0) {
        return layout_invalid(t->p, "a ) has no ( in '%.100s'", t->rule->pattern);
    }
    group *g = &t->groups[t->open[--t->depth]];
    g->end = t->used;
    g->inner = t->to->captures - g->capture;
    return put(t, t->at++, 1);
}

/* Parses [...] up to its end; the first character may be ]. */
static ckd_status put_bracket(translation *t) {
    ckd_status status = check_plain(t);
    const char *end = t->at + 1;
    end += *end == '^';
    end += *end == ']';
    while (*end && *end != ']') {
        char mark = end[0] == '[' && end[1] && strchr(":.=", end[1]) ? end[1] : '\0';
        end++;
        if (mark) {
            for (end++; *end && !(end[0] == mark && end[1] == ']'); end++) {
            }
            end += *end ? 2 : 0;
        }
    }
    if (status == CKD_OK && !*end) {
        status = layout_invalid(t->p, "a [ has no ] in '%.100s'", t->rule->pattern);
    }
    const char *begin = t->at;
    t->at = *end ? end + 1 : end;
    return status == CKD_OK ? put(t, begin, (size_t)(t->at - begin)) : status;
}

uint32_t layout_find_number(const layout *l, const char *name, size_t length) {
    for (uint32_t i = 0; i < l->number_count; i++) {
        if (strlen(l->numbers[i].name) == length && memcmp(l->numbers[i].name, name, length) == 0) {
            return i;
        }
    }
    return UINT32_MAX;
}

/* Returns the number's index in the rule; adds it if it is new. UINT32_MAX, with an error: there are too many. */
static uint32_t number_of_rule(translation *t, uint32_t number) {
    layout_rule *rule = t->rule;
    for (uint32_t i = 0; i < rule->number_count; i++) {
        if (rule->numbers[i] == number) {
            return i;
        }
    }
    if (rule->number_count == LAYOUT_NUMBERS) {
        layout_invalid(t->p, "a name can have %d different numbers", LAYOUT_NUMBERS);
        return UINT32_MAX;
    }
    rule->numbers[rule->number_count] = number;
    return rule->number_count++;
}

/* Makes the next capture this number of the rule. */
static ckd_status capture_number(translation *t, uint32_t index) {
    ckd_status status = count_capture(t);
    if (status != CKD_OK) {
        return status;
    }
    t->to->number_captures[t->to->captures] = index + 1;
    if (!t->to->of_number[index]) {
        t->to->of_number[index] = t->to->captures;
    }
    return put(t, NUMBER_RE, sizeof(NUMBER_RE) - 1);
}

static bool is_letter(char c) {
    return layout_is_name(&c, 1);
}

/* Parses {layer}, or a repetition {2,3}. */
static ckd_status put_brace(translation *t) {
    const char *close = strchr(t->at, '}');
    if (!close) {
        return layout_invalid(t->p, "a { has no } in '%.100s'", t->rule->pattern);
    }
    size_t length = (size_t)(close - t->at - 1);
    if (!is_letter(t->at[1])) {
        uint64_t max = 0, value = 0;
        for (const char *at = t->at + 1; at < close; at++) {
            value = *at >= '0' && *at <= '9' ? value * 10 + (uint64_t)(*at - '0') : 0;
            max = value > max ? value : max;
            if (value > REPEAT_MAX) {
                break;
            }
        }
        t->repeats *= max ? max : 1;
        return t->repeats > REPEAT_MAX
                   ? layout_invalid(t->p, "the pattern repeats something more than %d times", REPEAT_MAX)
                   : put_repetition(t, length + 2);
    }
    uint32_t number = layout_find_number(t->p->l, t->at + 1, length);
    if (number == UINT32_MAX) {
        return layout_invalid(t->p,
                              "no line before this says what number '%.*s' is: number %.*s over=AXES count=N",
                              (int)length, t->at + 1, (int)length, t->at + 1);
    }
    uint32_t index = number_of_rule(t, number);
    ckd_status status = index == UINT32_MAX ? t->p->err->status : capture_number(t, index);
    for (uint32_t i = 0; i < t->depth; i++) {
        t->groups[t->open[i]].has_number = true;
    }
    t->at = close + 1;
    return status == CKD_OK ? put_plain(t, (layout_item){.kind = LAYOUT_NUMBER, .index = index}, "", 0)
                            : status;
}

/* Parses a backslash and the character that it escapes. */
static ckd_status put_escaped(translation *t) {
    char next = t->at[1]; /* before letters, digits and some marks a backslash may be an operator */
    if (!next || is_letter(next) || (next >= '0' && next <= '9') || strchr("`'<>", next)) {
        return layout_invalid(t->p, "a backslash makes . [ ( and the like plain; it cannot stand before '%c'",
                              next ? next : ' ');
    }
    ckd_status status = put_plain(t, (layout_item){.kind = LAYOUT_TEXT}, t->at + 1, 1);
    t->at += 2;
    return status == CKD_OK ? put(t, t->at - 2, 2) : status;
}

static ckd_status translate_one(translation *t) {
    switch (*t->at) {
    case '(':
        return open_group(t);
    case ')':
        return close_group(t);
    case '[':
        return put_bracket(t);
    case '{':
        return put_brace(t);
    case '\\':
        return put_escaped(t);
    default:
        break;
    }
    ckd_status status = CKD_OK;
    if (strchr("*+?", *t->at)) {
        return put_repetition(t, 1);
    }
    if (strchr("|^$", *t->at)) {
        status = check_plain(t);
    } else { /* a . counts as a literal dot: names have them everywhere */
        status = put_plain(t, (layout_item){.kind = LAYOUT_TEXT}, t->at, 1);
    }
    return status == CKD_OK ? put(t, t->at++, 1) : status;
}

static ckd_status compile(translation *t) {
    int failed = regcomp(&t->to->regex, t->text ? t->text : "", REG_EXTENDED);
    if (failed) {
        char why[100];
        regerror(failed, &t->to->regex, why, sizeof(why));
        return layout_invalid(t->p, "'%.100s' is not a regular expression: %s", t->rule->pattern, why);
    }
    t->to->compiled = true;
    return t->to->regex.re_nsub == t->to->captures
               ? CKD_OK
               : layout_invalid(t->p, "the parentheses of '%.100s' are ambiguous", t->rule->pattern);
}

/* ---- as= ---- */

static ckd_status put_group(translation *t, translation *pattern, uint32_t index) {
    group *g = &pattern->groups[index];
    if (index >= pattern->group_count || g->depth > 0 || g->has_number || g->used) {
        return layout_invalid(
            t->p,
            index >= pattern->group_count ? "as= has \\%u, and the pattern no such parentheses"
            : g->used                     ? "as= has \\%u twice"
                      : "\\%u of as= cannot be inside other parentheses, nor have a number in it",
            index + 1);
    }
    g->used = true;
    layout_item item = {.kind = LAYOUT_GROUP, .index = g->capture};
    ckd_status status = layout_template_add(&t->rule->global_name, item, "", 0, t->p->err);
    uint32_t capture = t->to->captures + 1;
    THEN(status, put(t, "(", 1));
    THEN(status, put(t, pattern->text + g->begin, g->end - g->begin));
    t->to->captures += 1 + g->inner;
    for (size_t i = 0; i < t->rule->local_name.count; i++) {
        layout_item *local = &t->rule->local_name.items[i];
        if (local->kind == LAYOUT_GROUP && local->index == index && local->width == 0) {
            local->index = capture;
            local->width = 1; /* marks it as translated, so that it is not translated again */
        }
    }
    return status == CKD_OK ? put(t, ")", 1) : status;
}

/* Parses {part}. */
static ckd_status put_part(translation *t) {
    if (t->to->of_part) {
        return layout_invalid(t->p, "{part} appears twice in as=");
    }
    t->rule->apart = true;
    ckd_status status =
        layout_template_add(&t->rule->global_name, (layout_item){.kind = LAYOUT_PART}, "", 0, t->p->err);
    t->to->of_part = ++t->to->captures;
    for (size_t i = 0; i < t->rule->part_count && status == CKD_OK; i++) {
        status = put(t, i ? "|" : "(", 1);
        const char *name = t->rule->parts[i].name;
        THEN(status, put(t, name, strlen(name)));
    }
    if (status == CKD_OK && t->rule->part_count == 0) {
        status = layout_invalid(t->p, "{part} in as= needs parts=");
    }
    return status == CKD_OK ? put(t, ")", 1) : status;
}

/* Parses {tp}, or {rank} as axis LAYOUT_AXES: each rank has its own tensor. */
static ckd_status put_coordinate(translation *t, uint32_t axis) {
    layout_item item = {.kind = axis == LAYOUT_AXES ? LAYOUT_RANK : LAYOUT_AXIS, .index = axis, .width = 1};
    if (t->to->of_axis[axis]) {
        return layout_invalid(t->p, "a coordinate appears twice in as=");
    }
    ckd_status status = layout_template_add(&t->rule->global_name, item, "", 0, t->p->err);
    t->to->of_axis[axis] = ++t->to->captures;
    return status == CKD_OK ? put(t, NUMBER_RE, sizeof(NUMBER_RE) - 1) : status;
}

/* Parses {layer}, {part}, {tp} or {rank}. */
static ckd_status put_named(translation *t) {
    const char *close = strchr(t->at, '}');
    size_t length = close ? (size_t)(close - t->at - 1) : 0;
    const char *name = t->at + 1;
    if (length == 4 && memcmp(name, "part", 4) == 0) {
        t->at = close + 1;
        return put_part(t);
    }
    uint32_t number = length ? layout_find_number(t->p->l, name, length) : UINT32_MAX;
    for (uint32_t i = 0; i < t->rule->number_count; i++) {
        if (t->rule->numbers[i] == number) {
            layout_item item = {.kind = LAYOUT_NUMBER, .index = i};
            ckd_status status = layout_template_add(&t->rule->global_name, item, "", 0, t->p->err);
            t->at = close + 1;
            return status == CKD_OK ? capture_number(t, i) : status;
        }
    }
    uint32_t axis = length ? layout_find_axis(t->p->l, name, length) : LAYOUT_AXES;
    bool rank = length == 4 && memcmp(name, "rank", 4) == 0;
    if (axis == LAYOUT_AXES && !rank) {
        return layout_invalid(
            t->p, "'%.40s' in as= is none of {part}, {rank}, an axis, or a number of the pattern", t->at);
    }
    t->at = close + 1;
    return put_coordinate(t, axis);
}

static ckd_status translate_as(translation *t, translation *pattern) {
    ckd_status status = CKD_OK;
    for (t->at = t->as; *t->at && status == CKD_OK;) {
        if (t->at[0] == '\\' && t->at[1] >= '1' && t->at[1] <= '9') {
            status = put_group(t, pattern, (uint32_t)(t->at[1] - '1'));
            t->at += 2;
        } else if (t->at[0] == '{') {
            status = put_named(t);
        } else {
            t->at += t->at[0] == '\\' && t->at[1];
            char plain[2] = {'\\', *t->at};
            bool special = strchr(".[]*+?{}()|^$\\", *t->at) != NULL;
            status = layout_template_add(&t->rule->global_name, (layout_item){.kind = LAYOUT_TEXT}, t->at, 1,
                                         t->p->err);
            THEN(status, put(t, plain + !special, 1u + special));
            t->at++;
        }
        if (status == CKD_OK && t->to->captures > LAYOUT_CAPTURES) {
            status = layout_invalid(t->p, "as= has more than %d parentheses and numbers", LAYOUT_CAPTURES);
        }
    }
    return status;
}

/* Checks that as= contains everything that load needs to know. */
static ckd_status check_as(const translation *t, const translation *pattern) {
    for (uint32_t i = 0; i < pattern->group_count; i++) {
        if (pattern->groups[i].depth == 0 && !pattern->groups[i].used) {
            return layout_invalid(
                t->p, "as= leaves out \\%u of the pattern, so load could not restore that text", i + 1);
        }
    }
    for (uint32_t i = 0; i < t->rule->number_count; i++) {
        if (!t->to->of_number[i]) {
            return layout_invalid(t->p, "as= leaves out {%s} of the pattern",
                                  t->p->l->numbers[t->rule->numbers[i]].name);
        }
    }
    return CKD_OK;
}

ckd_status layout_compile(layout_parsing *p, layout_rule *rule, const char *as) {
    rule->renamed = as != NULL || rule->kind == LAYOUT_FLAT;
    translation t = {.p = p,
                     .rule = rule,
                     .as = as,
                     .back = rule->renamed,
                     .at = rule->pattern,
                     .repeats = 1,
                     .to = &rule->local};
    translation to_global = {.p = p, .rule = rule, .as = as, .repeats = 1, .to = &rule->global};
    ckd_status status = CKD_OK;
    while (*t.at && status == CKD_OK) {
        status = translate_one(&t);
    }
    if (status == CKD_OK && t.depth > 0) {
        status = layout_invalid(p, "a ( has no ) in '%.100s'", rule->pattern);
    }
    THEN(status, compile(&t));
    if (status == CKD_OK && as) {
        status = translate_as(&to_global, &t);
        THEN(status, check_as(&to_global, &t));
        THEN(status, compile(&to_global));
    }
    free(t.text);
    free(to_global.text);
    return status;
}

void layout_expression_free(layout_expression *e) {
    if (e->compiled) {
        regfree(&e->regex);
    }
    *e = (layout_expression){0};
}
