/*
 * Begins and ends a load: ckd_load_begin_with takes the reader lock and opens the checkpoint, ckd_load_end releases
 * all. Also compares requests with the checkpoint, and loads blobs. tensor.c loads one tensor, batch.c several; both
 * make tasks, which execute.c executes.
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/load/load.h"

#define STAGING_BYTES (UINT64_C(256) << 20)

static ckd_status make_decoders(ckd_load *load, ckd_error *err) {
    uint32_t count = pool_threads(load->store->pool);
    load->decoders = calloc(count, sizeof(*load->decoders));
    if (!load->decoders) {
        return err_nomem(err, count * sizeof(*load->decoders), "decoders");
    }
    ckd_status status = CKD_OK;
    for (; load->decoder_count < count && status == CKD_OK; load->decoder_count++) {
        decoder *d = &load->decoders[load->decoder_count];
        status = decoder_init(d, &load->views, &load->columns, err);
        d->shared_values = &load->cached;
        d->top = load->view;
        d->has_derived = load->has_derived;
    }
    return status;
}

/* Finds tensors that other tensors of the checkpoint copy or round. */
static ckd_status find_sources(ckd_load *load, ckd_error *err) {
    const view *v = load->view;
    load->has_derived = calloc(v->tensor_count + 1, sizeof(*load->has_derived));
    if (!load->has_derived) {
        return err_nomem(err, v->tensor_count, "a list of tensors");
    }
    const char *last = "";
    for (size_t i = 0; i < v->block_count; i++) {
        const record *r = v->blocks[i].record;
        const dependency *on = r->dependency_count ? &r->dependencies[0] : NULL;
        bool derived = r->predictor == PREDICT_COPY || r->predictor == PREDICT_CAST;
        if (!derived || !on || !id_equal(&on->checkpoint, &v->manifest.checkpoint.id)) {
            continue;
        }
        const char *name = on->tensor && *on->tensor ? on->tensor : r->tensor->name;
        const view_tensor *source = strcmp(name, last) == 0 ? NULL : view_find(v, name);
        if (source) {
            load->has_derived[source - v->tensors] = true;
        }
        last = name;
    }
    return CKD_OK;
}

static ckd_status list_tensors(ckd_load *load, ckd_error *err) {
    load->tensors.count = load->view->tensor_count;
    load->tensors.items = calloc(load->tensors.count + 1, sizeof(*load->tensors.items));
    if (!load->tensors.items) {
        return err_nomem(err, load->tensors.count * sizeof(*load->tensors.items), "a list of tensors");
    }
    for (size_t i = 0; i < load->view->tensor_count; i++) {
        view_tensor_info(&load->tensors.items[load->view->tensors[i].order], &load->view->tensors[i]);
    }
    return CKD_OK;
}

void load_divide_staging(ckd_load *load, uint64_t staging, bool planned) {
    uint64_t siblings = staging / 2;
    if (planned) {
        pthread_mutex_lock(&load->shared.mutex);
        siblings = load->shared.bytes < siblings ? load->shared.bytes : siblings;
        pthread_mutex_unlock(&load->shared.mutex);
    }
    load->shared.limit = staging / 2;
    values_store_set_limit(&load->cached, load->shared.view ? staging - siblings : staging);
}

static ckd_status make_stores(ckd_load *load, ckd_error *err) {
    ckd_status status = sibling_cache_init(&load->shared, load->view, load->staging / 2, err);
    load_divide_staging(load, load->staging, false);
    return status;
}

ckd_status ckd_load_begin(ckd_load **out, ckd_store *store, const ckd_id *checkpoint, ckd_error *err) {
    return ckd_load_begin_with(out, store, checkpoint, NULL, err);
}

ckd_status ckd_load_begin_with(ckd_load **out, ckd_store *store, const ckd_id *checkpoint,
                               const ckd_load_options *options, ckd_error *err) {
    *out = NULL;
    ckd_load_options o = {0};
    ckd_status status = store && checkpoint
                            ? COPY_OPTIONS(&o, options, "ckd_load_options", err)
                            : err_set(err, CKD_E_INVALID, "a load needs a store and a checkpoint's id");
    if (status != CKD_OK) {
        return status;
    }
    ckd_load *load = calloc(1, sizeof(*load));
    if (!load) {
        return err_nomem(err, sizeof(*load), "a load");
    }
    load->store = store;
    load->staging = o.staging_bytes ? o.staging_bytes : STAGING_BYTES;
    views_init(&load->views, store);
    values_store_init(&load->cached, 0);
    columns_cache_init(&load->columns);
    status = store_lock_reader(&load->reader_lock, store, err);
    if (status == CKD_OK) {
        status = views_get(&load->view, &load->views, checkpoint, err);
        load->views.values_only = true; /* only the loaded checkpoint's measures are needed */
        load->views.deleted_too = true; /* a compaction may give the checkpoint other ancestors meanwhile */
    }
    THEN(status, list_tensors(load, err));
    THEN(status, find_sources(load, err));
    THEN(status, make_decoders(load, err));
    THEN(status, make_stores(load, err));
    if (status != CKD_OK) {
        ckd_load_end(load);
        return status;
    }
    *out = load;
    return CKD_OK;
}

const ckd_tensor_list *ckd_load_tensors(const ckd_load *load) {
    return &load->tensors;
}

const ckd_checkpoint *ckd_load_checkpoint(const ckd_load *load) {
    return &load->view->manifest.checkpoint;
}

ckd_load_request load_request(const ckd_load_request *request) {
    ckd_load_request q = {0};
    memcpy(&q, request, request->struct_size < sizeof(q) ? request->struct_size : sizeof(q));
    return q;
}

const view_tensor *load_match(ckd_load_request *q, const ckd_load *load, const ckd_load_request *request) {
    *q = load_request(request);
    const view_tensor *t = q->name ? view_find(load->view, q->name) : NULL;
    return load_difference(q, t) ? NULL : t;
}

ckd_status load_check_requests(const ckd_load *load, const ckd_load_request *requests, size_t count,
                               ckd_error *err) {
    if (!load || (!requests && count > 0)) {
        return err_set(err, CKD_E_INVALID, "there is no load, or there are no requests");
    }
    for (size_t i = 0; i < count; i++) {
        ckd_status status =
            struct_check(&requests[i], SIZE_UP_TO(ckd_load_request, size), "ckd_load_request", err);
        if (status == CKD_OK && !requests[i].name) {
            status = err_set(err, CKD_E_INVALID, "a load's request needs the name of a tensor");
        }
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

ckd_difference load_difference(const ckd_load_request *q, const view_tensor *t) {
    if (!t) {
        return CKD_DIFFERS_MISSING;
    }
    if (q->dtype != CKD_DTYPE_NONE && q->dtype != t->tensor->dtype) {
        return CKD_DIFFERS_DTYPE;
    }
    bool same = !q->shape || (q->ndim == t->shape->ndim &&
                              memcmp(q->shape, t->shape->shape, q->ndim * sizeof(uint64_t)) == 0);
    return same ? (ckd_difference)0 : CKD_DIFFERS_SHAPE;
}

/* "4 x 5"; truncated if too long. */
static const char *shape_text(char *text, size_t size, uint32_t ndim, const uint64_t *shape) {
    snprintf(text, size, "a scalar");
    size_t used = 0;
    for (uint32_t d = 0; d < ndim && used < size; d++) {
        used += (size_t)snprintf(text + used, size - used, "%s%llu", d ? " x " : "",
                                 (unsigned long long)shape[d]);
    }
    return text;
}

void load_describe_difference(char *text, size_t size, ckd_difference kind, const ckd_load_request *q,
                              const view_tensor *t) {
    char stored[80], requested[80];
    if (kind == CKD_DIFFERS_DTYPE) {
        snprintf(text, size, "the tensor is stored as %s, but %s was requested",
                 ckd_dtype_name(t->tensor->dtype), ckd_dtype_name(q->dtype));
    } else if (kind == CKD_DIFFERS_SHAPE) {
        snprintf(text, size, "the tensor is stored with global shape %s, but %s was requested",
                 shape_text(stored, sizeof(stored), t->shape->ndim, t->shape->shape),
                 shape_text(requested, sizeof(requested), q->ndim, q->shape));
    } else {
        snprintf(text, size, "%s",
                 kind == CKD_DIFFERS_MISSING ? "the checkpoint has no such tensor" : "it was not requested");
    }
}

ckd_status load_span(region_span *span, ckd_region *region, const ckd_load_request *q, const view_tensor *t,
                     bool sized, ckd_error *err) {
    *span = (region_span){.region = region};
    if (!region_count(&span->count, t->shape, &q->region)) {
        return err_set(err, CKD_E_INVALID, "the region asked for does not lie inside the tensor's shape");
    }
    *region = region_canonical(t->shape, &q->region);
    uint64_t size = span->count * ckd_dtype_size(t->tensor->dtype);
    if (sized && (q->size != size || (size && !q->data))) {
        return err_set(err, CKD_E_INVALID, "the region has %llu bytes, but the buffer has %zu",
                       (unsigned long long)size, q->size);
    }
    return CKD_OK;
}

uint64_t ckd_load_bytes_read(const ckd_load *load) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < load->decoder_count; i++) {
        all += load->decoders[i].bytes_read;
    }
    return all;
}

ckd_status ckd_load_blob(void **data, size_t *size, ckd_load *load, const char *name, ckd_error *err) {
    *data = NULL;
    *size = 0;
    ckd_status status = load_check_requests(load, NULL, 0, err);
    if (status != CKD_OK) {
        return status;
    }
    const view_block *b = name ? view_find_blob(load->view, name) : NULL;
    if (!b) {
        return err_set(err, CKD_E_NOT_FOUND, "%s@%llu has no blob '%s'", load->view->manifest.checkpoint.run,
                       (unsigned long long)load->view->manifest.checkpoint.step, name ? name : "");
    }
    if (b->record->raw_size > CKD_BLOB_MAX) {
        return err_corrupt(err, file_path(b->chunk->file), b->record->offset, "the blob has more than 1 GiB");
    }
    void *to = malloc(b->record->raw_size + 1);
    if (!to) {
        return err_nomem(err, b->record->raw_size, "a blob");
    }
    status = blob_bytes(&load->decoders[0], b, to, err);
    if (status != CKD_OK) {
        free(to);
        return status;
    }
    *data = to;
    *size = b->record->raw_size;
    return CKD_OK;
}

ckd_status ckd_load_blobs(ckd_blob_list **out, const ckd_load *load, ckd_error *err) {
    *out = NULL;
    ckd_status status = load_check_requests(load, NULL, 0, err);
    if (status != CKD_OK) {
        return status;
    }
    const view *v = load->view;
    ckd_blob_list *list = malloc(sizeof(*list) + v->blob_count * sizeof(ckd_blob_info));
    if (!list) {
        return err_nomem(err, v->blob_count * sizeof(ckd_blob_info), "a list of blobs");
    }
    *list = (ckd_blob_list){v->blob_count, (ckd_blob_info *)(list + 1)};
    for (size_t i = 0; i < v->blob_count; i++) {
        const record *r = v->blobs[i].record;
        list->items[i] = (ckd_blob_info){r->tensor->name, r->raw_size};
    }
    *out = list;
    return CKD_OK;
}

void ckd_blob_list_free(ckd_blob_list *list) {
    free(list);
}

void ckd_blob_free(void *data) {
    free(data);
}

void ckd_load_end(ckd_load *load) {
    if (!load) {
        return;
    }
    for (uint32_t i = 0; i < load->decoder_count; i++) {
        decoder_free(&load->decoders[i]);
    }
    free(load->decoders);
    free(load->tensors.items);
    free(load->has_derived);
    sibling_cache_free(&load->shared);
    values_store_free(&load->cached);
    columns_cache_free(&load->columns, false);
    views_free(&load->views);
    lock_release(load->reader_lock);
    if (load->device.decoded + load->device.sent + load->device.given_up) {
        device_leases_trim(load->store);
    }
    free(load);
}
