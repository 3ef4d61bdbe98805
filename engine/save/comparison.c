/* SAME_OK: compares the tensors of a save with a checkpoint that exists already. Nothing is written. */
#include <stdlib.h>

#include "engine/save/internal.h"
#include "engine/common/common.h"

struct compared_tensor {
    bool seen; /* also set for a region without elements */
    coverage regions;
};

/* "tensor 'a' differs" */
static ckd_status differs(const ckd_save *save, const char *what, const char *name, const char *difference,
                          ckd_error *err) {
    return err_in_tensor(
        err,
        err_set(err, CKD_E_EXISTS, "run '%s' already has a different checkpoint at step %llu: %s '%s' %s",
                save->target.run, (unsigned long long)save->target.step, what, name, difference),
        name);
}

ckd_status save_compare_begin(ckd_save *save, ckd_error *err) {
    save->sources.views.use_materialized = false; /* copies would hide damage, and may be evicted */
    ckd_status status =
        views_get(&save->sources.existing, &save->sources.views, &save->target.existing.id, err);
    if (status != CKD_OK) {
        return status;
    }
    const view *v = save->sources.existing;
    comparison *c = &save->sources.compared;
    c->tensors = calloc(v->tensor_count + 1, sizeof(*c->tensors));
    c->blobs = calloc(v->blob_count + 1, sizeof(*c->blobs));
    if (!c->tensors || !c->blobs) {
        return err_nomem(err, v->tensor_count * sizeof(*c->tensors), "a comparison");
    }
    for (size_t i = 0; i < v->tensor_count; i++) {
        c->tensors[i].regions =
            coverage_begin(v->tensors[i].shape, load_le64(v->manifest.checkpoint.id.bytes));
    }
    return CKD_OK;
}

void save_compare_free(comparison *compared) {
    free(compared->tensors);
    free(compared->blobs);
}

void save_compared_region(save_sources *from, const tensor_context *tensor) {
    struct compared_tensor *c = &from->compared.tensors[tensor->parent - from->existing->tensors];
    c->seen = true;
    coverage_add(&c->regions, tensor->region);
}

ckd_status save_compare_block(ckd_save *save, block_job *job, const tensor_context *tensor, ckd_error *err) {
    if (!tensor->parent) {
        return differs(save, "tensor", tensor->tensor->name, "differs", err);
    }
    uint64_t size = job->input.count * ckd_dtype_size(tensor->tensor->dtype);
    bytes_clear(&job->scratch.previous);
    void *stored = bytes_extend(&job->scratch.previous, size + 1);
    if (!stored) {
        job->scratch.previous.failed = false;
        return err_nomem(err, size, "stored values to compare with");
    }
    const view_source from = {
        save->sources.existing, tensor->parent, {tensor->region, job->input.first, job->input.count}, NULL};
    job->decoder.blocks_decoded = 0;
    ckd_status status = span_values(&job->decoder, &from, stored, err);
    if (status == CKD_OK && size && memcmp(stored, job->input.values, size) != 0) {
        status = differs(save, "tensor", tensor->tensor->name, "differs", err);
    }
    return status;
}

/* The caller may drop its data if the comparison succeeds, so the recorded hash alone is not enough. */
static ckd_status read_stored_blob(ckd_save *save, const view_block *b, ckd_error *err) {
    bytes stored = {0};
    void *to = bytes_extend(&stored, b->record->raw_size + 1);
    ckd_status status = to ? blob_bytes(&save->pipeline.jobs[0].decoder, b, to, err)
                           : err_nomem(err, b->record->raw_size, "a stored blob to compare with");
    bytes_free(&stored);
    return status;
}

ckd_status save_compare_blob(ckd_save *save, const char *name, const void *data, size_t size,
                             ckd_error *err) {
    const view_block *b = view_find_blob(save->sources.existing, name);
    hash128 content = content_hash(data, size);
    if (!b || b->record->raw_size != size || !hash128_equal(&b->record->content, &content)) {
        return differs(save, "blob", name, "differs", err);
    }
    bool *seen = &save->sources.compared.blobs[b - save->sources.existing->blobs];
    if (*seen) {
        return err_in_tensor(err, err_set(err, CKD_E_MISMATCH, "two blobs have this name"), name);
    }
    *seen = true;
    return read_stored_blob(save, b, err);
}

ckd_status save_compare_end(const ckd_save *save, ckd_error *err) {
    const view *v = save->sources.existing;
    for (size_t i = 0; i < v->tensor_count; i++) {
        const struct compared_tensor *c = &save->sources.compared.tensors[i];
        const char *name = v->tensors[i].tensor->name;
        if (!c->seen) {
            return differs(save, "tensor", name, "is only in the existing checkpoint", err);
        }
        if (!coverage_complete(&c->regions)) {
            return err_in_tensor(
                err,
                err_set(err, CKD_E_MISMATCH, "the saved regions do not cover every element exactly once"),
                name);
        }
    }
    for (size_t i = 0; i < v->blob_count; i++) {
        if (!save->sources.compared.blobs[i]) {
            return differs(save, "blob", v->blobs[i].record->tensor->name,
                           "is only in the existing checkpoint", err);
        }
    }
    return CKD_OK;
}
