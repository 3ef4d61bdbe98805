/* Parses flat buffers in a layout's text: lists of parameters, and rules of the kind flat. */
#include <stdlib.h>
#include <string.h>

#include "cli/layout/parse.h"

/* ---- list NAME PARAMETER[:SHAPE] ... [AXIS=COORDINATES] ---- */

void layout_list_free(layout_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        layout_list_line *line = &list->lines[i];
        for (size_t k = 0; k < line->count; k++) {
            layout_template_free(&line->members[k].name);
        }
        free(line->members);
        for (uint32_t axis = 0; axis < LAYOUT_AXES; axis++) {
            free(line->only[axis]);
        }
    }
    free(list->lines);
}

static size_t find_list(const layout *l, const char *name) {
    for (size_t i = 0; i < l->list_count; i++) {
        if (strcmp(l->lists[i].name, name) == 0) {
            return i;
        }
    }
    return LAYOUT_NONE;
}

/* Parses 50257x768, 768, or scalar. */
static bool read_shape(layout_member *m, const char *text) {
    m->shaped = true;
    if (strcmp(text, "scalar") == 0) {
        return true;
    }
    uint64_t elements = 1;
    while (m->ndim < CKD_MAX_DIMS && layout_next_number(&m->shape[m->ndim], &text, 'x')) {
        if (__builtin_mul_overflow(elements, m->shape[m->ndim], &elements) || elements > CKD_MAX_ELEMENTS) {
            return false;
        }
        m->ndim++;
        if (!*text) {
            return true;
        }
    }
    return false;
}

/* Returns the number's index in the line; adds it if it is new. LAYOUT_NUMBERS: there are too many. */
static uint32_t number_of_line(layout_list_line *line, uint32_t number) {
    uint32_t i = 0;
    while (i < line->number_count && line->numbers[i] != number) {
        i++;
    }
    if (i == line->number_count && i < LAYOUT_NUMBERS) {
        line->numbers[line->number_count++] = number;
    }
    return i;
}

/* Parses a name, in which {layer} is a number. */
static ckd_status read_name(layout_parsing *p, layout_list_line *line, layout_template *t, const char *text,
                            size_t length) {
    ckd_status status = CKD_OK;
    for (const char *at = text, *end = text + length; at < end && status == CKD_OK;) {
        const char *open = memchr(at, '{', (size_t)(end - at));
        if (open != at) {
            size_t plain = (size_t)((open ? open : end) - at);
            status = layout_template_add(t, (layout_item){.kind = LAYOUT_TEXT}, at, plain, p->err);
            at += plain;
            continue;
        }
        const char *close = memchr(at, '}', (size_t)(end - at));
        uint32_t number = close ? layout_find_number(p->l, at + 1, (size_t)(close - at - 1)) : UINT32_MAX;
        if (number == UINT32_MAX) {
            return layout_invalid(p, "no line before this says what number '%.*s' is", (int)(end - at), at);
        }
        layout_item item = {.kind = LAYOUT_NUMBER, .index = number_of_line(line, number)};
        if (item.index == LAYOUT_NUMBERS) {
            return layout_invalid(p, "a line can have %d different numbers", LAYOUT_NUMBERS);
        }
        status = layout_template_add(t, item, "", 0, p->err);
        at = close + 1;
    }
    return status;
}

static ckd_status add_member(layout_parsing *p, layout_list_line *line, const char *word) {
    layout_member *m = layout_append(p, &line->members, &line->count, sizeof(*m));
    if (!m) {
        return p->err->status;
    }
    const char *colon = strchr(word, ':');
    size_t length = colon ? (size_t)(colon - word) : strlen(word);
    if (length == 0 || length > CKD_NAME_MAX || (colon && !read_shape(m, colon + 1))) {
        return layout_invalid(
            p,
            "a parameter is NAME or NAME:SHAPE, such as embed.weight:50257x768, bias:768 or step:scalar, not '%.100s'",
            word);
    }
    return read_name(p, line, &m->name, word, length);
}

ckd_status layout_parse_list(layout_parsing *p) {
    layout *l = p->l;
    if (p->count < 3 || !layout_is_name(p->words[1], strlen(p->words[1]))) {
        return layout_invalid(
            p,
            "list is followed by a name and parameters, in their order: list decay embed.weight:50257x768");
    }
    size_t number = find_list(l, p->words[1]);
    layout_list *list = number == LAYOUT_NONE ? layout_append(p, &l->lists, &l->list_count, sizeof(*list))
                                              : &l->lists[number];
    layout_list_line *line = list ? layout_append(p, &list->lines, &list->count, sizeof(*line)) : NULL;
    if (!line) {
        return p->err->status;
    }
    memcpy(list->name, p->words[1], strlen(p->words[1]));
    line->line = p->line;
    ckd_status status = CKD_OK;
    for (size_t i = 2; i < p->count && status == CKD_OK; i++) {
        const char *word = p->words[i];
        size_t length = strcspn(word, "=");
        uint32_t axis = word[length] ? layout_find_axis(l, word, length) : LAYOUT_AXES;
        status = axis != LAYOUT_AXES ? layout_parse_only(line->only, p, axis, word + length + 1)
                 : word[length]      ? layout_invalid(p, "the mesh has no axis '%.*s'", (int)length, word)
                                     : add_member(p, line, word);
    }
    return status;
}

/* ---- options of rules ---- */

static ckd_status set_of(layout_parsing *p, layout_rule *rule, const char *value) {
    rule->flat.list = find_list(p->l, value);
    return rule->flat.list != LAYOUT_NONE
               ? CKD_OK
               : layout_invalid(p, "no line before this is list %.60s PARAMETER ...", value);
}

static ckd_status set_over(layout_parsing *p, layout_rule *rule, const char *value) {
    return layout_parse_over(&rule->flat.over, p, value);
}

static ckd_status set_number(layout_parsing *p, uint64_t *to, const char *option, const char *value) {
    return layout_next_number(to, &value, '\0') && *to > 0 && *to <= CKD_MAX_ELEMENTS
               ? CKD_OK
               : layout_invalid(p, "%s= is a number of elements, at least 1", option);
}

static ckd_status set_pad(layout_parsing *p, layout_rule *rule, const char *value) {
    return set_number(p, &rule->flat.pad, "pad", value);
}

static ckd_status set_pad_all(layout_parsing *p, layout_rule *rule, const char *value) {
    return set_number(p, &rule->flat.pad_all, "pad_all", value);
}

static ckd_status set_align(layout_parsing *p, layout_rule *rule, const char *value) {
    return set_number(p, &rule->flat.align, "align", value);
}

static ckd_status set_cut(layout_parsing *p, layout_rule *rule, const char *value) {
    rule->flat.each = strcmp(value, "each") == 0;
    return rule->flat.each || strcmp(value, "even") == 0
               ? CKD_OK
               : layout_invalid(
                     p,
                     "cut= of a flat buffer is even (all of it, end to end) or each (each parameter on its own)");
}

static ckd_status set_padding(layout_parsing *p, layout_rule *rule, const char *value) {
    rule->flat.stripped = strcmp(value, "none") == 0;
    return rule->flat.stripped || strcmp(value, "zeros") == 0
               ? CKD_OK
               : layout_invalid(
                     p,
                     "padding= is zeros (it is there) or none (it was taken away from the end of each rank's)");
}

static ckd_status set_state(layout_parsing *p, layout_rule *rule, const char *value) {
    bool only = strcmp(value, "only") == 0, none = strcmp(value, "none") == 0;
    if (rule->flat.states || !rule->flat.of_itself || !rule->flat.of_states) {
        return layout_invalid(p, "state= is given twice");
    }
    rule->flat.of_itself = none;
    rule->flat.of_states = !none;
    rule->flat.states = only || none ? NULL : strdup(value);
    return only || none || rule->flat.states ? CKD_OK : cli_error_nomem(p->err);
}

ckd_status layout_flat_option(layout_parsing *p, layout_rule *rule, const char *word) {
    static const struct {
        const char *name;
        ckd_status (*set)(layout_parsing *p, layout_rule *rule, const char *value);
    } options[] = {{"of", set_of},           {"over", set_over},   {"pad", set_pad},
                   {"pad_all", set_pad_all}, {"align", set_align}, {"cut", set_cut},
                   {"padding", set_padding}, {"state", set_state}};
    size_t length = strcspn(word, "=");
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]) && word[length]; i++) {
        if (strlen(options[i].name) == length && memcmp(options[i].name, word, length) == 0) {
            return options[i].set(p, rule, word + length + 1);
        }
    }
    uint32_t axis = word[length] ? layout_find_axis(p->l, word, length) : LAYOUT_AXES;
    return axis != LAYOUT_AXES
               ? layout_parse_only(rule->only, p, axis, word + length + 1)
               : layout_invalid(
                     p,
                     "options of flat are of=, over=, cut=, pad=, pad_all=, align=, padding=, state= and coordinates, not '%.60s'",
                     word);
}

/* ---- states ---- */

/* Is this the checkpoint's name of the state, with * for the parameter? */
static bool is_state(const layout_state *s, const char *name, size_t length) {
    size_t before = strlen(s->global_before), after = strlen(s->global_after);
    return length == before + 1 + after && memcmp(name, s->global_before, before) == 0 &&
           name[before] == '*' && memcmp(name + before + 1, s->global_after, after) == 0;
}

bool layout_flat_has_state(const layout_rule *rule, const layout_state *s) {
    bool found = rule->flat.of_states && !rule->flat.states;
    for (const char *at = rule->flat.states; at && !found;) {
        size_t length = strcspn(at, ",");
        found = is_state(s, at, length);
        at = at[length] ? at + length + 1 : NULL;
    }
    return found;
}

ckd_status layout_flat_check_states(layout_parsing *p) {
    for (size_t i = 0; i < p->l->rule_count; i++) {
        const layout_rule *rule = &p->l->rules[i];
        for (const char *at = rule->flat.states; at;) {
            size_t length = strcspn(at, ",");
            bool exists = false;
            for (size_t k = 0; k < p->l->state_count; k++) {
                exists |= is_state(&p->l->states[k], at, length);
            }
            if (!exists) {
                return layout_error(
                    p->l, rule->line, p->err, CKD_E_INVALID,
                    "state= is only (of no parameters), none (of parameters only), or names of the checkpoint "
                    "such as exp_avg.*,master.*; '%.*s' is none that a state line, or ckptdelta itself, has",
                    (int)length, at);
            }
            at = at[length] ? at + length + 1 : NULL;
        }
    }
    return CKD_OK;
}

/* ---- consistency ---- */

/* Checks that ranks along the axes over which the buffer is cut share the same parameters. */
static ckd_status check_axes(layout_parsing *p, const layout_rule *rule, uint8_t *const only[LAYOUT_AXES],
                             const uint32_t *numbers, uint32_t number_count, uint32_t line) {
    for (uint32_t i = 0; i < rule->flat.over.count; i++) {
        uint32_t axis = rule->flat.over.axes[i];
        bool decides = only[axis] != NULL;
        for (uint32_t k = 0; k < number_count; k++) {
            const layout_over *over = &p->l->numbers[numbers[k]].over;
            decides |= memchr(over->axes, (int)axis, over->count) != NULL;
        }
        if (decides) {
            return layout_invalid(p, "the buffer is cut over %s, along which line %u says who has what",
                                  p->l->axes[axis].name, line);
        }
    }
    return CKD_OK;
}

ckd_status layout_flat_finish(layout_parsing *p, layout_rule *rule) {
    if (rule->flat.list == LAYOUT_NONE || rule->flat.over.count == 0) {
        return layout_invalid(
            p, "flat needs of=LIST and over=AXES: the parameters, and the ranks that share them");
    }
    ckd_status status = layout_compile(p, rule, NULL);
    THEN(status, check_axes(p, rule, rule->only, rule->numbers, rule->number_count, p->line));
    const layout_list *list = &p->l->lists[rule->flat.list];
    for (size_t i = 0; i < list->count && status == CKD_OK; i++) {
        const layout_list_line *line = &list->lines[i];
        status = check_axes(p, rule, line->only, line->numbers, line->number_count, line->line);
    }
    return status;
}
