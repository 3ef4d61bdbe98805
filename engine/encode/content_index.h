/*
 * What this save has written already, by content: a block whose values stand in it again, as they are or rounded, is not
 * stored a second time.
 */
#ifndef ENGINE_CONTENT_INDEX_H
#define ENGINE_CONTENT_INDEX_H

#include "base/error.h"
#include "base/hash.h"
#include "engine/lossy/lossy.h"

/* Where known values stand. Tensor names are interned: compare by strcmp, they live as long as the index. */
typedef struct content_entry {
    hash128 content; /* of the values in `dtype`, as they were given */
    hash128 stored;  /* of the block they come from */
    hash128
        values; /* of what will be loaded in their place, in `dtype`: other than `content` if the block is lossy */
    lossy_error error; /* of these against what was given; 0 if the block is exact */
    bool rounded;      /* they are the block's values rounded to `dtype` */
    ckd_dtype dtype;
    const char *tensor;
    const ckd_region *region;
    uint64_t first, count;
    uint32_t ndim;
    const uint64_t *shape;
    uint32_t depth; /* what loading the block takes */
    double chain_stored, chain_work;
} content_entry;

typedef struct content_index {
    content_entry *slots; /* open addressing; tensor NULL: free */
    size_t count, capacity;
    bool rounded; /* there are entries of rounded values */
} content_index;

/* Forgets all, and keeps its memory. */
void content_index_clear(content_index *index);
void content_index_free(content_index *index);
/* Adds an entry; the first of equal ones stays. Pointers must outlive the index. */
ckd_status content_index_add(content_index *index, const content_entry *entry, ckd_error *err);
/* An entry with this content over the same span of a tensor of the same shape; NULL if there is none. */
const content_entry *content_index_find(const content_index *index, const hash128 *content, ckd_dtype dtype,
                                        const geometry *shape, const span *where);

#endif
