/* Lists the tensors of a checkpoint. */
#include "engine/store/tensors.h"

#include <stdlib.h>
#include <string.h>

bool tensors_may_skip(ckd_status status) {
    return status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_IO;
}

void tensors_skip(const ckd_store *store, const ckd_checkpoint *c, const ckd_error *why) {
    store_message(store, "%s@%llu is listed without its tensors: %s (%s)", c->run,
                  (unsigned long long)c->step, why->message, why->file);
}

ckd_status tensors_open(view_cache *cache, const view **out, ckd_store *store, const ckd_id *id,
                        ckd_error *err) {
    views_init(cache, store);
    cache->use_materialized = false; /* the sizes of the blocks themselves are wanted */
    return views_get(out, cache, id, err);
}

/* Copies the names, which the view owns. */
static ckd_status list_of(ckd_tensor_list *out, const view *v, ckd_error *err) {
    out->items = calloc(v->tensor_count + 1, sizeof(*out->items));
    if (!out->items) {
        return err_nomem(err, v->tensor_count * sizeof(*out->items), "a list of tensors");
    }
    out->count = v->tensor_count;
    for (size_t i = 0; i < v->tensor_count; i++) {
        ckd_tensor_info *t = &out->items[v->tensors[i].order];
        view_tensor_info(t, &v->tensors[i]);
        t->name = strdup(t->name);
        if (!t->name) {
            return err_nomem(err, 0, "a tensor's name");
        }
    }
    return CKD_OK;
}

static ckd_status read_list(ckd_tensor_list *out, ckd_store *store, const ckd_id *id, ckd_error *err) {
    file_lock *lock;
    view_cache cache;
    const view *v;
    ckd_checkpoint c;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = store_lock_reader(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    status = tensors_open(&cache, &v, store, id, &why);
    THEN(status, list_of(out, v, &why));
    if (tensors_may_skip(status)) {
        status = store_find_id(&c, store, id, err);
        if (status == CKD_OK) {
            tensors_skip(store, &c, &why);
        }
    } else {
        err_from(err, status, &why);
    }
    views_free(&cache);
    lock_release(lock);
    return status;
}

ckd_status ckd_store_tensors(ckd_tensor_list **out, ckd_store *store, const ckd_id *checkpoint,
                             ckd_error *err) {
    *out = NULL;
    ckd_tensor_list *list = calloc(1, sizeof(*list));
    if (!list) {
        return err_nomem(err, sizeof(*list), "a list");
    }
    ckd_status status = read_list(list, store, checkpoint, err);
    if (status != CKD_OK) {
        ckd_tensor_list_free(list);
        return status;
    }
    *out = list;
    return CKD_OK;
}

void ckd_tensor_list_free(ckd_tensor_list *list) {
    if (list) {
        for (size_t i = 0; i < list->count; i++) {
            free((void *)list->items[i].name);
        }
        free(list->items);
        free(list);
    }
}

/* ---- tensors of a delta that were stored without a parent ---- */

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

/* Lists all tensors of a checkpoint, or fails. */
static ckd_status list_all(ckd_tensor_list **out, ckd_checkpoint *c, ckd_store *store, const ckd_id *id,
                           ckd_error *err) {
    ckd_status status = store_find_id(c, store, id, err);
    THEN(status, ckd_store_tensors(out, store, id, err));
    if (status == CKD_OK && (*out)->count == 0 && c->tensors > 0) { /* a message has said why */
        status = err_set(err, CKD_E_CORRUPT, "the tensors of %s@%llu cannot be read", c->run,
                         (unsigned long long)c->step);
    }
    return status;
}

ckd_status ckd_store_tensors_without_parent(ckd_tensor_list **out, ckd_store *store, const ckd_id *checkpoint,
                                            ckd_error *err) {
    *out = NULL;
    ckd_checkpoint c, before;
    ckd_tensor_list *list = NULL, *parent = NULL;
    ckd_status status = list_all(&list, &c, store, checkpoint, err);
    if (status == CKD_OK && !id_is_zero(&c.parent)) {
        status = list_all(&parent, &before, store, &c.parent, err);
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
