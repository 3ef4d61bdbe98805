/*
 * Gets the values to save, from the caller. save_fetch takes them from memory or calls the caller's read function.
 * save_device_fetch reads a block from a device later, if its values turn out to be needed.
 */
#include "engine/device/device.h"
#include "engine/save/internal.h"

struct device_values {
    ckd_device device;
    device_reader values;
};

ckd_status save_fetch(const void **values, ckd_save *save, bytes *scratch, const tensor_elements *elements,
                      ckd_error *err) {
    const ckd_tensor *t = elements->tensor;
    size_t size = ckd_dtype_size(t->dtype);
    if (t->data) {
        *values = (const uint8_t *)t->data + elements->first * size;
        return CKD_OK;
    }
    void *to = bytes_scratch(scratch, elements->count * size + 1, "a tensor's elements", err);
    if (!to) {
        return CKD_E_NOMEM;
    }
    *values = to;
    if (elements->count == 0) {
        return CKD_OK;
    }
    if (err) {
        memset(err, 0, sizeof(*err));
        err->offset = CKD_NO_OFFSET;
    }
    float_mode_leave(save->input.callers_mode);
    ckd_status status = t->read(t->read_context, elements->first, elements->count, to, err);
    save->input.callers_mode = float_mode_enter();
    if (status != CKD_OK && err && err->status == CKD_OK) {
        err_set(err, status, "the read function of the tensor failed");
    }
    return status;
}

ckd_status save_device_remember(ckd_save *save, region_job *rj, const ckd_tensor *tensor, ckd_error *err) {
    if (tensor->read != device_read) {
        return CKD_OK;
    }
    const device_reader *r = tensor->read_context;
    rj->device_values = arena_alloc(&save->registry.arena, sizeof(*rj->device_values));
    if (!rj->device_values) {
        return err_nomem(err, sizeof(*rj->device_values), "a tensor's description");
    }
    *rj->device_values = (struct device_values){CKD_DEVICE_INIT, *r};
    rj->device_values->device.device = r->lease->queue.device;
    rj->device_values->device.stream = r->lease->stream;
    return CKD_OK;
}

ckd_status save_device_fetch(ckd_save *save, block_job *job, const region_job *rj, ckd_error *err) {
    const struct device_values *device_values = rj->device_values;
    device_reader r = device_values->values;
    uint64_t raw = job->input.count * r.element;
    void *to = bytes_scratch(&job->input.own, raw, "a tensor's elements", err);
    ckd_status status =
        to ? device_acquire(&r.lease, save->store, &device_values->device, r.data, err) : CKD_E_NOMEM;
    if (status != CKD_OK) {
        return status;
    }
    r.end = job->input.first + job->input.count;
    r.buffer[0].count = r.buffer[1].count = 0;
    status = device_read(&r, job->input.first, job->input.count, to, err);
    r.lease->reader = NULL;
    device_release(save->store, r.lease);
    job->input.values = to;
    return status;
}
