/*
 * The content of blocks that this save has written. A block with the same values, as they are or rounded, is not
 * stored a second time.
 */
#ifndef ENGINE_CONTENT_INDEX_H
#define ENGINE_CONTENT_INDEX_H

#include "base/error.h"
#include "base/hash.h"
#include "engine/lossy/lossy.h"

/* Where values are stored. Names, regions and shapes must live as long as the index; names are compared by strcmp. */
typedef struct content_entry {
    hash128 content; /* of the input values in `dtype` */
    hash128 stored;  /* of the block that has them */
    /* of the decoded values, in `dtype`: differs from `content` if the block is lossy */
    hash128 values;
    lossy_error error; /* of the decoded values against the input; 0: exact */
    bool rounded;      /* they are the block's values rounded to `dtype` */
    ckd_dtype dtype;
    const char *tensor;
    const ckd_region *region;
    uint64_t first, count;
    uint32_t ndim;
    const uint64_t *shape;
    uint32_t depth; /* cost of loading the block */
    double chain_stored, chain_work;
} content_entry;

typedef struct content_index {
    content_entry *slots; /* open addressing; tensor NULL: free */
    size_t count, capacity;
    bool rounded; /* some entries have rounded values */
} content_index;

/* Removes all entries, and keeps the memory. */
void content_index_clear(content_index *index);
void content_index_free(content_index *index);
/* Adds an entry, unless an equal one exists. Its pointers must outlive the index. */
ckd_status content_index_add(content_index *index, const content_entry *entry, ckd_error *err);
/* Returns an entry with this content over the same span of a tensor of the same shape; NULL: none. */
const content_entry *content_index_find(const content_index *index, const hash128 *content, ckd_dtype dtype,
                                        const geometry *shape, const region_span *where);

#endif
