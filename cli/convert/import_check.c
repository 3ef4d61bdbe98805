/* Checks one tensor of the checkpoint: its dtype, its shape, and the part that each rank should have. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/convert/internal.h"
#include "cli/files/files.h"

/* ---- errors ---- */

static ckd_status CLI_PRINTF(4, 5)
    wrong(const import_plan *plan, const import_entry *e, ckd_error *err, const char *format, ...) {
    char message[sizeof(err->message)];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    layout_error(plan->layout, e->rule->line, err, CKD_E_MISMATCH, "%s", message);
    return cli_error_tensor(err, e->tensor->name);
}

/* Appends the lengths that ranks of the entry's set have in a dimension: "; ranks 0, 1 have 6, 5 of dimension 0". */
static ckd_status report_lengths(ckd_error *err, const import_tensor *t, const import_entry *entry,
                                 uint32_t dim) {
    char ranks[100] = "", lengths[140] = "";
    size_t a = 0, b = 0;
    for (size_t i = 0; i < t->count; i++) {
        const import_entry *e = &t->entries[i];
        if (e->rule != entry->rule || e->set != entry->set || dim >= e->tensor->ndim) {
            continue;
        }
        if (a > sizeof(ranks) - 16 || b > sizeof(lengths) - 30) {
            snprintf(lengths + b, sizeof(lengths) - b, ", ...");
            snprintf(ranks + a, sizeof(ranks) - a, ", ...");
            break;
        }
        a += (size_t)snprintf(ranks + a, sizeof(ranks) - a, "%s%u", a ? ", " : "", e->rank);
        b += (size_t)snprintf(lengths + b, sizeof(lengths) - b, "%s%" PRIu64, b ? ", " : "",
                              e->tensor->shape[dim]);
    }
    size_t used = strlen(err->message);
    snprintf(err->message + used, sizeof(err->message) - used, "; of dimension %u, ranks %s have %s", dim,
             ranks, lengths);
    return cli_error_tensor(err, entry->tensor->name);
}

/* ---- agreement ---- */

static bool is_cut(const layout_rule *rule, uint32_t dim, uint32_t ndim) {
    for (uint32_t i = 0; i < rule->cut_count; i++) {
        if (cli_dim_of(rule->cuts[i].dim, ndim) == dim) {
            return true;
        }
    }
    return false;
}

/* Two entries of one tensor must have the same dtype; under the same rule also the same lengths in uncut dimensions. */
static ckd_status check_pair(const import_plan *plan, const import_entry *a, const import_entry *b,
                             ckd_error *err) {
    const safetensors_tensor *x = a->tensor, *y = b->tensor;
    if (x->dtype != y->dtype) {
        return wrong(plan, b, err, "'%.120s' is %s on %s, but '%.120s' is %s on rank %u", y->name,
                     ckd_dtype_name(y->dtype), layout_rank_text(plan->layout, b->rank).text, x->name,
                     ckd_dtype_name(x->dtype), a->rank);
    }
    bool same = x->ndim == y->ndim;
    for (uint32_t d = 0; d < x->ndim && same && a->rule == b->rule; d++) {
        same = x->shape[d] == y->shape[d] || is_cut(a->rule, d, x->ndim);
    }
    if (!same) {
        return wrong(plan, b, err, "'%.120s' is %s on %s, but %s on rank %u", y->name,
                     layout_shape_text(y->ndim, y->shape).text, layout_rank_text(plan->layout, b->rank).text,
                     layout_shape_text(x->ndim, x->shape).text, a->rank);
    }
    return CKD_OK;
}

static ckd_status check_alike(const import_plan *plan, const import_tensor *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    const import_entry *first = t->entries;
    for (size_t i = 1; i < t->count && status == CKD_OK; i++) {
        first = t->entries[i].rule == first->rule ? first : &t->entries[i];
        status = check_pair(plan, t->entries, &t->entries[i], err);
        THEN(status, check_pair(plan, first, &t->entries[i], err));
    }
    return status;
}

/* ---- the shape ---- */

/* Is the entry's rank at the first place of the flat buffer, and of all cuts except this one? */
static bool is_along(const layout *l, const import_entry *e, uint32_t cut) {
    const layout_rule *rule = e->rule;
    uint32_t at[LAYOUT_AXES];
    layout_coordinates(at, l, e->rank);
    if (e->flat && layout_place(&e->flat->flat.over, l, at) != 0) {
        return false;
    }
    for (uint32_t i = 0; i < rule->cut_count; i++) {
        if (i != cut && layout_place(&rule->cuts[i].over, l, at) != 0) {
            return false;
        }
    }
    return true;
}

/* Infers the shape from the entries of e's rule and set; e is the first of them. */
static ckd_status infer_shape(uint64_t shape[CKD_MAX_DIMS], const import_plan *plan, const import_tensor *t,
                              const import_entry *e, ckd_error *err) {
    const layout_rule *rule = e->rule;
    memcpy(shape, e->tensor->shape, CKD_MAX_DIMS * sizeof(*shape));
    for (uint32_t i = 0; i < rule->cut_count; i++) {
        uint32_t dim = cli_dim_of(rule->cuts[i].dim, e->tensor->ndim);
        if (dim >= e->tensor->ndim) {
            return wrong(plan, e, err, "'%.120s' has the shape %s, and no dimension %d", e->tensor->name,
                         layout_shape_text(e->tensor->ndim, e->tensor->shape).text, rule->cuts[i].dim);
        }
        shape[dim] = 0;
        for (const import_entry *k = e; k < t->entries + t->count && k->rule == rule && k->set == e->set;
             k++) {
            if (is_along(plan->layout, k, i) &&
                __builtin_add_overflow(shape[dim], k->tensor->shape[dim], &shape[dim])) {
                return wrong(plan, e, err, "there are too many elements");
            }
        }
    }
    if (rule->padded && !rule->size) {
        return wrong(plan, e, err,
                     "the files do not show where padding begins: give the length without it, size=N");
    }
    uint32_t dim = layout_main_dim(rule, e->tensor->ndim);
    uint64_t *main = &shape[dim];
    if (rule->size) {
        *main = rule->size; /* without padding and repetition */
    } else if (rule->repeats && !rule->apart) {
        *main = 0;
        for (size_t i = 0; i < rule->part_count; i++) {
            *main += rule->parts[i].size;
        }
    } else if (rule->apart) {
        const layout_part *part = &rule->parts[e->part];
        if (!part->size && *main % rule->part_count) {
            return wrong(plan, e, err,
                         "dimension %u has %" PRIu64 " elements, which are not %zu parts of one size", dim,
                         *main, rule->part_count);
        }
        *main = part->size ? part->size : *main / rule->part_count;
    }
    return CKD_OK;
}

static ckd_status set_shape(const import_plan *plan, import_tensor *t, ckd_error *err) {
    safetensors_tensor *to = &t->tensor;
    to->dtype = t->entries->tensor->dtype;
    to->ndim = t->entries->tensor->ndim;
    ckd_status status = infer_shape(to->shape, plan, t, t->entries, err);
    to->elements = 1;
    for (uint32_t d = 0; d < to->ndim && status == CKD_OK; d++) {
        if (__builtin_mul_overflow(to->elements, to->shape[d], &to->elements) ||
            to->elements > CKD_MAX_ELEMENTS) {
            status = wrong(plan, t->entries, err, "a tensor has at most 2^40 elements");
        }
    }
    to->size = to->elements * ckd_dtype_size(to->dtype);
    return status;
}

/* All rules must lead to the same shape. */
static ckd_status check_shape(const import_plan *plan, const import_tensor *t, const import_entry *e,
                              ckd_error *err) {
    uint64_t shape[CKD_MAX_DIMS];
    ckd_status status = infer_shape(shape, plan, t, e, err);
    if (status == CKD_OK && memcmp(shape, t->tensor.shape, t->tensor.ndim * sizeof(*shape)) != 0) {
        return wrong(plan, e, err, "by this line '%.120s' is %s, by line %u it is %s", t->tensor.name,
                     layout_shape_text(t->tensor.ndim, shape).text, t->entries->rule->line,
                     layout_shape_text(t->tensor.ndim, t->tensor.shape).text);
    }
    return status;
}

/* ---- shares ---- */

ckd_status import_totals(uint64_t **out, const import_tensor *t, const layout_rule *rule, size_t part,
                         ckd_error *err) {
    size_t count = layout_tensors_of(rule);
    uint32_t dim = layout_main_dim(rule, t->tensor.ndim);
    *out = calloc(count, sizeof(**out));
    if (!*out) {
        return cli_error_nomem(err);
    }
    uint64_t length = dim < t->tensor.ndim ? t->tensor.shape[dim] : 0;
    for (size_t i = 0; i < count; i++) {
        bool uses_length = !rule->apart || i == part || !rule->parts[i].size;
        (*out)[i] = uses_length ? length : rule->parts[i].size;
    }
    return CKD_OK;
}

ckd_status import_share(layout_share *out, const layout *l, const layout_rule *rule, uint32_t rank,
                        const layout_whole *whole, ckd_error *err) {
    uint32_t at[LAYOUT_AXES];
    layout_coordinates(at, l, rank);
    return layout_share_make(out, l, rule, at, whole, err);
}

static ckd_status check_share(const import_plan *plan, const import_tensor *t, const import_entry *e,
                              const uint64_t *totals, ckd_error *err) {
    layout_share share;
    layout_whole whole = {t->tensor.ndim, t->tensor.shape, totals};
    ckd_status status = import_share(&share, plan->layout, e->rule, e->rank, &whole, err);
    if (status == CKD_E_MISMATCH) {
        return report_lengths(err, t, e, layout_main_dim(e->rule, t->tensor.ndim));
    }
    for (uint32_t d = 0; d < t->tensor.ndim && status == CKD_OK; d++) {
        if (share.lengths[d] != e->tensor->shape[d]) {
            wrong(plan, e, err, "'%.120s' is %s on %s, and should be %s", e->tensor->name,
                  layout_shape_text(t->tensor.ndim, e->tensor->shape).text,
                  layout_rank_text(plan->layout, e->rank).text,
                  layout_shape_text(t->tensor.ndim, share.lengths).text);
            status = report_lengths(err, t, e, d);
        }
    }
    layout_share_free(&share);
    return status;
}

/* Checks all entries of one rule; e is the first of them. */
static ckd_status check_shares(const import_plan *plan, const import_tensor *t, const import_entry *e,
                               ckd_error *err) {
    uint64_t *totals = NULL;
    ckd_status status = check_shape(plan, t, e, err);
    THEN(status, import_totals(&totals, t, e->rule, e->part, err));
    for (const import_entry *k = e; k < t->entries + t->count && k->rule == e->rule && status == CKD_OK;
         k++) {
        status = check_share(plan, t, k, totals, err);
    }
    free(totals);
    return status;
}

/* ---- ranks ---- */

static bool has_none(const layout_share *s) {
    bool empty = false;
    for (uint32_t d = 0; d < s->ndim; d++) {
        empty |= s->lengths[d] == 0;
    }
    return empty;
}

/* A rank that should hold nothing of the tensor need not have it. */
static ckd_status check_absent(const import_plan *plan, const import_tensor *t,
                               const layout_binding *expected, const layout_name_values *values,
                               uint32_t rank, ckd_error *err) {
    uint64_t *totals = NULL;
    layout_share share = {0};
    ckd_error ignored;
    ckd_status status = import_totals(&totals, t, expected->rule, expected->part, err);
    layout_whole whole = {t->tensor.ndim, t->tensor.shape, totals};
    bool lacking = status != CKD_OK ||
                   import_share(&share, plan->layout, expected->rule, rank, &whole, &ignored) != CKD_OK ||
                   !has_none(&share);
    layout_share_free(&share);
    free(totals);
    char *name = NULL;
    if (status == CKD_OK && lacking) {
        status = layout_other_name(&name, plan->layout, expected, values, err);
    }
    if (status == CKD_OK && lacking) {
        layout_error(plan->layout, expected->rule->line, err, CKD_E_MISMATCH,
                     "%s has no '%.200s', while rank %u has '%.200s'",
                     layout_rank_text(plan->layout, rank).text, name, t->entries->rank,
                     t->entries->tensor->name);
        status = cli_error_tensor(err, name);
    }
    free(name);
    return status;
}

/* Checks that load would write for this rank exactly what was read. */
static ckd_status check_back(const import_plan *plan, const import_entry *e, const layout_binding *expected,
                             const layout_name_values *values, ckd_error *err) {
    const char *from = e->tensor->name;
    if (!expected) {
        return wrong(plan, e, err,
                     "'%.100s' of rank %u becomes '%.100s', which load would not turn back into it", from,
                     e->rank, e->name);
    }
    if (expected->rule != e->rule) {
        return wrong(
            plan, e, err,
            "'%.100s' of rank %u becomes '%.100s', which line %u matches first: load would follow that one",
            from, e->rank, e->name, expected->rule->line);
    }
    if (expected->part != e->part) {
        return wrong(plan, e, err, "'%.100s' becomes '%.100s', which as= does not turn back into it", from,
                     e->name);
    }
    char *name;
    ckd_status status = layout_other_name(&name, plan->layout, expected, values, err);
    if (status == CKD_OK && strcmp(name, from) != 0) {
        status = wrong(plan, e, err, "'%.100s' of rank %u becomes '%.100s', which load would make '%.100s'",
                       from, e->rank, e->name, name);
    }
    free(name);
    return status;
}

static ckd_status check_rank(const import_plan *plan, const import_tensor *t, const layout_bindings *b,
                             const import_entry *e, uint32_t rank, ckd_error *err) {
    uint32_t at[LAYOUT_AXES];
    uint64_t numbers[LAYOUT_NUMBERS];
    layout_coordinates(at, plan->layout, rank);
    const layout_binding *expected = layout_choose(numbers, plan->layout, b, at);
    if (expected && expected->rule->kind == LAYOUT_SKIPPED) {
        expected = e ? expected : NULL;
    }
    layout_name_values values = {at, numbers, expected ? expected->part : LAYOUT_NONE};
    return e          ? check_back(plan, e, expected, &values, err)
           : expected ? check_absent(plan, t, expected, &values, rank, err)
                      : CKD_OK;
}

static ckd_status check_ranks(const import_plan *plan, const import_tensor *t, ckd_error *err) {
    const import_entry **of_rank = calloc(plan->layout->world, sizeof(*of_rank));
    layout_bindings b = {0};
    ckd_status status =
        of_rank ? layout_bind(&b, plan->layout, t->tensor.name, true, err) : cli_error_nomem(err);
    for (size_t i = 0; i < t->count && status == CKD_OK; i++) {
        const import_entry *e = &t->entries[i], *other = of_rank[e->rank];
        if (other) {
            status = wrong(plan, e, err, "'%.120s' and '%.120s' of rank %u both become '%.120s'",
                           other->tensor->name, e->tensor->name, e->rank, e->name);
        }
        of_rank[e->rank] = e;
    }
    for (uint32_t rank = 0; rank < plan->layout->world && status == CKD_OK; rank++) {
        status = check_rank(plan, t, &b, of_rank[rank], rank, err);
    }
    layout_bindings_free(&b);
    free(of_rank);
    return status;
}

static ckd_status check_mean(const import_plan *plan, const import_tensor *t, ckd_error *err) {
    ckd_dtype dtype = t->tensor.dtype;
    bool real = dtype == CKD_F64 || dtype == CKD_F32 || dtype == CKD_F16 || dtype == CKD_BF16;
    return real || t->entries->rule->kind != LAYOUT_AVERAGED
               ? CKD_OK
               : wrong(plan, t->entries, err, "'%.100s' is %s; f64, f32, f16 and bf16 can be averaged",
                       t->tensor.name, ckd_dtype_name(dtype));
}

ckd_status import_check(import_plan *plan, import_tensor *t, ckd_error *err) {
    ckd_status status = check_alike(plan, t, err);
    THEN(status, set_shape(plan, t, err));
    THEN(status, check_ranks(plan, t, err));
    for (size_t i = 0; i < t->count && status == CKD_OK; i++) {
        bool new_rule = i == 0 || t->entries[i].rule != t->entries[i - 1].rule;
        status = new_rule ? check_shares(plan, t, &t->entries[i], err) : status;
    }
    return status == CKD_OK ? check_mean(plan, t, err) : status;
}
