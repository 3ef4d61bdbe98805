/* Loads some blocks that a device coded, before they are committed. */
#include "engine/save/self_check.h"

#include "engine/save/save.h"
#include "engine/save/lossy.h"
#include "engine/save/pipeline.h"

/* Returns true if a device made the payload. */
static bool coded_by_device(const block_job *job, const region_job *rj) {
    if (rj->lossy) {
        return rj->lossy->tile.input.device != NULL;
    }
    return job->input.precoded.coded &&
           (job->decision.chosen == &job->analysis.predicted ? job->input.precoded.delta
                                                             : job->input.precoded.standalone);
}

/*
 * Returns true if a device made the payload, or at least the hash: the host does not hash the values again if it
 * codes them after all. Among copies, only rounded masters count, as a load must round to the same values.
 */
static bool made_by_device(const block_job *job, const region_job *rj) {
    bool copy = !job->decision.chosen; /* a duplicate */
    return copy ? job->decision.predictor == PREDICT_CAST && job->input.precoded.coded
                : job->input.precoded.coded || coded_by_device(job, rj);
}

static uint32_t kind_of(const block_job *job, const region_job *rj) {
    const record_tensor *t = rj->context.tensor;
    bool delta = job->decision.chosen == &job->analysis.predicted;
    uint32_t coded = coded_by_device(job, rj),
             coding_id = job->decision.chosen ? (uint32_t)job->decision.chosen->coding : UINT8_MAX;
    return (uint32_t)t->role << 24 | (uint32_t)t->dtype << 16 | coding_id << 8 | coded << 1 | delta;
}

void self_check_record(ckd_save *save, const block_job *job, const region_job *rj) {
    const tensor_context *t = &rj->context;
    self_check_list *all = &save->device.self_checks;
    if (all->count == SELF_CHECK_KINDS || !made_by_device(job, rj)) {
        return;
    }
    uint32_t kind = kind_of(job, rj);
    for (uint32_t i = 0; i < all->count; i++) {
        if (all->blocks[i].kind == kind) {
            return;
        }
    }
    all->blocks[all->count++] =
        (self_check_block){t->tensor, *t->region, job->input.first, job->input.count, kind};
}

static ckd_status try_one(ckd_save *save, const view *v, const self_check_block *b, ckd_error *err) {
    block_job *job = &save->pipeline.jobs[0];
    const view_tensor *t = view_find(v, b->tensor->name);
    const view_source from = {v, t, {&b->region, b->first, b->count}, NULL};
    void *to = bytes_scratch(&job->input.own, b->count * ckd_dtype_size(b->tensor->dtype),
                             "a tensor's elements", err);
    if (!t || !to) {
        return t ? CKD_E_NOMEM : err_set(err, CKD_E_CORRUPT, "it is not there");
    }
    job->decoder.blocks_decoded = 0;
    return span_values(&job->decoder, &from, to, err);
}

ckd_status self_check_run(ckd_save *save, const view *v, ckd_error *err) {
    ckd_error why = {.status = CKD_OK};
    for (uint32_t i = 0; i < save->device.self_checks.count; i++) {
        const self_check_block *b = &save->device.self_checks.blocks[i];
        ckd_status status = try_one(save, v, b, &why);
        if (status == CKD_E_NOMEM || status == CKD_E_IO) { /* it was not read at all */
            return err_from(err, status, &why);
        }
        if (status != CKD_OK) {
            atomic_store(&save->store->devices_differ, true);
            return err_set(
                err, CKD_E_DEVICE,
                "tensor '%s' as coded by a device does not load to the values that were saved (%.200s): "
                "nothing was committed; save again: later saves with this store handle are coded on the "
                "host",
                b->tensor->name, why.message);
        }
    }
    return CKD_OK;
}
