/*
 * Planning a save of many ranks: pure arithmetic. Internal to engine/.
 *
 *   plan_describe.c  writes and reads descriptions
 *   plan_tensors.c   all ranks' descriptions, by tensor
 *   plan_make.c      finds the distinct regions of each tensor, checks that they tile it, and makes the plan
 *   plan_assign.c    who writes a region that several ranks hold
 *   plan_defect.c    where regions do not tile a tensor, and who holds them
 *   plan_bytes.c     plans as bytes, keys
 *   plan_cache.c     plans by key
 *
 * Memory: about 60 bytes for each region of all ranks, and twice 8 bytes for each dimension of one tensor's regions.
 * Descriptions are read in place.
 */
#ifndef ENGINE_PLAN_H
#define ENGINE_PLAN_H

#include "base/bytes.h"
#include "base/hash.h"
#include "engine/common/region.h"

/* One rank's part of a plan. */
typedef struct plan_rank {
    hash128 description;
    uint64_t regions; /* in its description */
    uint64_t bytes;   /* it writes */
    uint8_t *writes;  /* bit i: it writes region i */
} plan_rank;

struct ckd_plan {
    hash128 key;
    ckd_plan_summary summary;
    plan_rank *ranks;
    uint8_t *bits; /* memory of `writes` for all ranks */
};
/* Allocates a plan. regions: the number of regions that each rank describes. */
ckd_status plan_new(ckd_plan **out, uint32_t world, const uint64_t *regions, ckd_error *err);
/*
 * Returns the key of a plan. It covers everything that the plan depends on: names, roles, dtypes, shapes, regions,
 * ranks and world, but not where values are. Plans with equal keys are equal. Ranks exchange the hashes of their
 * descriptions to find out whether an earlier plan applies.
 */
hash128 plan_key_of_hashes(const hash128 *hashes, uint32_t world);
hash128 plan_description_hash(const ckd_bytes *description);
/* Converts a plan to bytes and back. Errors of reading: CORRUPT, UNSUPPORTED, NOMEM. */
ckd_status plan_bytes(ckd_bytes *out, const ckd_plan *plan, ckd_error *err);
ckd_status plan_read(ckd_plan **out, const void *data, size_t size, ckd_error *err);
/* Sets the summary's least_bytes and most_bytes. */
void plan_find_extremes(ckd_plan *plan);

/* ---- the most recent plans, by key; one thread at a time ---- */
typedef struct plan_cache plan_cache;
ckd_status plan_cache_new(plan_cache **out, uint32_t plans, ckd_error *err); /* plans 0: 4 */
void plan_cache_free(plan_cache *cache);                                     /* also frees its plans */
/* Returns the plan, or NULL. The cache owns it; it lives until as many others were added. */
const ckd_plan *plan_cache_find(plan_cache *cache, const hash128 *key);
/* Takes over the plan. Frees an equal one; otherwise, if the cache is full, the least recently used one. */
void plan_cache_add(plan_cache *cache, ckd_plan *plan);

/* ---- descriptions ---- */
typedef struct description {
    uint32_t rank, world;
    uint64_t count;
    hash128 hash;
    reader at; /* at the first entry */
} description;
/* One described region; points into the description. */
typedef struct described {
    const char *name; /* not NUL-terminated */
    uint16_t name_size;
    const uint8_t *traits; /* role, dtype, dimensions and shape: equal bytes mean equal traits */
    size_t traits_size;
    ckd_role role;
    ckd_dtype dtype;
    geometry shape;
    ckd_region region; /* not yet checked against the shape */
} described;
/* Errors: CORRUPT, UNSUPPORTED. */
ckd_status description_open(description *out, const ckd_bytes *bytes_of, ckd_error *err);
/* Read an entry: role, dtype and shape; then its region, which has as many dimensions. false: invalid. */
bool description_traits(described *out, reader *at);
bool description_region(described *out, reader *at);
bool description_name_valid(const described *d);

/* ---- regions of one tensor, as boxes where possible ---- */
/*
 * Splits a flat range into at most 2 * ndim - 1 boxes (1 without dimensions) that tile it in order. Returns their
 * number.
 */
size_t flat_boxes(ckd_region boxes[2 * CKD_MAX_DIMS], const geometry *g, uint64_t start, uint64_t count);
/* Returns the same elements in the same order, as a box if possible, else as a flat range. Not for empty regions. */
ckd_region region_as_box(const geometry *g, const ckd_region *region);

/* A place where regions do not tile a tensor. */
typedef struct plan_defect {
    bool found;     /* false: there is none */
    bool overlap;   /* false: no region holds these elements */
    ckd_region box; /* the elements concerned */
    size_t a, b;    /* of an overlap: indexes of two regions that hold them */
} plan_defect;
/*
 * Finds the first defect, if the regions do not tile the tensor. It follows common/coverage_check.h dimension
 * by dimension: along one, all cross-sections must be tiled, and it descends into the first that is not. O(d n log n)
 * for n boxes in d dimensions. The tensor and the regions must not be empty, and the regions must lie in the tensor.
 * Errors: NOMEM.
 */
typedef void (*region_fn)(ckd_region *out, const void *context, size_t index);
ckd_status plan_find_defect(plan_defect *out, const geometry *g, region_fn region, const void *context,
                            size_t count, ckd_error *err);
/* Writes text like "[0:4, 2:8]", truncated to fit. */
void region_text(char *text, size_t size, const ckd_region *box, uint32_t ndim);

/* ---- who writes ---- */
/* A region that `count` ranks hold. */
typedef struct plan_group {
    uint64_t unit; /* equal for groups that one rank should write */
    uint64_t bytes;
    uint32_t first, count; /* of the holders */
} plan_group;
/*
 * Sorts the groups and chooses a writer for each. ranks: ranks of the holders, ascending in a group. loads: bytes of
 * each rank, which the call adds to. chosen: for each group, in the sorted order.
 */
ckd_status plan_assign(uint32_t *chosen, plan_group *groups, size_t count, const uint32_t *ranks,
                       uint64_t *loads, ckd_error *err);
#endif
