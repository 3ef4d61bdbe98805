/* Keeping the catalog in step with the manifests, which are the truth. */
#include <stdlib.h>

#include "engine/store.h"

/* Adopts the highest valid generation among items[0 ... count - 1], which name the same checkpoint. */
static ckd_status adopt_newest(ckd_store *store, const manifest_name *items, size_t count, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        ckd_error why = {0};
        manifest m;
        ckd_status status =
            store_read_manifest(&m, store, items[i].run, items[i].step, items[i].generation, &why);
        if (status == CKD_OK) {
            return store_adopt(store, &m, err);
        }
        if (status != CKD_E_CORRUPT && status != CKD_E_UNSUPPORTED && status != CKD_E_NOT_FOUND) {
            if (err) {
                *err = why;
            }
            return status;
        }
        store->manifests_skipped++;
        store_message(store, "manifest %s.%llu.%u is not used: %s", items[i].run,
                      (unsigned long long)items[i].step, (unsigned)items[i].generation, why.message);
    }
    return CKD_OK;
}

static size_t generations(const manifest_list *list, size_t first) {
    size_t end = first + 1;
    while (end < list->count && same_checkpoint_name(&list->items[first], &list->items[end])) {
        end++;
    }
    return end - first;
}

static int compare_names(const manifest_name *a, const ckd_checkpoint *b) {
    int order = strcmp(a->run, b->run);
    return order ? order : a->step < b->step ? -1 : a->step > b->step;
}

/* Merges the sorted manifests with the sorted catalog. With `apply` 0 only tells whether they differ. */
static ckd_status merge(ckd_store *store, const manifest_list *manifests, const ckd_checkpoint_list *known,
                        bool apply, bool *differ, ckd_error *err) {
    size_t k = 0;
    for (size_t i = 0; i < manifests->count;) {
        size_t count = generations(manifests, i);
        while (k < known->count && compare_names(&manifests->items[i], &known->items[k]) > 0) {
            *differ = true;
            ckd_status status =
                apply ? catalog_remove(store->catalog, known->items[k].run, known->items[k].step, err)
                      : CKD_OK;
            if (status != CKD_OK) {
                return status;
            }
            k++;
        }
        bool here = k < known->count && compare_names(&manifests->items[i], &known->items[k]) == 0;
        if (!here || known->items[k].generation != manifests->items[i].generation) {
            *differ = true;
            ckd_status status = apply ? adopt_newest(store, &manifests->items[i], count, err) : CKD_OK;
            if (status != CKD_OK) {
                return status;
            }
        }
        k += here;
        i += count;
    }
    for (; k < known->count; k++) {
        *differ = true;
        ckd_status status =
            apply ? catalog_remove(store->catalog, known->items[k].run, known->items[k].step, err) : CKD_OK;
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

static ckd_status apply_in_transaction(ckd_store *store, const manifest_list *manifests,
                                       const ckd_checkpoint_list *known, ckd_error *err) {
    bool differ = false;
    ckd_status status = catalog_begin(store->catalog, err);
    if (status != CKD_OK) {
        return status;
    }
    status = merge(store, manifests, known, true, &differ, err);
    if (status != CKD_OK) {
        catalog_rollback(store->catalog);
        return status;
    }
    return catalog_commit(store->catalog, err);
}

/* A reader may not change the file: it works on a catalog of its own, in memory. */
static ckd_status use_memory(ckd_store *store, ckd_error *err) {
    catalog_close(store->catalog);
    store->catalog = NULL;
    return catalog_open(&store->catalog, NULL, CATALOG_MEMORY, &store->id, store->options.lock_timeout_ms,
                        err);
}

ckd_status store_refresh(ckd_store *store, ckd_error *err) {
    manifest_list manifests;
    ckd_status status = manifests_read(&manifests, store, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_checkpoint_list known = {0};
    bool differ = false;
    status = catalog_list(&known, store->catalog, NULL, err);
    if (status == CKD_OK) {
        status = merge(store, &manifests, &known, false, &differ, err);
    }
    if (status == CKD_OK && differ && store->mode == CKD_OPEN_READ) {
        catalog_list_free(&known);
        status = use_memory(store, err);
    }
    if (status == CKD_OK && differ) {
        status = apply_in_transaction(store, &manifests, &known, err);
    }
    catalog_list_free(&known);
    manifests_free(&manifests);
    return status;
}

static bool replaceable(ckd_status status) {
    return status == CKD_E_CORRUPT || status == CKD_E_NOT_FOUND;
}

static ckd_status open_for_reading(ckd_store *store, ckd_error *err) {
    pathname p = path_in(store->path, FILE_CATALOG);
    ckd_error why = {0};
    ckd_status status =
        catalog_open(&store->catalog, p.text, CATALOG_READ, &store->id, store->options.lock_timeout_ms, &why);
    if (status == CKD_OK) {
        status = store_refresh(store, &why);
    }
    if (status == CKD_OK || status == CKD_E_NOMEM) {
        if (err && status != CKD_OK) {
            *err = why;
        }
        return status;
    }
    /* Missing, damaged, newer, locked, or with a journal that only a writer may roll back: the manifests know it all. */
    if (status != CKD_E_NOT_FOUND) {
        store_message(store, "the catalog is not used, the manifests are read instead: %s", why.message);
    }
    status = use_memory(store, err);
    return status == CKD_OK ? store_refresh(store, err) : status;
}

ckd_status store_renew_catalog(ckd_store *store, ckd_error *err) {
    pathname p = path_in(store->path, FILE_CATALOG), old = path_in(store->path, FILE_CATALOG ".old");
    pathname journal = path_in(store->path, FILE_CATALOG "-journal");
    /* The journal first: it must never be applied to the new file. */
    ckd_status status = file_remove(journal.text, true, err);
    if (status == CKD_OK && file_exists(p.text)) {
        status = file_replace(p.text, old.text, err);
    }
    if (status == CKD_OK) {
        status = dir_sync(store->path, err);
    }
    if (status == CKD_OK) {
        status = catalog_open(&store->catalog, p.text, CATALOG_WRITE, &store->id,
                              store->options.lock_timeout_ms, err);
    }
    return status == CKD_OK ? store_refresh(store, err) : status;
}

ckd_status store_open_catalog(ckd_store *store, ckd_error *err) {
    if (store->mode == CKD_OPEN_READ) {
        return open_for_reading(store, err);
    }
    pathname p = path_in(store->path, FILE_CATALOG);
    ckd_error why = {0};
    ckd_status status = catalog_open(&store->catalog, p.text, CATALOG_WRITE, &store->id,
                                     store->options.lock_timeout_ms, &why);
    if (status == CKD_OK) {
        status = store_refresh(store, &why);
    }
    if (replaceable(status)) {
        store_message(
            store,
            "the catalog is damaged (%s); making it anew from the manifests, the old one is kept as " FILE_CATALOG
            ".old",
            why.message);
        catalog_close(store->catalog);
        store->catalog = NULL;
        return store_renew_catalog(store, err);
    }
    if (status != CKD_OK && err) {
        *err = why;
    }
    return status;
}
