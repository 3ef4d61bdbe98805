/*
 * Builds one rank's tensors from a checkpoint. A rank's tensor may consist of parts of several tensors, so it is loaded
 * section by section, and each section is placed.
 */
#include "cli/convert/rank_content.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- names ---- */

void bound_checkpoint_free(bound_checkpoint *b) {
    for (size_t i = 0; b->bindings && i < b->list->count; i++) {
        layout_bindings_free(&b->bindings[i]);
    }
    free(b->bindings);
    *b = (bound_checkpoint){0};
}

/* Checks that some rank holds it, or that all skip it. */
static ckd_status check_held(const layout *l, const layout_bindings *b, const char *name, ckd_error *err) {
    uint32_t at[LAYOUT_AXES];
    uint64_t numbers[LAYOUT_NUMBERS];
    for (uint32_t rank = 0; rank < l->world && b->count; rank++) {
        layout_coordinates(at, l, rank);
        if (layout_choose(numbers, l, b, at)) {
            return CKD_OK;
        }
    }
    if (b->count) {
        layout_error(l, b->items[0].rule->line, err, CKD_E_MISMATCH,
                     "the rule matches '%.200s', but by its numbers no rank holds it", name);
    } else {
        layout_error(
            l, 0, err, CKD_E_MISMATCH,
            "no rule matches '%.200s' of the checkpoint; add a rule for it, of kind skipped to leave it out",
            name);
    }
    return cli_error_tensor(err, name);
}

ckd_status bound_checkpoint_make(bound_checkpoint *out, const layout *l, const ckd_tensor_list *list,
                                 ckd_error *err) {
    *out = (bound_checkpoint){l, list, calloc(list->count + 1, sizeof(*out->bindings))};
    ckd_status status = out->bindings ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < list->count && status == CKD_OK; i++) {
        status = layout_bind(&out->bindings[i], l, list->items[i].name, true, err);
        THEN(status, check_held(l, &out->bindings[i], list->items[i].name, err));
    }
    return status;
}

/* ---- a rank's tensors ---- */

ckd_dtype rank_tensor_dtype(const rank_tensor *t) {
    return t->member_count ? rank_tensor_dtype(&t->members[0]) : t->parts[0]->dtype;
}

void rank_tensor_free(rank_tensor *t) {
    for (size_t i = 0; i < t->member_count; i++) {
        rank_tensor_free(&t->members[i]);
    }
    free(t->members);
    free(t->ranges);
    free(t->name);
    free(t->parts);
    layout_share_free(&t->share);
    *t = (rank_tensor){0};
}

void rank_content_free(rank_content *c) {
    for (size_t i = 0; i < c->count; i++) {
        rank_tensor_free(&c->items[i]);
    }
    free(c->items);
    *c = (rank_content){0};
}

/* A checkpoint tensor that the rank holds wholly or partly. */
typedef struct held {
    char *name; /* the rank's name for it */
    const layout_rule *rule;
    const ckd_tensor_info *info;
    size_t part, order;
} held;

static int by_rank_name(const void *left, const void *right) {
    const held *a = left, *b = right;
    int order = strcmp(a->name, b->name);
    return order ? order : (a->order > b->order) - (a->order < b->order);
}

static int by_order(const void *left, const void *right) {
    const held *a = *(held *const *)left, *b = *(held *const *)right;
    return (a->order > b->order) - (a->order < b->order);
}

static ckd_status find_held(held *out, size_t *count, const bound_checkpoint *b, uint32_t rank,
                            ckd_error *err) {
    uint32_t at[LAYOUT_AXES];
    uint64_t numbers[LAYOUT_NUMBERS];
    layout_coordinates(at, b->layout, rank);
    for (size_t i = 0; i < b->list->count; i++) {
        const layout_binding *chosen = layout_choose(numbers, b->layout, &b->bindings[i], at);
        if (!chosen || chosen->rule->kind == LAYOUT_SKIPPED) {
            continue;
        }
        held *h = &out[*count];
        *h = (held){.rule = chosen->rule, .info = &b->list->items[i], .part = chosen->part, .order = i};
        layout_name_values values = {at, numbers, chosen->part};
        ckd_status status = layout_other_name(&h->name, b->layout, chosen, &values, err);
        if (status != CKD_OK) {
            return status;
        }
        (*count)++;
    }
    return CKD_OK;
}

/* Parts that are side by side in one tensor must agree in all dimensions except its main one. */
static ckd_status check_parts(const rank_tensor *t, const layout *l, ckd_error *err) {
    const ckd_tensor_info *first = t->parts[0];
    for (size_t i = 0; i < layout_tensors_of(t->rule); i++) {
        const ckd_tensor_info *part = t->parts[i];
        if (!part) {
            layout_error(l, t->rule->line, err, CKD_E_MISMATCH, "the checkpoint has no part %s of '%.200s'",
                         t->rule->parts[i].name, t->name);
            return cli_error_tensor(err, t->name);
        }
        if (!first) {
            continue; /* the next check reports it */
        }
        bool same = part->dtype == first->dtype && part->ndim == first->ndim;
        for (uint32_t d = 0; same && d < part->ndim; d++) {
            same = d == layout_main_dim(t->rule, first->ndim) || part->shape[d] == first->shape[d];
        }
        if (!same) {
            layout_error(
                l, t->rule->line, err, CKD_E_MISMATCH,
                "'%.120s' and '%.120s' have different dtypes or shapes, and cannot be parts of '%.120s'",
                first->name, part->name, t->name);
            return cli_error_tensor(err, t->name);
        }
    }
    return CKD_OK;
}

/* Computes the rank's shape and elements. */
static ckd_status find_share(rank_tensor *t, const layout *l, uint32_t rank, ckd_error *err) {
    uint32_t at[LAYOUT_AXES];
    uint64_t *totals = calloc(layout_tensors_of(t->rule), sizeof(*totals));
    ckd_status status = totals ? check_parts(t, l, err) : cli_error_nomem(err);
    const ckd_tensor_info *first = t->parts[0];
    uint32_t dim = status == CKD_OK ? layout_main_dim(t->rule, first->ndim) : 0;
    for (size_t i = 0; i < layout_tensors_of(t->rule) && status == CKD_OK; i++) {
        totals[i] = dim < first->ndim ? t->parts[i]->shape[dim] : 0;
    }
    if (status == CKD_OK) {
        layout_coordinates(at, l, rank);
        layout_whole whole = {first->ndim, first->shape, totals};
        status = layout_share_make(&t->share, l, t->rule, at, &whole, err);
        if (status == CKD_E_MISMATCH) {
            cli_error_tensor(err, first->name);
        }
    }
    free(totals);
    return status;
}

/*
 * Adds one tensor of the rank, made of `count` checkpoint tensors: its parts, or itself. Takes ownership of the name.
 */
static ckd_status add_tensor(rank_content *out, const bound_checkpoint *b, uint32_t rank, held *from,
                             size_t count, ckd_error *err) {
    rank_tensor *t = &out->items[out->count++];
    *t = (rank_tensor){.name = from->name, .rule = from->rule};
    from->name = NULL;
    t->parts = calloc(layout_tensors_of(t->rule), sizeof(const ckd_tensor_info *));
    if (!t->parts) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < count; i++) {
        size_t part = from[i].part == LAYOUT_NONE ? 0 : from[i].part;
        if (from[i].rule != t->rule || t->parts[part]) {
            layout_error(b->layout, from[i].rule->line, err, CKD_E_MISMATCH,
                         "'%.120s' and '%.120s' of the checkpoint would both be '%.120s' on rank %u",
                         from[0].info->name, from[i].info->name, t->name, rank);
            return cli_error_tensor(err, from[i].info->name);
        }
        t->parts[part] = from[i].info;
    }
    return find_share(t, b->layout, rank, err);
}

/* Groups `count` tensors by their names on the rank, in checkpoint order. */
static ckd_status group_held(rank_content *out, const bound_checkpoint *b, uint32_t rank, held *all,
                             size_t count, ckd_error *err) {
    qsort(all, count, sizeof(*all), by_rank_name);
    held **firsts = calloc(count + 1, sizeof(held *));
    out->items = calloc(count + 1, sizeof(*out->items));
    size_t groups = 0;
    if (!firsts || !out->items) {
        free(firsts);
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || strcmp(all[i - 1].name, all[i].name) != 0) {
            firsts[groups++] = &all[i];
        }
    }
    size_t *sizes = calloc(count + 1, sizeof(*sizes)); /* indexed by the group's first tensor */
    ckd_status status = sizes ? CKD_OK : cli_error_nomem(err);
    for (size_t g = 0; g < groups && sizes; g++) {
        sizes[firsts[g] - all] = (size_t)((g + 1 < groups ? firsts[g + 1] : all + count) - firsts[g]);
    }
    qsort(firsts, groups, sizeof(held *), by_order);
    for (size_t g = 0; g < groups && status == CKD_OK; g++) {
        status = add_tensor(out, b, rank, firsts[g], sizes[firsts[g] - all], err);
    }
    free(sizes);
    free(firsts);
    return status;
}

ckd_status rank_content_make(rank_content *out, const bound_checkpoint *b, uint32_t rank, ckd_error *err) {
    *out = (rank_content){0};
    held *all = calloc(b->list->count + 1, sizeof(*all));
    size_t count = 0;
    ckd_status status = all ? find_held(all, &count, b, rank, err) : cli_error_nomem(err);
    THEN(status, group_held(out, b, rank, all, count, err));
    if (status == CKD_OK && b->layout->list_count) {
        status = rank_content_flatten(out, b, rank, err);
    }
    for (size_t i = 0; i < count; i++) {
        free(all[i].name);
    }
    free(all);
    if (status != CKD_OK) {
        rank_content_free(out);
    }
    return status;
}

/* ---- values ---- */

/* Consecutive stretches of one part, as far as they are inside a box. */
typedef struct section {
    size_t part, first, end; /* stretches first ... end - 1 */
    uint64_t first_at;       /* start of the first one in the rank's tensor */
    uint64_t offset, length; /* in the checkpoint's tensor */
} section;

/* Intersects a stretch that begins at `at` with low ... high - 1. Returns false if they do not meet. */
static bool intersect(uint64_t *begin, uint64_t *end, uint64_t at, uint64_t length, uint64_t low,
                      uint64_t high) {
    *begin = at > low ? at : low;
    *end = at + length < high ? at + length : high;
    return *begin < *end;
}

/* Calls `call` for each section of the part that meets the box of the rank's tensor. */
typedef ckd_status (*section_fn)(void *context, const section *s, ckd_error *err);
static ckd_status each_section(const rank_tensor *t, size_t part, const ckd_region *box, section_fn call,
                               void *context, ckd_error *err) {
    section s = {.part = part};
    uint64_t low = box->offsets[t->share.dim], high = low + box->lengths[t->share.dim];
    uint64_t at = 0, begin, end;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < t->share.count && status == CKD_OK; i++) {
        const layout_stretch *stretch = &t->share.stretches[i];
        if (stretch->part == part && intersect(&begin, &end, at, stretch->length, low, high)) {
            uint64_t offset = stretch->offset + (begin - at);
            if (s.length == 0 || s.offset + s.length != offset) {
                status = s.length ? call(context, &s, err) : CKD_OK;
                s = (section){.part = part, .first = i, .first_at = at, .offset = offset};
            }
            s.length += end - begin;
            s.end = i + 1;
        }
        at += stretch->length;
    }
    return status == CKD_OK && s.length ? call(context, &s, err) : status;
}

static ckd_load_request request_of(const rank_tensor *t, const section *s, const ckd_region *box) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = t->parts[s->part]->name;
    q.region.kind = CKD_REGION_BOX;
    for (uint32_t d = 0; d < t->share.ndim; d++) {
        q.region.offsets[d] = t->share.offsets[d] + box->offsets[d];
        q.region.lengths[d] = box->lengths[d];
    }
    q.region.offsets[t->share.dim] = s->offset;
    q.region.lengths[t->share.dim] = s->length;
    return q;
}

typedef struct filling {
    const rank_tensor *t;
    const ckd_region *box;
    ckd_load *load;
    char *to, *scratch;
    uint64_t outer, inner; /* rows before the main dimension, bytes after it */
} filling;

/* Copies rows of a stretch from the loaded data to their destination. from NULL: zeros. */
static void place_rows(const filling *f, uint64_t position, uint64_t length, const char *from,
                       uint64_t from_length) {
    uint64_t whole = f->box->lengths[f->t->share.dim];
    for (uint64_t o = 0; o < f->outer; o++) {
        char *to = f->to + (o * whole + position) * f->inner;
        if (from) {
            memcpy(to, from + o * from_length * f->inner, (size_t)(length * f->inner));
        } else {
            memset(to, 0, (size_t)(length * f->inner));
        }
    }
}

static ckd_status load_section(void *context, const section *s, ckd_error *err) {
    const filling *f = context;
    uint32_t dim = f->t->share.dim;
    uint64_t low = f->box->offsets[dim], high = low + f->box->lengths[dim];
    ckd_load_request q = request_of(f->t, s, f->box);
    /* If the section is exactly the needed data in the right order, nothing has to be moved. */
    bool direct = s->length == f->box->lengths[dim];
    q.data = direct ? f->to : f->scratch;
    q.size = (size_t)(f->outer * s->length * f->inner);
    ckd_status status = ckd_load_tensor(f->load, &q, err);
    uint64_t at = s->first_at, done = 0, begin, end;
    for (size_t i = s->first; i < s->end && status == CKD_OK && !direct; i++) {
        const layout_stretch *stretch = &f->t->share.stretches[i];
        if (stretch->part == s->part && intersect(&begin, &end, at, stretch->length, low, high)) {
            place_rows(f, begin - low, end - begin, f->scratch + done * f->inner, s->length);
            done += end - begin;
        }
        at += stretch->length;
    }
    return status;
}

static void clear_padding(const filling *f) {
    uint32_t dim = f->t->share.dim;
    uint64_t low = f->box->offsets[dim], high = low + f->box->lengths[dim], at = 0, begin, end;
    for (size_t i = 0; i < f->t->share.count; i++) {
        const layout_stretch *stretch = &f->t->share.stretches[i];
        if (stretch->part == LAYOUT_NONE && intersect(&begin, &end, at, stretch->length, low, high)) {
            place_rows(f, begin - low, end - begin, NULL, 0);
        }
        at += stretch->length;
    }
}

ckd_status rank_tensor_load(void *to, void *scratch, const rank_tensor *t, const ckd_region *box,
                            ckd_load *load, ckd_error *err) {
    if (t->member_count) {
        return rank_flat_load(to, scratch, t, box, load, err);
    }
    filling f = {t, box, load, to, scratch, 1, ckd_dtype_size(t->parts[0]->dtype)};
    for (uint32_t d = 0; d < t->share.ndim; d++) {
        f.outer *= d < t->share.dim ? box->lengths[d] : 1;
        f.inner *= d > t->share.dim ? box->lengths[d] : 1;
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < layout_tensors_of(t->rule) && status == CKD_OK; i++) {
        status = each_section(t, i, box, load_section, &f, err);
    }
    clear_padding(&f);
    return status;
}

/* ---- requests ---- */

typedef struct asking {
    const rank_tensor *t;
    ckd_region box;
    ckd_load_request **requests;
    size_t *count;
} asking;

ckd_status rank_add_request(ckd_load_request **requests, size_t *count, const ckd_load_request *request,
                            ckd_error *err) {
    ckd_load_request *grown = realloc(*requests, (*count + 1) * sizeof(*grown));
    if (!grown) {
        return cli_error_nomem(err);
    }
    *requests = grown;
    grown[(*count)++] = *request;
    return CKD_OK;
}

static ckd_status read_section(void *context, const section *s, ckd_error *err) {
    asking *a = context;
    ckd_load_request request = request_of(a->t, s, &a->box);
    return rank_add_request(a->requests, a->count, &request, err);
}

ckd_status rank_tensor_box_requests(ckd_load_request **requests, size_t *count, const rank_tensor *t,
                                    const ckd_region *box, ckd_error *err) {
    asking a = {t, *box, requests, count};
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < layout_tensors_of(t->rule) && status == CKD_OK; i++) {
        status = each_section(t, i, box, read_section, &a, err);
    }
    return status;
}

ckd_status rank_tensor_requests(ckd_load_request **requests, size_t *count, const rank_tensor *t,
                                ckd_error *err) {
    if (t->member_count) {
        return rank_flat_requests(requests, count, t, err);
    }
    ckd_region all = {.kind = CKD_REGION_BOX};
    memcpy(all.lengths, t->share.lengths, sizeof(all.lengths));
    return rank_tensor_box_requests(requests, count, t, &all, err);
}
