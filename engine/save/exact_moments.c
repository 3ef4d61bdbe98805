/*
 * Moments whose role is exact while the role of the other moment is lossy: they never become tiles, but the other
 * moment is coded against their values.
 */
#include <math.h>
#include <stdlib.h>

#include "engine/device/device.h"
#include "engine/save/lossy.h"

static bool is_beside_lossy(const ckd_save *save, const ckd_tensor *tensor, const record_tensor *described) {
    ckd_role role = described->role,
             other = role == CKD_ROLE_EXP_AVG ? CKD_ROLE_EXP_AVG_SQ : CKD_ROLE_EXP_AVG;
    return (role == CKD_ROLE_EXP_AVG || role == CKD_ROLE_EXP_AVG_SQ) && tensor->read != device_read &&
           save_fidelity(save, role) == CKD_EXACT && save_fidelity(save, other) != CKD_EXACT &&
           lossy_part_of(role, described->dtype) != LOSSY_NONE;
}

static ckd_status pair_exact_tile(region_figures *f, ckd_save *save, inflight_tile *held,
                                  const ckd_tensor *tensor, const tensor_context *context, ckd_error *err) {
    lossy_tile *t = &held->tile;
    double update = NAN, eps[PAIR_BOUNDS];
    save_eps_of(eps, tensor);
    held->second = NULL;
    t->part = lossy_part_of(context->tensor->role, t->dtype);
    ckd_status status = save_fetch_tile(save, &held->buffers, t, tensor, err);
    THEN(status, moment_stats_get(&held->second, save, t, context, err));
    moment_stats *k = held->second;
    THEN(status, pair_exact(&update, save, held, eps, err));
    if (status == CKD_OK && k) {
        if (t->part == LOSSY_SECOND) {
            direction_record(&k->sample, 0, t->count, t->now, t->now);
        } else if (k->sample.count) {
            direction_add(&f->direction, &k->sample, 0, t->count, t->now, t->now, eps[PAIR_EPS]);
        }
        pair_add_update(f, &t->pair, update);
        moment_stats_used(save, k, context);
    }
    return status;
}

ckd_status pair_exact_tensor(ckd_save *save, const ckd_tensor *tensor, const tensor_context *context,
                             uint64_t elements, ckd_error *err) {
    region_figures f = {.paired = false};
    if (!is_beside_lossy(save, tensor, context->tensor)) {
        return CKD_OK;
    }
    ckd_status status = save_begin_tiles(save, err);
    inflight_tile *held = status == CKD_OK ? calloc(1, sizeof(*held)) : NULL;
    if (status == CKD_OK && !held) {
        status = err_nomem(err, sizeof(*held), "a tile of a tensor");
    }
    for (uint64_t first = 0; first < elements && status == CKD_OK; first += held->tile.count) {
        held->tile = save_cut_tile(save, context, elements, first);
        status = pair_exact_tile(&f, save, held, tensor, context, err);
    }
    if (status == CKD_OK && f.paired) {
        f.measures.direction_change = direction_change(&f.direction);
        status = measures_add(&save->measures, context->tensor->name, context->region, context->shape.ndim,
                              &f.measures, err);
    }
    if (held) {
        inflight_tile_free(held);
    }
    free(held);
    return status;
}
