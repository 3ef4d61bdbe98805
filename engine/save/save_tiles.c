/* How a save cuts lossy tiles; and their memory, which stays with the kit. */
#include <math.h>
#include <stdlib.h>

#include "engine/lossy/lossy_device.h"
#include "engine/save/save_lossy.h"

static const ckd_optimizer usual_adam = {.beta2 = 0.999, .eps = 1e-8, .step = 1};

void save_eps_of(double eps[PAIR_BOUNDS], const ckd_tensor *tensor) {
    const ckd_optimizer *o = tensor->optimizer ? tensor->optimizer : &usual_adam;
    eps[PAIR_EPS] = o->eps;
    eps[PAIR_LOW_EPS] = o->eps * sqrt(1 - pow(o->beta2, (double)o->step));
}

uint64_t save_tile_elements(const ckd_save *save) {
    uint64_t most = save->staging / LOSSY_TILE_BYTES;
    most = most < LOSSY_TILE_FEWEST ? LOSSY_TILE_FEWEST : most;
    return most < LOSSY_TILE_ELEMENTS ? most : LOSSY_TILE_ELEMENTS;
}

lossy_tile save_cut_tile(ckd_save *save, const tensor_context *context, uint64_t elements, uint64_t first) {
    lossy_tile t = {.part = save_lossy_part(save, context->tensor),
                    .dtype = context->tensor->dtype,
                    .pool = save->store->pool,
                    .rooms = &save->tiles->statistics,
                    .stop = &save->stop,
                    .expected_movement = NAN};
    lossy_tile_cut(&t, &context->shape, context->region, elements, first, save_tile_elements(save));
    return t;
}

ckd_status save_begin_tiles(ckd_save *save, ckd_error *err) {
    ckd_status status = save->tiles ? CKD_OK : save_flush(save, err);
    if (save->tiles || status != CKD_OK) {
        return status;
    }
    if (!save->kit->tiles) {
        status = save_tiles_new(save->kit, save->job_count, err);
    }
    if (status == CKD_OK) {
        save->tiles = save->kit->tiles;
        save->tiles->seen = save->budget;
        save->tiles->seen_region = save->tiles->regions = 0;
    }
    return status;
}

ckd_status save_tiles_new(save_kit *kit, uint32_t threads, ckd_error *err) {
    save_tiles *all = kit->tiles = calloc(1, sizeof(*all));
    if (!all) {
        return err_nomem(err, sizeof(*all), "a tile of a tensor");
    }
    all->loaders = calloc(threads, sizeof(*all->loaders));
    all->rooms = calloc(threads, sizeof(*all->rooms));
    all->statistics.workers = calloc(threads, sizeof(*all->statistics.workers));
    all->statistics.count = all->statistics.workers ? threads : 0;
    ckd_status status = all->loaders && all->rooms && all->statistics.workers
                            ? CKD_OK
                            : err_nomem(err, threads * sizeof(*all->loaders), "a tile of a tensor");
    while (all->loader_count < threads && status == CKD_OK) {
        status = decoder_init(&all->loaders[all->loader_count++], kit->columns, err);
    }
    return status;
}

static void free_part(tile_part *p) {
    bytes_free(&p->original);
    bytes_free(&p->now);
    bytes_free(&p->before);
}

void held_tile_free(held_tile *held) {
    lossy_buffers *b = &held->buffers;
    bytes *const all[] = {&b->original, &b->now, &b->stored, &b->before};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_free(all[i]);
    }
    free_part(&held->parts[0]);
    free_part(&held->parts[1]);
    lossy_tile_free(&held->tile);
}

void save_tiles_free(save_tiles *all) {
    if (!all) {
        return;
    }
    held_tile_free(&all->held[0]);
    held_tile_free(&all->held[1]);
    kept_seconds_free(all->spare);
    for (size_t i = 0; i < PAIR_ROOMS; i++) {
        bytes_free(&all->pair_rooms[i]);
    }
    for (uint32_t i = 0; i < all->loader_count; i++) {
        decoder_free(&all->loaders[i]);
        bytes_free(&all->rooms[i]);
    }
    if (all->device) {
        lossy_device_end(all->device);
        free(all->device);
    }
    free(all->loaders);
    free(all->rooms);
    free(all->known_rows.items);
    tile_rooms_free(&all->statistics);
    lattice_scratch_free(&all->scratch);
    free(all);
}

void save_tiles_give_back(save_tiles *all, uint64_t most) {
    low_rank_room *r = &all->statistics.search;
    if (r->left.capacity + r->right.capacity + r->small.capacity + r->scratch.capacity > most) {
        low_rank_room_free(r);
    }
    for (size_t i = 0; i < PAIR_ROOMS; i++) {
        if (all->pair_rooms[i].capacity > most) {
            bytes_free(&all->pair_rooms[i]);
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        low_rank *f = &all->held[i].tile.factors;
        if (f->memory.capacity > most) {
            low_rank_free(f);
        }
    }
}
