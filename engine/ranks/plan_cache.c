#include <stdlib.h>
#include <string.h>

#include "engine/ranks/internal.h"

#define PLANS_USUALLY 4

struct plan_cache {
    uint32_t capacity, count;
    ckd_plan *plans[]; /* most recently used first */
};

ckd_status plan_cache_new(plan_cache **out, uint32_t plans, ckd_error *err) {
    plans = plans ? plans : PLANS_USUALLY;
    size_t size = sizeof(**out) + plans * sizeof((*out)->plans[0]);
    *out = calloc(1, size);
    if (!*out) {
        return err_nomem(err, size, "a cache of plans");
    }
    (*out)->capacity = plans;
    return CKD_OK;
}

void plan_cache_free(plan_cache *cache) {
    for (uint32_t i = 0; cache && i < cache->count; i++) {
        ckd_plan_free(cache->plans[i]);
    }
    free(cache);
}

static void to_front(plan_cache *cache, uint32_t index) {
    ckd_plan *plan = cache->plans[index];
    memmove(cache->plans + 1, cache->plans, index * sizeof(cache->plans[0]));
    cache->plans[0] = plan;
}

const ckd_plan *plan_cache_find(plan_cache *cache, const hash128 *key) {
    for (uint32_t i = 0; i < cache->count; i++) {
        if (hash128_equal(&cache->plans[i]->key, key)) {
            to_front(cache, i);
            return cache->plans[0];
        }
    }
    return NULL;
}

void plan_cache_add(plan_cache *cache, ckd_plan *plan) {
    if (plan_cache_find(cache, &plan->key)) {
        ckd_plan_free(cache->plans[0]);
        cache->plans[0] = plan;
        return;
    }
    if (cache->count == cache->capacity) {
        ckd_plan_free(cache->plans[--cache->count]);
    }
    cache->plans[cache->count] = plan;
    to_front(cache, cache->count++);
}
