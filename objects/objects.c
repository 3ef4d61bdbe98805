/* The functions that other rooms call: they check what is given, and pass it to the place. */
#include "objects/backend.h"

#include <stdlib.h>

static const object_call no_limits;

ckd_status objects_open(object_store **out, const char *address, const object_options *options,
                        ckd_error *err) {
    static const object_options defaults;
    *out = NULL;
    if (!address || !*address) {
        return err_set(err, CKD_E_INVALID, "the address of an object store is empty");
    }
    object_store *store = calloc(1, sizeof(*store));
    if (!store) {
        return err_nomem(err, sizeof(*store), "an object store");
    }
    ckd_status status = CKD_OK;
    if (objects_address_is_remote(address)) {
        const s3_backend *s3 = NULL;
        status = s3_backend_load(&s3, err);
        THEN(status, s3->open(store, address, options ? options : &defaults, err));
    } else {
        status = directory_open(store, address, options ? options : &defaults, err);
    }
    if (status != CKD_OK) {
        free(store);
        return status;
    }
    *out = store;
    return CKD_OK;
}

void objects_close(object_store *store) {
    if (store) {
        store->functions->close(store->place);
        free(store);
    }
}

static ckd_status check_key(const char *key, ckd_error *err) {
    return object_key_valid(key)
               ? CKD_OK
               : err_set(
                     err, CKD_E_INVALID,
                     "\"%.200s\" cannot be the key of an object: a key has at most %d bytes of A-Z a-z 0-9 . _ - /, "
                     "and none of its parts is empty, begins with a dot, or is longer than %d bytes",
                     key ? key : "", OBJECT_KEY_MAX, OBJECT_PART_MAX);
}

static ckd_status check_source(const object_source *from, ckd_error *err) {
    uint64_t there = from->file ? file_size(from->file) : from->size;
    if (!from->file && !from->data && from->size > 0) {
        return err_set(err, CKD_E_INVALID, "an object's bytes are neither in memory nor in a file");
    }
    if (from->file && (from->offset > there || from->size > there - from->offset)) {
        return err_set(err, CKD_E_INVALID, "%s is too short for the bytes that an object takes from it",
                       file_path(from->file));
    }
    return CKD_OK;
}

ckd_status objects_put(object_store *store, const char *key, const object_source *from,
                       const object_call *call, ckd_error *err) {
    ckd_status status = check_key(key, err);
    THEN(status, check_source(from, err));
    THEN(status, store->functions->put(store->place, key, from, call ? call : &no_limits, err));
    return status;
}

ckd_status objects_put_new(object_store *store, const char *key, const object_source *from,
                           const object_call *call, ckd_error *err) {
    ckd_status status = check_key(key, err);
    THEN(status, check_source(from, err));
    if (status == CKD_OK && from->size > OBJECT_NEW_MAX) {
        status = err_set(err, CKD_E_INVALID,
                         "%s has %llu bytes: an object that is put only if absent has at most %llu", key,
                         (unsigned long long)from->size, (unsigned long long)OBJECT_NEW_MAX);
    }
    THEN(status, store->functions->put_new(store->place, key, from, call ? call : &no_limits, err));
    return status;
}

ckd_status objects_probe(object_store *store, bool *honoured, const object_call *call, ckd_error *err) {
    *honoured = false;
    return store->functions->probe(store->place, honoured, call ? call : &no_limits, err);
}

ckd_status objects_get(object_store *store, const char *key, const object_range *range,
                       const object_call *call, ckd_error *err) {
    ckd_status status = check_key(key, err);
    if (status == CKD_OK && range->size > UINT64_MAX - range->offset) {
        status = err_set(err, CKD_E_INVALID, "a range of %s ends beyond 2^64 - 1", key);
    }
    THEN(status, store->functions->get(store->place, key, range, call ? call : &no_limits, err));
    return status;
}

ckd_status objects_size(object_store *store, const char *key, uint64_t *size, const object_call *call,
                        ckd_error *err) {
    ckd_status status = check_key(key, err);
    *size = 0;
    THEN(status, store->functions->size(store->place, key, size, call ? call : &no_limits, err));
    return status;
}

ckd_status objects_delete(object_store *store, const char *const *keys, size_t count, const object_call *call,
                          ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = check_key(keys[i], err);
    }
    if (status == CKD_OK && count > 0) {
        status = store->functions->delete_all(store->place, keys, count, call ? call : &no_limits, err);
    }
    return status;
}

ckd_status objects_list(object_store *store, const object_query *query, object_page *out,
                        const object_call *call, ckd_error *err) {
    object_query asked = {query->prefix ? query->prefix : "", query->after ? query->after : "", query->limit};
    *out = (object_page){0};
    if (!object_prefix_valid(asked.prefix) || strlen(asked.after) > 4 * OBJECT_KEY_MAX) {
        return err_set(err, CKD_E_INVALID, "\"%.200s\" cannot be a prefix of keys", asked.prefix);
    }
    if (asked.limit == 0 || asked.limit > OBJECT_LIST_MAX) {
        asked.limit = OBJECT_LIST_MAX;
    }
    ckd_status status = store->functions->list(store->place, &asked, out, call ? call : &no_limits, err);
    if (status != CKD_OK) {
        object_page_free(out);
    }
    return status;
}

ckd_status objects_abort_uploads(object_store *store, uint64_t age_s, uint64_t *count,
                                 const object_call *call, ckd_error *err) {
    return store->functions->abort_uploads(store->place, age_s, count, call ? call : &no_limits, err);
}
