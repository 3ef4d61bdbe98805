/* Parses rules: REGEX KIND OPTIONS. */
#include <stdlib.h>
#include <string.h>

#include "cli/layout/parse.h"
#include "cli/files/files.h"

static const struct {
    const char *name;
    layout_kind kind;
} kinds[] = {{"unique", LAYOUT_UNIQUE},   {"replicated", LAYOUT_REPLICATED}, {"averaged", LAYOUT_AVERAGED},
             {"sharded", LAYOUT_SHARDED}, {"expert", LAYOUT_EXPERT},         {"skipped", LAYOUT_SKIPPED},
             {"flat", LAYOUT_FLAT}};

/* A rule while its line is parsed. */
typedef struct reading {
    layout_parsing *p;
    layout_rule *rule;
    const char *as;
    bool of_main; /* parts=, groups=, size= or pad= was given, for main_cut */
} reading;

/* ---- options ---- */

/* Returns the cut that the option modifies: the one of the last dim=. NULL, with an error, if there is none. */
static layout_cut *last_cut(reading *r, const char *option) {
    if (r->rule->cut_count == 0) {
        layout_invalid(r->p, "%s says how a dimension is cut; say dim= before it", option);
        return NULL;
    }
    return &r->rule->cuts[r->rule->cut_count - 1];
}

static ckd_status set_as(reading *r, const char *value) {
    if (r->as) {
        return layout_invalid(r->p, "as= is given twice");
    }
    r->as = value;
    return CKD_OK;
}

static ckd_status set_dim(reading *r, const char *value) {
    int32_t dim;
    if (!cli_parse_dim(&dim, value)) {
        return layout_invalid(r->p, "dim= is a number from 0 to %d, or, from the last one back, -1 to -%d",
                              CKD_MAX_DIMS - 1, CKD_MAX_DIMS);
    }
    if (r->rule->cut_count == LAYOUT_CUTS) {
        return layout_invalid(r->p, "at most %d dimensions can be cut", LAYOUT_CUTS);
    }
    for (uint32_t i = 0; i < r->rule->cut_count; i++) {
        if (r->rule->cuts[i].dim == dim) {
            return layout_invalid(r->p, "dimension %d is cut already; to cut it over two axes say over=A,B",
                                  dim);
        }
    }
    r->rule->cuts[r->rule->cut_count++] = (layout_cut){.dim = dim, .unit = 1};
    return CKD_OK;
}

static ckd_status set_over(reading *r, const char *value) {
    layout_cut *cut = last_cut(r, "over=");
    if (!cut) {
        return r->p->err->status;
    }
    return cut->over.count
               ? layout_invalid(r->p, "over= is given for dim=%d already; name axes together: over=A,B",
                                cut->dim)
               : layout_parse_over(&cut->over, r->p, value);
}

static bool read_cut(layout_cut_kind *out, const char *text) {
    static const char *const names[] = {
        [LAYOUT_EVEN] = "even", [LAYOUT_CHUNK] = "chunk", [LAYOUT_REPEAT] = "repeat"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(names[i], text) == 0) {
            *out = (layout_cut_kind)i;
            return true;
        }
    }
    return false;
}

static ckd_status set_cut(reading *r, const char *value) {
    layout_cut *cut = last_cut(r, "cut=");
    if (!cut) {
        return r->p->err->status;
    }
    if (!read_cut(&cut->kind, value) || cut->sizes) {
        return layout_invalid(
            r->p,
            "cut= is even (all the same), chunk (as torch.chunk) or repeat (neighbours share one if there "
            "are too few); or say sizes= instead");
    }
    return CKD_OK;
}

static ckd_status set_sizes(reading *r, const char *value) {
    layout_cut *cut = last_cut(r, "sizes=");
    size_t count = 0;
    ckd_status status =
        cut ? layout_parse_numbers(&cut->sizes, &count, r->p, "sizes", value) : r->p->err->status;
    if (status != CKD_OK) {
        return status;
    }
    cut->kind = LAYOUT_SIZES;
    return cut->over.count && count == cut->over.places
               ? CKD_OK
               : layout_invalid(
                     r->p, "sizes= is a number for each place of over=, which comes before it; here are %zu",
                     count);
}

static ckd_status set_unit(reading *r, const char *value) {
    layout_cut *cut = last_cut(r, "unit=");
    if (!cut) {
        return r->p->err->status;
    }
    return layout_next_number(&cut->unit, &value, '\0') && cut->unit > 0 && cut->unit <= CKD_MAX_ELEMENTS
               ? CKD_OK
               : layout_invalid(r->p, "unit= is how many elements stay together");
}

/* Marks the main cut: padding and parts belong to one dimension. */
static ckd_status set_main(reading *r, const char *option) {
    if (!last_cut(r, option)) {
        return r->p->err->status;
    }
    if (r->of_main && r->rule->main_cut != r->rule->cut_count - 1) {
        return layout_invalid(r->p, "%s: only one dimension can have parts or padding", option);
    }
    r->of_main = true;
    r->rule->main_cut = r->rule->cut_count - 1;
    return CKD_OK;
}

static ckd_status set_number(reading *r, const char *option, uint64_t *to, const char *value,
                             const char *what) {
    ckd_status status = set_main(r, option);
    if (status == CKD_OK && (!layout_next_number(to, &value, '\0') || *to == 0 || *to > CKD_MAX_ELEMENTS)) {
        status = layout_invalid(r->p, "%s is %s", option, what);
    }
    return status;
}

static ckd_status set_size(reading *r, const char *value) {
    r->rule->padded = true;
    return set_number(r, "size=", &r->rule->size, value, "the length without padding, over all ranks");
}

static ckd_status set_pad(reading *r, const char *value) {
    r->rule->padded = true;
    return set_number(r, "pad=", &r->rule->pad, value, "a number of which each place's length is a multiple");
}

static ckd_status set_groups(reading *r, const char *value) {
    return set_number(r, "groups=", &r->rule->groups, value,
                      "how many groups of all parts there are, over all ranks");
}

/* Parses SIZE, SIZE:UNIT or SIZE:UNIT:CUT. */
static bool read_part(layout_part *part, const char *text) {
    if (!layout_next_number(&part->size, &text, ':') || part->size == 0 || part->size > CKD_MAX_ELEMENTS) {
        return false;
    }
    if (*text &&
        (!layout_next_number(&part->unit, &text, ':') || part->unit == 0 || part->unit > part->size)) {
        return false;
    }
    part->kind_given = *text != '\0';
    return !*text || read_cut(&part->kind, text);
}

/* Parses NAME, or NAME: followed by the text that read_part parses. */
static ckd_status add_part(reading *r, const char *text, size_t length) {
    layout_part *part = layout_append(r->p, &r->rule->parts, &r->rule->part_count, sizeof(*part));
    if (!part) {
        return r->p->err->status;
    }
    char numbers[64] = {0};
    size_t name = strcspn(text, ":,"), rest = name < length ? length - name - 1 : 0;
    part->unit = 1;
    part->name = strndup(text, name);
    if (!part->name) {
        return cli_error_nomem(r->p->err);
    }
    bool fine = layout_is_name(text, name) && rest < sizeof(numbers) && (name == length || rest > 0);
    if (fine && rest) {
        memcpy(numbers, text + name + 1, rest);
        fine = read_part(part, numbers);
    }
    if (!fine) {
        return layout_invalid(
            r->p,
            "parts= lists NAME:SIZE, NAME:SIZE:UNIT or NAME:SIZE:UNIT:CUT, or NAME where all have one size, not '%.*s'",
            (int)length, text);
    }
    for (size_t i = 0; i + 1 < r->rule->part_count; i++) {
        if (strcmp(r->rule->parts[i].name, part->name) == 0) {
            return layout_invalid(r->p, "part %s is given twice", part->name);
        }
    }
    return CKD_OK;
}

static ckd_status set_parts(reading *r, const char *value) {
    ckd_status status = set_main(r, "parts=");
    if (status == CKD_OK && r->rule->part_count) {
        status = layout_invalid(r->p, "parts= is given twice");
    }
    for (const char *at = value; at && status == CKD_OK;) {
        const char *comma = strchr(at, ',');
        status = add_part(r, at, comma ? (size_t)(comma - at) : strlen(at));
        at = comma ? comma + 1 : NULL;
    }
    for (size_t i = 1; i < r->rule->part_count && status == CKD_OK; i++) {
        if (!r->rule->parts[i].size != !r->rule->parts[0].size) {
            status = layout_invalid(r->p, "either all parts have a size, or none has");
        }
    }
    return status;
}

static ckd_status set_take(reading *r, const char *value) {
    if (strcmp(value, "first") != 0 || r->rule->kind == LAYOUT_AVERAGED) {
        return layout_invalid(
            r->p, "take=first, not for averaged: copies are not compared, the lowest rank's is taken");
    }
    r->rule->take_first = true;
    return CKD_OK;
}

ckd_status layout_parse_only(uint8_t *all[LAYOUT_AXES], layout_parsing *p, uint32_t axis, const char *value) {
    uint32_t size = p->l->axes[axis].size;
    uint8_t **only = &all[axis];
    if (*only) {
        return layout_invalid(p, "%s= is given twice", p->l->axes[axis].name);
    }
    *only = calloc(size, 1);
    if (!*only) {
        return cli_error_nomem(p->err);
    }
    for (const char *at = value; at;) {
        const char *comma = strchr(at, ',');
        size_t length = comma ? (size_t)(comma - at) : strlen(at);
        char digits[8] = {0};
        const char *number = digits;
        uint64_t coordinate = size - 1;
        memcpy(digits, at, length < sizeof(digits) ? length : 0);
        if (strcmp(digits, "last") != 0 &&
            (!layout_next_number(&coordinate, &number, '\0') || coordinate >= size)) {
            return layout_invalid(p, "%s= lists coordinates from 0 to %u, or last, not '%.*s'",
                                  p->l->axes[axis].name, size - 1, (int)length, at);
        }
        (*only)[coordinate] = 1;
        at = comma ? comma + 1 : NULL;
    }
    return CKD_OK;
}

static ckd_status set_option(reading *r, const char *word) {
    static const struct {
        const char *name;
        ckd_status (*set)(reading *r, const char *value);
    } options[] = {{"as", set_as},       {"dim", set_dim},       {"over", set_over}, {"cut", set_cut},
                   {"sizes", set_sizes}, {"unit", set_unit},     {"size", set_size}, {"pad", set_pad},
                   {"parts", set_parts}, {"groups", set_groups}, {"take", set_take}};
    size_t length = strcspn(word, "=");
    if (!word[length]) {
        return layout_invalid(r->p, "'%.60s' is not an option; options are NAME=VALUE", word);
    }
    if (r->rule->kind == LAYOUT_SKIPPED && layout_find_axis(r->p->l, word, length) == LAYOUT_AXES) {
        return layout_invalid(r->p, "what is skipped has no options but coordinates");
    }
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        if (strlen(options[i].name) == length && memcmp(options[i].name, word, length) == 0) {
            return options[i].set(r, word + length + 1);
        }
    }
    uint32_t axis = layout_find_axis(r->p->l, word, length);
    if (axis == LAYOUT_AXES) {
        return layout_invalid(r->p, "'%.*s' is neither an option nor an axis of the mesh", (int)length, word);
    }
    return layout_parse_only(r->rule->only, r->p, axis, word + length + 1);
}

/* ---- consistency ---- */

static ckd_status use_axes(uint8_t used[LAYOUT_AXES], reading *r, const layout_over *over, const char *what) {
    for (uint32_t i = 0; i < over->count; i++) {
        uint32_t axis = over->axes[i];
        if (used[axis] || r->rule->only[axis]) {
            return layout_invalid(r->p, "axis %s cannot have another use besides %s",
                                  r->p->l->axes[axis].name, what);
        }
        used[axis] = 1;
    }
    return CKD_OK;
}

/* Finds the axes whose coordinates as= puts into the name: ranks along them have separate tensors. */
static ckd_status use_coordinates(uint8_t used[LAYOUT_AXES], reading *r) {
    layout_over axes_of_name = {0};
    const uint32_t *of_axis = r->rule->global.of_axis;
    for (uint32_t axis = 0; axis < r->p->l->axis_count; axis++) {
        if (of_axis[axis] || (of_axis[LAYOUT_AXES] && !r->rule->only[axis])) {
            axes_of_name.axes[axes_of_name.count++] = (uint8_t)axis;
        }
    }
    ckd_status status = use_axes(used, r, &axes_of_name, "its coordinate in as=");
    for (uint32_t i = 0; i < axes_of_name.count && status == CKD_OK; i++) {
        r->rule->numbered.axes[r->rule->numbered.count++] = axes_of_name.axes[i];
    }
    return status;
}

/* Checks the numbers in the name, which select the ranks that hold it; different numbers must have different axes. */
static ckd_status check_axes(reading *r) {
    uint8_t used[LAYOUT_AXES] = {0};
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < r->rule->cut_count && status == CKD_OK; i++) {
        const layout_cut *cut = &r->rule->cuts[i];
        status = cut->over.count
                     ? use_axes(used, r, &cut->over, "over= of a dim=")
                     : layout_invalid(r->p, "dim=%d needs over=, the axes over which it is cut", cut->dim);
    }
    r->rule->numbered.places = 1;
    for (uint32_t i = 0; i < r->rule->number_count && status == CKD_OK; i++) {
        const layout_number *n = &r->p->l->numbers[r->rule->numbers[i]];
        status = use_axes(used, r, &n->over, n->name);
        for (uint32_t k = 0; k < n->over.count && status == CKD_OK; k++) {
            r->rule->numbered.axes[r->rule->numbered.count++] = n->over.axes[k];
        }
    }
    return status == CKD_OK ? use_coordinates(used, r) : status;
}

/* Along axes that nothing else mentions, only coordinate 0 holds the tensor. */
static ckd_status make_unique(reading *r) {
    uint8_t used[LAYOUT_AXES] = {0};
    for (uint32_t i = 0; i < r->rule->cut_count; i++) {
        for (uint32_t k = 0; k < r->rule->cuts[i].over.count; k++) {
            used[r->rule->cuts[i].over.axes[k]] = 1;
        }
    }
    for (uint32_t i = 0; i < r->rule->numbered.count; i++) {
        used[r->rule->numbered.axes[i]] = 1;
    }
    for (uint32_t axis = 0; axis < r->p->l->axis_count; axis++) {
        if (!used[axis] && !r->rule->only[axis]) {
            ckd_status status = layout_parse_only(r->rule->only, r->p, axis, "0");
            if (status != CKD_OK) {
                return status;
            }
        }
    }
    return CKD_OK;
}

/* With repetition, files do not tell the total size. */
static ckd_status check_repeats(reading *r) {
    layout_rule *rule = r->rule;
    for (uint32_t i = 0; i < rule->cut_count; i++) {
        if (rule->cuts[i].kind != LAYOUT_REPEAT) {
            continue;
        }
        bool sized = rule->size || (rule->part_count && rule->parts[0].size);
        if (i != rule->main_cut || !sized || rule->pad) {
            return layout_invalid(
                r->p, "cut=repeat needs size=N, or sizes in parts=: the length without repetition; "
                      "and cannot be padded");
        }
        rule->repeats = true;
        rule->padded = false;
    }
    for (size_t i = 0; i < rule->part_count; i++) {
        layout_part *part = &rule->parts[i];
        part->kind = part->kind_given ? part->kind : rule->cuts[rule->main_cut].kind;
        rule->repeats |= part->kind == LAYOUT_REPEAT;
    }
    if (rule->repeats && rule->kind == LAYOUT_AVERAGED && rule->part_count && !rule->apart) {
        return layout_invalid(
            r->p,
            "parts that are kept together and repeated have no mean; store them apart with as=...{part}...");
    }
    return CKD_OK;
}

static ckd_status check_main(reading *r) {
    const layout_rule *rule = r->rule;
    const layout_cut *cut = &rule->cuts[rule->main_cut];
    if (rule->padded && rule->part_count) {
        return layout_invalid(r->p, "size= and pad= are not for tensors with parts=");
    }
    if (rule->groups && !rule->apart) {
        return layout_invalid(
            r->p,
            "groups= is for parts= that are stored apart, as=...{part}...; kept together, unit= does it");
    }
    if (rule->apart && !rule->part_count) {
        return layout_invalid(r->p, "{part} in as= needs parts=");
    }
    if (rule->part_count && (cut->kind == LAYOUT_SIZES || cut->unit != 1)) {
        return layout_invalid(
            r->p, "with parts=, units are said there (NAME:SIZE:UNIT), and sizes= is not possible");
    }
    for (size_t i = 0; i < rule->part_count && rule->groups; i++) {
        if (rule->parts[i].size % rule->groups || rule->parts[i].size / rule->groups % rule->parts[i].unit) {
            return layout_invalid(r->p, "part %s does not divide into %llu groups", rule->parts[i].name,
                                  (unsigned long long)rule->groups);
        }
    }
    return CKD_OK;
}

static ckd_status finish(reading *r) {
    layout_rule *rule = r->rule;
    if (rule->kind == LAYOUT_SHARDED && rule->cut_count == 0) {
        return layout_invalid(r->p, "sharded needs dim= and over=");
    }
    if (rule->kind == LAYOUT_REPLICATED && rule->cut_count > 0) {
        return layout_invalid(r->p, "what is cut is sharded; along the other axes it is replicated anyway");
    }
    ckd_status status = layout_compile(r->p, rule, r->as);
    THEN(status, check_repeats(r));
    rule->pad = rule->pad ? rule->pad : 1;
    if (status == CKD_OK && rule->kind == LAYOUT_EXPERT && rule->cut_count + rule->number_count == 0) {
        status = layout_invalid(
            r->p, "expert needs a {number} in the pattern, or dim= and over= for stacked experts");
    }
    THEN(status, check_axes(r));
    if (status == CKD_OK && rule->kind == LAYOUT_UNIQUE) {
        status = make_unique(r);
    }
    return status == CKD_OK ? check_main(r) : status;
}

ckd_status layout_parse_rule(layout_parsing *p) {
    if (p->count < 2) {
        return layout_invalid(p, "a rule is REGEX KIND OPTIONS; '%.100s' stands alone", p->words[0]);
    }
    layout_rule *rule = layout_append(p, &p->l->rules, &p->l->rule_count, sizeof(*rule));
    if (!rule) {
        return p->err->status;
    }
    rule->line = p->line;
    size_t kind = 0, kind_count = sizeof(kinds) / sizeof(kinds[0]);
    while (kind < kind_count && strcmp(kinds[kind].name, p->words[1]) != 0) {
        kind++;
    }
    if (kind == kind_count) {
        return layout_invalid(
            p, "'%.40s' is none of unique, replicated, averaged, sharded, expert, flat, skipped",
            p->words[1]);
    }
    rule->kind = kinds[kind].kind;
    rule->flat = (layout_flat){
        .list = LAYOUT_NONE, .pad = 1, .pad_all = 1, .align = 1, .of_itself = true, .of_states = true};
    rule->pattern = strdup(p->words[0]);
    reading r = {.p = p, .rule = rule};
    ckd_status status = rule->pattern ? CKD_OK : cli_error_nomem(p->err);
    for (size_t i = 2; i < p->count && status == CKD_OK; i++) {
        status = rule->kind == LAYOUT_FLAT ? layout_flat_option(p, rule, p->words[i])
                                           : set_option(&r, p->words[i]);
    }
    return status != CKD_OK ? status : rule->kind == LAYOUT_FLAT ? layout_flat_finish(p, rule) : finish(&r);
}

void layout_rule_free(layout_rule *rule) {
    free(rule->pattern);
    free(rule->flat.states);
    for (uint32_t i = 0; i < LAYOUT_CUTS; i++) {
        free(rule->cuts[i].sizes);
    }
    for (size_t i = 0; i < rule->part_count; i++) {
        free(rule->parts[i].name);
    }
    free(rule->parts);
    for (uint32_t i = 0; i < LAYOUT_AXES; i++) {
        free(rule->only[i]);
    }
    layout_expression_free(&rule->local);
    layout_expression_free(&rule->global);
    layout_template_free(&rule->local_name);
    layout_template_free(&rule->global_name);
}
