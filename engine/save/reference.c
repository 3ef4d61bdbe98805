/* The parent's values, as the device has cached them since the save that made them. */
#include <stdlib.h>

#include "engine/lossy/lossy.h"
#include "engine/save/lossy.h"

device_reference_key save_reference_key(const lossy_tile *t, const tensor_context *context) {
    return (device_reference_key){.tensor = context->tensor->name,
                                  .dtype = t->dtype,
                                  .ndim = context->shape.ndim,
                                  .span = {context->region, t->shape.first, t->shape.count}};
}

/*
 * Finds the place of a parent block in the tile. false: it is not wholly inside, or not made of rows of equal length.
 * Both have their elements in the tensor's order, so checking the first and the last one is enough.
 */
static bool find_part(lossy_device_part *out, const record *r, const tile_shape *shape,
                      const tensor_context *context) {
    const geometry *g = &context->shape;
    uint64_t first = region_global(g, r->region, r->first),
             last = region_global(g, r->region, r->first + r->count - 1);
    uint64_t at = region_lower_bound(g, context->region, first),
             end = region_lower_bound(g, context->region, last);
    if (at < shape->first || end >= shape->first + shape->count ||
        region_global(g, context->region, at) != first || region_global(g, context->region, end) != last) {
        return false;
    }
    *out = (lossy_device_part){
        .at = at - shape->first, .width = r->count, .count = r->count, .content = r->content};
    if (end - at + 1 == r->count) {
        return true;
    }
    out->width = g->ndim == 2 && r->region->kind == CKD_REGION_BOX ? r->region->lengths[1] : 0;
    uint64_t rows = out->width ? r->count / out->width : 0;
    return rows > 0 && r->first % out->width == 0 && r->count % out->width == 0 &&
           end - at == (rows - 1) * shape->columns + out->width - 1;
}

/*
 * Lists the parent's blocks as parts of the tile. Returns 0 if they do not cover it, or one is no part of it. out:
 * room for all blocks of the tensor.
 */
static size_t find_parts(lossy_device_part *out, const tile_shape *shape, const tile_parent *from,
                         const tensor_context *context) {
    region_span tile_span = {context->region, shape->first, shape->count};
    size_t s, last, count = 0;
    uint64_t elements = 0;
    for (view_shards_for(&s, &last, from->tensor, &tile_span); s < last; s++) {
        const view_shard *shard = &from->tensor->shards[s];
        size_t i, end;
        view_shard_range(&i, &end, shard, from->tensor->shape, &tile_span);
        for (; i < end; i++) {
            if (!find_part(&out[count], shard->blocks[i].record, shape, context)) {
                return 0;
            }
            elements += out[count++].count;
        }
    }
    return elements == shape->count ? count : 0;
}

ckd_status save_reference_compare(bool *same, const lossy_tile *t, const tile_parent *from,
                                  const tensor_context *context, ckd_error *err) {
    size_t capacity = 0;
    for (size_t s = 0; s < from->tensor->shard_count; s++) {
        capacity += from->tensor->shards[s].block_count;
    }
    *same = false;
    lossy_device_part *parts = malloc(capacity * sizeof(*parts) + 1);
    if (!parts) {
        return err_nomem(err, capacity * sizeof(*parts), "a tile of a tensor");
    }
    size_t count = find_parts(parts, &t->shape, from, context);
    ckd_status status = count ? lossy_device_compare(same, t->input.device, parts, count, err) : CKD_OK;
    free(parts);
    return status;
}

void save_reference_keep(ckd_save *save, const lossy_tile *t, const tensor_context *context) {
    device_reference_key key = save_reference_key(t, context);
    ckd_error why;
    if (t->input.device && t->part == LOSSY_WEIGHT &&
        lossy_device_keep_reference(t->input.device, &key, &why) != CKD_OK) {
        store_message(save->store, "%s cannot be cached on the device for the next save: %s", key.tensor,
                      why.message);
    }
}
