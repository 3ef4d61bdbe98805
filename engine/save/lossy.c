/*
 * Takes a lossy tensor through a save tile by tile: loads a tile, plans it, and pushes its blocks into the pipeline.
 * Two tiles may be in progress, so that one is planned while the other is coded.
 */
#include "engine/save/internal.h"
#include "engine/save/lossy.h"

#include <math.h>
#include <stdlib.h>

#include "engine/encode/encode.h"
#include "engine/lossy/lossy.h"

/* from save to save, the scratch of each part of a tile may keep 1/KEPT_SHARE of the staging limit */
#define KEPT_SHARE 8

/* ---- regions ---- */

static void free_region(lossy_region *r) {
    if (--r->users == 0) {
        save_panels_free(&r->panels);
        free(r->parts);
        free(r);
    }
}

/* ---- blocks ---- */

/* The input elements of a block; NULL: they are on a device. */
static const void *input_of(const lossy_tile *t, const block_job *job) {
    return t->input.device ? NULL
                           : (const uint8_t *)t->input.values +
                                 (job->input.first - t->shape.first) * ckd_dtype_size(t->dtype);
}

/* Elements of the block that begins at element `at` of the tile. panel: the tile's; NULL: the tile is whole. */
static uint64_t block_count(const save_panel *panel, const lossy_tile *t, uint64_t at) {
    uint64_t remaining = t->shape.count - at,
             count = panel ? save_panel_block(&panel->rows, t->shape.first + at)
                           : lossy_block_count(&t->shape, at);
    return count < remaining ? count : remaining;
}

/* Computes the hashes and errors of the blocks of a tile on a device. */
static ckd_status measure_on_device(const save_panel *panel, const lossy_tile *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint64_t at = 0; at < t->shape.count && status == CKD_OK;) {
        uint64_t n = block_count(panel, t, at);
        status = lossy_device_add_block(t->input.device, at, n, err);
        at += n;
    }
    return status == CKD_OK ? lossy_device_measure(t->input.device, err) : status;
}

/* Returns true if the tile has several blocks, so that the column part is written once for all of them. */
static bool shares_columns(const lossy_tile *t) {
    return t->plan.lattice.shared_rows || (lossy_block_count(&t->shape, 0) < t->shape.count &&
                                           (t->plan.lattice.own.step || t->plan.lattice.own.rank));
}

/* job->input.first is set. */
static ckd_status fill_place(save_slot *slot, block_job *job, lossy_region *r, const region_part *p,
                             lossy_tile *t, ckd_error *err) {
    ckd_save *save = r->save;
    ckd_status status = CKD_OK;
    uint64_t at = job->input.first - t->shape.first;
    job->input.count = block_count(p->panel, t, at);
    job->input.try_delta = true;
    slot->input = input_of(t, job);
    if (t->plan.lattice.shared && at == 0) {
        shared_part columns = {
            &t->plan.lattice.own, p->context->tensor, {p->context->region, t->shape.first, t->shape.count}};
        status = grid_side_record(&t->plan.shared_content, save, &slot->append, &columns, err);
    }
    if (status == CKD_OK && t->plan.lattice.shared_rows) {
        status = grid_rows(job, slot, r, p->panel, err);
    }
    return status;
}

/* Pushes the blocks of a part; they are in progress when it returns. */
static ckd_status push_part(lossy_region *r, region_part *p, tile_part *part, const tile_parent *from,
                            ckd_error *err) {
    ckd_save *save = r->save;
    lossy_tile *t = &part->tile;
    region_job *rj;
    part->figures = &p->figures;
    p->figures.measures.movement += t->plan.movement * t->plan.movement * (double)t->shape.count;
    t->plan.lattice.shared = shares_columns(t);
    ckd_status status = save_new_region_job(&rj, save, p->context, NULL, err);
    if (status == CKD_OK) {
        rj->lossy = part;
        rj->parent = from->view;
        rj->context.parent = from->tensor;
    }
    for (uint64_t at = 0; at < t->shape.count && status == CKD_OK;) {
        save_slot *slot;
        block_job *job;
        status = save_next_slot(&slot, &job, save, rj, err);
        if (status == CKD_OK) {
            job->input.first = t->shape.first + at;
            status = fill_place(slot, job, r, p, t, err);
        }
        if (status == CKD_OK) {
            at += job->input.count;
            save_push(save);
        }
    }
    part->end = save->pipeline.pushed;
    return status;
}

static ckd_status save_exactly(lossy_region *r, const lossy_tile *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->count && status == CKD_OK; i++) {
        const save_panel *p = r->parts[i].panel;
        uint64_t first = p ? t->shape.first / t->shape.columns * p->rows.width : t->shape.first;
        uint64_t count = p ? t->shape.count / t->shape.columns * p->rows.width : t->shape.count;
        status = p ? save_exact_panel(r->save, r->tensor, p, first, first + count, err)
                   : save_exact_span(r->save, &(exact_span){r->tensor, &r->context, first, first + count},
                                     NULL, err);
    }
    return status == CKD_OK ? save_flush(r->save, err) : status;
}

/*
 * Waits until the blocks of a part on a device are written, because the device holds one part at a time. Then compares
 * directions.
 */
static ckd_status finish_on_device(lossy_region *r, region_part *p, const tile_part *part, ckd_error *err) {
    const lossy_tile *t = &part->tile;
    moment_stats *second = part->inflight->second;
    ckd_status status = save_await(r->save, part->end, err);
    /* Without a second moment, or before it comes, there is nothing to compare directions with. */
    if (status == CKD_OK && second && second->sample.stride && t->part != LOSSY_WEIGHT) {
        direction_sums *sums = t->part == LOSSY_MOMENT ? &p->figures.direction : NULL;
        status = lossy_device_direction(sums, &second->sample, t, r->eps[PAIR_EPS], err);
    }
    return status;
}

/* Pushes all parts of a planned tile. */
static ckd_status push_tile(lossy_region *r, inflight_tile *inflight, const tile_parent *from,
                            ckd_error *err) {
    const lossy_tile *t = &inflight->tile;
    ckd_status status = CKD_OK;
    r->save->lossy.tiles->row_records.count = 0;
    for (size_t i = 0; i < r->count && status == CKD_OK; i++) {
        region_part *p = &r->parts[i];
        tile_part *part = &inflight->parts[i % 2];
        status = save_await(r->save, part->end, err);
        part->inflight = inflight;
        if (status == CKD_OK && p->panel) {
            status = grid_of_panel(part, r->save, t, p->panel, err);
            part->tile.plan.lattice.shared_rows = grid_shares_rows(t);
        } else {
            part->tile = *t;
        }
        if (status == CKD_OK && t->input.device) {
            status = measure_on_device(p->panel, &part->tile, err);
        }
        THEN(status, push_part(r, p, part, from, err));
        if (status == CKD_OK && t->input.device) {
            status = finish_on_device(r, p, part, err);
        }
    }
    return status;
}

/*
 * *worth == false: better coded exactly. *ready == false: the tile is on a device, and the host must code it. Sets
 * inflight->second.
 */
static ckd_status prepare_tile(bool *worth, bool *ready, inflight_tile *inflight, const lossy_region *r,
                               ckd_error *err) {
    ckd_save *save = r->save;
    lossy_tile *t = &inflight->tile;
    ckd_status status = CKD_OK;
    if (t->part == LOSSY_WEIGHT) {
        inflight->second = find_moment_stats(save, &t->shape, &r->context);
        t->context.scales =
            inflight->second && inflight->second->scales.row ? &inflight->second->scales : NULL;
    } else if (!inflight->second) {
        status = moment_stats_get(&inflight->second, save, t, &r->context, err);
    }
    moment_stats *second = inflight->second;
    if (second && t->part == LOSSY_SECOND) {
        t->found = &second->scales;
        second->scales.row = second->scales.column = NULL; /* of an earlier attempt */
    }
    THEN(status, lossy_tile_prepare(t, worth, save->lossy.tiles->loaders[0].kernels, err));
    *ready = *worth || !t->input.device;
    if (status == CKD_OK && *worth && t->input.device) {
        status = lossy_device_code(ready, t, err);
    }
    if (status == CKD_OK && *worth && *ready) {
        status = pair_tile(ready, save, inflight, r->eps, err);
    }
    return status;
}

/* ---- the next tile ---- */

/* The most columns of a panel; UINT64_MAX without panels. */
static uint64_t widest_of(const lossy_region *r) {
    uint64_t widest = r->panels.count ? 1 : UINT64_MAX;
    for (size_t i = 0; i < r->panels.count; i++) {
        uint64_t width = r->panels.items[i].rows.width;
        widest = width > widest ? width : widest;
    }
    return widest;
}

/* Clears *all unless this save has the input of all blocks of a part on a device. */
static ckd_status find_blocks_in_save(bool *all, const lossy_region *r, const region_part *p,
                                      const lossy_tile *t, ckd_error *err) {
    ckd_status status = measure_on_device(p->panel, t, err);
    for (uint64_t at = 0; at < t->shape.count && *all && status == CKD_OK;) {
        uint64_t n = block_count(p->panel, t, at);
        region_span block = {p->context->region, t->shape.first + at, n};
        const hash128 *original = &lossy_device_block_of(t->input.device, at)->original;
        *all = block_is_registered(&block, original, &r->save->coding.context, p->context, t->limits.bound);
        at += n;
    }
    return status;
}

/*
 * Sets *all if this save already has all values of a tile on a device, because it has the masters from which they are
 * rounded. The tile's blocks then only name the masters, and need neither a parent nor a plan.
 */
static ckd_status find_in_save(bool *all, inflight_tile *inflight, lossy_region *r, ckd_error *err) {
    ckd_save *save = r->save;
    lossy_tile *t = &inflight->tile;
    *all = false;
    if (r->tensor->read != device_read || t->part != LOSSY_WEIGHT || t->dtype == CKD_F32 ||
        r->params.max_error > 0) {
        return CKD_OK;
    }
    ckd_status status = save_end_tiles(save, err); /* the masters may be in progress */
    THEN(status, save_await(save, save->pipeline.pushed, err));
    if (status == CKD_OK && save->registry.dedup_index.rounded) {
        status = save_begin_input(all, save, t, r->tensor, widest_of(r), err);
    }
    t->limits.bound = INFINITY; /* as lossy_tile_prepare sets it */
    for (size_t i = 0; i < r->count && *all && status == CKD_OK; i++) {
        const region_part *p = &r->parts[i];
        tile_part *part = &inflight->parts[0];
        part->tile = *t;
        if (p->panel) {
            status = grid_of_panel(part, save, t, p->panel, err);
        }
        THEN(status, find_blocks_in_save(all, r, p, &part->tile, err));
    }
    if (status == CKD_OK && t->input.device && !*all) {
        save_tile_leave_device(save, t);
    }
    inflight->second = *all ? find_moment_stats(save, &t->shape, &r->context) : NULL;
    return status;
}

/* Returns the budget by which the tile's parent is chosen. */
static load_budget budget_for(const lossy_region *r) {
    const save_tiles *all = r->save->lossy.tiles;
    load_budget budget = all->budget;
    if (all->seen_region != r->number) {
        save_remove_expected(&budget, r->save->sources.parent, r->context.parent, r->share);
    }
    return budget;
}

/*
 * Loads and prepares a tile: in the device's memory if the tile is there and can be coded there. Otherwise, or if that
 * fails, in the host's memory.
 */
static ckd_status load_and_prepare(bool *worth, tile_parent *from, inflight_tile *inflight, lossy_region *r,
                                   ckd_error *err) {
    ckd_save *save = r->save;
    lossy_tile *t = &inflight->tile, cut = *t;
    load_budget budget = budget_for(r);
    bool ready = false, device = true;
    ckd_status status = CKD_OK;
    inflight->second = NULL;
    *from = (tile_parent){0};
    while (!ready && status == CKD_OK) {
        lossy_tile_reset(t, &cut);
        status = device ? find_in_save(&ready, inflight, r, err) : CKD_OK;
        *worth = ready;
        if (status == CKD_OK && !ready) {
            status = save_load_tile(from, inflight, &budget, device ? widest_of(r) : 0, err);
            THEN(status, prepare_tile(worth, &ready, inflight, r, err));
        }
        /* If the device is broken, reading from it fails on the host, too. */
        if ((status == CKD_E_NOMEM || status == CKD_E_DEVICE) && t->input.device) {
            if (!r->reported_fallback) {
                store_message(save->store, "%s is coded on the host: %s", r->context.tensor->name,
                              err ? err->message : "too little memory on the device");
            }
            r->reported_fallback = true;
            status = CKD_OK;
            ready = false;
        }
        device = false;
        if (!ready) {
            save_tile_leave_device(save, t);
        }
    }
    return status;
}

/* ---- tiles in progress ---- */

static ckd_status end_region(lossy_region *r, ckd_error *err) {
    const tensor_context *context = &r->context;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->count && status == CKD_OK && r->users == 1; i++) {
        region_part *p = &r->parts[i];
        measures *m = &p->figures.measures;
        uint64_t elements;
        region_count(&elements, &context->shape, p->context->region);
        m->movement = sqrt(m->movement / (double)(elements ? elements : 1));
        m->direction_change = direction_change(&p->figures.direction);
        m->update = p->figures.paired ? m->update : (double)NAN;
        m->update_given = p->figures.paired ? m->update_given : (double)NAN;
        status = measures_add(&r->save->lossy.measures, context->tensor->name, p->context->region,
                              context->shape.ndim, m, err);
    }
    free_region(r);
    return status;
}

/* Waits until the tile is done, and frees its place. */
static ckd_status end_tile(ckd_save *save, inflight_tile *inflight, ckd_error *err) {
    ckd_status status = inflight->in_use ? save_await(save, inflight->end, err) : CKD_OK;
    if (status != CKD_OK || !inflight->in_use) {
        return status;
    }
    lossy_region *r = inflight->region;
    save->lossy.tiles->budget = inflight->budget;
    save->lossy.tiles->seen_region = r->number;
    inflight->in_use = false;
    moment_stats_used(save, inflight->second, &r->context);
    if (inflight->tile.input.device) {
        save_reference_keep(save, &inflight->tile, &r->context);
        save_tile_leave_device(save, &inflight->tile);
    }
    return end_region(r, err);
}

/* Returns the older of the tiles in progress; NULL: none. */
static inflight_tile *oldest_inflight(save_tiles *all) {
    inflight_tile *a = &all->in_flight[0], *b = &all->in_flight[1];
    bool second = b->in_use && (!a->in_use || b->end < a->end);
    return second ? b : a->in_use ? a : NULL;
}

ckd_status save_end_tiles(ckd_save *save, ckd_error *err) {
    ckd_status status = CKD_OK;
    while (save->lossy.tiles && status == CKD_OK && oldest_inflight(save->lossy.tiles)) {
        status = end_tile(save, oldest_inflight(save->lossy.tiles), err);
    }
    return status;
}

void save_lossy_free(ckd_save *save) {
    save_tiles *all = save->lossy.tiles;
    moment_stats_end(save);
    for (uint32_t i = 0; all && i < 2; i++) {
        inflight_tile *inflight = &all->in_flight[i];
        if (inflight->in_use) {
            free_region(inflight->region);
            inflight->in_use = false;
        }
    }
    if (all && all->device) {
        lossy_device_end(all->device);
    }
    if (all) {
        save_tiles_trim(all, save->coding.staging / KEPT_SHARE);
    }
    save->lossy.tiles = NULL;
}

static size_t inflight_bytes(const inflight_tile *h) {
    const lossy_buffers *b = &h->buffers;
    return b->original.capacity + b->now.capacity + b->stored.capacity + b->parent_values.capacity;
}

/*
 * Provides a place for a tile of `count` elements. Two tiles are held at a time only if both have at most half of the
 * largest size. A larger one also takes the memory of the other. Waits depend on sizes only: see save_tiles.seen.
 */
static ckd_status begin_inflight(inflight_tile **out, ckd_save *save, uint64_t count, ckd_error *err) {
    inflight_tile *a = &save->lossy.tiles->in_flight[0], *b = &save->lossy.tiles->in_flight[1];
    uint64_t half = save_tile_elements(save) / 2;
    bool large = count > half || (a->in_use && a->tile.shape.count > half) ||
                 (b->in_use && b->tile.shape.count > half);
    ckd_status status = CKD_OK;
    if (large) {
        status = save_end_tiles(save, err);
    } else if (a->in_use && b->in_use) {
        status = end_tile(save, oldest_inflight(save->lossy.tiles), err);
    }
    if (status != CKD_OK) {
        return status;
    }
    *out = large ? (inflight_bytes(b) > inflight_bytes(a) ? b : a) : (a->in_use ? b : a);
    if (count > half) {
        inflight_tile_free(*out == a ? b : a);
    }
    return CKD_OK;
}

/* ---- a tensor ---- */

static ckd_status save_next_tile(lossy_region *r, lossy_tile *cut, ckd_error *err) {
    ckd_save *save = r->save;
    tile_parent from;
    inflight_tile *inflight;
    bool worth = false;
    ckd_status status = begin_inflight(&inflight, save, cut->shape.count, err);
    if (status != CKD_OK) {
        return status;
    }
    lossy_tile_reset(&inflight->tile, cut);
    inflight->region = r;
    inflight->parts[0].end = inflight->parts[1].end = 0;
    uint64_t begun_ns = clock_monotonic_ns(), waited = save->pipeline.waited_ns;
    int64_t gained = pool_saved_ns(save->store->pool);
    status = load_and_prepare(&worth, &from, inflight, r, err);
    gained = pool_saved_ns(save->store->pool) - gained;
    waited = save->pipeline.waited_ns - waited; /* blocks that were coded meanwhile are counted elsewhere */
    int64_t worked = (int64_t)(clock_monotonic_ns() - begun_ns - waited) + gained;
    /* the pool also counts the waits of the store's other saves */
    save_add_analysis(save, worked > 0 ? (uint64_t)worked : 0);
    if (status == CKD_OK && worth) {
        inflight->in_use = true;
        r->users++;
        status = push_tile(r, inflight, &from, err);
        inflight->end = save->pipeline.pushed;
        if (inflight->second && inflight->second->values_part == inflight->tile.part) {
            inflight->second->end = inflight->end;
        }
        if (status == CKD_OK && inflight->tile.input.device) {
            status = save_end_tiles(save, err);
        }
        uint64_t raw = cut->shape.count * ckd_dtype_size(cut->dtype);
        return status == CKD_OK ? save_report_progress(save, raw, err) : status;
    }
    save_tile_leave_device(save, &inflight->tile);
    double update = NAN;
    THEN(status, pair_exact(&update, save, inflight, r->eps, err));
    for (size_t i = 0; i < r->count; i++) {
        pair_add_update(&r->parts[i].figures, &inflight->tile.context.pair, update);
    }
    if (status == CKD_OK) {
        figures_add_exact(r, &inflight->tile);
        status = save_exactly(r, cut, err);
    }
    if (inflight->second) {
        moment_stats_used(save, inflight->second, &r->context);
    }
    save->lossy.tiles->budget = save->coding.budget;
    save->lossy.tiles->seen_region = r->number;
    return status;
}

static ckd_status begin_region(lossy_region **out, ckd_save *save, const ckd_tensor *tensor,
                               const tensor_context *context, uint64_t elements, ckd_error *err) {
    lossy_region *r = *out = calloc(1, sizeof(*r));
    if (!r) {
        return err_nomem(err, sizeof(*r), "a tensor");
    }
    *r = (lossy_region){.save = save,
                        .tensor = tensor,
                        .context = *context,
                        .params = save_quant_params_of(save, context->tensor),
                        .share = save->input.leaves_budget,
                        .number = ++save->lossy.tiles->regions,
                        .users = 1};
    save_eps_of(r->eps, tensor);
    ckd_status status = CKD_OK;
    if (save_is_cut_lossy(save, context, elements)) {
        status = save_cut(&r->panels, save, context, &save->coding.grid.row_sides,
                          &save->coding.grid.column_sides, err);
    }
    r->count = r->panels.count ? r->panels.count : 1;
    r->parts = status == CKD_OK ? calloc(r->count, sizeof(*r->parts)) : NULL;
    for (size_t i = 0; i < r->count && r->parts; i++) {
        const save_panel *panel = r->panels.count ? &r->panels.items[i] : NULL;
        r->parts[i].panel = panel;
        r->parts[i].context = panel ? &panel->context : &r->context;
    }
    if (status == CKD_OK && !r->parts) {
        status = err_nomem(err, r->count * sizeof(*r->parts), "a tensor");
    }
    return status;
}

ckd_status save_lossy_region(ckd_save *save, const ckd_tensor *tensor, const tensor_context *context,
                             uint64_t elements, ckd_error *err) {
    lossy_region *r = NULL;
    ckd_status status = save_begin_tiles(save, err);
    THEN(status, begin_region(&r, save, tensor, context, elements, err));
    for (uint64_t first = 0; first < elements && status == CKD_OK;) {
        lossy_tile t = save_cut_tile(save, context, elements, first);
        t.params = &r->params;
        status = save_next_tile(r, &t, err);
        first += t.shape.count;
    }
    if (status != CKD_OK) {
        save_stop_helpers(save);
        if (save->lossy.tiles && save->lossy.tiles->device) {
            lossy_device_end(save->lossy.tiles->device);
        }
    }
    if (r && status == CKD_OK) {
        return end_region(r, err);
    }
    if (r) {
        free_region(r);
    }
    return status;
}
