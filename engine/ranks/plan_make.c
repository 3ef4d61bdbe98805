/*
 * Makes the plan of a save from the descriptions of all ranks: groups equal regions, checks that they tile each tensor,
 * and has plan_assign.c choose a writer for each.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* qsort_r */
#endif
#include <stdlib.h>
#include <string.h>

#include "engine/ranks/internal.h"
#include "engine/ranks/plan_tensors.h"
#include "engine/common/common.h"

/* The regions of one tensor as words: kind, then offsets and lengths, or start and count. */
typedef struct region_keys {
    uint64_t *words;
    size_t stride, capacity; /* in words */
} region_keys;

typedef struct planner {
    planned_tensors tensors;
    ckd_plan *plan;
    region_keys keys;
    /* One tensor's regions with elements, by region, then rank. Later the first of each group. */
    uint32_t *sorted;
    size_t sorted_capacity;
    uint32_t *holders, *entries; /* of all groups: ranks, and their entries that describe the region */
    size_t holder_count;
    plan_group *groups;
    size_t group_count, group_capacity;
    uint64_t seed; /* of the coverage check */
} planner;

static void planner_free(planner *p) {
    planned_free(&p->tensors);
    free(p->keys.words);
    free(p->sorted);
    free(p->holders);
    free(p->entries);
    free(p->groups);
}

/* ---- regions as keys ---- */

static void put_key(uint64_t *words, const geometry *g, const ckd_region *region) {
    ckd_region r = region_as_box(g, region);
    *words++ = r.kind;
    if (r.kind == CKD_REGION_FLAT) {
        words[0] = r.start;
        words[1] = r.count;
        return;
    }
    for (uint32_t d = 0; d < g->ndim; d++) {
        words[d] = r.offsets[d];
        words[g->ndim + d] = r.lengths[d];
    }
}

static void get_key(ckd_region *r, const uint64_t *words, uint32_t ndim) {
    r->kind = (ckd_region_kind)*words++;
    r->start = r->count = 0;
    if (r->kind == CKD_REGION_FLAT) {
        r->start = words[0];
        r->count = words[1];
        return;
    }
    for (uint32_t d = 0; d < ndim; d++) {
        r->offsets[d] = words[d];
        r->lengths[d] = words[ndim + d];
    }
}

static int key_order(const region_keys *keys, uint32_t a, uint32_t b) {
    const uint64_t *x = keys->words + a * keys->stride, *y = keys->words + b * keys->stride;
    for (size_t i = 0; i < keys->stride; i++) {
        if (x[i] != y[i]) {
            return x[i] < y[i] ? -1 : 1;
        }
    }
    return 0;
}

static int sort_order(const void *a, const void *b, void *keys) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    int order = key_order(keys, x, y);
    return order ? order : x < y ? -1 : x > y; /* ranks ascend */
}

/* ---- one tensor ---- */

typedef struct tensor_work {
    const planned_tensor *t;
    geometry shape;
    size_t element;     /* bytes of an element */
    const char *family; /* the parameter's name */
    size_t family_size;
    size_t used; /* regions in `sorted` */
} tensor_work;

static const planned_shard *shard_at(const planner *p, const tensor_work *w, uint32_t index) {
    return &p->tensors.shards[p->tensors.order[w->t->first + index]];
}

static ckd_status reserve_keys(planner *p, const tensor_work *w, ckd_error *err) {
    p->keys.stride = w->shape.ndim ? 1 + 2 * (size_t)w->shape.ndim : 3;
    uint64_t words = 0, size = 0;
    bool fits = size_mul(&words, w->t->count, p->keys.stride) && size_mul(&size, words, sizeof(uint64_t)) &&
                size < SIZE_MAX / 2;
    if (fits && words > p->keys.capacity) {
        free(p->keys.words);
        p->keys.words = malloc((size_t)size);
        p->keys.capacity = p->keys.words ? (size_t)words : 0;
        fits = p->keys.words != NULL;
    }
    if (fits && w->t->count > p->sorted_capacity) {
        free(p->sorted);
        p->sorted = malloc((size_t)w->t->count * sizeof(*p->sorted));
        p->sorted_capacity = p->sorted ? (size_t)w->t->count : 0;
        fits = p->sorted != NULL;
    }
    return fits ? CKD_OK : err_nomem(err, (size_t)size, "a tensor's regions");
}

static ckd_status in_tensor(const tensor_work *w, ckd_status status, ckd_error *err) {
    return err_in_tensor(err, status, planned_name_of(w->t).text);
}

static ckd_status read_regions(planner *p, tensor_work *w, ckd_error *err) {
    ckd_status status = reserve_keys(p, w, err);
    if (status != CKD_OK) {
        return status;
    }
    memset(p->keys.words, 0, w->t->count * p->keys.stride * sizeof(uint64_t));
    described d;
    planned_traits(&d, w->t);
    for (uint32_t i = 0; i < w->t->count; i++) {
        const planned_shard *s = shard_at(p, w, i);
        uint64_t elements;
        planned_region(&d, s);
        if (!region_count(&elements, &w->shape, &d.region)) {
            err_set(err, CKD_E_MISMATCH,
                    "rank %u holds elements beyond the tensor's shape: give its region in global coordinates",
                    (unsigned)s->rank);
            return in_tensor(w, CKD_E_MISMATCH, err);
        }
        if (elements == 0 && w->shape.elements != 0) {
            p->plan->summary.empty++;
            continue;
        }
        if (elements != 0) {
            put_key(p->keys.words + i * p->keys.stride, &w->shape, &d.region);
        } /* all regions of an empty tensor are the same */
        p->sorted[w->used++] = i;
    }
    qsort_r(p->sorted, w->used, sizeof(*p->sorted), sort_order, &p->keys);
    return CKD_OK;
}

/* ---- groups: who holds the same region ---- */

static ckd_status add_group(planner *p, const plan_group *added, ckd_error *err) {
    if (p->group_count == p->group_capacity) {
        size_t capacity = p->group_capacity ? p->group_capacity + p->group_capacity / 2 : 1024;
        plan_group *grown = realloc(p->groups, capacity * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "distinct regions");
        }
        p->groups = grown;
        p->group_capacity = capacity;
    }
    p->groups[p->group_count++] = *added;
    return CKD_OK;
}

static uint64_t mix(uint64_t a, uint64_t b) {
    uint8_t text[16];
    store_le64(text, a);
    store_le64(text + 8, b);
    return hash64(text, sizeof(text));
}

/* Equal for tensors of one parameter if the same ranks hold the same region. */
static uint64_t unit_of(const planner *p, const tensor_work *w, const plan_group *g, uint32_t index) {
    const uint64_t *key = p->keys.words + index * p->keys.stride;
    uint64_t unit = mix(hash64(w->family, w->family_size), hash64(key, p->keys.stride * sizeof(*key)));
    return mix(unit, hash64(p->holders + g->first, g->count * sizeof(*p->holders)));
}

static uint64_t key_elements(const planner *p, const tensor_work *w, uint32_t index) {
    ckd_region r;
    uint64_t elements;
    get_key(&r, p->keys.words + index * p->keys.stride, w->shape.ndim);
    return w->shape.elements && region_count(&elements, &w->shape, &r) ? elements : 0;
}

/* sorted[from ... to - 1] are one region. */
static ckd_status take_group(planner *p, tensor_work *w, size_t from, size_t to, ckd_error *err) {
    plan_group g = {.first = (uint32_t)p->holder_count,
                    .count = (uint32_t)(to - from),
                    .bytes = key_elements(p, w, p->sorted[from]) * w->element};
    for (size_t i = from; i < to; i++) {
        const planned_shard *s = shard_at(p, w, p->sorted[i]);
        if (i > from && p->holders[p->holder_count - 1] == s->rank && w->shape.elements) {
            err_set(err, CKD_E_MISMATCH, "rank %u describes the same region of it twice", (unsigned)s->rank);
            return in_tensor(w, CKD_E_MISMATCH, err);
        }
        p->holders[p->holder_count] = s->rank;
        p->entries[p->holder_count++] = s->entry;
    }
    if (g.count > 1) {
        g.unit = unit_of(p, w, &g, p->sorted[from]);
    }
    p->plan->summary.raw_bytes += g.bytes;
    p->plan->summary.replicas += g.count - 1;
    p->plan->summary.written++;
    return add_group(p, &g, err);
}

/* ---- do the regions tile the tensor? ---- */

typedef struct distinct {
    const planner *p;
    const tensor_work *w;
} distinct;

static void distinct_region(ckd_region *out, const void *context, size_t index) {
    const distinct *d = context;
    get_key(out, d->p->keys.words + d->p->sorted[index] * d->p->keys.stride, d->w->shape.ndim);
}

static ckd_status explain(const planner *p, const tensor_work *w, size_t count, ckd_error *err) {
    distinct d = {p, w};
    plan_defect defect;
    ckd_status status = plan_find_defect(&defect, &w->shape, distinct_region, &d, count, err);
    if (status != CKD_OK) {
        return status;
    }
    char where[128];
    region_text(where, sizeof(where), &defect.box, w->shape.ndim);
    if (!defect.found) {
        err_set(err, CKD_E_MISMATCH, "the ranks' regions do not tile it");
    } else if (defect.overlap) {
        err_set(
            err, CKD_E_MISMATCH,
            "ranks %u and %u both hold its elements %s, but not as the same region: regions must be equal, "
            "as replicas are, or have nothing in common",
            (unsigned)shard_at(p, w, p->sorted[defect.a])->rank,
            (unsigned)shard_at(p, w, p->sorted[defect.b])->rank, where);
    } else {
        err_set(err, CKD_E_MISMATCH,
                "no rank holds its elements %s: describe what is missing, or a smaller global shape", where);
    }
    return in_tensor(w, CKD_E_MISMATCH, err);
}

static ckd_status plan_tensor(planner *p, const planned_tensor *t, ckd_error *err) {
    tensor_work w = {.t = t};
    described d;
    planned_traits(&d, t);
    w.shape = d.shape;
    w.element = ckd_dtype_size(d.dtype);
    w.family = role_name_family(t->name, t->name_size, &w.family_size);
    if (!w.family) { /* the parameter is known only by its number */
        w.family = t->name;
        w.family_size = t->name_size;
    }
    ckd_status status = read_regions(p, &w, err);
    coverage cover = coverage_begin(&w.shape, p->seed);
    size_t count = 0;
    for (size_t from = 0, to = 0; from < w.used && status == CKD_OK; from = to) {
        while (to < w.used && key_order(&p->keys, p->sorted[from], p->sorted[to]) == 0) {
            to++;
        }
        status = take_group(p, &w, from, to, err);
        ckd_region r;
        get_key(&r, p->keys.words + p->sorted[from] * p->keys.stride, w.shape.ndim);
        if (w.shape.elements) {
            coverage_add(&cover, &r);
        }
        p->sorted[count++] = p->sorted[from];
    }
    if (status == CKD_OK && !coverage_complete(&cover)) {
        status = explain(p, &w, count, err);
    }
    return status;
}

/* ---- the plan ---- */

static ckd_status choose_writers(planner *p, ckd_error *err) {
    uint64_t *loads = calloc(p->tensors.world, sizeof(*loads));
    uint32_t *chosen = malloc((p->group_count + 1) * sizeof(*chosen));
    ckd_status status = loads && chosen
                            ? plan_assign(chosen, p->groups, p->group_count, p->holders, loads, err)
                            : err_nomem(err, p->group_count * sizeof(*chosen), "writers");
    for (size_t i = 0; i < p->group_count && status == CKD_OK; i++) {
        uint32_t rank = p->holders[p->groups[i].first + chosen[i]];
        uint32_t entry = p->entries[p->groups[i].first + chosen[i]];
        p->plan->ranks[rank].writes[entry / 8] |= (uint8_t)(1u << entry % 8);
    }
    for (uint32_t r = 0; r < p->tensors.world && status == CKD_OK; r++) {
        p->plan->ranks[r].bytes = loads[r];
    }
    free(loads);
    free(chosen);
    return status;
}

static ckd_status begin_plan(planner *p, ckd_error *err) {
    uint32_t world = p->tensors.world;
    uint64_t *regions = calloc(world, sizeof(*regions));
    hash128 *hashes = calloc(world, sizeof(*hashes));
    size_t capacity = (size_t)p->tensors.shard_count + 1;
    p->holders = malloc(capacity * sizeof(*p->holders));
    p->entries = malloc(capacity * sizeof(*p->entries));
    ckd_status status = regions && hashes && p->holders && p->entries
                            ? CKD_OK
                            : err_nomem(err, capacity * sizeof(*p->holders), "holders");
    for (uint32_t r = 0; r < world && status == CKD_OK; r++) {
        regions[r] = p->tensors.ranks[r].count;
        hashes[r] = p->tensors.ranks[r].hash;
    }
    THEN(status, plan_new(&p->plan, world, regions, err));
    if (status == CKD_OK) {
        p->plan->key = plan_key_of_hashes(hashes, world);
        p->plan->summary = (ckd_plan_summary){
            .world = world, .tensors = p->tensors.count, .regions = p->tensors.shard_count};
        p->seed = load_le64(p->plan->key.bytes);
    }
    for (uint32_t r = 0; r < world && status == CKD_OK; r++) {
        p->plan->ranks[r].description = hashes[r];
    }
    free(regions);
    free(hashes);
    return status;
}

ckd_status ckd_plan_make(ckd_plan **out, const ckd_bytes *descriptions, uint32_t world, ckd_error *err) {
    *out = NULL;
    planner p = {.plan = NULL};
    ckd_status status = planned_read(&p.tensors, descriptions, world, err);
    THEN(status, begin_plan(&p, err));
    for (size_t i = 0; i < p.tensors.count && status == CKD_OK; i++) {
        status = plan_tensor(&p, &p.tensors.items[i], err);
    }
    THEN(status, choose_writers(&p, err));
    if (status == CKD_OK) {
        plan_find_extremes(p.plan);
        *out = p.plan;
    } else {
        ckd_plan_free(p.plan);
    }
    planner_free(&p);
    return status;
}
