/*
 * Finds out whether a checkpoint that is about to be committed is suspect: values of the model or the optimizer have
 * become NaN or infinite. The coordinator judges for all ranks, because it has the figures of all their files.
 *
 * The reference is the last healthy checkpoint before this one. Values that were not finite there may be intended, such
 * as the minus infinities of an attention mask. A weight that the reference lacks, or has in another shape, may have
 * had such values from the start; a moment or a master may not.
 */
#include <stdio.h>

#include "engine/decode/decode.h"
#include "engine/save/internal.h"

/* The last healthy checkpoint. view NULL: there is none, or it cannot be read. */
typedef struct reference {
    view_cache views;
    const view *view;
    bool strict;  /* the parent is suspect, and there is no healthy one: nothing is excused */
    bool counted; /* known not to be of an early version; those did not count values of exact tensors */
} reference;

static void open_reference(reference *r, const ckd_save *save) {
    const save_target *t = &save->target;
    ckd_checkpoint from = t->origin;
    views_init(&r->views, save->store);
    if (t->has_origin && from.suspect) {
        r->strict = ckd_store_previous(&from, save->store, t->origin.run, t->origin.step, NULL) != CKD_OK;
    }
    if (t->has_origin && !r->strict && views_get(&r->view, &r->views, &from.id, NULL) != CKD_OK) {
        r->view = NULL;
    }
}

static bool is_state(const view_tensor *t) {
    ckd_role role = t->tensor->role;
    return role == CKD_ROLE_EXP_AVG || role == CKD_ROLE_EXP_AVG_SQ || role == CKD_ROLE_MASTER;
}

/* Counts the values that are not finite, up to `limit`. */
static ckd_status count_values(uint64_t *count, reference *r, const view_tensor *t, uint64_t limit,
                               ckd_error *err) {
    decoder d;
    bytes values = {0};
    *count = 0;
    ckd_status status = decoder_init(&d, &r->views, NULL, err);
    for (size_t s = 0; s < t->shard_count && status == CKD_OK && *count < limit; s++) {
        const view_shard *shard = &t->shards[s];
        for (size_t i = 0; i < shard->block_count && status == CKD_OK && *count < limit; i++) {
            const record *block = shard->blocks[i].record;
            void *to = bytes_scratch(&values, block->raw_size + 1, "a block's values", err);
            status = to ? block_values(&d, r->view, &shard->blocks[i], to, err) : CKD_E_NOMEM;
            *count +=
                status == CKD_OK ? d.kernels->count_nonfinite(t->tensor->dtype, to, (size_t)block->count) : 0;
        }
    }
    bytes_free(&values);
    decoder_free(&d);
    return status;
}

/*
 * Returns the reference's tensor of this name and shape; NULL: none. The shape must be equal because a larger mask has
 * more infinities.
 */
static const view_tensor *find_before(const reference *r, const view_tensor *t) {
    const view_tensor *before = r->view ? view_find(r->view, t->tensor->name) : NULL;
    bool same = before && before->shape->ndim == t->shape->ndim &&
                memcmp(before->shape->shape, t->shape->shape, t->shape->ndim * sizeof(uint64_t)) == 0;
    return same ? before : NULL;
}

/* Has the tensor more values that are not finite (`now` of them) than in the reference? */
static bool has_grown(reference *r, const view_tensor *t, uint64_t now) {
    const view_tensor *before = find_before(r, t);
    if (!before) {
        return r->strict || is_state(t);
    }
    uint64_t then = view_tensor_nonfinite(before);
    if (then == 0 && !r->counted && !is_state(t)) {
        ckd_error why;
        if (count_values(&then, r, before, now, &why) != CKD_OK) {
            then = 0;
        }
        r->counted = then == 0;
    }
    return now > then;
}

/* The tensors of a checkpoint whose values have become NaN or infinite. */
typedef struct finding {
    uint64_t tensors;
    const view_tensor *first; /* in the order saved */
} finding;

static void find(finding *f, reference *r, const view *v, bool state) {
    for (size_t i = 0; i < v->tensor_count; i++) {
        const view_tensor *t = &v->tensors[i];
        uint64_t now = view_tensor_nonfinite(t);
        bool counts = now > 0 && t->tensor->role != CKD_ROLE_OTHER && is_state(t) == state;
        if (counts && has_grown(r, t, now)) {
            f->tensors++;
            f->first = !f->first || t->order < f->first->order ? t : f->first;
        }
    }
}

static bool any_nonfinite(const view *v) {
    bool any = false;
    for (size_t i = 0; i < v->shard_count && !any; i++) {
        any = v->shards[i].measures.nonfinite > 0;
    }
    return any;
}

void suspect_judge(suspect_verdict *out, const ckd_save *save, const view *v) {
    *out = (suspect_verdict){.reasons = 0};
    if (!any_nonfinite(v)) {
        return;
    }
    reference r = {.view = NULL};
    finding f = {.first = NULL};
    open_reference(&r, save);
    find(&f, &r, v, true);
    r.counted = f.tensors > 0; /* the verdict no longer depends on `counted` */
    find(&f, &r, v, false);
    if (f.first) {
        out->reasons = CKD_SUSPECT_NONFINITE;
        out->tensors = f.tensors;
        out->values = view_tensor_nonfinite(f.first);
        out->of = f.first->shape->elements;
        snprintf(out->first, sizeof(out->first), "%s", f.first->tensor->name);
    }
    views_free(&r.views);
}

void suspect_report(const suspect_verdict *v, const ckd_store *store, const ckd_checkpoint *c) {
    if (v->reasons) {
        store_message(
            store,
            "%s@%llu: %llu tensor%s become NaN or infinite (first: %.200s, %llu of %llu values); the "
            "checkpoint is marked suspect",
            c->run, (unsigned long long)c->step, (unsigned long long)v->tensors,
            v->tensors == 1 ? " has" : "s have", v->first, (unsigned long long)v->values,
            (unsigned long long)v->of);
    }
}
