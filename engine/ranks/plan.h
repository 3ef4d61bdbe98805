/*
 * Planning a save of many ranks: pure arithmetic. Internal to engine/.
 *
 *   plan_describe.c  descriptions as bytes, and reading them
 *   plan_tensors.c   all ranks' descriptions, by tensor
 *   plan_make.c      of each tensor the distinct regions, and whether they tile it -> plan
 *   plan_assign.c    who writes a region that several ranks hold
 *   plan_defect.c    where regions do not tile a tensor, and whose they are
 *   plan_bytes.c     plans as bytes, keys
 *   plan_cache.c     plans by key
 *
 * Memory: about 60 bytes for each region of all ranks, and 8 for each dimension of one tensor's regions, twice. Descriptions are read where
 * they lie.
 */
#ifndef ENGINE_PLAN_H
#define ENGINE_PLAN_H

#include "base/bytes.h"
#include "base/hash.h"
#include "engine/common/region.h"

/* What a plan says of one rank. */
typedef struct plan_rank {
    hash128 description;
    uint64_t regions; /* described */
    uint64_t bytes;   /* written */
    uint8_t *writes;  /* bit i: it writes region i */
} plan_rank;

struct ckd_plan {
    hash128 key;
    ckd_plan_summary summary;
    plan_rank *ranks;
    uint8_t *bits; /* of all ranks */
};
/* Room for ranks that describe so many regions each. */
ckd_status plan_new(ckd_plan **out, uint32_t world, const uint64_t *regions, ckd_error *err);
/*
 * What a plan depends on: names, roles, dtypes, shapes, regions, ranks and world, not where values lie. Plans of equal keys
 * are equal. Ranks exchange the hashes of their descriptions to learn that an earlier plan holds.
 */
hash128 plan_key_of_hashes(const hash128 *hashes, uint32_t world);
hash128 plan_description_hash(const ckd_bytes *description);
/* The plan as bytes, and back. Errors of reading: CORRUPT, UNSUPPORTED, NOMEM. */
ckd_status plan_bytes(ckd_bytes *out, const ckd_plan *plan, ckd_error *err);
ckd_status plan_read(ckd_plan **out, const void *data, size_t size, ckd_error *err);
/* Sets the summary's least and most bytes of a rank. */
void plan_find_extremes(ckd_plan *plan);

/* ---- the last few plans, by their keys; one thread at a time ---- */
typedef struct plan_cache plan_cache;
ckd_status plan_cache_new(plan_cache **out, uint32_t plans, ckd_error *err); /* plans 0: 4 */
void plan_cache_free(plan_cache *cache);                                     /* and its plans */
/* NULL if it is not there. The plan is the cache's, and lives until as many others were added. */
const ckd_plan *plan_cache_find(plan_cache *cache, const hash128 *key);
/* Takes the plan over. Frees an equal one, or else the one not asked for the longest if the cache is full. */
void plan_cache_add(plan_cache *cache, ckd_plan *plan);

/* ---- descriptions ---- */
typedef struct description {
    uint32_t rank, world;
    uint64_t count;
    hash128 hash;
    reader at; /* the first entry */
} description;
/* One region as described; points into the description. */
typedef struct described {
    const char *name; /* not NUL-terminated */
    uint16_t name_size;
    const uint8_t *traits; /* role, dtype, dimensions and shape: equal bytes, equal traits */
    size_t traits_size;
    ckd_role role;
    ckd_dtype dtype;
    geometry shape;
    ckd_region region; /* not yet checked against the shape */
} described;
/* Errors: CORRUPT, UNSUPPORTED. */
ckd_status description_open(description *out, const ckd_bytes *bytes_of, ckd_error *err);
/* Of an entry: role, dtype and shape; then the region, which has that many dimensions. false: not so. */
bool description_traits(described *out, reader *at);
bool description_region(described *out, reader *at);
bool description_name_valid(const described *d);

/* ---- regions of one tensor, as boxes where they are boxes ---- */
/* At most 2 * ndim - 1 boxes (1 of no dimensions) that tile the range, in its order. Returns how many. */
size_t flat_boxes(ckd_region boxes[2 * CKD_MAX_DIMS], const geometry *g, uint64_t start, uint64_t count);
/* The same elements in the same order: a box wherever there is one, else a flat range. Not for regions without elements. */
ckd_region region_as_box(const geometry *g, const ckd_region *region);

/* Where regions do not tile a tensor. */
typedef struct plan_defect {
    bool overlap;   /* else: these elements are in no region */
    ckd_region box; /* elements concerned */
    size_t a, b;    /* of an overlap: indexes of two regions that hold them */
} plan_defect;
/*
 * Finds the first defect. *found is false if they tile it; but for that, see common/coverage_check.h, which this follows dimension by dimension: along one the
 * cross-sections must tile, and the first that does not is looked into. d n log n for n boxes in d dimensions. Regions have
 * elements, and lie in the tensor, which has elements. Errors: NOMEM.
 */
typedef void (*region_fn)(ckd_region *out, const void *context, size_t index);
ckd_status plan_find_defect(plan_defect *out, bool *found, const geometry *g, region_fn region,
                            const void *context, size_t count, ckd_error *err);
/* "[0:4, 2:8]", cut to fit. */
void region_text(char *text, size_t size, const ckd_region *box, uint32_t ndim);

/* ---- who writes ---- */
/* A region that `count` ranks hold. */
typedef struct plan_group {
    uint64_t unit; /* equal for what should be written by one rank */
    uint64_t bytes;
    uint32_t first, count; /* of the holders */
} plan_group;
/* Sorts the groups. ranks: holders' ranks, ascending in a group; loads: bytes of each rank, added to; chosen: of each group, after sorting. */
ckd_status plan_assign(uint32_t *chosen, plan_group *groups, size_t count, const uint32_t *ranks,
                       uint64_t *loads, ckd_error *err);
#endif
