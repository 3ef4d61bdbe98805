/* Finds the values that a block builds on: their view, tensor and block. Decodes nothing. */
#include "engine/store/view.h"

ckd_status view_block_corrupt(const view_block *b, ckd_error *err, const char *what) {
    err_corrupt(err, file_path(b->chunk->file), b->record->offset, "%s", what);
    return err_in_tensor(err, CKD_E_CORRUPT, b->record->tensor->name);
}

/* Finds the tensor that a VALUES dependency names, and its view. */
static ckd_status find_dependency(const view **v, const view_tensor **t, view_cache *cache, const view *own,
                                  const view_block *b, const dependency *on, ckd_error *err) {
    ckd_status status = CKD_OK;
    *v = own;
    if (!id_equal(&on->checkpoint, &own->manifest.checkpoint.id)) {
        status = views_within(v, cache, own, &on->checkpoint, err);
        if (status == CKD_E_NOT_FOUND) {
            char hex[CKD_ID_TEXT];
            ckd_id_text(hex, &on->checkpoint);
            err_corrupt(
                err, file_path(b->chunk->file), b->record->offset,
                "the block builds on checkpoint %s, of which the files that its manifest names hold nothing",
                hex);
            return CKD_E_CORRUPT;
        }
    }
    if (status != CKD_OK) {
        return status;
    }
    const char *name = on->tensor && *on->tensor ? on->tensor : b->record->tensor->name;
    *t = view_find(*v, name);
    return *t ? CKD_OK
              : view_block_corrupt(b, err, "the block builds on a tensor that is not in its checkpoint");
}

ckd_status view_source_of(view_source *out, view_cache *cache, const view *own, const view_block *b,
                          uint32_t index, ckd_dtype dtype, ckd_error *err) {
    const record *r = b->record;
    *out = (view_source){.view = NULL};
    if (r->dependency_count <= index || r->dependencies[index].kind != DEPENDS_VALUES) {
        return view_block_corrupt(b, err, "the block names nothing to build on");
    }
    const dependency *on = &r->dependencies[index];
    ckd_status status = find_dependency(&out->view, &out->tensor, cache, own, b, on, err);
    if (status != CKD_OK) {
        return status;
    }
    const view_tensor *t = out->tensor;
    bool same_shape = t->shape.ndim == r->tensor->ndim &&
                      memcmp(t->shape.shape, r->tensor->shape, t->shape.ndim * sizeof(uint64_t)) == 0;
    span want =
        on->same_span ? (span){r->region, r->first, r->count} : (span){&on->region, on->first, on->count};
    uint64_t elements;
    if ((on->same_span && !same_shape) || (dtype != CKD_DTYPE_NONE && t->tensor->dtype != dtype) ||
        want.count != r->count || !region_count(&elements, &t->shape, want.region) || want.first > elements ||
        want.count > elements - want.first) {
        return view_block_corrupt(b, err, "the block builds on values of another shape or dtype");
    }
    out->want = want;
    out->content = &on->content;
    return CKD_OK;
}

const view_block *view_source_block(const view_source *s) {
    size_t i, last;
    for (view_shards_for(&i, &last, s->tensor, &s->want); i < last; i++) {
        size_t first, end;
        view_shard_range(&first, &end, &s->tensor->shards[i], &s->tensor->shape, &s->want);
        for (; first < end; first++) {
            const view_block *b = &s->tensor->shards[i].blocks[first];
            span have = {b->record->region, b->record->first, b->record->count};
            if (span_equal(&have, &s->want, s->tensor->shape.ndim)) {
                return hash128_equal(&b->record->content, s->content) ? b : NULL;
            }
        }
    }
    return NULL;
}

/* Finds a link: values that are in the checkpoint only for blocks that build on them. */
static ckd_status find_link(const view_block **out, const view **in, view_cache *cache, const view *own,
                            const view_block *b, const dependency *on, ckd_error *err) {
    const record *r = b->record;
    bool elsewhere = !id_equal(&on->checkpoint, &own->manifest.checkpoint.id);
    *in = own;
    ckd_status status = elsewhere ? views_within(in, cache, own, &on->checkpoint, err) : CKD_OK;
    if (status != CKD_OK && status != CKD_E_NOT_FOUND) {
        return status;
    }
    *out = status == CKD_OK && on->same_span ? view_find_link(*in, r, &on->content) : NULL;
    return *out ? CKD_OK : view_block_corrupt(b, err, "the link that the block builds on is missing");
}

bool view_builds_on_link(const record *r) {
    return r->dependency_count && r->dependencies[0].kind == DEPENDS_LINK && r->predictor == PREDICT_PARENT;
}

ckd_status view_parent_block(const view_block **out, const view **in, view_cache *cache, const view *own,
                             const view_block *b, ckd_error *err) {
    const record *r = b->record;
    view_source s;
    if (view_builds_on_link(r)) {
        return find_link(out, in, cache, own, b, &r->dependencies[0], err);
    }
    ckd_dtype dtype = r->predictor == PREDICT_CAST ? CKD_DTYPE_NONE : r->tensor->dtype;
    ckd_status status = view_source_of(&s, cache, own, b, 0, dtype, err);
    *out = status == CKD_OK ? view_source_block(&s) : NULL;
    *in = s.view;
    return status;
}
