/*
 * A hash table of the blocks that this save has written, by content. A part of the content hash is the place in the
 * table.
 */
#include "engine/encode/content_index.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"

void content_index_clear(content_index *index) {
    if (index->count) {
        memset(index->slots, 0, index->capacity * sizeof(*index->slots));
    }
    index->count = 0;
    index->rounded = false;
}

void content_index_free(content_index *index) {
    free(index->slots);
    memset(index, 0, sizeof(*index));
}

static size_t home(const content_index *index, const hash128 *content) {
    return (size_t)load_le64(content->bytes) & (index->capacity - 1);
}

static bool same_entry(const content_entry *a, const content_entry *b) {
    return a->dtype == b->dtype && a->count == b->count && a->first == b->first && a->ndim == b->ndim &&
           hash128_equal(&a->content, &b->content) &&
           memcmp(a->shape, b->shape, a->ndim * sizeof(uint64_t)) == 0 &&
           region_equal(a->region, b->region, a->ndim);
}

static void insert(content_index *index, const content_entry *entry) {
    size_t at = home(index, &entry->content);
    while (index->slots[at].tensor) {
        if (same_entry(&index->slots[at], entry)) {
            return;
        }
        at = (at + 1) & (index->capacity - 1);
    }
    index->slots[at] = *entry;
    index->count++;
}

static ckd_status grow(content_index *index, ckd_error *err) {
    content_index bigger = {.capacity = index->capacity ? 2 * index->capacity : 256,
                            .rounded = index->rounded};
    bigger.slots = calloc(bigger.capacity, sizeof(*bigger.slots));
    if (!bigger.slots) {
        return err_nomem(err, bigger.capacity * sizeof(*bigger.slots), "the content index");
    }
    for (size_t i = 0; i < index->capacity; i++) {
        if (index->slots[i].tensor) {
            insert(&bigger, &index->slots[i]);
        }
    }
    free(index->slots);
    *index = bigger;
    return CKD_OK;
}

ckd_status content_index_add(content_index *index, const content_entry *entry, ckd_error *err) {
    if (2 * (index->count + 1) > index->capacity) {
        ckd_status status = grow(index, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    insert(index, entry);
    index->rounded = index->rounded || entry->rounded;
    return CKD_OK;
}

const content_entry *content_index_find(const content_index *index, const hash128 *content, ckd_dtype dtype,
                                        const geometry *shape, const region_span *where) {
    if (index->count == 0) {
        return NULL;
    }
    content_entry key = {.content = *content,
                         .dtype = dtype,
                         .region = where->region,
                         .first = where->first,
                         .count = where->count,
                         .ndim = shape->ndim,
                         .shape = shape->shape};
    for (size_t at = home(index, content); index->slots[at].tensor; at = (at + 1) & (index->capacity - 1)) {
        if (same_entry(&index->slots[at], &key)) {
            return &index->slots[at];
        }
    }
    return NULL;
}
