/* The names saved so far, so that a region or blob that is saved twice is refused before it is coded. */
#include <stdlib.h>

#include "base/hash.h"
#include "engine/save/internal.h"

/* A new region is compared with at most this many regions of its tensor. The commit finds any overlap with others. */
#define COMPARED_MAX 1024u

struct saved_name {
    const record_tensor *tensor; /* dtype NONE: a blob */
    const ckd_region *region;
    /* in the tensor's order, behind the last element of this region and of all earlier ones */
    uint64_t end;
    saved_name *earlier; /* of the same name */
};

/* The slot of a name of this kind, or the free slot where it belongs. */
static size_t place_of(const saved_names *n, const char *name, bool is_blob) {
    size_t i = (size_t)(hash64(name, strlen(name)) & (n->capacity - 1));
    while (n->slots[i] && ((n->slots[i]->tensor->dtype == CKD_DTYPE_NONE) != is_blob ||
                           strcmp(n->slots[i]->tensor->name, name) != 0)) {
        i = (i + 1) & (n->capacity - 1);
    }
    return i;
}

/* Keeps the table at most half full. */
static ckd_status grow_if_full(saved_names *n, ckd_error *err) {
    if (2 * n->count < n->capacity) {
        return CKD_OK;
    }
    saved_names grown = {.capacity = n->capacity ? 2 * n->capacity : 64, .count = n->count};
    grown.slots = calloc(grown.capacity, sizeof(saved_name *));
    if (!grown.slots) {
        return err_nomem(err, grown.capacity * sizeof(saved_name *), "names of what was saved");
    }
    for (size_t i = 0; i < n->capacity; i++) {
        if (n->slots[i]) {
            const record_tensor *t = n->slots[i]->tensor;
            grown.slots[place_of(&grown, t->name, t->dtype == CKD_DTYPE_NONE)] = n->slots[i];
        }
    }
    free(n->slots);
    *n = grown;
    return CKD_OK;
}

static ckd_status check_new(const saved_name *saved, const record_tensor *tensor, const geometry *shape,
                            const ckd_region *region, uint64_t elements, ckd_error *err) {
    const record_tensor *t = saved->tensor;
    if (t->dtype != tensor->dtype || t->role != tensor->role || t->ndim != tensor->ndim ||
        memcmp(t->shape, tensor->shape, sizeof(t->shape)) != 0) {
        return err_set(err, CKD_E_MISMATCH,
                       "another region of the tensor was saved with another dtype, shape or role");
    }
    if (elements == 0 || region_global(shape, region, 0) >= saved->end) {
        return CKD_OK;
    }
    for (uint32_t i = 0; saved && i < COMPARED_MAX; i++, saved = saved->earlier) {
        uint64_t count;
        if (region_count(&count, shape, saved->region) && count > 0 &&
            regions_overlap(shape, saved->region, region)) {
            return err_set(err, CKD_E_MISMATCH, "two saved regions of the tensor overlap");
        }
    }
    return CKD_OK;
}

ckd_status save_record_region(save_registry *registry, const record_tensor *tensor, const geometry *shape,
                              const ckd_region *region, uint64_t elements, ckd_error *err) {
    ckd_status status = grow_if_full(&registry->names, err);
    if (status != CKD_OK) {
        return status;
    }
    saved_name **slot = &registry->names.slots[place_of(&registry->names, tensor->name, false)];
    status = *slot ? check_new(*slot, tensor, shape, region, elements, err) : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    saved_name *name = arena_alloc(&registry->arena, sizeof(*name));
    if (!name) {
        return err_nomem(err, sizeof(*name), "the name of a tensor");
    }
    uint64_t end = elements ? region_global(shape, region, elements - 1) + 1 : 0;
    *name = (saved_name){.tensor = tensor, .region = region, .end = end, .earlier = *slot};
    name->end = *slot && (*slot)->end > end ? (*slot)->end : end;
    registry->names.count += !*slot;
    *slot = name;
    return CKD_OK;
}

ckd_status save_record_blob(save_registry *registry, const char *name, ckd_error *err) {
    ckd_status status = grow_if_full(&registry->names, err);
    if (status != CKD_OK) {
        return status;
    }
    size_t place = place_of(&registry->names, name, true), length = strlen(name) + 1;
    if (registry->names.slots[place]) {
        return err_in_tensor(err, err_set(err, CKD_E_MISMATCH, "the blob is saved twice"), name);
    }
    saved_name *saved = arena_alloc(&registry->arena, sizeof(*saved));
    record_tensor *tensor = arena_alloc(&registry->arena, sizeof(*tensor));
    char *copy = arena_alloc(&registry->arena, length);
    if (!saved || !tensor || !copy) {
        return err_nomem(err, sizeof(*saved) + sizeof(*tensor) + length, "the name of a blob");
    }
    memcpy(copy, name, length);
    tensor->name = copy;
    saved->tensor = tensor;
    registry->names.slots[place] = saved;
    registry->names.count++;
    return CKD_OK;
}

void save_names_free(saved_names *n) {
    free(n->slots);
    *n = (saved_names){NULL, 0, 0};
}
