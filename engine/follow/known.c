/*
 * Values of an earlier version, for the deltas on them. A version that is one delta after the folder's is read as that
 * delta alone. The decoder compares every hash, so values that turn out to be others only cost time.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/follow/follow.h"

#define HULL_BYTES_MAX \
    (UINT64_C(16) << 20) /* a block of columns is gathered from rows of at most this size */

/* Whether the earlier checkpoint has a block of the same span and content. */
static bool has_content(const view_tensor *before, const record *r) {
    const region_span span = {r->region, r->first, r->count};
    size_t s, last;
    for (view_shards_for(&s, &last, before, &span); s < last; s++) {
        size_t first, end;
        view_shard_range(&first, &end, &before->shards[s], before->shape, &span);
        for (; first < end; first++) {
            if (follow_same_block(before->shards[s].blocks[first].record, r, before->shape->ndim)) {
                return true;
            }
        }
    }
    return false;
}

/* Copies the elements of the record's block from those between its first and its last. */
static bool gather(void *to, const record *r, const geometry *shape, const follow_range *range,
                   const void *from) {
    const ckd_region flat = {.kind = CKD_REGION_FLAT, .start = range->first, .count = range->count};
    const region_span have = {&flat, 0, range->count}, want = {r->region, r->first, r->count};
    return span_copy(shape, r->raw_size / r->count, to, &want, from, &have) == r->count;
}

static bool from_memory(const follow_known *k, void *to, const record *r, const follow_range *range) {
    bool inside =
        range->first >= k->range.first && range->first + range->count <= k->range.first + k->range.count;
    return inside && gather(to, r, k->now->shape, range,
                            k->values + (range->first - k->range.first) * (r->raw_size / r->count));
}

static bool from_file(const follow_known *k, void *to, const record *r, const follow_range *range) {
    const uint64_t size = r->raw_size / r->count, at = k->offset + range->first * size;
    if (range->count == r->count) {
        return file_read_at(k->file, at, to, r->raw_size, NULL) == CKD_OK;
    }
    void *values = range->count <= HULL_BYTES_MAX / size ? malloc(range->count * size) : NULL;
    bool done = values && file_read_at(k->file, at, values, range->count * size, NULL) == CKD_OK &&
                gather(to, r, k->now->shape, range, values);
    free(values);
    return done;
}

bool follow_known_copy(void *context, void *to, const record *r) {
    const follow_known *k = context;
    const record_tensor *t = k->now->tensor;
    const geometry *shape = k->now->shape;
    bool same = strcmp(r->tensor->name, t->name) == 0 && r->tensor->dtype == t->dtype &&
                r->tensor->ndim == shape->ndim &&
                memcmp(r->tensor->shape, shape->shape, shape->ndim * sizeof(uint64_t)) == 0;
    if (!same || r->count == 0 || r->raw_size != r->count * ckd_dtype_size(t->dtype) ||
        (k->before && !has_content(k->before, r))) {
        return false;
    }
    const follow_range range = follow_hull(shape, r);
    return k->values ? from_memory(k, to, r, &range) : from_file(k, to, r, &range);
}
