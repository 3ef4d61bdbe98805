/* Finds the elements of a tensor in the files, and checks that none is missing. */
#include <stdlib.h>
#include <string.h>

#include "cli/convert/internal.h"

/* ---- fragments ---- */

void import_fragments_free(import_fragments *p) {
    free(p->items);
    *p = (import_fragments){0};
}

/* Intersects a box of the rank's tensor with a stretch that begins at `at`. Returns false if they do not meet. */
static bool intersect(import_fragment *p, const layout_share *s, const layout_stretch *stretch, uint64_t at,
                      const ckd_region *box) {
    uint64_t low = box->offsets[s->dim], high = low + box->lengths[s->dim];
    uint64_t begin = at > low ? at : low, end = at + stretch->length < high ? at + stretch->length : high;
    if (begin >= end) {
        return false;
    }
    for (uint32_t d = 0; d < s->ndim; d++) {
        p->offsets[d] = s->offsets[d] + box->offsets[d];
        p->lengths[d] = box->lengths[d];
        p->local[d] = box->offsets[d];
    }
    p->offsets[s->dim] = stretch->offset + (begin - at);
    p->lengths[s->dim] = end - begin;
    p->local[s->dim] = begin;
    return true;
}

/* Adds the fragments of the entry's part in a box of the rank's tensor. first: number of its set's first copy. */
static ckd_status add_fragments(import_fragments *out, const import_entry *e, const layout_share *s,
                                size_t first, const ckd_region *box, ckd_error *err) {
    import_fragment *grown = realloc(out->items, (out->count + s->count + 1) * sizeof(*grown));
    if (!grown) {
        return cli_error_nomem(err);
    }
    out->items = grown;
    uint64_t at = 0;
    size_t part = e->part == LAYOUT_NONE ? 0 : e->part;
    for (size_t i = 0; i < s->count; i++) {
        const layout_stretch *stretch = &s->stretches[i];
        import_fragment *p = &out->items[out->count];
        *p = (import_fragment){.entry = e, .copy = first + stretch->copy};
        out->count += stretch->part == part && intersect(p, s, stretch, at, box);
        at += stretch->length;
    }
    return CKD_OK;
}

static void count_copies(import_fragments *out, const import_entry *e, const layout_share *s, size_t first) {
    size_t part = e->part == LAYOUT_NONE ? 0 : e->part;
    for (size_t i = 0; i < s->count; i++) {
        if (s->stretches[i].part == part && out->copies < first + s->stretches[i].copies) {
            out->copies = first + s->stretches[i].copies;
        }
    }
}

/* Adds everything that the rank's file has of it. */
static ckd_status add_entry(import_fragments *out, const import_entry *e, const layout_share *s, size_t first,
                            ckd_error *err) {
    const safetensors_tensor *t = e->tensor;
    ckd_status status = CKD_OK;
    count_copies(out, e, s, first);
    for (uint64_t done = 0, n; done < e->range.count && status == CKD_OK; done += n) {
        ckd_region box;
        n = layout_next_box(&box, t->ndim, t->shape, e->range.first + done, e->range.count - done);
        status = add_fragments(out, e, s, first, &box, err);
    }
    return status;
}

ckd_status import_fragments_make(import_fragments *out, const import_plan *plan, const import_tensor *t,
                                 ckd_error *err) {
    *out = (import_fragments){0};
    uint64_t *totals = NULL;
    size_t first = 0;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < t->count && status == CKD_OK; i++) {
        const import_entry *e = &t->entries[i];
        bool new_rule = i == 0 || e->rule != e[-1].rule;
        if (new_rule || e->set != e[-1].set) {
            first = out->copies++;
        }
        if (new_rule) {
            free(totals);
            status = import_totals(&totals, t, e->rule, e->part, err);
        }
        layout_share share = {0};
        layout_whole whole = {t->tensor.ndim, t->tensor.shape, totals};
        THEN(status, import_share(&share, plan->layout, e->rule, e->rank, &whole, err));
        THEN(status, add_entry(out, e, &share, first, err));
        layout_share_free(&share);
    }
    free(totals);
    if (status != CKD_OK) {
        import_fragments_free(out);
    }
    return status;
}

/* ---- tiling ---- */

/* The regions of one rank, in the form that the plan of many ranks' saves requires. */
typedef struct rank_regions {
    ckd_tensor *tensors;
    size_t count;
} rank_regions;

static ckd_status add_region(rank_regions *to, const import_tensor *t, const import_fragment *p,
                             ckd_error *err) {
    if (to->count % 64 == 0) {
        ckd_tensor *grown = realloc(to->tensors, (to->count + 64) * sizeof(*grown));
        if (!grown) {
            return cli_error_nomem(err);
        }
        to->tensors = grown;
    }
    ckd_tensor *tensor = &to->tensors[to->count++];
    *tensor = (ckd_tensor)CKD_TENSOR_INIT;
    tensor->name = t->tensor.name;
    tensor->role = CKD_ROLE_OTHER;
    tensor->dtype = t->tensor.dtype;
    tensor->ndim = t->tensor.ndim;
    tensor->shape = t->tensor.shape;
    tensor->region.kind = t->tensor.ndim ? CKD_REGION_BOX : CKD_REGION_WHOLE;
    memcpy(tensor->region.offsets, p->offsets, sizeof(p->offsets));
    memcpy(tensor->region.lengths, p->lengths, sizeof(p->lengths));
    return CKD_OK;
}

static ckd_status gather_regions(rank_regions *of_rank, import_plan *plan, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < plan->count && status == CKD_OK; i++) {
        import_fragments fragments;
        status = import_fragments_make(&fragments, plan, &plan->tensors[i], err);
        plan->tensors[i].copies = fragments.copies;
        for (size_t k = 0; status == CKD_OK && k < fragments.count; k++) {
            const import_fragment *p = &fragments.items[k];
            if (p->copy == 0) {
                status = add_region(&of_rank[p->entry->rank], &plan->tensors[i], p, err);
            }
        }
        import_fragments_free(&fragments);
    }
    return status;
}

static ckd_status check_regions(const rank_regions *of_rank, uint32_t world, ckd_error *err) {
    ckd_bytes *descriptions = calloc(world, sizeof(*descriptions));
    ckd_plan *plan = NULL;
    ckd_status status = descriptions ? CKD_OK : cli_error_nomem(err);
    for (uint32_t r = 0; r < world && status == CKD_OK; r++) {
        status = ckd_plan_describe(&descriptions[r], r, world, of_rank[r].tensors, of_rank[r].count, err);
    }
    THEN(status, ckd_plan_make(&plan, descriptions, world, err));
    for (uint32_t r = 0; descriptions && r < world; r++) {
        ckd_bytes_free(&descriptions[r]);
    }
    free(descriptions);
    ckd_plan_free(plan);
    return status;
}

/* The plan's error names the elements and ranks; this adds the rule. */
static ckd_status name_line(const import_plan *plan, ckd_error *err) {
    ckd_error plan_error = *err;
    for (size_t i = 0; i < plan->count; i++) {
        if (strcmp(plan->tensors[i].tensor.name, plan_error.tensor) == 0) {
            layout_error(plan->layout, plan->tensors[i].entries->rule->line, err, plan_error.status, "%s",
                         plan_error.message);
            return cli_error_tensor(err, plan_error.tensor);
        }
    }
    return plan_error.status;
}

ckd_status import_check_coverage(import_plan *plan, ckd_error *err) {
    uint32_t world = plan->layout->world;
    rank_regions *of_rank = calloc(world, sizeof(*of_rank));
    ckd_status status = of_rank ? gather_regions(of_rank, plan, err) : cli_error_nomem(err);
    if (status == CKD_OK) {
        status = check_regions(of_rank, world, err);
        status = status == CKD_OK ? status : name_line(plan, err);
    }
    for (uint32_t r = 0; of_rank && r < world; r++) {
        free(of_rank[r].tensors);
    }
    free(of_rank);
    return status;
}
