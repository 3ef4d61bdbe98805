/*
 * Statistics of moments that a lossy save keeps for later tensors. They serve three purposes: the quantisation steps of
 * the weights, how far errors of the first moments turn an optimizer's step, and how large they make it.
 */
#include <math.h>
#include <stdlib.h>

#include "base/file.h"
#include "engine/save/lossy.h"

void moment_stats_free(moment_stats *k) {
    while (k) {
        moment_stats *next = k->next;
        lossy_scales_free(&k->scales);
        direction_free(&k->sample);
        bytes_free(&k->values);
        file_scratch_close(k->file);
        free(k);
        k = next;
    }
}

/* Moves the first entry of a list to the head of another. */
static void move(moment_stats **to, moment_stats **from) {
    moment_stats *k = *from;
    *from = k->next;
    k->next = *to;
    *to = k;
}

/* ---- the table. A search for moments that were all saved before their weights takes no longer than for others ---- */

static uint64_t hash_of(const char *weight, const tile_shape *shape) {
    const uint64_t key[3] = {hash64(weight, strlen(weight)), shape->first, shape->count};
    return hash64(key, sizeof(key));
}

/* Must not be called while there are no buckets. */
static moment_stats **bucket_of(const moment_table *t, uint64_t hash) {
    return &t->buckets[hash & (t->size - 1)];
}

static ckd_status grow_table(moment_table *t, ckd_error *err) {
    moment_table grown = {.size = t->size ? 2 * t->size : 64, .count = t->count};
    grown.buckets = calloc(grown.size, sizeof(moment_stats *));
    if (!grown.buckets) {
        return err_nomem(err, grown.size * sizeof(moment_stats *), "second moments' means");
    }
    for (size_t i = 0; i < t->size; i++) {
        moment_stats *reversed = NULL; /* the newest entry of a bucket stays the first */
        while (t->buckets[i]) {
            move(&reversed, &t->buckets[i]);
        }
        while (reversed) {
            move(bucket_of(&grown, reversed->hash), &reversed);
        }
    }
    free(t->buckets);
    *t = grown;
    return CKD_OK;
}

void moment_stats_end(ckd_save *save) {
    moment_stats *unused = NULL;
    moment_table *t = &save->lossy.moments;
    for (size_t i = 0; i < t->size; i++) {
        while (t->buckets[i]) {
            pair_end(save->lossy.tiles, t->buckets[i]);
            move(&save->lossy.tiles->spare, &t->buckets[i]);
        }
    }
    free(t->buckets);
    *t = (moment_table){.buckets = NULL};
    for (moment_stats **at = save->lossy.tiles ? &save->lossy.tiles->spare : NULL; at && *at;) {
        if ((*at)->served) {
            (*at)->served = false;
            at = &(*at)->next;
        } else {
            move(&unused, at);
        }
    }
    moment_stats_free(unused);
}

/* Returns an unused entry, new if need be; NULL: out of memory. */
static moment_stats *begin(save_tiles *all) {
    moment_stats empty = {.served = true}, *k = all->spare;
    if (!k) {
        k = malloc(sizeof(*k));
    } else {
        all->spare = k->next;
        empty.scales.memory = k->scales.memory;
        empty.sample.memory = k->sample.memory;
    }
    if (k) {
        *k = empty;
    }
    return k;
}

/* A weight's master is not the last tensor: its rounded copy may follow. */
void moment_stats_used(ckd_save *save, moment_stats *k, const tensor_context *context) {
    if (!k) {
        return;
    }
    ckd_role role = context->tensor->role;
    k->second_came = k->second_came || role == CKD_ROLE_EXP_AVG_SQ;
    k->moment_came = k->moment_came || role == CKD_ROLE_EXP_AVG;
    k->weight_came = k->weight_came || strcmp(context->tensor->name, k->weight) == 0;
    bool needed = false; /* by another tile in progress */
    for (int i = 0; i < 2; i++) {
        const inflight_tile *h = &save->lossy.tiles->in_flight[i];
        needed = needed || (h->in_use && h->second == k);
    }
    if (k->second_came && k->moment_came && !needed) {
        pair_end(save->lossy.tiles, k);
    }
    if (k->second_came && k->moment_came && k->weight_came && !needed) {
        moment_stats **at = bucket_of(&save->lossy.moments, k->hash);
        while (*at != k) {
            at = &(*at)->next;
        }
        move(&save->lossy.tiles->spare, at);
        save->lossy.moments.count--;
    }
}

static ckd_status new_moment_stats(moment_stats **out, ckd_save *save, const tile_shape *shape,
                                   const char *weight, const tensor_context *context, ckd_error *err) {
    moment_table *table = &save->lossy.moments;
    ckd_status status = table->count == table->size ? grow_table(table, err) : CKD_OK;
    moment_stats *stats = *out = status == CKD_OK ? begin(save->lossy.tiles) : NULL;
    if (status != CKD_OK) {
        return status;
    }
    if (!stats) {
        return err_nomem(err, sizeof(*stats), "second moments' means");
    }
    stats->weight = weight;
    stats->first = shape->first;
    stats->count = shape->count;
    stats->region = *context->region;
    stats->hash = hash_of(weight, shape);
    stats->next = *bucket_of(table, stats->hash);
    *bucket_of(table, stats->hash) = stats;
    table->count++;
    return CKD_OK;
}

ckd_status moment_stats_get(moment_stats **out, ckd_save *save, const lossy_tile *t,
                            const tensor_context *context, ckd_error *err) {
    const char *weight = context->largest ? NULL : context->weight;
    *out = weight ? find_moment_stats(save, &t->shape, context) : NULL;
    ckd_status status =
        weight && !*out ? new_moment_stats(out, save, &t->shape, weight, context, err) : CKD_OK;
    if (status == CKD_OK && *out && t->part == LOSSY_SECOND) {
        status = save_await(save, (*out)->end, err); /* blocks of the first moment look for the sample */
        THEN(status, direction_begin(&(*out)->sample, t->shape.count, err));
    }
    return status;
}

moment_stats *find_moment_stats(const ckd_save *save, const tile_shape *shape,
                                const tensor_context *context) {
    const char *weight = context->weight ? context->weight : context->tensor->name;
    const moment_table *table = &save->lossy.moments;
    const uint64_t hash = hash_of(weight, shape);
    for (moment_stats *k = table->size ? *bucket_of(table, hash) : NULL; k; k = k->next) {
        if (k->hash == hash && strcmp(k->weight, weight) == 0 && k->first == shape->first &&
            k->count == shape->count && region_equal(&k->region, context->region, context->shape.ndim)) {
            return k;
        }
    }
    return NULL;
}

/* ---- exact moments beside a lossy one ---- */

/*
 * Returns true for a moment whose role is exact while the other moment's role is lossy. It never becomes a tile, but
 * the other moment is coded against its values.
 */
static bool is_beside_lossy(const ckd_save *save, const record_tensor *described) {
    ckd_role role = described->role,
             other = role == CKD_ROLE_EXP_AVG ? CKD_ROLE_EXP_AVG_SQ : CKD_ROLE_EXP_AVG;
    return (role == CKD_ROLE_EXP_AVG || role == CKD_ROLE_EXP_AVG_SQ) &&
           save_fidelity(save, role) == CKD_EXACT && save_fidelity(save, other) != CKD_EXACT &&
           lossy_part_of(role, described->dtype) != LOSSY_NONE;
}

static ckd_status pair_exact_tile(region_figures *f, ckd_save *save, inflight_tile *inflight,
                                  const ckd_tensor *tensor, const tensor_context *context, ckd_error *err) {
    lossy_tile *t = &inflight->tile;
    double update = NAN, eps[PAIR_BOUNDS];
    save_eps_of(eps, tensor);
    inflight->second = NULL;
    t->part = lossy_part_of(context->tensor->role, t->dtype);
    ckd_status status = save_fetch_tile(save, &inflight->buffers, t, tensor, err);
    THEN(status, moment_stats_get(&inflight->second, save, t, context, err));
    moment_stats *k = inflight->second;
    THEN(status, pair_exact(&update, save, inflight, eps, err));
    if (status == CKD_OK && k) {
        direction_values v = {t->input.now, t->input.now, 0, t->shape.count};
        if (t->part == LOSSY_SECOND) {
            direction_record(&k->sample, &v);
        } else if (k->sample.count) {
            direction_add(&f->direction, &k->sample, &v, eps[PAIR_EPS]);
        }
        pair_add_update(f, &t->context.pair, update);
        moment_stats_used(save, k, context);
    }
    return status;
}

ckd_status pair_exact_tensor(ckd_save *save, const ckd_tensor *tensor, const tensor_context *context,
                             uint64_t elements, ckd_error *err) {
    region_figures f = {.paired = false};
    if (!is_beside_lossy(save, context->tensor)) {
        return CKD_OK;
    }
    ckd_status status = save_begin_tiles(save, err);
    inflight_tile *inflight = status == CKD_OK ? calloc(1, sizeof(*inflight)) : NULL;
    if (status == CKD_OK && !inflight) {
        status = err_nomem(err, sizeof(*inflight), "a tile of a tensor");
    }
    for (uint64_t first = 0; first < elements && status == CKD_OK; first += inflight->tile.shape.count) {
        inflight->tile = save_cut_tile(save, context, elements, first);
        status = pair_exact_tile(&f, save, inflight, tensor, context, err);
    }
    if (status == CKD_OK && f.paired) {
        f.measures.direction_change = direction_change(&f.direction);
        status = measures_add(&save->lossy.measures, context->tensor->name, context->region,
                              context->shape.ndim, &f.measures, err);
    }
    if (inflight) {
        inflight_tile_free(inflight);
    }
    free(inflight);
    return status;
}
