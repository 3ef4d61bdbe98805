/* How a save cuts lossy tiles, and the tiles' memory, which stays with the workspace. */
#include <math.h>
#include <stdlib.h>

#include "engine/lossy/lossy.h"
#include "engine/save/lossy.h"

static const ckd_optimizer default_adam = {.beta2 = 0.999, .eps = 1e-8, .step = 1};

void save_eps_of(double eps[PAIR_BOUNDS], const ckd_tensor *tensor) {
    const ckd_optimizer *o = tensor->optimizer ? tensor->optimizer : &default_adam;
    eps[PAIR_EPS] = o->eps;
    eps[PAIR_LOW_EPS] = o->eps * sqrt(1 - pow(o->beta2, (double)o->step));
}

uint64_t save_tile_elements(const ckd_save *save) {
    uint64_t max = save->coding.staging / LOSSY_TILE_BYTES;
    max = max < LOSSY_TILE_MIN ? LOSSY_TILE_MIN : max;
    return max < LOSSY_TILE_ELEMENTS ? max : LOSSY_TILE_ELEMENTS;
}

lossy_tile save_cut_tile(ckd_save *save, const tensor_context *context, uint64_t elements, uint64_t first) {
    lossy_tile t = {.part = save_lossy_part(save, context->tensor),
                    .dtype = context->tensor->dtype,
                    .resources.pool = save->store->pool,
                    .resources.scratches = &save->lossy.tiles->statistics,
                    .resources.stop = &save->group.stop,
                    .context.expected_movement = NAN};
    lossy_tile_cut(&t.shape, &context->shape, context->region, elements, first, save_tile_elements(save));
    return t;
}

ckd_status save_begin_tiles(ckd_save *save, ckd_error *err) {
    ckd_status status = save->lossy.tiles ? CKD_OK : save_flush(save, err);
    if (save->lossy.tiles || status != CKD_OK) {
        return status;
    }
    if (!save->pipeline.workspace->tiles) {
        status = save_tiles_new(save->pipeline.workspace, save->pipeline.threads, err);
    }
    if (status == CKD_OK) {
        save->lossy.tiles = save->pipeline.workspace->tiles;
        for (uint32_t i = 0; i < save->lossy.tiles->loader_count; i++) {
            save->lossy.tiles->loaders[i].views = &save->sources.views;
        }
        save->lossy.tiles->budget = save->coding.budget;
        save->lossy.tiles->seen_region = save->lossy.tiles->regions = 0;
    }
    return status;
}

ckd_status save_tiles_new(save_workspace *workspace, uint32_t threads, ckd_error *err) {
    save_tiles *all = workspace->tiles = calloc(1, sizeof(*all));
    if (!all) {
        return err_nomem(err, sizeof(*all), "a tile of a tensor");
    }
    all->loaders = calloc(threads, sizeof(*all->loaders));
    all->decode_buffers = calloc(threads, sizeof(*all->decode_buffers));
    all->statistics.workers = calloc(threads, sizeof(*all->statistics.workers));
    all->statistics.count = all->statistics.workers ? threads : 0;
    ckd_status status = all->loaders && all->decode_buffers && all->statistics.workers
                            ? CKD_OK
                            : err_nomem(err, threads * sizeof(*all->loaders), "a tile of a tensor");
    while (all->loader_count < threads && status == CKD_OK) {
        status = decoder_init(&all->loaders[all->loader_count++], NULL, workspace->columns, err);
    }
    return status;
}

static void free_part(tile_part *p) {
    bytes_free(&p->original);
    bytes_free(&p->now);
    bytes_free(&p->parent_values);
}

void inflight_tile_free(inflight_tile *inflight) {
    lossy_buffers *b = &inflight->buffers;
    bytes *const all[] = {&b->original, &b->now, &b->stored, &b->parent_values};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_free(all[i]);
    }
    free_part(&inflight->parts[0]);
    free_part(&inflight->parts[1]);
    lossy_tile_free(&inflight->tile);
}

void save_tiles_free(save_tiles *all) {
    if (!all) {
        return;
    }
    inflight_tile_free(&all->in_flight[0]);
    inflight_tile_free(&all->in_flight[1]);
    moment_stats_free(all->spare);
    for (size_t i = 0; i < PAIR_BUFFERS; i++) {
        bytes_free(&all->pair_buffers[i]);
    }
    for (uint32_t i = 0; i < all->loader_count; i++) {
        decoder_free(&all->loaders[i]);
        bytes_free(&all->decode_buffers[i]);
    }
    if (all->device) {
        lossy_device_end(all->device);
        free(all->device);
    }
    free(all->loaders);
    free(all->decode_buffers);
    free(all->row_records.items);
    tile_scratches_free(&all->statistics);
    lattice_scratch_free(&all->scratch);
    free(all);
}

void save_tiles_trim(save_tiles *all, uint64_t max) {
    low_rank_scratch *r = &all->statistics.search;
    if (r->left.capacity + r->right.capacity + r->small.capacity + r->scratch.capacity > max) {
        low_rank_scratch_free(r);
    }
    for (size_t i = 0; i < PAIR_BUFFERS; i++) {
        if (all->pair_buffers[i].capacity > max) {
            bytes_free(&all->pair_buffers[i]);
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        low_rank *f = &all->in_flight[i].tile.plan.factors;
        if (f->memory.capacity > max) {
            low_rank_free(f);
        }
    }
}
