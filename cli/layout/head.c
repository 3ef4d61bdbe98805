/* Parses what precedes the rules: the mesh, the ranks' files, names of states, numbers in names. */
#include <stdlib.h>
#include <string.h>

#include "cli/layout/parse.h"

#define NUMBERS_MAX 1000000u

/* ---- mesh AXIS=N ... ---- */

/* Words that are options of rules. */
static bool is_taken(const char *name, size_t length) {
    static const char *const taken[] = {"as",   "dim",   "over",   "cut",   "sizes",   "unit",   "size",
                                        "pad",  "parts", "groups", "take",  "count",   "table",  "rank",
                                        "part", "of",    "state",  "align", "pad_all", "padding"};
    for (size_t i = 0; i < sizeof(taken) / sizeof(taken[0]); i++) {
        if (strlen(taken[i]) == length && memcmp(taken[i], name, length) == 0) {
            return true;
        }
    }
    return false;
}

ckd_status layout_parse_mesh(layout_parsing *p) {
    layout *l = p->l;
    if (l->axis_count > 0) {
        return layout_invalid(p, "there is a mesh already");
    }
    l->world = 1;
    for (size_t i = 1; i < p->count; i++) {
        const char *word = p->words[i], *equals = strchr(word, '='), *value = equals ? equals + 1 : word;
        size_t length = equals ? (size_t)(equals - word) : 0;
        uint64_t size;
        if (!layout_is_name(word, length) || !layout_next_number(&size, &value, '\0') || size < 1 ||
            size > CKD_WORLD_MAX) {
            return layout_invalid(p,
                                  "an axis of the mesh is NAME=SIZE, such as tp=4, at most %d, not '%.60s'",
                                  CKD_WORLD_MAX, word);
        }
        if (is_taken(word, length)) {
            return layout_invalid(p, "an axis cannot be called %.*s, which is an option of rules",
                                  (int)length, word);
        }
        if (layout_find_axis(l, word, length) != LAYOUT_AXES || l->axis_count == LAYOUT_AXES) {
            return layout_invalid(p, "axis %.*s is given twice, or is one more than %d", (int)length, word,
                                  LAYOUT_AXES);
        }
        if (l->world * size > CKD_WORLD_MAX) {
            return layout_invalid(p, "the mesh has more than %d ranks", CKD_WORLD_MAX);
        }
        layout_axis *axis = &l->axes[l->axis_count++];
        memcpy(axis->name, word, length);
        axis->size = (uint32_t)size;
        l->world *= (uint32_t)size;
    }
    return l->axis_count
               ? CKD_OK
               : layout_invalid(p, "mesh names its axes, the last counting fastest: mesh pp=2 tp=4");
}

/* ---- files TEMPLATE ---- */

void layout_template_free(layout_template *t) {
    for (size_t i = 0; i < t->count; i++) {
        free(t->items[i].text);
    }
    free(t->items);
    *t = (layout_template){0};
}

ckd_status layout_template_add(layout_template *t, layout_item item, const char *text, size_t length,
                               ckd_error *err) {
    layout_item *items = realloc(t->items, (t->count + 1) * sizeof(*items));
    if (!items) {
        return cli_error_nomem(err);
    }
    t->items = items;
    item.text = strndup(text, length);
    if (!item.text) {
        return cli_error_nomem(err);
    }
    items[t->count++] = item;
    return CKD_OK;
}

/* Parses {AXIS}, {AXIS:WIDTH}, {rank}, {rank:WIDTH}. */
static ckd_status add_place(layout_template *t, layout_parsing *p, const char *open, const char *close) {
    size_t inside = (size_t)(close - open - 1), length = strcspn(open + 1, ":}");
    uint64_t width = 1;
    if (length < inside) {
        char digits[4] = {0};
        const char *at = digits;
        size_t count = inside - length - 1;
        if (count <= 2) {
            memcpy(digits, open + 2 + length, count);
        }
        if (!layout_next_number(&width, &at, '\0') || width < 1 || width > 16) {
            return layout_invalid(p, "'%.*s' is not {AXIS:DIGITS}", (int)inside + 2, open);
        }
    }
    uint32_t axis = layout_find_axis(p->l, open + 1, length);
    bool rank = length == 4 && memcmp(open + 1, "rank", 4) == 0;
    if (axis == LAYOUT_AXES && !rank) {
        return layout_invalid(p, "'%.*s' is neither an axis of the mesh nor rank", (int)length, open + 1);
    }
    if (t->count && t->items[t->count - 1].kind != LAYOUT_TEXT) {
        return layout_invalid(p, "two numbers need something between them");
    }
    layout_item item = {
        .kind = rank ? LAYOUT_RANK : LAYOUT_AXIS, .index = rank ? 0 : axis, .width = (uint32_t)width};
    return layout_template_add(t, item, "", 0, p->err);
}

static ckd_status parse_path(layout_template *t, layout_parsing *p, const char *text) {
    ckd_status status = CKD_OK;
    for (const char *at = text; *at && status == CKD_OK;) {
        if (*at == '{') {
            const char *close = strchr(at, '}');
            status = close ? add_place(t, p, at, close) : layout_invalid(p, "'%.60s' has no end }", at);
            at = close ? close + 1 : at;
            continue;
        }
        size_t length = strcspn(at, "{");
        if (t->count && *at >= '0' && *at <= '9') {
            return layout_invalid(p, "a digit cannot follow a number: the number's end would be unclear");
        }
        status = layout_template_add(t, (layout_item){.kind = LAYOUT_TEXT}, at, length, p->err);
        at += length;
    }
    return status;
}

/* Checks that the path and the words after it together identify the rank. */
static ckd_status check_path(const layout_path *file, layout_parsing *p) {
    const layout_template *t = &file->end;
    bool fixed[LAYOUT_AXES], rank = false;
    memcpy(fixed, file->fixed, sizeof(fixed));
    for (size_t i = 0; i < t->count; i++) {
        rank |= t->items[i].kind == LAYOUT_RANK;
        if (t->items[i].kind == LAYOUT_AXIS) {
            if (fixed[t->items[i].index]) {
                return layout_invalid(p, "axis %s appears in it twice", p->l->axes[t->items[i].index].name);
            }
            fixed[t->items[i].index] = true;
        }
    }
    for (uint32_t i = 0; i < p->l->axis_count; i++) {
        if (!rank && !fixed[i] && p->l->axes[i].size > 1) {
            return layout_invalid(
                p,
                "the path does not contain axis %s: put {%s} or {rank} into it, or a coordinate after it, such as %s=0",
                p->l->axes[i].name, p->l->axes[i].name, p->l->axes[i].name);
        }
        if (rank && fixed[i]) {
            return layout_invalid(p, "{rank} says which rank it is; leave out %s", p->l->axes[i].name);
        }
        if (p->l->file_count == 1 && file->fixed[i] && p->l->axes[i].size > 1) {
            return layout_invalid(
                p,
                "load names the files of all ranks by the first `files` line, so it cannot be for %s=%u only",
                p->l->axes[i].name, file->at[i]);
        }
    }
    return CKD_OK;
}

/* Parses AXIS=COORDINATE. */
static ckd_status fix_coordinate(layout_path *file, layout_parsing *p, const char *word) {
    size_t length = strcspn(word, "=");
    uint32_t axis = word[length] ? layout_find_axis(p->l, word, length) : LAYOUT_AXES;
    const char *digits = axis == LAYOUT_AXES ? "" : word + length + 1;
    uint64_t coordinate = 0;
    bool last = strcmp(digits, "last") == 0;
    if (axis == LAYOUT_AXES || file->fixed[axis] ||
        (!last && (!layout_next_number(&coordinate, &digits, '\0') || coordinate >= p->l->axes[axis].size))) {
        return layout_invalid(
            p, "the path is followed by coordinates that it does not contain, such as dp=0, not '%.60s'",
            word);
    }
    file->fixed[axis] = true;
    file->at[axis] = last ? p->l->axes[axis].size - 1 : (uint32_t)coordinate;
    return CKD_OK;
}

ckd_status layout_parse_files(layout_parsing *p) {
    if (p->count < 2 || p->words[1][0] == '/' || strstr(p->words[1], "..")) {
        return layout_invalid(
            p, "files is followed by the end of a path, such as mp_rank_{tp:2}_{pp:3}/model.safetensors");
    }
    layout_path *file = layout_append(p, &p->l->files, &p->l->file_count, sizeof(*file));
    ckd_status status = file ? parse_path(&file->end, p, p->words[1]) : p->err->status;
    for (size_t i = 2; i < p->count && status == CKD_OK; i++) {
        status = fix_coordinate(file, p, p->words[i]);
    }
    return status == CKD_OK ? check_path(file, p) : status;
}

/* ---- state LOCAL GLOBAL ---- */

static ckd_status split_star(char **before, char **after, layout_parsing *p, const char *text) {
    const char *star = strchr(text, '*');
    if (!star || strchr(star + 1, '*') || !text[1]) {
        return layout_invalid(p, "'%.60s' must have one *, for the parameter's name, and something else",
                              text);
    }
    *before = strndup(text, (size_t)(star - text));
    *after = strdup(star + 1);
    return *before && *after ? CKD_OK : cli_error_nomem(p->err);
}

ckd_status layout_parse_state(layout_parsing *p) {
    if (p->count != 3) {
        return layout_invalid(
            p, "state is followed by a name in the ranks' files and one in the checkpoint: state optim.*.m "
               "exp_avg.*");
    }
    layout_state *s = layout_append(p, &p->l->states, &p->l->state_count, sizeof(*s));
    ckd_status status = s ? split_star(&s->local_before, &s->local_after, p, p->words[1]) : p->err->status;
    return status == CKD_OK ? split_star(&s->global_before, &s->global_after, p, p->words[2]) : status;
}

/* ---- number NAME over=AXES count=N | sizes=A,B | table=0,1/2,3 [global] ---- */

/* Divides numbers evenly or as torch.chunk does. */
static ckd_status count_evenly(layout_number *n, layout_parsing *p, const char *value) {
    uint64_t count;
    const char *at = value;
    if (!layout_next_number(&count, &at, '\0') || count < 1 || count > NUMBERS_MAX) {
        return layout_invalid(p, "count= is how many %ss there are, not '%.40s'", n->name, value);
    }
    if (count % n->over.places) {
        return layout_invalid(p, "%llu %ss cannot be dealt evenly to %u places; say sizes= or table=",
                              (unsigned long long)count, n->name, n->over.places);
    }
    n->numbers = calloc((size_t)count, sizeof(*n->numbers));
    if (!n->numbers) {
        return cli_error_nomem(p->err);
    }
    for (uint64_t i = 0; i < count; i++) {
        n->numbers[i] = i;
    }
    for (uint32_t i = 0; i <= n->over.places; i++) {
        n->begin[i] = (size_t)(count / n->over.places) * i;
    }
    return CKD_OK;
}

static ckd_status count_sizes(layout_number *n, layout_parsing *p, const char *value) {
    uint64_t *sizes = NULL, all = 0;
    size_t count = 0;
    ckd_status status = layout_parse_numbers(&sizes, &count, p, "sizes", value);
    if (status == CKD_OK && count != n->over.places) {
        status = layout_invalid(p, "sizes= has %zu numbers for %u places", count, n->over.places);
    }
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        all += sizes[i];
        n->begin[i + 1] = (size_t)all;
        if (sizes[i] > NUMBERS_MAX || all > NUMBERS_MAX) {
            status = layout_invalid(p, "there are more than %u of them", NUMBERS_MAX);
        }
    }
    if (status == CKD_OK) {
        n->numbers = calloc((size_t)all + 1, sizeof(*n->numbers));
        status = n->numbers ? CKD_OK : cli_error_nomem(p->err);
    }
    for (uint64_t i = 0; i < all && status == CKD_OK; i++) {
        n->numbers[i] = i;
    }
    free(sizes);
    return status;
}

/*
 * Parses a list, up to anything but a digit or a comma between digits. Returns false if a number is missing or too
 * long.
 */
static bool read_list(uint64_t *numbers, size_t *count, const char **text) {
    const char *at = *text;
    bool more = *at >= '0' && *at <= '9';
    while (more) {
        uint64_t value = 0;
        size_t digits = strspn(at, "0123456789");
        for (size_t i = 0; i < digits && digits < 10; i++) {
            value = value * 10 + (uint64_t)(at[i] - '0');
        }
        if (digits == 0 || digits >= 10) {
            return false;
        }
        numbers[(*count)++] = value;
        at += digits;
        more = *at == ',';
        at += more;
    }
    *text = at;
    return true;
}

/* Parses lists of numbers, one per place; a place may have none. */
static ckd_status count_table(layout_number *n, layout_parsing *p, const char *value) {
    n->numbers = calloc(strlen(value) + 1, sizeof(*n->numbers));
    if (!n->numbers) {
        return cli_error_nomem(p->err);
    }
    size_t count = 0;
    const char *at = value;
    for (uint32_t place = 0; place < n->over.places; place++) {
        bool last = place + 1 == n->over.places;
        if (!read_list(n->numbers, &count, &at) || *at != (last ? '\0' : '/')) {
            return layout_invalid(
                p, "table= lists the numbers of each of %u places: 0,1,4,5/2,3,6,7, not '%.60s'",
                n->over.places, value);
        }
        at += !last;
        n->begin[place + 1] = count;
    }
    return CKD_OK;
}

static ckd_status parse_number_option(layout_number *n, layout_parsing *p, const char *word) {
    static const struct {
        const char *name;
        ckd_status (*parse)(layout_number *n, layout_parsing *p, const char *value);
    } ways[] = {{"count=", count_evenly}, {"sizes=", count_sizes}, {"table=", count_table}};
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
        if (strncmp(word, ways[i].name, 6) == 0) {
            if (n->numbers) {
                return layout_invalid(p, "say one of count=, sizes= and table=");
            }
            return ways[i].parse(n, p, word + 6);
        }
    }
    if (strcmp(word, "global") == 0) {
        n->global = true;
        return CKD_OK;
    }
    return layout_invalid(p, "number has the options over=, count=, sizes=, table= and global, not '%.60s'",
                          word);
}

ckd_status layout_parse_number(layout_parsing *p) {
    if (p->count < 4 || strncmp(p->words[2], "over=", 5) != 0) {
        return layout_invalid(
            p,
            "number is followed by a name, over=AXES, and one of count=, sizes=, table=: number layer over=pp count=24");
    }
    if (!layout_is_name(p->words[1], strlen(p->words[1])) || is_taken(p->words[1], strlen(p->words[1]))) {
        return layout_invalid(p, "a number cannot be called '%.60s'", p->words[1]);
    }
    for (size_t i = 0; i < p->l->number_count; i++) {
        if (strcmp(p->l->numbers[i].name, p->words[1]) == 0) {
            return layout_invalid(p, "number %s is in line %u already", p->words[1], p->l->numbers[i].line);
        }
    }
    layout_number *n = layout_append(p, &p->l->numbers, &p->l->number_count, sizeof(*n));
    if (!n) {
        return p->err->status;
    }
    n->line = p->line;
    memcpy(n->name, p->words[1], strlen(p->words[1]));
    ckd_status status = layout_parse_over(&n->over, p, p->words[2] + 5);
    if (status == CKD_OK) {
        n->begin = calloc((size_t)n->over.places + 1, sizeof(*n->begin));
        status = n->begin ? CKD_OK : cli_error_nomem(p->err);
    }
    for (size_t i = 3; i < p->count && status == CKD_OK; i++) {
        status = parse_number_option(n, p, p->words[i]);
    }
    return status == CKD_OK && !n->numbers ? layout_invalid(p, "say count=, sizes= or table=") : status;
}
