/* All ranks' descriptions, sorted by tensor. Internal to planning. */
#ifndef ENGINE_PLAN_TENSORS_H
#define ENGINE_PLAN_TENSORS_H

#include "engine/ranks/internal.h"

typedef struct planned_tensor {
    const char *name; /* not NUL-terminated; points into a description */
    const uint8_t *traits;
    size_t traits_size;
    uint32_t rank; /* first rank that described it */
    uint16_t name_size;
    uint8_t ndim;
    uint64_t first, count; /* range of its shards in `order` */
} planned_tensor;

typedef struct planned_shard {
    const uint8_t *region; /* points into the description */
    uint32_t tensor, rank, entry;
} planned_shard;

typedef struct planned_tensors {
    uint32_t world;
    description *ranks; /* by rank */
    planned_tensor *items;
    size_t count, capacity;
    uint32_t *slots; /* hash table of names: index + 1 */
    size_t slot_count;
    planned_shard *shards;
    uint32_t *order; /* shards by tensor, then rank */
    uint64_t shard_count;
} planned_tensors;

/* Reads and compares the descriptions, which must outlive `out`. Release with planned_free, also after a failure. */
ckd_status planned_read(planned_tensors *out, const ckd_bytes *descriptions, uint32_t world, ckd_error *err);
void planned_free(planned_tensors *p);
/* planned_traits sets everything but the region; planned_region then sets the region of one shard. */
void planned_traits(described *out, const planned_tensor *t);
void planned_region(described *out, const planned_shard *s);
/* The name for a message, cut to the 255 bytes that ckd_error holds. */
typedef struct planned_name {
    char text[256];
} planned_name;
planned_name planned_name_of(const planned_tensor *t);

#endif
