/* SAME_OK: the checkpoint exists already; is what is being saved the same? Nothing is written. */
#include <stdlib.h>

#include "engine/save.h"

static ckd_status differs(const ckd_save *save, const char *what, const char *name, ckd_error *err) {
    return err_set(err, CKD_E_EXISTS, "run '%s' has another checkpoint at step %llu already: %s '%s' differs",
                   save->target.run, (unsigned long long)save->target.step, what, name);
}

ckd_status save_compare_block(ckd_save *save, block_job *job, const tensor_context *tensor, ckd_error *err) {
    if (!tensor->parent) {
        return err_in_tensor(err, differs(save, "tensor", tensor->tensor->name, err), tensor->tensor->name);
    }
    uint64_t size = job->count * ckd_dtype_size(tensor->tensor->dtype);
    bytes_clear(&job->previous);
    void *stored = bytes_extend(&job->previous, size + 1);
    if (!stored) {
        job->previous.failed = false;
        return err_nomem(err, size, "stored values to compare with");
    }
    span mine = {tensor->region, job->first, job->count};
    job->decoder.steps = 0;
    ckd_status status =
        span_values(&job->decoder, &save->views, save->existing, tensor->parent, &mine, stored, NULL, err);
    if (status == CKD_OK && size && memcmp(stored, job->values, size) != 0) {
        status = err_in_tensor(err, differs(save, "tensor", tensor->tensor->name, err), tensor->tensor->name);
    }
    return status;
}

ckd_status save_compare_blob(ckd_save *save, const char *name, const void *data, size_t size,
                             ckd_error *err) {
    const view_block *b = view_find_blob(save->existing, name);
    hash128 content = content_hash(data, size);
    save->blobs_compared++;
    return b && b->record->raw_size == size && hash128_equal(&b->record->content, &content)
               ? CKD_OK
               : differs(save, "blob", name, err);
}

ckd_status save_compare_end(const ckd_save *save, ckd_error *err) {
    uint64_t elements = 0;
    for (size_t i = 0; i < save->existing->tensor_count; i++) {
        elements += save->existing->tensors[i].shape.elements;
    }
    if (save->elements_compared >= elements && save->blobs_compared >= save->existing->blob_count) {
        return CKD_OK;
    }
    return err_set(err, CKD_E_EXISTS,
                   "run '%s' has another checkpoint at step %llu already: it holds more tensors or blobs",
                   save->target.run, (unsigned long long)save->target.step);
}
