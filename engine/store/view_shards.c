/*
 * Finds the blocks of a tensor that may hold a part of a span. view_shards_for has the range of shards, and
 * view_shard_range the range of blocks in a shard. A block in these ranges need not intersect the span, so callers
 * compare the regions (decode/values.c: scatter_block).
 */
#include "engine/store/view.h"

/*
 * The global stretch of a range, or of a slab along the first dimension. Returns false for other regions, and empty
 * ones.
 */
static bool global_range(uint64_t *begin, uint64_t *end, const geometry *g, const view_shard *s) {
    const ckd_region *r = s->region;
    bool slab = r->kind == CKD_REGION_BOX && g->ndim > 0;
    for (uint32_t d = 1; d < g->ndim && slab; d++) {
        slab = r->lengths[d] == g->shape[d];
    }
    *begin = r->kind == CKD_REGION_FLAT ? r->start : slab ? r->offsets[0] * g->strides[0] : 0;
    *end = *begin + s->elements;
    return s->elements > 0 && (r->kind != CKD_REGION_BOX || slab);
}

bool view_in_sequence(const view_tensor *t) {
    uint64_t begin, end, last = 0;
    for (size_t i = 0; i < t->shard_count; i++) {
        if (!global_range(&begin, &end, t->shape, &t->shards[i]) || begin != last) {
            return false;
        }
        last = end;
    }
    return true;
}

/* The first block that ends after element `at` of the shard. */
static size_t block_at(const view_shard *s, uint64_t at) {
    size_t low = 0, high = s->block_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const record *r = s->blocks[middle].record;
        if (r->first + r->count <= at) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The last shard that begins at or before the element. Requires t->in_sequence. */
static size_t shard_at(const view_tensor *t, uint64_t global) {
    size_t low = 0, high = t->shard_count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        uint64_t begin, end;
        global_range(&begin, &end, t->shape, &t->shards[middle]);
        if (begin <= global) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The shard of exactly this region, or shard_count. */
static size_t shard_of_region(const view_tensor *t, const ckd_region *region) {
    size_t low = 0, high = t->shard_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = region_compare(t->shards[middle].region, region, t->shape);
        if (order == 0) {
            return middle;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return t->shard_count;
}

void view_shards_for(size_t *first, size_t *end, const view_tensor *t, const region_span *span) {
    *first = 0;
    *end = span->count ? t->shard_count : 0;
    if (*end <= 1) {
        return;
    }
    if (t->in_sequence) {
        *first = shard_at(t, region_global(t->shape, span->region, span->first));
        *end = shard_at(t, region_global(t->shape, span->region, span->first + span->count - 1)) + 1;
        return;
    }
    size_t same = shard_of_region(t, span->region);
    if (same < t->shard_count) { /* shards do not overlap, so no other shard intersects */
        *first = same;
        *end = same + 1;
    }
}

/* A quick test: whether two boxes cannot intersect. */
static bool boxes_apart(const geometry *g, const ckd_region *a, const ckd_region *b) {
    bool apart = false;
    for (uint32_t d = 0; d < g->ndim && a->kind == CKD_REGION_BOX && b->kind == CKD_REGION_BOX; d++) {
        apart = apart || a->offsets[d] >= b->offsets[d] + b->lengths[d] ||
                b->offsets[d] >= a->offsets[d] + a->lengths[d];
    }
    return apart;
}

void view_shard_range(size_t *first, size_t *end, const view_shard *shard, const geometry *shape,
                      const region_span *span) {
    *first = *end = 0;
    if (span->count == 0 || shard->elements == 0 || boxes_apart(shape, shard->region, span->region)) {
        return;
    }
    uint64_t global_first = region_global(shape, span->region, span->first);
    uint64_t global_last = region_global(shape, span->region, span->first + span->count - 1);
    uint64_t low = region_lower_bound(shape, shard->region, global_first);
    uint64_t high = region_lower_bound(shape, shard->region, global_last + 1);
    if (low < high) {
        *first = block_at(shard, low);
        *end = block_at(shard, high - 1) + 1;
    }
}
