/*
 * Extracts parameters from ranks' flat buffers. A parameter is treated like a tensor of the rank, of which the file has
 * only some elements.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/convert/internal.h"

/* ---- buffers with one name ---- */

typedef struct reading {
    import_plan *plan;
    const import_references *all;
    const import_reference *first; /* of the buffers with this name */
    /* The last bindings, by index in the buffer: most ranks have the same parameters. */
    layout_bindings *bound;
    char **names;
    size_t capacity;
} reading;

/* A rank's buffer being taken apart. */
typedef struct taking {
    reading *r;
    uint32_t rank;
    const uint32_t *at;
    const import_reference *found; /* NULL: the rank has no such buffer */
    layout_buffer buffer;
    const safetensors_tensor **tensors; /* one per parameter */
    uint64_t *sizes;
    layout_range *ranges;
} taking;

static void free_bound(reading *r) {
    for (size_t i = 0; i < r->capacity; i++) {
        layout_bindings_free(&r->bound[i]);
        free(r->names[i]);
    }
    free(r->bound);
    free(r->names);
}

static ckd_status grow_bound(reading *r, size_t count, ckd_error *err) {
    if (count <= r->capacity) {
        return CKD_OK;
    }
    layout_bindings *bound = realloc(r->bound, count * sizeof(*bound));
    r->bound = bound ? bound : r->bound;
    char **names = bound ? realloc(r->names, count * sizeof(char *)) : NULL;
    r->names = names ? names : r->names;
    if (!bound || !names) {
        return cli_error_nomem(err);
    }
    for (; r->capacity < count; r->capacity++) {
        r->bound[r->capacity] = (layout_bindings){0};
        r->names[r->capacity] = NULL;
    }
    return CKD_OK;
}

/* Returns the rules for the buffer's i-th parameter. */
static ckd_status bind_parameter(const layout_bindings **out, reading *r, size_t i, const char *name,
                                 ckd_error *err) {
    *out = &r->bound[i];
    if (r->names[i] && strcmp(r->names[i], name) == 0) {
        return CKD_OK;
    }
    layout_bindings_free(&r->bound[i]);
    free(r->names[i]);
    r->names[i] = strdup(name);
    return r->names[i] ? layout_bind(&r->bound[i], r->plan->layout, name, false, err) : cli_error_nomem(err);
}

static ckd_status choose_rule(const layout_binding **out, uint64_t numbers[LAYOUT_NUMBERS], const taking *t,
                              size_t i, ckd_error *err) {
    const layout *l = t->r->plan->layout;
    const layout_parameter *p = &t->buffer.parameters[i];
    const layout_bindings *b;
    ckd_status status = bind_parameter(&b, t->r, i, p->name, err);
    if (status != CKD_OK) {
        return status;
    }
    *out = layout_choose(numbers, l, b, t->at);
    layout_kind kind = *out ? (*out)->rule->kind : LAYOUT_SKIPPED;
    if (kind != LAYOUT_SKIPPED && kind != LAYOUT_FLAT) {
        return layout_check_parameter(l, t->buffer.rule, (*out)->rule, p, err);
    }
    layout_error(
        l, p->line, err, CKD_E_MISMATCH,
        "no rule stores '%.200s' of %s; a tensor in a flat buffer needs a rule that does not skip it",
        p->name, layout_rank_text(l, t->rank).text);
    return cli_error_tensor(err, p->name);
}

/* ---- shapes ---- */

static ckd_status find_shape(safetensors_tensor *out, const taking *t, const layout_rule *rule,
                             const layout_parameter *p, ckd_error *err) {
    const layout *l = t->r->plan->layout;
    const import_reference *reference = import_find_reference(t->r->all, p->plain, t->rank);
    ckd_status status = CKD_OK;
    if (p->member->shaped) {
        out->ndim = p->member->ndim;
        status = layout_rank_shape(out->shape, l, rule, t->at,
                                   &(layout_whole){out->ndim, p->member->shape, NULL}, err);
    } else if (reference) {
        out->ndim = reference->tensor->ndim;
        memcpy(out->shape, reference->tensor->shape, sizeof(out->shape));
    } else {
        status = layout_error(
            l, p->line, err, CKD_E_MISMATCH,
            "the shape of '%.200s' is not known: give it here as NAME:ROWSxCOLUMNS; %s has no tensor of this name, which would show it",
            p->plain, layout_rank_text(l, t->rank).text);
    }
    out->elements = 1;
    for (uint32_t d = 0; d < out->ndim && status == CKD_OK; d++) {
        if (__builtin_mul_overflow(out->elements, out->shape[d], &out->elements) ||
            out->elements > CKD_MAX_ELEMENTS) {
            status = layout_error(l, p->line, err, CKD_E_MISMATCH, "a tensor has at most 2^40 elements");
        }
    }
    return status == CKD_OK || status == CKD_E_NOMEM ? status : cli_error_tensor(err, p->name);
}

/* Makes the parameter as a tensor of the rank; the plan owns it. */
static ckd_status make_parameter(const safetensors_tensor **out, const taking *t, const layout_rule *rule,
                                 const layout_parameter *p, ckd_error *err) {
    import_plan *plan = t->r->plan;
    if (plan->parameter_count % 1024 == 0) {
        import_parameter **grown =
            realloc(plan->parameters, (plan->parameter_count + 1024) * sizeof(import_parameter *));
        if (!grown) {
            return cli_error_nomem(err);
        }
        plan->parameters = grown;
    }
    import_parameter *made = calloc(1, sizeof(*made));
    char *name = made ? strdup(p->name) : NULL;
    if (!name) {
        free(made);
        return cli_error_nomem(err);
    }
    plan->parameters[plan->parameter_count++] = made;
    const safetensors_tensor *buffer = (t->found ? t->found : t->r->first)->tensor;
    *made = (import_parameter){
        .tensor = {.name = name, .dtype = buffer->dtype}, .flat = t->buffer.rule, .rank = t->rank};
    *out = &made->tensor;
    return find_shape(&made->tensor, t, rule, p, err);
}

/* ---- a rank's buffer ---- */

/* Checks that the buffer's length equals that of its parameters and padding. */
static ckd_status check_buffer(const taking *t, uint64_t length, ckd_error *err) {
    const layout *l = t->r->plan->layout;
    uint32_t line = t->buffer.rule->line;
    const char *name = t->r->first->tensor->name;
    uint64_t sum = 0;
    for (size_t i = 0; i < t->buffer.count; i++) {
        sum += t->sizes[i];
    }
    if (!t->found && length > 0) {
        layout_error(l, line, err, CKD_E_MISMATCH, "%s has no '%.200s', while rank %u has one",
                     layout_rank_text(l, t->rank).text, name, t->r->first->rank);
    } else if (t->found && t->buffer.count == 0) {
        layout_error(l, line, err, CKD_E_MISMATCH, "no line of list %s says what is in '%.200s' of %s",
                     l->lists[t->buffer.rule->flat.list].name, name, layout_rank_text(l, t->rank).text);
    } else if (strcmp(t->buffer.name, name) != 0) {
        layout_error(l, line, err, CKD_E_MISMATCH,
                     "the rule matches '%.200s', which load would call '%.200s'", name, t->buffer.name);
    } else if (t->found && (t->found->tensor->ndim != 1 || t->found->tensor->shape[0] != length)) {
        layout_error(l, line, err, CKD_E_MISMATCH,
                     "'%.120s' is %s on %s, and should be [%" PRIu64 "]: its %zu parameters have %" PRIu64
                     " elements, shared by %u ranks",
                     name, layout_shape_text(t->found->tensor->ndim, t->found->tensor->shape).text,
                     layout_rank_text(l, t->rank).text, length, t->buffer.count, sum,
                     t->buffer.rule->flat.over.places);
    } else {
        return CKD_OK;
    }
    return cli_error_tensor(err, name);
}

static ckd_status add_parameters(const taking *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < t->buffer.count && status == CKD_OK; i++) {
        const layout_binding *chosen;
        uint64_t numbers[LAYOUT_NUMBERS];
        import_reference r = t->found ? *t->found : *t->r->first;
        r.file = t->found ? r.file : NULL;
        r.stored = r.tensor;
        r.tensor = t->tensors[i];
        r.flat = t->buffer.rule;
        r.range = t->ranges[i];
        r.rank = t->rank;
        r.member = i;
        status = choose_rule(&chosen, numbers, t, i, err);
        if (status == CKD_OK) {
            t->r->plan->matched[chosen->rule - t->r->plan->layout->rules]++;
            status = import_add_entries(t->r->plan, &r, chosen, numbers, t->at, err);
        }
    }
    return status;
}

static ckd_status take_parameters(taking *t, ckd_error *err) {
    size_t count = t->buffer.count;
    t->tensors = calloc(count + 1, sizeof(safetensors_tensor *));
    t->sizes = calloc(count + 1, sizeof(*t->sizes));
    t->ranges = calloc(count + 1, sizeof(*t->ranges));
    ckd_status status = t->tensors && t->sizes && t->ranges ? CKD_OK : cli_error_nomem(err);
    THEN(status, grow_bound(t->r, count, err));
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        const layout_binding *chosen;
        uint64_t numbers[LAYOUT_NUMBERS];
        status = choose_rule(&chosen, numbers, t, i, err);
        THEN(status, make_parameter(&t->tensors[i], t, chosen->rule, &t->buffer.parameters[i], err));
        t->sizes[i] = status == CKD_OK ? t->tensors[i]->elements : 0;
    }
    layout_ranges ranges = {t->sizes, count, t->ranges, 0};
    THEN(status, layout_ranges_make(&ranges, t->r->plan->layout, t->buffer.rule, t->at, err));
    THEN(status, check_buffer(t, ranges.length, err));
    return status == CKD_OK ? add_parameters(t, err) : status;
}

static ckd_status take_buffer(reading *r, uint32_t rank, const import_reference *found,
                              const layout_bindings *b, ckd_error *err) {
    uint32_t at[LAYOUT_AXES];
    uint64_t numbers[LAYOUT_NUMBERS];
    layout_coordinates(at, r->plan->layout, rank);
    const layout_binding *chosen = layout_choose(numbers, r->plan->layout, b, at);
    if (!chosen || chosen->rule->kind != LAYOUT_FLAT) {
        return CKD_OK;
    }
    taking t = {.r = r, .rank = rank, .at = at, .found = found};
    layout_name_values values = {.at = at, .numbers = chosen->numbers};
    ckd_status status =
        layout_buffer_make(&t.buffer, r->plan->layout, chosen->rule, chosen->state, &values, err);
    THEN(status, take_parameters(&t, err));
    layout_buffer_free(&t.buffer);
    free(t.tensors);
    free(t.sizes);
    free(t.ranges);
    return status;
}

ckd_status import_add_buffers(import_plan *plan, const import_references *all, size_t first, size_t end,
                              const layout_bindings *b, ckd_error *err) {
    reading r = {.plan = plan, .all = all, .first = &all->items[first]};
    ckd_status status = CKD_OK;
    size_t next = first;
    for (uint32_t rank = 0; rank < plan->layout->world && status == CKD_OK; rank++) {
        bool has = next < end && all->items[next].rank == rank;
        status = take_buffer(&r, rank, has ? &all->items[next] : NULL, b, err);
        next += has;
    }
    free_bound(&r);
    return status;
}

/* ---- the way back ---- */

static int by_name_and_rank(const void *left, const void *right) {
    const import_parameter *a = *(import_parameter *const *)left, *b = *(import_parameter *const *)right;
    int order = strcmp(a->tensor.name, b->tensor.name);
    return order ? order : (a->rank > b->rank) - (a->rank < b->rank);
}

typedef struct checking {
    const import_plan *plan;
    const import_references *all;
    uint32_t rank;
} checking;

static ckd_status check_one(const checking *c, const layout_buffer *b, const layout_parameter *p,
                            ckd_error *err) {
    const layout *l = c->plan->layout;
    const import_reference *r = import_find_reference(c->all, p->name, c->rank);
    import_parameter key = {.tensor.name = p->name, .rank = c->rank}, *sought = &key;
    import_parameter **found = bsearch(&sought, c->plan->parameters, c->plan->parameter_count,
                                       sizeof(import_parameter *), by_name_and_rank);
    if (r && r->taken) {
        layout_error(
            l, b->rule->line, err, CKD_E_MISMATCH,
            "load would put '%.120s' into '%.120s', but %s has a tensor of it; state=only and state=none say "
            "what is in flat buffers",
            p->name, b->name, layout_rank_text(l, c->rank).text);
        return cli_error_tensor(err, p->name);
    }
    if (found && (*found)->flat != b->rule) {
        layout_error(l, b->rule->line, err, CKD_E_MISMATCH,
                     "'%.120s' is in '%.120s' of %s, and by line %u in another flat buffer", p->name, b->name,
                     layout_rank_text(l, c->rank).text, (*found)->flat->line);
        return cli_error_tensor(err, p->name);
    }
    return CKD_OK;
}

static ckd_status check_parameters(void *context, const layout_buffer *b, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < b->count && status == CKD_OK; i++) {
        status = check_one(context, b, &b->parameters[i], err);
    }
    return status;
}

/* `parameters` are sorted. */
static ckd_status check_once(const import_plan *plan, ckd_error *err) {
    for (size_t i = 1; i < plan->parameter_count; i++) {
        const import_parameter *a = plan->parameters[i - 1], *b = plan->parameters[i];
        if (by_name_and_rank(&plan->parameters[i - 1], &plan->parameters[i]) == 0) {
            uint32_t first = a->flat->line < b->flat->line ? a->flat->line : b->flat->line;
            uint32_t second = a->flat->line < b->flat->line ? b->flat->line : a->flat->line;
            layout_error(plan->layout, first, err, CKD_E_MISMATCH,
                         "'%.200s' is in flat buffers of %s twice, by lines %u and %u", a->tensor.name,
                         layout_rank_text(plan->layout, a->rank).text, first, second);
            return cli_error_tensor(err, a->tensor.name);
        }
    }
    return CKD_OK;
}

ckd_status import_check_buffers(import_plan *plan, const import_references *all, ckd_error *err) {
    if (plan->layout->list_count == 0) {
        return CKD_OK;
    }
    if (plan->parameter_count) {
        qsort(plan->parameters, plan->parameter_count, sizeof(import_parameter *), by_name_and_rank);
    }
    ckd_status status = check_once(plan, err);
    for (uint32_t rank = 0; rank < plan->layout->world && status == CKD_OK; rank++) {
        checking c = {plan, all, rank};
        uint32_t at[LAYOUT_AXES];
        layout_coordinates(at, plan->layout, rank);
        status = layout_each_buffer(plan->layout, at, check_parameters, &c, err);
    }
    return status;
}
