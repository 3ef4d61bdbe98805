/* Finds the values that a block builds on: their view, tensor and block. Decodes nothing. */
#include "engine/store/view.h"

ckd_status view_block_corrupt(const view_block *b, ckd_error *err, const char *what) {
    err_corrupt(err, file_path(b->chunk->file), b->record->offset, "%s", what);
    return err_in_tensor(err, CKD_E_CORRUPT, b->record->tensor->name);
}

ckd_status view_lacks(const view *v, ckd_status status, ckd_error *err) {
    return v && v->lost ? err_from(err, v->lost->status, v->lost) : status;
}

/* Finds the tensor that a VALUES dependency names, and its view. */
static ckd_status find_dependency(view_source *out, view_cache *cache, const view *own, const view_block *b,
                                  const dependency *d, ckd_error *err) {
    ckd_status status = CKD_OK;
    out->view = own;
    if (!id_equal(&d->checkpoint, &own->manifest.checkpoint.id)) {
        status = views_within(&out->view, cache, own, &d->checkpoint, err);
        if (status == CKD_E_NOT_FOUND) {
            char hex[CKD_ID_TEXT];
            ckd_id_text(hex, &d->checkpoint);
            err_corrupt(
                err, file_path(b->chunk->file), b->record->offset,
                "the block depends on checkpoint %s, but no file that the manifest names has records of it",
                hex);
            return CKD_E_CORRUPT;
        }
    }
    if (status != CKD_OK) {
        return status;
    }
    const char *name = d->tensor && *d->tensor ? d->tensor : b->record->tensor->name;
    out->tensor = view_find(out->view, name);
    return out->tensor ? CKD_OK
                       : view_lacks(out->view,
                                    view_block_corrupt(
                                        b, err, "the block builds on a tensor that is not in its checkpoint"),
                                    err);
}

static const char mismatch_text[] = "the block builds on values of another shape or dtype";

ckd_status view_source_of(view_source *out, view_cache *cache, const view *own, const view_block *b,
                          uint32_t index, ckd_error *err) {
    const record *r = b->record;
    *out = (view_source){.view = NULL};
    if (r->dependency_count <= index || r->dependencies[index].kind != DEPENDS_VALUES) {
        return view_block_corrupt(b, err, "the block names no block to depend on");
    }
    const dependency *d = &r->dependencies[index];
    ckd_status status = find_dependency(out, cache, own, b, d, err);
    if (status != CKD_OK) {
        return status;
    }
    const view_tensor *t = out->tensor;
    bool same_shape = t->shape->ndim == r->tensor->ndim &&
                      memcmp(t->shape->shape, r->tensor->shape, t->shape->ndim * sizeof(uint64_t)) == 0;
    region_span span = d->same_span ? (region_span){r->region, r->first, r->count}
                                    : (region_span){d->region, d->first, d->count};
    uint64_t elements;
    if ((d->same_span && !same_shape) || span.count != r->count ||
        !region_count(&elements, t->shape, span.region) || span.first > elements ||
        span.count > elements - span.first) {
        return view_block_corrupt(b, err, mismatch_text);
    }
    out->span = span;
    out->content = &d->content;
    return CKD_OK;
}

ckd_status view_source_check_dtype(const view_source *s, const view_block *b, ckd_dtype dtype,
                                   ckd_error *err) {
    return s->tensor->tensor->dtype == dtype ? CKD_OK : view_block_corrupt(b, err, mismatch_text);
}

const view_block *view_source_block(const view_source *s) {
    size_t i, last;
    for (view_shards_for(&i, &last, s->tensor, &s->span); i < last; i++) {
        size_t first, end;
        view_shard_range(&first, &end, &s->tensor->shards[i], s->tensor->shape, &s->span);
        for (; first < end; first++) {
            const view_block *b = &s->tensor->shards[i].blocks[first];
            region_span have = {b->record->region, b->record->first, b->record->count};
            if (span_equal(&have, &s->span, s->tensor->shape->ndim)) {
                return hash128_equal(&b->record->content, s->content) ? b : NULL;
            }
        }
    }
    return NULL;
}

/* Finds a link, a record that early versions kept only as a base for deltas. */
static ckd_status find_link(const view_block **out, const view **in, view_cache *cache, const view *own,
                            const view_block *b, ckd_error *err) {
    const record *r = b->record;
    const dependency *d = &r->dependencies[0];
    bool other_checkpoint = !id_equal(&d->checkpoint, &own->manifest.checkpoint.id);
    *in = own;
    ckd_status status = other_checkpoint ? views_within(in, cache, own, &d->checkpoint, err) : CKD_OK;
    if (status != CKD_OK && status != CKD_E_NOT_FOUND) {
        return status;
    }
    *out = status == CKD_OK && d->same_span ? view_find_link(*in, r, &d->content) : NULL;
    return *out ? CKD_OK
                : view_lacks(*in, view_block_corrupt(b, err, "the link that the block builds on is missing"),
                             err);
}

bool view_builds_on_link(const record *r) {
    return r->dependency_count && r->dependencies[0].kind == DEPENDS_LINK && r->predictor == PREDICT_PARENT;
}

ckd_status view_parent_block(const view_block **out, const view **in, view_cache *cache, const view *own,
                             const view_block *b, ckd_error *err) {
    const record *r = b->record;
    view_source s;
    if (view_builds_on_link(r)) {
        return find_link(out, in, cache, own, b, err);
    }
    ckd_status status = view_source_of(&s, cache, own, b, 0, err);
    if (status == CKD_OK && r->predictor != PREDICT_CAST) {
        status = view_source_check_dtype(&s, b, r->tensor->dtype, err);
    }
    *out = status == CKD_OK ? view_source_block(&s) : NULL;
    *in = s.view;
    return status;
}
