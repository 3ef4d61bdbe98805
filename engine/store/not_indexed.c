#include "engine/store/not_indexed.h"

#include <math.h>

bool not_indexed_may_skip(ckd_status status) {
    return status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED || status == CKD_E_IO;
}

ckd_status not_indexed_open(view_cache *cache, const view **out, ckd_store *store, const ckd_id *id,
                            ckd_error *err) {
    views_init(cache, store);
    cache->use_materialized = false; /* the sizes of the blocks themselves are wanted */
    return views_get(out, cache, id, err);
}

/* Reports a checkpoint with unreadable chunk files. The catalog would have no tensors of it either. */
static ckd_status report_unreadable(ckd_store *store, const ckd_id *id, const ckd_error *why,
                                    ckd_error *err) {
    ckd_checkpoint c;
    ckd_status status = store_find_id(&c, store, id, err);
    if (status == CKD_OK) {
        store_report_unreadable(store, &c, why);
    }
    return status;
}

ckd_status not_indexed_tensors(ckd_tensor_list *out, ckd_store *store, const ckd_id *id, ckd_error *err) {
    file_lock *lock;
    view_cache cache;
    const view *v;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    memset(out, 0, sizeof(*out));
    ckd_status status = store_lock_reader(&lock, store, err);
    if (status != CKD_OK) {
        return status;
    }
    status = not_indexed_open(&cache, &v, store, id, &why);
    THEN(status, view_tensor_list(out, v, &why));
    if (not_indexed_may_skip(status)) {
        status = report_unreadable(store, id, &why, err);
    } else {
        err_from(err, status, &why);
    }
    views_free(&cache);
    lock_release(lock);
    return status;
}

void not_indexed_updates(ckd_tensor_list *list, ckd_store *store, const ckd_id *id) {
    file_lock *lock;
    view_cache cache;
    const view *v;
    ckd_tensor_info info;
    bool lossy = false;
    for (size_t i = 0; i < list->count; i++) {
        lossy = lossy || list->items[i].rel_l2 != 0;
    }
    for (size_t i = 0; i < list->count; i++) {
        ckd_tensor_info *t = &list->items[i];
        bool moment = t->role == CKD_ROLE_EXP_AVG || t->role == CKD_ROLE_EXP_AVG_SQ; /* it may be exact */
        t->largest_update = t->largest_update_given = t->rel_l2 != 0 || (lossy && moment) ? (double)NAN : 0;
    }
    if (!lossy || store_lock_reader(&lock, store, NULL) != CKD_OK) {
        return;
    }
    bool opened = not_indexed_open(&cache, &v, store, id, NULL) == CKD_OK;
    for (size_t i = 0; i < list->count && opened; i++) {
        ckd_tensor_info *t = &list->items[i];
        const view_tensor *tensor = isnan(t->largest_update) ? view_find(v, t->name) : NULL;
        if (tensor) {
            view_tensor_info(&info, tensor);
            t->largest_update = info.largest_update;
            t->largest_update_given = info.largest_update_given;
        }
    }
    views_free(&cache);
    lock_release(lock);
}
