/* Translates a rank's names to the checkpoint's, and back. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/layout/parse.h"

#define DIGITS_MAX 9 /* per number in a name */

void layout_bindings_free(layout_bindings *b) {
    for (size_t i = 0; i < b->count; i++) {
        free(b->items[i].name);
    }
    free(b->items);
    *b = (layout_bindings){0};
}

/* ---- matching ---- */

static const layout_expression *expression_of(const layout_rule *rule, bool global) {
    return global && rule->renamed ? &rule->global : &rule->local;
}

static bool read_number(uint64_t *out, const char *name, regoff_t begin, regoff_t end) {
    *out = 0;
    for (regoff_t i = begin; i < end; i++) {
        *out = *out * 10 + (uint64_t)(name[i] - '0');
    }
    return begin >= 0 && end - begin <= DIGITS_MAX;
}

/* Reads the numbers and the part from a name. Returns false if one is missing, or occurs with two values. */
static bool read_captures(layout_binding *b) {
    const layout_expression *e = expression_of(b->rule, b->global);
    for (uint32_t i = 0; i < b->rule->number_count; i++) {
        uint32_t first = e->of_number[i];
        if (!read_number(&b->numbers[i], b->name, b->begin[first], b->end[first])) {
            return false;
        }
    }
    for (uint32_t i = 1; i <= e->captures; i++) {
        uint64_t value;
        if (e->number_captures[i] && (!read_number(&value, b->name, b->begin[i], b->end[i]) ||
                                      value != b->numbers[e->number_captures[i] - 1])) {
            return false;
        }
    }
    for (uint32_t axis = 0; axis <= LAYOUT_AXES; axis++) {
        uint32_t capture = e->of_axis[axis];
        b->coordinates[axis] = UINT64_MAX;
        if (capture && !read_number(&b->coordinates[axis], b->name, b->begin[capture], b->end[capture])) {
            return false;
        }
    }
    b->part = LAYOUT_NONE;
    for (size_t i = 0; e->of_part && i < b->rule->part_count; i++) {
        size_t length = (size_t)(b->end[e->of_part] - b->begin[e->of_part]);
        const char *text = b->name + b->begin[e->of_part], *part = b->rule->parts[i].name;
        b->part = strlen(part) == length && memcmp(part, text, length) == 0 ? i : b->part;
    }
    return true;
}

/* Does the rule match this whole name? If so, the binding owns the name; otherwise it is freed. */
static bool match(layout_binding *out, const layout_rule *rule, char *name, bool global) {
    regmatch_t captured[LAYOUT_CAPTURES + 1];
    const layout_expression *e = expression_of(rule, global);
    *out = (layout_binding){.rule = rule, .name = name, .global = global};
    /* regexec finds the longest of the leftmost matches, so it is the whole name if that is possible at all. */
    bool matches = regexec(&e->regex, name, LAYOUT_CAPTURES + 1, captured, 0) == 0 &&
                   captured[0].rm_so == 0 && !name[captured[0].rm_eo];
    for (uint32_t i = 0; i <= e->captures && matches; i++) {
        out->begin[i] = captured[i].rm_so;
        out->end[i] = captured[i].rm_eo;
    }
    if (matches && read_captures(out)) {
        return true;
    }
    free(name);
    return false;
}

/*
 * Returns what * stands for in the state's name. NULL if the name is not one of the state's, or if memory ran out (then
 * *failed).
 */
static char *inner_name(bool *failed, const layout_state *s, const char *name, bool global) {
    const char *before = global ? s->global_before : s->local_before;
    const char *after = global ? s->global_after : s->local_after;
    size_t b = strlen(before), a = strlen(after), length = strlen(name);
    if (length <= a + b || memcmp(name, before, b) != 0 || memcmp(name + length - a, after, a) != 0) {
        return NULL;
    }
    char *inner = strndup(name + b, length - a - b);
    *failed |= !inner;
    return inner;
}

/* Binds the name as a state of a parameter that the rule matches; otherwise by the name itself. */
static bool bind_rule(layout_binding *out, bool *failed, const layout *l, const layout_rule *rule,
                      const char *name, bool global) {
    bool flat = rule->kind == LAYOUT_FLAT;
    if (flat && global) {
        return false; /* the checkpoint has no such tensor */
    }
    for (size_t i = 0; i < l->state_count; i++) {
        if (flat && !layout_flat_has_state(rule, &l->states[i])) {
            continue;
        }
        char *inner = inner_name(failed, &l->states[i], name, global);
        if (inner && match(out, rule, inner, global)) {
            out->state = i;
            return true;
        }
    }
    char *copy = flat && !rule->flat.of_itself ? NULL : strdup(name);
    *failed |= !copy && (!flat || rule->flat.of_itself);
    if (copy && match(out, rule, copy, global)) {
        out->state = LAYOUT_NONE;
        return true;
    }
    return false;
}

ckd_status layout_bind(layout_bindings *out, const layout *l, const char *name, bool global, ckd_error *err) {
    *out = (layout_bindings){0};
    bool failed = false;
    for (size_t i = 0; i < l->rule_count && !failed; i++) {
        layout_binding b;
        if (!bind_rule(&b, &failed, l, &l->rules[i], name, global)) {
            continue;
        }
        layout_binding *items = realloc(out->items, (out->count + 1) * sizeof(*items));
        if (!items) {
            free(b.name);
            failed = true;
            break;
        }
        out->items = items;
        items[out->count++] = b;
    }
    if (failed) {
        layout_bindings_free(out);
        return cli_error_nomem(err);
    }
    return CKD_OK;
}

/* ---- which ranks ---- */

static bool translate_number(uint64_t *out, const layout *l, const layout_number *n, uint64_t number,
                             bool global, const uint32_t at[LAYOUT_AXES]) {
    uint32_t place = layout_place(&n->over, l, at);
    size_t count = n->begin[place + 1] - n->begin[place];
    const uint64_t *listed = n->numbers + n->begin[place];
    if (!global && !n->global) {
        *out = number < count ? listed[number] : 0;
        return number < count;
    }
    for (size_t i = 0; i < count; i++) {
        if (listed[i] == number) {
            *out = global && !n->global ? i : number;
            return true;
        }
    }
    return false;
}

bool layout_applies(uint64_t numbers[LAYOUT_NUMBERS], const layout *l, const layout_binding *b,
                    const uint32_t at[LAYOUT_AXES]) {
    for (uint32_t axis = 0; axis < l->axis_count; axis++) {
        if (b->rule->only[axis] && !b->rule->only[axis][at[axis]]) {
            return false;
        }
    }
    for (uint32_t axis = 0; axis <= LAYOUT_AXES; axis++) {
        uint64_t coordinate = axis == LAYOUT_AXES ? layout_rank(l, at) : at[axis];
        if (b->coordinates[axis] != UINT64_MAX && b->coordinates[axis] != coordinate) {
            return false;
        }
    }
    for (uint32_t i = 0; i < b->rule->number_count; i++) {
        const layout_number *n = &l->numbers[b->rule->numbers[i]];
        if (!translate_number(&numbers[i], l, n, b->numbers[i], b->global, at)) {
            return false;
        }
    }
    return true;
}

static bool is_anywhere(const layout_number *n, uint64_t number) {
    for (size_t i = 0; i < n->begin[n->over.places]; i++) {
        if (n->numbers[i] == number) {
            return true;
        }
    }
    return false;
}

/*
 * Is this a checkpoint tensor that belongs to other ranks by its numbers and coordinates? Then no later rule, such as a
 * catch-all, may give it to this rank.
 */
static bool is_elsewhere(const layout *l, const layout_binding *b, const uint32_t at[LAYOUT_AXES]) {
    const layout_rule *rule = b->rule;
    bool decided = b->global && rule->number_count > 0;
    for (uint32_t axis = 0; axis <= LAYOUT_AXES; axis++) {
        uint32_t size = axis < l->axis_count ? l->axes[axis].size : l->world;
        if (axis < l->axis_count && rule->only[axis] && !rule->only[axis][at[axis]]) {
            return false;
        }
        if (b->coordinates[axis] != UINT64_MAX && b->global) {
            if (b->coordinates[axis] >= size) {
                return false;
            }
            decided = true;
        }
    }
    for (uint32_t i = 0; i < rule->number_count && decided; i++) {
        decided = is_anywhere(&l->numbers[rule->numbers[i]], b->numbers[i]);
    }
    return decided;
}

const layout_binding *layout_choose(uint64_t numbers[LAYOUT_NUMBERS], const layout *l,
                                    const layout_bindings *b, const uint32_t at[LAYOUT_AXES]) {
    for (size_t i = 0; i < b->count; i++) {
        if (layout_applies(numbers, l, &b->items[i], at)) {
            return &b->items[i];
        }
        if (is_elsewhere(l, &b->items[i], at)) {
            return NULL;
        }
    }
    return NULL;
}

/* ---- the name on the other side ---- */

static void write_captured(FILE *to, const layout_binding *b, uint32_t capture) {
    if (b->begin[capture] >= 0) {
        fwrite(b->name + b->begin[capture], 1, (size_t)(b->end[capture] - b->begin[capture]), to);
    }
}

void layout_template_write(FILE *to, const layout *l, const layout_template *t, const layout_binding *b,
                           const layout_name_values *values) {
    for (size_t i = 0; i < t->count; i++) {
        const layout_item *item = &t->items[i];
        if (item->kind == LAYOUT_GROUP) {
            write_captured(to, b, item->index);
        } else if (item->kind == LAYOUT_NUMBER) {
            fprintf(to, "%llu", (unsigned long long)values->numbers[item->index]);
        } else if (item->kind == LAYOUT_AXIS || item->kind == LAYOUT_RANK) {
            fprintf(to, "%u",
                    item->kind == LAYOUT_RANK ? layout_rank(l, values->at) : values->at[item->index]);
        } else if (item->kind == LAYOUT_PART) {
            fputs(b->rule->parts[values->part].name, to);
        } else {
            fputs(item->text, to);
        }
    }
}

/* Writes the same name with other numbers. */
static void write_renumbered(FILE *to, const layout_binding *b, const uint64_t numbers[LAYOUT_NUMBERS]) {
    regoff_t done = 0;
    for (uint32_t i = 1; i <= b->rule->local.captures; i++) {
        uint32_t number = b->rule->local.number_captures[i];
        if (number && b->begin[i] >= done) {
            fprintf(to, "%.*s%llu", (int)(b->begin[i] - done), b->name + done,
                    (unsigned long long)numbers[number - 1]);
            done = b->end[i];
        }
    }
    fputs(b->name + done, to);
}

ckd_status layout_other_name(char **out, const layout *l, const layout_binding *b,
                             const layout_name_values *values, ckd_error *err) {
    *out = NULL;
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (!to) {
        return cli_error_nomem(err);
    }
    const layout_state *s = b->state == LAYOUT_NONE ? NULL : &l->states[b->state];
    fputs(!s ? "" : b->global ? s->local_before : s->global_before, to);
    if (b->rule->renamed) {
        layout_template_write(to, l, b->global ? &b->rule->local_name : &b->rule->global_name, b, values);
    } else {
        write_renumbered(to, b, values->numbers);
    }
    fputs(!s ? "" : b->global ? s->local_after : s->global_after, to);
    bool failed = ferror(to) != 0;
    if (fclose(to) != 0 || failed) {
        free(text);
        return cli_error_nomem(err);
    }
    *out = text;
    return CKD_OK;
}
