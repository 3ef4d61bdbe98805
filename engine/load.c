/* Loading: find the blocks that intersect, rebuild them in parallel, place them. */
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/load_shared.h"

struct ckd_load {
    ckd_store *store;
    file_lock *reader_lock;
    view_cache views;
    const view *view;
    ckd_tensor_list tensors;
    decoder *decoders; /* one a worker */
    uint32_t decoder_count;
    load_shared shared; /* between the calls of this load */
};

static ckd_status make_decoders(ckd_load *load, ckd_error *err) {
    uint32_t count = pool_threads(load->store->pool);
    load->decoders = calloc(count, sizeof(*load->decoders));
    if (!load->decoders) {
        return err_nomem(err, count * sizeof(*load->decoders), "decoders");
    }
    ckd_status status = CKD_OK;
    for (; load->decoder_count < count && status == CKD_OK; load->decoder_count++) {
        status = decoder_init(&load->decoders[load->decoder_count], err);
    }
    return status;
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

ckd_status ckd_load_begin(ckd_load **out, ckd_store *store, const ckd_id *checkpoint, ckd_error *err) {
    *out = NULL;
    ckd_load *load = calloc(1, sizeof(*load));
    if (!load) {
        return err_nomem(err, sizeof(*load), "a load");
    }
    load->store = store;
    views_init(&load->views, store);
    ckd_status status = store_lock_reader(&load->reader_lock, store, err);
    if (status == CKD_OK) {
        status = views_get(&load->view, &load->views, checkpoint, err);
    }
    if (status == CKD_OK) {
        status = list_tensors(load, err);
    }
    if (status == CKD_OK) {
        status = make_decoders(load, err);
    }
    if (status == CKD_OK) {
        status = load_shared_init(&load->shared, load->view, err);
    }
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

static ckd_status check_request(const ckd_load_request *q, const view_tensor *t, span *want,
                                ckd_region *region, ckd_error *err) {
    if (q->dtype != CKD_DTYPE_NONE && q->dtype != t->tensor->dtype) {
        return err_set(err, CKD_E_MISMATCH, "the tensor is stored as %s, %s was asked for",
                       ckd_dtype_name(t->tensor->dtype), ckd_dtype_name(q->dtype));
    }
    if (q->shape &&
        (q->ndim != t->shape.ndim || memcmp(q->shape, t->shape.shape, q->ndim * sizeof(uint64_t)) != 0)) {
        return err_set(err, CKD_E_MISMATCH,
                       "the tensor is stored with another global shape than was asked for");
    }
    *want = (span){.region = region};
    if (!region_count(&want->count, &t->shape, &q->region)) {
        return err_set(err, CKD_E_INVALID, "the region asked for does not lie inside the tensor's shape");
    }
    *region = region_canonical(&t->shape, &q->region);
    uint64_t size = want->count * ckd_dtype_size(t->tensor->dtype);
    if (q->size != size || (size && !q->data)) {
        return err_set(err, CKD_E_INVALID, "the region has %llu bytes, room for %zu was given",
                       (unsigned long long)size, q->size);
    }
    return CKD_OK;
}

typedef struct placement {
    ckd_load *load;
    const view_tensor *tensor;
    const span *want;
    void *to;
    const view_block **blocks;
    uint64_t *copied; /* by block */
} placement;

static ckd_status place_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    placement *p = context;
    if (p->load->shared.view) {
        return load_shared_place(&p->load->shared, &p->load->decoders[worker], &p->load->views, p->tensor,
                                 p->blocks[index], p->want, p->to, &p->copied[index], err);
    }
    return block_into_span(&p->load->decoders[worker], &p->load->views, p->load->view, p->tensor,
                           p->blocks[index], p->want, p->to, &p->copied[index], err);
}

static size_t intersecting_blocks(const view_block **blocks, const view_tensor *t, const span *want) {
    size_t count = 0;
    for (size_t s = 0; s < t->shard_count; s++) {
        size_t first, end;
        view_shard_range(&first, &end, &t->shards[s], &t->shape, want);
        for (size_t i = first; i < end; i++) {
            if (blocks) {
                blocks[count] = &t->shards[s].blocks[i];
            }
            count++;
        }
    }
    return count;
}

static ckd_status place_all(ckd_load *load, const view_tensor *t, const span *want, void *to,
                            ckd_error *err) {
    size_t count = intersecting_blocks(NULL, t, want);
    placement p = {.load = load, .tensor = t, .want = want, .to = to};
    p.blocks = calloc(count + 1, sizeof(*p.blocks));
    p.copied = calloc(count + 1, sizeof(*p.copied));
    ckd_status status = CKD_OK;
    if (!p.blocks || !p.copied) {
        status = err_nomem(err, count * sizeof(*p.blocks), "a load's plan");
    } else {
        intersecting_blocks(p.blocks, t, want);
        status = pool_run(load->store->pool, count, place_one, &p, err);
    }
    uint64_t copied = 0;
    for (size_t i = 0; status == CKD_OK && i < count; i++) {
        copied += p.copied[i];
    }
    if (status == CKD_OK && copied != want->count) {
        status = err_set(err, CKD_E_CORRUPT, "the checkpoint holds %llu of the %llu elements asked for",
                         (unsigned long long)copied, (unsigned long long)want->count);
    }
    free(p.blocks);
    free(p.copied);
    return status;
}

ckd_status ckd_load_tensor(ckd_load *load, const ckd_load_request *request, ckd_error *err) {
    ckd_load_request q = {0};
    memcpy(&q, request, request->struct_size < sizeof(q) ? request->struct_size : sizeof(q));
    const view_tensor *t = q.name ? view_find(load->view, q.name) : NULL;
    if (!t) {
        return err_in_tensor(err,
                             err_set(err, CKD_E_NOT_FOUND, "%s@%llu has no such tensor",
                                     load->view->manifest.checkpoint.run,
                                     (unsigned long long)load->view->manifest.checkpoint.step),
                             q.name ? q.name : "");
    }
    span want;
    ckd_region region;
    ckd_status status = check_request(&q, t, &want, &region, err);
    if (status == CKD_OK && want.count) {
        float_mode mode = float_mode_enter();
        status = place_all(load, t, &want, q.data, err);
        float_mode_leave(mode);
    }
    return status == CKD_OK ? CKD_OK : err_in_tensor(err, status, q.name);
}

ckd_status ckd_load_blob(void **data, size_t *size, ckd_load *load, const char *name, ckd_error *err) {
    *data = NULL;
    *size = 0;
    const view_block *b = name ? view_find_blob(load->view, name) : NULL;
    if (!b) {
        return err_set(err, CKD_E_NOT_FOUND, "%s@%llu has no blob '%s'", load->view->manifest.checkpoint.run,
                       (unsigned long long)load->view->manifest.checkpoint.step, name ? name : "");
    }
    if (b->record->raw_size > CKD_BLOB_MAX) {
        return err_corrupt(err, file_path(b->chunk->file), b->record->offset, "a blob of more than 1 GiB");
    }
    void *to = malloc(b->record->raw_size + 1);
    if (!to) {
        return err_nomem(err, b->record->raw_size, "a blob");
    }
    ckd_status status = blob_bytes(&load->decoders[0], b, to, err);
    if (status != CKD_OK) {
        free(to);
        return status;
    }
    *data = to;
    *size = b->record->raw_size;
    return CKD_OK;
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
    load_shared_free(&load->shared);
    views_free(&load->views);
    lock_release(load->reader_lock);
    free(load);
}
