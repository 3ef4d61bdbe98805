/* Region jobs: their blocks on the way into the pipeline, progress, and the blocks of exact spans. */
#include "engine/save/internal.h"
#include "engine/save/device.h"

/*
 * Returns a region job whose blocks are all written, for reuse; NULL: there is none. So even a million small tensors
 * need only as many region jobs as are in progress at a time.
 */
static region_job *written_region_job(save_pipeline *p) {
    region_job *rj = p->first_pushed;
    pthread_mutex_lock(&p->mutex);
    bool written = rj && rj->end <= p->written;
    pthread_mutex_unlock(&p->mutex);
    if (!written) {
        return NULL;
    }
    p->first_pushed = rj->next;
    p->last_pushed = rj->next ? p->last_pushed : NULL;
    return rj;
}

static void region_job_is_pushed(save_pipeline *p, region_job *rj) {
    rj->end = p->pushed;
    rj->next = NULL;
    *(p->last_pushed ? &p->last_pushed->next : &p->first_pushed) = rj;
    p->last_pushed = rj;
}

ckd_status save_new_region_job(region_job **out, ckd_save *save, const tensor_context *t, step_tensor *step,
                               ckd_error *err) {
    region_job *rj = *out = written_region_job(&save->pipeline);
    if (!rj) {
        rj = *out = arena_alloc(&save->registry.arena, sizeof(*rj));
    }
    if (!rj) {
        return err_nomem(err, sizeof(*rj), "a tensor's description");
    }
    *rj = (region_job){.context = *t,
                       .parent = save->sources.parent,
                       .expected = t->parent,
                       .step = step,
                       .fraction = save->input.leaves_budget};
    save->input.leaves_budget = 0;
    return CKD_OK;
}

/*
 * Whether the block may still be in progress when its tensor's call returns. Its values are then copied before it is
 * pushed, so that the call need not wait for the workers to let go of the caller's memory.
 */
static bool may_outlive_call(const ckd_save *save, const exact_span *span, uint64_t first) {
    uint64_t in_flight = (uint64_t)save->pipeline.slot_count * span->context->block_elements;
    return !save->input.buffers_are_stable && span->end - first <= in_flight;
}

static ckd_status copy_values(block_job *job, size_t size, ckd_error *err) {
    void *copy = bytes_scratch(&job->input.own, size, "a tensor's elements", err);
    if (!copy) {
        return CKD_E_NOMEM;
    }
    memcpy(copy, job->input.values, size);
    job->input.values = copy;
    return CKD_OK;
}

/* Pushes the block that begins at element `first`. *count: its elements. */
static ckd_status push_block(uint64_t *count, ckd_save *save, region_job *rj, unchanged_blocks *unchanged,
                             uint64_t first, ckd_error *err) {
    const exact_span *span = unchanged->span;
    save_slot *slot;
    block_job *job;
    ckd_status status = save_device_code(save, unchanged, first, err);
    THEN(status, save_next_slot(&slot, &job, save, rj, err));
    if (status != CKD_OK) {
        return status;
    }
    job->input.first = first;
    job->input.count = *count = save_block_length(span->context, first, span->end);
    job->input.values = NULL;
    slot->borrowed = span->tensor->data && job->input.count > 0;
    if (!device_dedup_next(unchanged, save, job) && !save_device_take_result(save, job, unchanged)) {
        tensor_elements block = {span->tensor, first, job->input.count};
        status = save_fetch(&job->input.values, save, &job->input.own, &block, err);
    }
    if (status == CKD_OK && slot->borrowed && may_outlive_call(save, span, first)) {
        status = copy_values(job, job->input.count * ckd_dtype_size(span->tensor->dtype), err);
        slot->borrowed = false;
    }
    if (status == CKD_OK) {
        save_push(save);
    }
    return status;
}

ckd_status save_report_progress(ckd_save *save, uint64_t raw, ckd_error *err) {
    save->stats.raw_bytes += raw;
    const ckd_save_options *o = &save->options;
    if (!o->on_progress) {
        return CKD_OK;
    }
    float_mode_leave(save->input.callers_mode);
    int stop =
        o->on_progress(o->progress_context, save->stats.raw_bytes,
                       o->total_bytes > save->stats.raw_bytes ? o->total_bytes : save->stats.raw_bytes);
    save->input.callers_mode = float_mode_enter();
    return stop ? err_set(err, CKD_E_CANCELLED, "the save was cancelled") : CKD_OK;
}

ckd_status save_exact_span(ckd_save *save, const exact_span *span, step_tensor *step, ckd_error *err) {
    size_t size = ckd_dtype_size(span->tensor->dtype);
    region_job *rj;
    ckd_status status = save_new_region_job(&rj, save, span->context, step, err);
    THEN(status, save_device_remember(save, rj, span->tensor, err));
    uint64_t unreported = 0, count = 0, first = span->first;
    save->registry.has_masters |= block_is_master(span->context);
    unchanged_blocks unchanged = {0};
    THEN(status, device_dedup_begin(&unchanged, save, span, err));
    do {
        THEN(status, push_block(&count, save, rj, &unchanged, first, err));
        if (status != CKD_OK) {
            break;
        }
        first += count;
        unreported += count * size;
        if (unreported >= size * (uint64_t)CKD_BLOCK_ELEMENTS || first >= span->end) {
            status = save_report_progress(save, unreported, err);
            unreported = 0;
        }
    } while (status == CKD_OK && first < span->end);
    device_dedup_free(&unchanged);
    if (status == CKD_OK) {
        region_job_is_pushed(&save->pipeline, rj);
    }
    return status;
}
