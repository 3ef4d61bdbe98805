/* Finds the blocks of a tensor whose content is new. Reads no values from the store. */
#include <stdlib.h>

#include "codec/common/common.h"
#include "engine/follow/follow.h"

bool follow_same_form(const view_tensor *a, const view_tensor *b) {
    return a->tensor->dtype == b->tensor->dtype && a->shape->ndim == b->shape->ndim &&
           memcmp(a->shape->shape, b->shape->shape, a->shape->ndim * sizeof(uint64_t)) == 0;
}

follow_range follow_hull(const geometry *shape, const record *r) {
    uint64_t first = region_global(shape, r->region, r->first);
    return (follow_range){first, region_global(shape, r->region, r->first + r->count - 1) + 1 - first};
}

bool follow_same_block(const record *a, const record *b, uint32_t ndim) {
    const region_span x = {a->region, a->first, a->count}, y = {b->region, b->first, b->count};
    return span_equal(&x, &y, ndim) && hash128_equal(&a->content, &b->content);
}

/* Whether `before` has this block, cut in the same way. Both lists are in the same order. */
static bool in_other(const view_tensor *before, const view_tensor *now, size_t shard, size_t block) {
    if (shard >= before->shard_count || block >= before->shards[shard].block_count) {
        return false;
    }
    return follow_same_block(now->shards[shard].blocks[block].record,
                             before->shards[shard].blocks[block].record, now->shape->ndim);
}

/* Whether the file has the block's values. */
static ckd_status in_file(bool *same, follow_present *present, const geometry *shape, const record *r,
                          ckd_error *err) {
    follow_range range = follow_hull(shape, r);
    *same = false;
    if (range.count != r->count) {
        return CKD_OK; /* its elements are not consecutive: it is written again */
    }
    void *values = bytes_scratch(&present->room, r->raw_size + 1, "a block's values", err);
    if (!values) {
        return CKD_E_NOMEM;
    }
    uint64_t element = r->raw_size / r->count;
    ckd_status status =
        file_read_at(present->file, present->offset + range.first * element, values, r->raw_size, err);
    if (status == CKD_OK) {
        hash128 content = content_hash(values, r->raw_size);
        *same = wire_content_matches(&r->content, &content);
    }
    return status;
}

static int by_first(const void *left, const void *right) {
    const follow_range *a = left, *b = right;
    return a->first < b->first ? -1 : a->first > b->first;
}

/* Sorts the ranges, and joins those that touch. */
static void join(follow_ranges *r) {
    size_t kept = 0;
    if (r->count > 1) {
        qsort(r->items, r->count, sizeof(*r->items), by_first);
    }
    for (size_t i = 0; i < r->count; i++) {
        follow_range *last = kept ? &r->items[kept - 1] : NULL, *next = &r->items[i];
        if (last && next->first <= last->first + last->count) {
            uint64_t end = next->first + next->count;
            last->count = end > last->first + last->count ? end - last->first : last->count;
        } else {
            r->items[kept++] = *next;
        }
    }
    r->count = kept;
}

ckd_status follow_ranges_find(follow_ranges *out, const view_tensor *now, const view_tensor *before,
                              follow_present *present, ckd_error *err) {
    ckd_status status = CKD_OK;
    out->count = 0;
    for (size_t s = 0; s < now->shard_count; s++) {
        for (size_t k = 0; k < now->shards[s].block_count && status == CKD_OK; k++) {
            const record *r = now->shards[s].blocks[k].record;
            bool same = r->count == 0 || (before && in_other(before, now, s, k));
            if (!same && !before && present && present->file) {
                status = in_file(&same, present, now->shape, r, err);
            }
            if (status == CKD_OK && !same) {
                status = ARRAY_GROW(out->items, out->capacity, out->count + 1, "changed blocks", err);
            }
            if (status == CKD_OK && !same) {
                out->items[out->count++] = follow_hull(now->shape, r);
            }
        }
    }
    join(out);
    return status;
}
