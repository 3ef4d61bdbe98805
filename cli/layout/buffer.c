/* Flat buffers: which parameters a rank's buffer has, and which of their elements. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/layout/parse.h"

#define PARAMETERS_MAX (1u << 20) /* per buffer */

void layout_buffer_free(layout_buffer *b) {
    for (size_t i = 0; i < b->count; i++) {
        free(b->parameters[i].name);
        free(b->parameters[i].plain);
    }
    free(b->parameters);
    free(b->name);
    *b = (layout_buffer){0};
}

/* ---- a rank's numbers ---- */

static size_t numbers_at(const layout_number *n, const layout *l, const uint32_t at[LAYOUT_AXES]) {
    uint32_t place = layout_place(&n->over, l, at);
    return n->begin[place + 1] - n->begin[place];
}

/* Returns the i-th number as in the rank's names. */
static uint64_t number_at(const layout_number *n, const layout *l, const uint32_t at[LAYOUT_AXES], size_t i) {
    return n->global ? n->numbers[n->begin[layout_place(&n->over, l, at)] + i] : i;
}

/* Enumerates combinations of numbers, the last one changing fastest. */
typedef struct counting {
    const layout *l;
    const uint32_t *at;
    const uint32_t *numbers; /* indexes in the layout */
    uint32_t count;
    bool fixed[LAYOUT_NUMBERS]; /* its value does not change */
    size_t index[LAYOUT_NUMBERS];
    uint64_t values[LAYOUT_NUMBERS];
} counting;

static void take_values(counting *c) {
    for (uint32_t i = 0; i < c->count; i++) {
        if (!c->fixed[i]) {
            c->values[i] = number_at(&c->l->numbers[c->numbers[i]], c->l, c->at, c->index[i]);
        }
    }
}

/* Returns false if there is no combination. */
static bool count_first(counting *c) {
    for (uint32_t i = 0; i < c->count; i++) {
        if (!c->fixed[i] && numbers_at(&c->l->numbers[c->numbers[i]], c->l, c->at) == 0) {
            return false;
        }
    }
    take_values(c);
    return true;
}

/* Returns false after the last one. */
static bool count_next(counting *c) {
    for (uint32_t i = c->count; i-- > 0;) {
        if (c->fixed[i]) {
            continue;
        }
        if (++c->index[i] < numbers_at(&c->l->numbers[c->numbers[i]], c->l, c->at)) {
            take_values(c);
            return true;
        }
        c->index[i] = 0;
    }
    return false;
}

/* ---- parameters ---- */

/* Returns before + the template + after; free() it. NULL: no memory. */
static char *write_name(const layout *l, const layout_template *t, const uint64_t numbers[LAYOUT_NUMBERS],
                        const char *before, const char *after) {
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (!to) {
        return NULL;
    }
    const layout_binding no_binding = {
        .state = LAYOUT_NONE}; /* the template has numbers, but no groups or parts */
    fputs(before, to);
    layout_template_write(to, l, t, &no_binding, &(layout_name_values){.numbers = numbers});
    fputs(after, to);
    bool failed = ferror(to) != 0;
    if (fclose(to) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}

static ckd_status add_parameter(layout_buffer *b, const layout *l, const layout_list_line *line,
                                const layout_member *m, const uint64_t numbers[LAYOUT_NUMBERS],
                                ckd_error *err) {
    if (b->count == PARAMETERS_MAX) {
        return layout_error(l, line->line, err, CKD_E_MISMATCH, "a buffer has more than %u parameters",
                            PARAMETERS_MAX);
    }
    if (b->count == b->capacity) {
        size_t capacity = 2 * b->capacity + 16;
        layout_parameter *grown = realloc(b->parameters, capacity * sizeof(*grown));
        if (!grown) {
            return cli_error_nomem(err);
        }
        b->parameters = grown;
        b->capacity = capacity;
    }
    const layout_state *s = b->state == LAYOUT_NONE ? NULL : &l->states[b->state];
    layout_parameter *p = &b->parameters[b->count++];
    *p = (layout_parameter){.member = m, .line = line->line};
    p->plain = write_name(l, &m->name, numbers, "", "");
    p->name = write_name(l, &m->name, numbers, s ? s->local_before : "", s ? s->local_after : "");
    return p->plain && p->name ? CKD_OK : cli_error_nomem(err);
}

/* Adds a line's parameters for all combinations of its numbers. */
static ckd_status add_line(layout_buffer *b, const layout *l, const layout_list_line *line,
                           const layout_name_values *values, ckd_error *err) {
    for (uint32_t axis = 0; axis < l->axis_count; axis++) {
        if (line->only[axis] && !line->only[axis][values->at[axis]]) {
            return CKD_OK;
        }
    }
    counting c = {.l = l, .at = values->at, .numbers = line->numbers, .count = line->number_count};
    for (uint32_t i = 0; i < line->number_count; i++) {
        for (uint32_t k = 0; k < b->rule->number_count; k++) {
            if (b->rule->numbers[k] == line->numbers[i]) {
                c.fixed[i] = true;
                c.values[i] = values->numbers[k];
            }
        }
    }
    ckd_status status = CKD_OK;
    for (bool more = count_first(&c); more && status == CKD_OK; more = count_next(&c)) {
        for (size_t i = 0; i < line->count && status == CKD_OK; i++) {
            status = add_parameter(b, l, line, &line->members[i], c.values, err);
        }
    }
    return status;
}

ckd_status layout_buffer_make(layout_buffer *out, const layout *l, const layout_rule *rule, size_t state,
                              const layout_name_values *values, ckd_error *err) {
    *out = (layout_buffer){.rule = rule, .state = state};
    const layout_state *s = state == LAYOUT_NONE ? NULL : &l->states[state];
    out->name =
        write_name(l, &rule->local_name, values->numbers, s ? s->local_before : "", s ? s->local_after : "");
    const layout_list *list = &l->lists[rule->flat.list];
    ckd_status status = out->name ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < list->count && status == CKD_OK; i++) {
        status = add_line(out, l, &list->lines[i], values, err);
    }
    return status;
}

/* ---- all buffers of a rank ---- */

/* Calls `each` for the buffer of the parameters, and for the buffer of each state. */
static ckd_status call_for_states(const layout *l, const layout_rule *rule, const counting *c,
                                  layout_buffer_fn call, void *context, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i <= l->state_count && status == CKD_OK; i++) {
        if (i == 0 ? !rule->flat.of_itself : !layout_flat_has_state(rule, &l->states[i - 1])) {
            continue;
        }
        layout_buffer b;
        layout_name_values values = {.at = c->at, .numbers = c->values};
        status = layout_buffer_make(&b, l, rule, i ? i - 1 : LAYOUT_NONE, &values, err);
        THEN(status, call(context, &b, err));
        layout_buffer_free(&b);
    }
    return status;
}

ckd_status layout_each_buffer(const layout *l, const uint32_t at[LAYOUT_AXES], layout_buffer_fn call,
                              void *context, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < l->rule_count && status == CKD_OK; i++) {
        const layout_rule *rule = &l->rules[i];
        bool applies = rule->kind == LAYOUT_FLAT;
        for (uint32_t axis = 0; axis < l->axis_count && applies; axis++) {
            applies = !rule->only[axis] || rule->only[axis][at[axis]];
        }
        counting c = {.l = l, .at = at, .numbers = rule->numbers, .count = rule->number_count};
        for (bool more = applies && count_first(&c); more && status == CKD_OK; more = count_next(&c)) {
            status = call_for_states(l, rule, &c, call, context, err);
        }
    }
    return status;
}

ckd_status layout_check_parameter(const layout *l, const layout_rule *flat, const layout_rule *own,
                                  const layout_parameter *p, ckd_error *err) {
    for (uint32_t i = 0; i < flat->flat.over.count; i++) {
        int axis = flat->flat.over.axes[i];
        bool decides = own->only[axis] || memchr(own->numbered.axes, axis, own->numbered.count);
        for (uint32_t k = 0; k < own->cut_count; k++) {
            decides |= memchr(own->cuts[k].over.axes, axis, own->cuts[k].over.count) != NULL;
        }
        if (decides) {
            layout_error(
                l, p->line, err, CKD_E_MISMATCH,
                "line %u says which ranks along %s have '%.200s', over which the flat buffer of line %u is cut",
                own->line, l->axes[axis].name, p->name, flat->line);
            return cli_error_tensor(err, p->name);
        }
    }
    return CKD_OK;
}

/* ---- elements ---- */

static uint64_t round_up(uint64_t n, uint64_t to) {
    return (n / to + (n % to != 0)) * to;
}

/*
 * Returns the step of the padded total length: the least common multiple of pad times the number of places, and
 * pad_all. 0: too large.
 */
static uint64_t padding_step(const layout_flat *flat) {
    uint64_t a = flat->pad, b = flat->pad_all, step;
    if (__builtin_mul_overflow(a, (uint64_t)flat->over.places, &a) || a > CKD_MAX_ELEMENTS) {
        return 0;
    }
    uint64_t x = a, y = b;
    while (y) {
        uint64_t rest = x % y;
        x = y;
        y = rest;
    }
    return __builtin_mul_overflow(a, b / x, &step) || step > CKD_MAX_ELEMENTS ? 0 : step;
}

/* Intersects elements begin ... begin + size - 1 with low ... high - 1. */
static layout_range intersect(uint64_t begin, uint64_t size, uint64_t low, uint64_t high) {
    uint64_t a = begin > low ? begin : low, b = begin + size < high ? begin + size : high;
    return a < b ? (layout_range){a - begin, b - a, a - low} : (layout_range){0};
}

/* Each parameter is padded and cut separately; the shares follow each other. */
static uint64_t range_each(layout_range *out, const layout_flat *flat, uint32_t place, uint64_t step,
                           const uint64_t *sizes, size_t count) {
    uint64_t used = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t share = round_up(sizes[i], step) / flat->over.places;
        used = round_up(used, flat->align);
        out[i] = intersect(0, sizes[i], place * share, (place + 1) * share);
        out[i].at = used;
        used += flat->stripped ? out[i].count : share;
    }
    return used;
}

/* All parameters are joined end to end, then padded and cut. */
static uint64_t range_all(layout_range *out, const layout_flat *flat, uint32_t place, uint64_t step,
                          const uint64_t *sizes, size_t count) {
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        total = round_up(total, flat->align) + sizes[i];
    }
    uint64_t share = round_up(total, step) / flat->over.places, low = place * share, high = low + share;
    uint64_t begin = 0;
    for (size_t i = 0; i < count; i++) {
        begin = round_up(begin, flat->align);
        out[i] = intersect(begin, sizes[i], low, high);
        begin += sizes[i];
    }
    return !flat->stripped ? share : low >= total ? 0 : (total < high ? total : high) - low;
}

ckd_status layout_ranges_make(layout_ranges *r, const layout *l, const layout_rule *flat,
                              const uint32_t at[LAYOUT_AXES], ckd_error *err) {
    uint64_t step = padding_step(&flat->flat);
    if (step == 0) {
        return layout_error(l, flat->line, err, CKD_E_MISMATCH, "elements cannot be padded that way");
    }
    uint32_t place = layout_place(&flat->flat.over, l, at);
    r->length =
        (flat->flat.each ? range_each : range_all)(r->items, &flat->flat, place, step, r->sizes, r->count);
    return CKD_OK;
}

uint64_t layout_next_box(ckd_region *out, uint32_t ndim, const uint64_t *shape, uint64_t first,
                         uint64_t count) {
    *out = (ckd_region){.kind = CKD_REGION_BOX, .lengths = {1}};
    uint64_t inner[CKD_MAX_DIMS] = {1}, all = 1;
    for (uint32_t d = ndim; d-- > 0;) {
        inner[d] = all;
        all *= shape[d];
    }
    /* Find the first dimension whose whole rows start here and are all needed. */
    uint32_t dim = 0;
    while (dim < ndim && (first % inner[dim] != 0 || count < inner[dim])) {
        dim++;
    }
    for (uint32_t d = 0; d < ndim; d++) {
        uint64_t index = first / inner[d] % shape[d], left = shape[d] - index;
        out->offsets[d] = d <= dim ? index : 0;
        out->lengths[d] = d < dim                   ? 1
                          : d > dim                 ? shape[d]
                          : count / inner[d] < left ? count / inner[d]
                                                    : left;
    }
    return ndim ? out->lengths[dim] * inner[dim] : 1;
}
