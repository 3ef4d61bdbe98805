/*
 * Lists the tensors of a delta checkpoint that were stored without a parent: the parent has no tensor of that name,
 * dtype and shape.
 */
#include <stdlib.h>

#include "engine/store/store.h"

static int by_name(const void *a, const void *b) {
    return strcmp(((const ckd_tensor_info *)a)->name, ((const ckd_tensor_info *)b)->name);
}

static bool same_kind(const ckd_tensor_info *a, const ckd_tensor_info *b) {
    return a->dtype == b->dtype && a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, a->ndim * sizeof(a->shape[0])) == 0;
}

/* Keeps the tensors that are not in `parent`, in order. */
static void keep_new(ckd_tensor_list *list, ckd_tensor_list *parent) {
    size_t kept = 0;
    if (parent->count == 0) { /* `items` may be NULL then */
        return;
    }
    qsort(parent->items, parent->count, sizeof(*parent->items), by_name);
    for (size_t i = 0; i < list->count; i++) {
        const ckd_tensor_info *old =
            bsearch(&list->items[i], parent->items, parent->count, sizeof(*parent->items), by_name);
        if (old && same_kind(old, &list->items[i])) {
            free((void *)list->items[i].name);
        } else {
            list->items[kept++] = list->items[i];
        }
    }
    list->count = kept;
}

ckd_status ckd_store_tensors_without_parent(ckd_tensor_list **out, ckd_store *store, const ckd_id *checkpoint,
                                            ckd_error *err) {
    *out = NULL;
    ckd_checkpoint c;
    ckd_tensor_list *list = NULL, *parent = NULL;
    ckd_status status = store_find_id(&c, store, checkpoint, err);
    THEN(status, ckd_store_tensors(&list, store, checkpoint, err));
    if (status == CKD_OK && !id_is_zero(&c.parent)) {
        status = ckd_store_tensors(&parent, store, &c.parent, err);
    }
    if (status == CKD_OK && parent) {
        keep_new(list, parent);
    }
    ckd_tensor_list_free(parent);
    if (status != CKD_OK) {
        ckd_tensor_list_free(list);
        list = NULL;
    }
    *out = list;
    return status;
}
