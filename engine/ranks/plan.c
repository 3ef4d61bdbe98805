/*
 * A plan once it is made: its memory, its key, its bytes, and the most recent plans by key.
 *
 * Plans as bytes: "ckdp", u32 version, u32 world, u32 0, the key; then tensors, regions, written, replicas, empty and
 * raw bytes (u64 each). For each rank: the hash of its description, u64 regions, u64 bytes and one bit a region. At the
 * end, u64 hash of everything before.
 */
#include <stdlib.h>
#include <string.h>

#include "codec/common/common.h"
#include "engine/ranks/internal.h"

#define MAGIC         "ckdp"
#define VERSION       1
#define PLANS_USUALLY 4

ckd_status plan_new(ckd_plan **out, uint32_t world, const uint64_t *regions, ckd_error *err) {
    *out = NULL;
    uint64_t bits = 0;
    for (uint32_t r = 0; r < world; r++) {
        if (regions[r] > UINT64_C(1) << 40 || !size_add(&bits, bits, (regions[r] + 7) / 8)) {
            return err_set(err, CKD_E_CORRUPT, "a plan has too many regions");
        }
    }
    ckd_plan *plan = calloc(1, sizeof(*plan));
    plan_rank *ranks = calloc(world, sizeof(*ranks));
    uint8_t *writes = calloc((size_t)bits + 1, 1);
    if (!plan || !ranks || !writes) {
        free(plan);
        free(ranks);
        free(writes);
        return err_nomem(err, (size_t)bits + world * sizeof(*ranks), "a plan");
    }
    *plan = (ckd_plan){.ranks = ranks, .bits = writes, .summary.world = world};
    for (uint32_t r = 0; r < world; r++) {
        ranks[r].regions = regions[r];
        ranks[r].writes = writes;
        writes += (regions[r] + 7) / 8;
    }
    *out = plan;
    return CKD_OK;
}

void ckd_plan_free(ckd_plan *plan) {
    if (plan) {
        free(plan->ranks);
        free(plan->bits);
        free(plan);
    }
}

/* ---- keys ---- */

hash128 plan_key_of_hashes(const hash128 *hashes, uint32_t world) {
    return hash128_of(hashes, world * sizeof(*hashes)); /* each hash covers its rank and world */
}

hash128 plan_description_hash(const ckd_bytes *d) {
    return hash128_of(d->data, d->size);
}

/* ---- queries ---- */

int ckd_plan_writes(const ckd_plan *plan, uint32_t rank, size_t index) {
    if (rank >= plan->summary.world || index >= plan->ranks[rank].regions) {
        return 0;
    }
    return plan->ranks[rank].writes[index / 8] >> index % 8 & 1;
}

void plan_find_extremes(ckd_plan *plan) {
    ckd_plan_summary *s = &plan->summary;
    s->min_bytes = s->max_bytes = plan->ranks[0].bytes;
    for (uint32_t r = 1; r < s->world; r++) {
        uint64_t load = plan->ranks[r].bytes;
        s->min_bytes = load < s->min_bytes ? load : s->min_bytes;
        s->max_bytes = load > s->max_bytes ? load : s->max_bytes;
    }
}

ckd_plan_summary ckd_plan_summarise(const ckd_plan *plan) {
    return plan->summary;
}

/* ---- as bytes ---- */

ckd_status plan_bytes(ckd_bytes *out, const ckd_plan *plan, ckd_error *err) {
    const ckd_plan_summary *s = &plan->summary;
    const uint64_t counts[] = {s->tensors, s->regions, s->written, s->replicas, s->empty, s->raw_bytes};
    bytes to = {0};
    bytes_put(&to, MAGIC, 4);
    bytes_put_u32(&to, VERSION);
    bytes_put_u32(&to, s->world);
    bytes_put_u32(&to, 0);
    wire_put_hash(&to, &plan->key);
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        bytes_put_u64(&to, counts[i]);
    }
    for (uint32_t r = 0; r < s->world; r++) {
        const plan_rank *rank = &plan->ranks[r];
        wire_put_hash(&to, &rank->description);
        bytes_put_u64(&to, rank->regions);
        bytes_put_u64(&to, rank->bytes);
        bytes_put(&to, rank->writes, (size_t)(rank->regions + 7) / 8);
    }
    bytes_put_u64(&to, to.failed ? 0 : hash64(to.data, to.size));
    *out = (ckd_bytes){NULL, 0};
    if (to.failed) {
        ckd_status status = err_nomem(err, to.size, "a plan");
        bytes_free(&to);
        return status;
    }
    *out = (ckd_bytes){to.data, to.size};
    return CKD_OK;
}

/* Called twice: first for the number of regions of each rank, then for the rest. */
static bool read_ranks(ckd_plan *plan, uint64_t *regions, uint32_t world, reader at) {
    for (uint32_t r = 0; r < world; r++) {
        hash128 described_by = wire_hash(&at);
        uint64_t count = reader_u64(&at), written = reader_u64(&at);
        if (at.failed || count > 8 * (uint64_t)reader_left(&at)) {
            return false;
        }
        const uint8_t *bits = reader_take(&at, (size_t)(count + 7) / 8);
        if (!bits) {
            return false;
        }
        regions[r] = count;
        if (plan) {
            plan->ranks[r].description = described_by;
            plan->ranks[r].bytes = written;
            memcpy(plan->ranks[r].writes, bits, (size_t)(count + 7) / 8);
        }
    }
    return reader_left(&at) == 0;
}

static ckd_status read_plan(ckd_plan **out, reader *at, uint32_t world, ckd_error *err) {
    hash128 key = wire_hash(at);
    ckd_plan_summary s = {.world = world};
    uint64_t *const counts[] = {&s.tensors, &s.regions, &s.written, &s.replicas, &s.empty, &s.raw_bytes};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        *counts[i] = reader_u64(at);
    }
    uint64_t *regions = calloc(world, sizeof(*regions));
    if (!regions) {
        return err_nomem(err, world * sizeof(*regions), "a plan");
    }
    ckd_status status = read_ranks(NULL, regions, world, *at)
                            ? plan_new(out, world, regions, err)
                            : err_set(err, CKD_E_CORRUPT, "the bytes of a plan make no sense");
    if (status == CKD_OK) {
        read_ranks(*out, regions, world, *at);
        (*out)->key = key;
        (*out)->summary = s;
        plan_find_extremes(*out);
    }
    free(regions);
    return status;
}

ckd_status plan_read(ckd_plan **out, const void *data, size_t size, ckd_error *err) {
    *out = NULL;
    const uint8_t *text = data;
    if (size < 24 || memcmp(text, MAGIC, 4) != 0) {
        return err_set(err, CKD_E_CORRUPT, "not a plan");
    }
    if (load_le32(text + 4) != VERSION) {
        return err_set(err, CKD_E_UNSUPPORTED,
                       "a plan is of version %u, this library knows %d: all ranks must use the same",
                       (unsigned)load_le32(text + 4), VERSION);
    }
    uint32_t world = load_le32(text + 8);
    reader at = reader_of(text + 16, size - 24);
    if (!wire_hash_matches(load_le64(text + size - 8), hash64(text, size - 8)) || world == 0 ||
        world > CKD_WORLD_MAX) {
        return err_set(err, CKD_E_CORRUPT, "a plan was damaged on its way");
    }
    return read_plan(out, &at, world, err);
}

/* ---- the most recent plans, by key ---- */

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
