/* The parent's values of a tile: decoded by the host, or in the memory of the tile's device. */
#include <stdlib.h>

#include "engine/device/device.h"
#include "engine/lossy/lossy.h"
#include "engine/save/lossy.h"

/* ---- on the host ---- */

typedef struct tile_load {
    ckd_save *save;
    const lossy_tile *tile;
    const tile_parent *from;
    const tensor_context *context;
    void *to; /* in the tensor's dtype */
    float *floats;
    const view_block **blocks; /* blocks of the parent that overlap the tile */
    size_t count;
    uint64_t *copied; /* elements copied from each */
} tile_load;

/*
 * Returns the parent block's values from the caller's memory, contiguous, if their hash matches the store's. The block
 * then need not be decoded. NULL: the hash differs, or the block is not wholly inside the tile; values outside the tile
 * may be overwritten meanwhile. scratch: for a block that is not contiguous in that memory.
 */
static ckd_status find_decoded(const void **values, const tile_load *l, const region_span *block,
                               const record *r, bytes *scratch, ckd_error *err) {
    const tensor_context *t = l->context;
    size_t size = ckd_dtype_size(l->tile->dtype);
    region_span tile = {t->region, l->tile->shape.first, l->tile->shape.count};
    *values = NULL;
    if (!t->parent_values || l->from->is_ancestor || span_common(&t->shape, &tile, block) != r->count) {
        return CKD_OK;
    }
    const void *decoded = (const uint8_t *)t->parent_values + r->first * size;
    if (!region_equal(r->region, t->region, t->shape.ndim)) {
        decoded = bytes_scratch(scratch, r->raw_size, "coding scratch", err);
        if (!decoded) {
            return CKD_E_NOMEM;
        }
        span_copy(&t->shape, size, scratch->data, block, t->parent_values, &t->values_span);
    }
    hash128 content = content_hash(decoded, r->raw_size);
    *values = hash128_equal(&content, &r->content) ? decoded : NULL;
    return CKD_OK;
}

/* Loads the overlapping part of one of the parent's blocks, however that was cut. */
static ckd_status load_block(void *context, size_t index, uint32_t worker, ckd_error *err) {
    tile_load *l = context;
    /* 0: the saving thread itself */
    ckd_status status = worker == 0 ? cancel_poll(&l->save->group.stop, err) : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    const lossy_tile *t = l->tile;
    const view_block *b = l->blocks[index];
    const record *r = b->record;
    region_span tile_span = {l->context->region, t->shape.first, t->shape.count};
    decoder *d = &l->save->lossy.tiles->loaders[worker];
    bool inside = region_equal(r->region, tile_span.region, l->context->shape.ndim) &&
                  r->first >= t->shape.first && r->first + r->count <= t->shape.first + t->shape.count;
    size_t size = ckd_dtype_size(t->dtype);
    region_span block = {r->region, r->first, r->count};
    const void *decoded;
    status = find_decoded(&decoded, l, &block, r, &l->save->lossy.tiles->decode_buffers[worker], err);
    if (status != CKD_OK) {
        return status;
    }
    const view_source stored = {l->from->view, l->from->tensor, block, NULL};
    if (decoded && chain_is_intact(d->views, &stored, &d->stored)) {
        bool in_place = l->to == (const uint8_t *)l->context->parent_values + t->shape.first * size;
        l->copied[index] =
            in_place ? r->count : span_copy(&l->context->shape, size, l->to, &tile_span, decoded, &block);
        return CKD_OK;
    }
    if (inside) {
        l->copied[index] = r->count;
        return block_values(d, l->from->view, b, (uint8_t *)l->to + (r->first - t->shape.first) * size, err);
    }
    const span_target target = {l->from->tensor, &tile_span, l->to};
    return block_into_span(d, l->from->view, b, &target, &l->copied[index], err);
}

static ckd_status widen_slice(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)err;
    tile_load *l = context;
    uint64_t at = index * CKD_BLOCK_ELEMENTS, remaining = l->tile->shape.count - at;
    const uint8_t *from = (const uint8_t *)l->to + at * ckd_dtype_size(l->tile->dtype);
    l->save->lossy.tiles->loaders[worker].kernels->widen(l->floats + at, l->tile->dtype, from,
                                                         remaining < CKD_BLOCK_ELEMENTS ? remaining
                                                                                        : CKD_BLOCK_ELEMENTS);
    return CKD_OK;
}

/* blocks == NULL: only counts. */
static void find_blocks(tile_load *l) {
    const view_tensor *tensor = l->from->tensor;
    region_span tile_span = {l->context->region, l->tile->shape.first, l->tile->shape.count};
    size_t s, last;
    l->count = 0;
    for (view_shards_for(&s, &last, tensor, &tile_span); s < last; s++) {
        size_t first, end;
        view_shard_range(&first, &end, &tensor->shards[s], tensor->shape, &tile_span);
        for (; first < end; first++, l->count++) {
            if (l->blocks) {
                l->blocks[l->count] = &tensor->shards[s].blocks[first];
            }
        }
    }
}

/* Lists the parent's blocks. The caller frees the list. */
static ckd_status list_blocks(tile_load *l, ckd_error *err) {
    find_blocks(l);
    l->blocks = calloc(l->count + 1, sizeof(*l->blocks));
    if (!l->blocks) {
        return err_nomem(err, l->count * sizeof(*l->blocks), "a tile");
    }
    find_blocks(l);
    return CKD_OK;
}

static ckd_status load_blocks(tile_load *l, ckd_error *err) {
    uint64_t copied = 0;
    thread_pool *pool = l->save->store->pool;
    ckd_status status = list_blocks(l, err);
    l->copied = status == CKD_OK ? calloc(l->count + 1, sizeof(*l->copied)) : NULL;
    THEN(status, l->copied ? pool_run(pool, l->count, load_block, l, err)
                           : err_nomem(err, l->count * sizeof(*l->copied), "a tile"));
    for (size_t i = 0; i < l->count && status == CKD_OK; i++) {
        copied += l->copied[i];
    }
    if (status == CKD_OK && copied != l->tile->shape.count) {
        status = err_set(err, CKD_E_CORRUPT, "the parent does not have all of the tensor");
    }
    if (status == CKD_OK && (void *)l->floats != l->to) {
        size_t slices = (l->tile->shape.count + CKD_BLOCK_ELEMENTS - 1) / CKD_BLOCK_ELEMENTS;
        status = pool_run(pool, slices, widen_slice, l, err);
    }
    free(l->copied);
    free((void *)l->blocks);
    return status;
}

/* *loaded == false: the parent cannot be read, which does not fail the save. */
static ckd_status load_parent(bool *loaded, tile_load *l, lossy_buffers *b, ckd_error *err) {
    const lossy_tile *t = l->tile;
    void *decoded = l->context->decoded_values;
    size_t size = ckd_dtype_size(t->dtype);
    *loaded = false;
    if (t->dtype == CKD_F32) {
        l->to = l->floats;
    } else if (decoded) {
        l->to = (uint8_t *)decoded + t->shape.first * size;
    } else {
        l->to = bytes_scratch(&b->stored, t->shape.count * size, "a tile of a tensor", err);
    }
    ckd_status status = l->to ? load_blocks(l, err) : CKD_E_NOMEM;
    if (status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_IO) {
        atomic_store(&l->save->sources.damaged, true);
        return CKD_OK;
    }
    *loaded = status == CKD_OK;
    return status;
}

ckd_status save_parent_load(const float **out, const parent_request *request, lossy_buffers *b,
                            ckd_error *err) {
    const lossy_tile *t = request->tile;
    bool loaded = false;
    *out = NULL;
    if (!request->from->tensor) {
        return CKD_OK;
    }
    /* The memory for decoded values holds the parent's until the tile's own replace them, block by block. */
    bool in_place = request->context->decoded_values && t->dtype == CKD_F32;
    tile_load l = {.save = request->save, .tile = t, .from = request->from, .context = request->context};
    l.floats = in_place ? (float *)request->context->decoded_values + t->shape.first
                        : bytes_scratch(&b->parent_values, t->shape.count * sizeof(float),
                                        "a tile of a tensor", err);
    ckd_status status = l.floats ? load_parent(&loaded, &l, b, err) : CKD_E_NOMEM;
    *out = loaded ? l.floats : NULL;
    return status;
}

/* ---- on a device ---- */

typedef struct parent_filling {
    ckd_save *save;
    const tile_parent *from;
    span_decode fill;
} parent_filling;

static ckd_status make_one(void *context, device_chain *c, chain_sides *sides, bool values, uint32_t worker,
                           ckd_error *err) {
    const parent_filling *w = context;
    ckd_save *save = w->save;
    decoder *d = &save->lossy.tiles->loaders[worker];
    /* 0: the saving thread itself */
    ckd_status status = worker == 0 ? cancel_poll(&save->group.stop, err) : CKD_OK;
    if (status == CKD_OK && !values && c->block->record->count >= DEVICE_MIN_ELEMENTS) {
        status = device_chain_make(c, sides, d, w->from->view, err);
        if (c->count) {
            return status;
        }
    }
    void *to = status == CKD_OK ? device_chain_values(c, err) : NULL;
    if (status != CKD_OK || !to) {
        return status != CKD_OK ? status : CKD_E_NOMEM;
    }
    status = block_values(d, w->from->view, c->block, to, err);
    return status == CKD_OK ? device_chain_filled(c, err) : status;
}

static ckd_status fill_tile(bool *made, parent_filling *w, const lossy_tile *t, const tensor_context *context,
                            ckd_error *err) {
    span_decode *f = &w->fill;
    const region_span tile_span = {context->region, t->shape.first, t->shape.count};
    tile_load l = {.save = w->save, .tile = t, .from = w->from, .context = context};
    f->span = &tile_span;
    ckd_status status = list_blocks(&l, err);
    if (status == CKD_OK && device_can_decode_span(f, l.blocks, &l.count)) {
        status = device_decode_span(f, l.blocks, l.count, err);
        *made = status == CKD_OK && !f->mismatch && f->copied == t->shape.count;
    }
    free((void *)l.blocks);
    return status == CKD_OK && *made ? lossy_device_before_made(t->input.device, err) : status;
}

bool save_parent_in_memory(const tile_parent *from, const tensor_context *context) {
    return context->decoded_values || (context->parent_values && !from->is_ancestor);
}

bool save_parent_decode_on_device(parent_attempt *out, ckd_save *save, const lossy_tile *t,
                                  const tile_parent *from, const tensor_context *context) {
    bool made = false;
    parent_filling *w = calloc(1, sizeof(*w));
    *out = (parent_attempt){.status = CKD_OK};
    if (!w) {
        return false;
    }
    lossy_device_scratch scratch = lossy_device_scratch_of(t->input.device);
    w->save = save;
    w->from = from;
    span_decode *f = &w->fill;
    f->pool = save->store->pool;
    f->lease = t->input.device->lease;
    f->tensor = from->tensor;
    f->data = scratch.parent_values;
    f->make = make_one;
    f->context = w;
    /* three quarters of what the host would have held of the tile */
    f->staging = t->shape.count * (LOSSY_TILE_BYTES / 4 * 3);
    f->memory = scratch.spare;
    f->memory_size = scratch.size;
    out->status = fill_tile(&made, w, t, context, &out->why);
    out->mismatch = f->mismatch;
    free(w);
    return made && out->status == CKD_OK;
}

void save_parent_report(ckd_save *save, const parent_attempt *a, const tensor_context *context) {
    const char *name = context->tensor->name;
    if (a->status == CKD_E_DEVICE || a->status == CKD_E_NOMEM || a->status == CKD_E_UNSUPPORTED) {
        store_message(save->store, "the parent of '%s' is decoded on the host, as the device failed: %s",
                      name, a->why.message);
    } else if (a->mismatch) {
        store_message(
            save->store,
            "the parent of '%s' is decoded on the host, as the device's result does not match its content hash",
            name);
    } else {
        return;
    }
    save->device.parents_on_host = true;
}
