/* Chooses a tile's parent, and loads the tile: its input, its parent's values, and both as floats. */
#include <math.h>
#include <stdlib.h>

#include "engine/save/internal.h"
#include "engine/encode/encode.h"
#include "engine/lossy/lossy.h"
#include "engine/save/lossy.h"

/* ---- choosing the parent ---- */

/*
 * The next delta may make a tile's chain cost more than the load budget allows. The tile is then coded against an
 * ancestor whose chain takes only this share of the budget. The delta on the ancestor is larger, but far smaller than a
 * lossy base. So lossy bases are rare, and loads stay bounded.
 *
 * Usually several ancestors qualify. All tiles prefer the same ones, whatever their chains are otherwise, so that a
 * load opens few checkpoints. They prefer the checkpoint with the smallest hash (lot_of), which is as good as random,
 * but the same in every run.
 */
#define LIGHT        0.09
#define LIGHT_CHOICE 8 /* ancestors to choose among */

static load_cost chain_of(uint32_t *depth, const view_tensor *tensor, const tensor_context *context,
                          const tile_shape *shape) {
    load_cost all = {0, 0};
    region_span tile_span = {context->region, shape->first, shape->count};
    *depth = 0;
    for (size_t s = 0; s < tensor->shard_count; s++) {
        size_t first, end;
        view_shard_range(&first, &end, &tensor->shards[s], &context->shape, &tile_span);
        for (size_t i = first; i < end; i++) {
            const record *r = tensor->shards[s].blocks[i].record;
            load_cost chain = record_chain(r);
            all.stored += chain.stored;
            all.work += chain.work;
            *depth = r->depth > *depth ? r->depth : *depth;
        }
    }
    return all;
}

/* Goes back to the checkpoint on which the tensor's first block builds, if that block is a delta or a copy. */
static bool step_to_parent(const view **v, const view_tensor **tensor, ckd_save *save) {
    const record *r = (*tensor)->shard_count && (*tensor)->shards[0].block_count
                          ? (*tensor)->shards[0].blocks[0].record
                          : NULL;
    const view *older;
    if (!r || r->dependency_count == 0 || (r->predictor != PREDICT_PARENT && r->predictor != PREDICT_COPY) ||
        id_equal(&r->dependencies[0].checkpoint, &(*v)->manifest.checkpoint.id) ||
        views_within(&older, &save->sources.views, *v, &r->dependencies[0].checkpoint, NULL) != CKD_OK) {
        return false;
    }
    const view_tensor *t = view_find(older, (*tensor)->tensor->name);
    if (!t || t->tensor->dtype != (*tensor)->tensor->dtype || t->shape->ndim != (*tensor)->shape->ndim ||
        memcmp(t->shape->shape, (*tensor)->shape->shape, t->shape->ndim * sizeof(uint64_t)) != 0) {
        return false;
    }
    *v = older;
    *tensor = t;
    return true;
}

/* Estimates the chain with one more delta, using the size of the parent's own delta. */
static load_cost cost_with_next_delta(const tile_parent *p, const load_cost *chain, ckd_save *save,
                                      const tensor_context *context, const lossy_tile *t) {
    uint32_t depth;
    load_cost next = *chain;
    const view *v = p->view;
    const view_tensor *tensor = p->tensor;
    if (step_to_parent(&v, &tensor, save)) {
        load_cost before = chain_of(&depth, tensor, context, &t->shape);
        next.stored += chain->stored > before.stored ? chain->stored - before.stored : 0;
        next.work += chain->work > before.work ? chain->work - before.work : 0;
    }
    return next;
}

/* Hash that orders checkpoints: as good as random, but the same for every tensor, thread and process. */
static uint64_t checkpoint_hash(const view *v) {
    const chunk_records *records = v->parts[0];
    hash128 ends[2] = {records->records[0].content, records->records[records->count - 1].content};
    return hash64(ends, sizeof(ends));
}

/* All tensors go back to the same few checkpoints, so that the files of the others need not be kept. */
static bool ranks_before(const tile_parent *a, const tile_parent *b) {
    return checkpoint_hash(a->view) < checkpoint_hash(b->view);
}

/*
 * Whether all of the tile can be read. The parent's manifest names only files that a load of the parent reads. If the
 * parent's block builds on nothing, the ancestor's block and the records below it may be in files that it does not
 * name.
 */
static bool has_tile(const tile_parent *p, ckd_save *save, const lossy_tile *t,
                     const tensor_context *context) {
    const view_source tile = {p->view, p->tensor, {context->region, t->shape.first, t->shape.count}, NULL};
    return closure_visit_source(&save->sources.views, &tile, NULL, NULL, NULL) == CKD_OK;
}

/*
 * Goes back from the parent, whose chain is not light, to an ancestor with a light chain; if there is none, to the
 * oldest ancestor.
 */
static void choose_ancestor(tile_parent *p, ckd_save *save, const lossy_tile *t,
                            const tensor_context *context, const load_cost *base) {
    tile_parent at = *p;
    uint32_t light = 0, depth;
    for (uint32_t i = 0; i < MAX_DEPTH && light < LIGHT_CHOICE && step_to_parent(&at.view, &at.tensor, save);
         i++) {
        at.is_ancestor = true;
        load_cost chain = chain_of(&depth, at.tensor, context, &t->shape);
        uint32_t found =
            light + (light || budget_allows_chain(&save->coding.budget, &chain, base, LIGHT * PART_LOSSY));
        if (found <= 1 || ranks_before(&at, p)) {
            if (!has_tile(&at, save, t, context)) {
                continue;
            }
            *p = at;
        }
        light = found;
    }
}

/* A tile whose chain is light enough keeps its parent; its blocks may still be stored on their own. */
static void choose_parent(tile_parent *p, ckd_save *save, const load_budget *budget, const lossy_tile *t,
                          const tensor_context *context) {
    *p = (tile_parent){.view = save->sources.parent, .tensor = context->parent};
    if (!p->tensor) {
        return;
    }
    uint32_t depth;
    uint64_t raw = t->shape.count * ckd_dtype_size(t->dtype);
    load_cost base = lossy_base_cost(t->dtype, raw), chain = chain_of(&depth, p->tensor, context, &t->shape);
    load_cost next = cost_with_next_delta(p, &chain, save, context, t);
    if (!budget_ends_tensor(budget, p->tensor) && budget_has_room(budget, &next, &base, PART_LOSSY) &&
        depth < MAX_SAVE_DEPTH) {
        return;
    }
    if (!budget_allows_chain(budget, &chain, &base, LIGHT * PART_LOSSY)) {
        choose_ancestor(p, save, t, context, &base);
    }
}

/*
 * Recalls what earlier encoders recorded: the error of the chosen parent's values, and, if that is an ancestor, the
 * movement of the save's own parent.
 */
static void read_recorded_errors(lossy_tile *t, const tile_parent *p, const view_tensor *parent,
                                 const ckd_save *save) {
    double error = 0, movement = 0, elements = 0;
    for (size_t s = 0; s < p->tensor->shard_count; s++) {
        const view_shard *shard = &p->tensor->shards[s];
        error += shard->measures.error_squares;
        elements += (double)shard->elements;
    }
    /* training continued from the decoded values */
    bool true_ones = !p->is_ancestor && save_is_first_after_resume(save);
    t->context.parent_error = error >= 0 && !true_ones ? error / elements : 0;
    if (!p->is_ancestor) {
        return;
    }
    for (size_t s = 0; s < parent->shard_count; s++) {
        const view_shard *shard = &parent->shards[s];
        movement += shard->measures.movement * shard->measures.movement * (double)shard->elements;
    }
    t->context.expected_movement = sqrt(movement / elements);
}

/* Returns the values themselves if they are aligned floats; else converts them into `scratch`. */
static const float *as_floats(bytes *scratch, const void *values, ckd_dtype dtype, uint64_t count,
                              const kernels *k, ckd_error *err) {
    if (dtype == CKD_F32 && (uintptr_t)values % _Alignof(float) == 0) {
        return values;
    }
    float *floats = bytes_scratch(scratch, count * sizeof(float), "a tile of a tensor", err);
    if (floats) {
        k->widen(floats, dtype, values, count);
    }
    return floats;
}

/* ---- on a device ---- */

/* Returns the tile's address in device memory; NULL: it is not on a device, or cannot be coded there. */
static const void *on_device(device_lease **lease, const ckd_save *save, const lossy_tile *t,
                             const ckd_tensor *tensor) {
    if (tensor->read != device_read || atomic_load(&save->store->devices_differ)) {
        return NULL;
    }
    const device_reader *source = tensor->read_context;
    const void *values = source->data + t->shape.first * source->element;
    *lease = source->lease;
    return lossy_device_can_code(t, values) ? values : NULL;
}

static ckd_status begin_on_device(ckd_save *save, lossy_tile *t, const lossy_device_values *values,
                                  ckd_error *err) {
    save_tiles *all = save->lossy.tiles;
    if (!all->device) {
        all->device = calloc(1, sizeof(*all->device));
        if (!all->device) {
            device_reference_release(values->store, values->reference);
            return err_nomem(err, sizeof(*all->device), "a tile of a tensor");
        }
    }
    t->input.device = all->device; /* set even if the call below fails, so that the tile leaves the device */
    return lossy_device_begin(all->device, t, values, err);
}

/*
 * Begins a tile with the parent's values cached on the device. *begun == false: none are cached, or they are not the
 * parent's.
 */
static ckd_status begin_with_cached(bool *begun, inflight_tile *inflight, const tile_parent *from,
                                    lossy_device_values values, ckd_error *err) {
    ckd_save *save = inflight->region->save;
    const tensor_context *context = &inflight->region->context;
    lossy_tile *t = &inflight->tile;
    *begun = false;
    bytes scratch = {0};
    device_reference_key key = save_reference_key(t, context);
    const view_source stored = {
        from->view, from->tensor, {context->region, t->shape.first, t->shape.count}, NULL};
    bool has_cached = from->tensor && !save->sources.ignore_cached;
    values.reference =
        has_cached ? device_reference_acquire(save->store, values.lease->queue.device, &key) : NULL;
    bool counts = values.reference && chain_is_intact(&save->sources.views, &stored, &scratch);
    bytes_free(&scratch);
    if (!counts) {
        device_reference_release(save->store, values.reference);
        return CKD_OK;
    }
    ckd_status status = begin_on_device(save, t, &values, err);
    THEN(status, save_reference_compare(begun, t, from, context, err));
    if (status == CKD_OK && !*begun) {
        save_tile_leave_device(save, t);
    }
    return status;
}

/*
 * Begins a tile with the parent's values decoded on the device. *begun == false: the device cannot decode them, and
 * *attempt says why.
 */
static ckd_status begin_with_made(bool *begun, parent_attempt *attempt, inflight_tile *inflight,
                                  const tile_parent *from, lossy_device_values values, ckd_error *err) {
    ckd_save *save = inflight->region->save;
    const tensor_context *context = &inflight->region->context;
    lossy_tile *t = &inflight->tile;
    if (!from->tensor || save->device.parents_on_host || save_parent_in_memory(from, context)) {
        return CKD_OK;
    }
    values.makes_parent_values = true;
    ckd_status status = begin_on_device(save, t, &values, err);
    *begun = status == CKD_OK && save_parent_decode_on_device(attempt, save, t, from, context);
    if (status == CKD_OK && !*begun) {
        save_tile_leave_device(save, t);
    }
    return status;
}

static ckd_status load_parent_values(const float **parent_values, inflight_tile *inflight,
                                     const tile_parent *from, ckd_error *err) {
    const lossy_region *r = inflight->region;
    return save_parent_load(parent_values, &(parent_request){r->save, &inflight->tile, from, &r->context},
                            &inflight->buffers, err);
}

/* How a tile on a device began. */
typedef struct tile_start {
    bool begun;                 /* false: the host must code it */
    bool loaded;                /* `parent_values` has the parent's values, or there are none */
    const float *parent_values; /* on the host */
} tile_start;

static ckd_status begin_device_tile(tile_start *start, inflight_tile *inflight, const tile_parent *from,
                                    lossy_device_values values, ckd_error *err) {
    const lossy_region *r = inflight->region;
    parent_attempt attempt = {.status = CKD_OK};
    ckd_status status = begin_with_cached(&start->begun, inflight, from, values, err);
    if (status == CKD_OK && !start->begun) {
        status = begin_with_made(&start->begun, &attempt, inflight, from, values, err);
    }
    if (status != CKD_OK || start->begun) {
        return status;
    }
    status = load_parent_values(&start->parent_values, inflight, from, err);
    values.parent_values = start->parent_values;
    start->loaded = true;
    if (status == CKD_OK && values.parent_values) {
        save_parent_report(r->save, &attempt, &r->context);
    }
    start->begun = status == CKD_OK && (values.parent_values || !lossy_wants_parent(&inflight->tile));
    return start->begun ? begin_on_device(r->save, &inflight->tile, &values, err) : status;
}

ckd_status save_begin_input(bool *begun, ckd_save *save, lossy_tile *t, const ckd_tensor *tensor,
                            uint64_t widest, ckd_error *err) {
    lossy_device_values values = {.store = save->store, .widest = widest, .only_input = true};
    values.input = on_device(&values.lease, save, t, tensor);
    *begun = values.input != NULL;
    return *begun ? begin_on_device(save, t, &values, err) : CKD_OK;
}

ckd_status save_fetch_tile(ckd_save *save, lossy_buffers *b, lossy_tile *t, const ckd_tensor *tensor,
                           ckd_error *err) {
    const kernels *k = save->lossy.tiles->loaders[0].kernels;
    ckd_status status = save_fetch(&t->input.values, save, &b->original,
                                   &(tensor_elements){tensor, t->shape.first, t->shape.count}, err);
    t->input.now =
        status == CKD_OK ? as_floats(&b->now, t->input.values, t->dtype, t->shape.count, k, err) : NULL;
    return status == CKD_OK && !t->input.now ? CKD_E_NOMEM : status;
}

ckd_status save_load_tile(tile_parent *from, inflight_tile *inflight, const load_budget *budget,
                          uint64_t widest, ckd_error *err) {
    const lossy_region *r = inflight->region;
    const tensor_context *context = &r->context;
    lossy_tile *t = &inflight->tile;
    lossy_device_values values = {
        .store = r->save->store, .widest = widest, .master = block_is_master(context)};
    tile_start start = {.parent_values = NULL};
    ckd_status status = CKD_OK;
    *from = (tile_parent){0};
    if (lossy_wants_parent(t)) {
        choose_parent(from, r->save, budget, t, context);
    }
    values.input = widest ? on_device(&values.lease, r->save, t, r->tensor) : NULL;
    if (values.input) {
        status = begin_device_tile(&start, inflight, from, values, err);
    }
    if (status == CKD_OK && !start.loaded && !start.begun) {
        status = load_parent_values(&start.parent_values, inflight, from, err);
    }
    if (status == CKD_OK && !start.begun) {
        status = save_fetch_tile(r->save, &inflight->buffers, t, r->tensor, err);
        t->input.parent_values = start.parent_values;
    }
    if (status == CKD_OK && t->input.parent_values) {
        read_recorded_errors(t, from, context->parent, r->save);
    }
    return status;
}

void save_tile_leave_device(ckd_save *save, lossy_tile *t) {
    if (save->lossy.tiles->device) {
        lossy_device_end(save->lossy.tiles->device);
    }
    t->input.device = NULL;
}
