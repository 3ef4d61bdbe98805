/*
 * Makes and executes the tasks of a load. load_task_make lists the blocks that a request needs. load_task_execute has
 * them decoded into place, and load_task_check finds out if elements are missing.
 *
 * For host memory, the threads call decode/values.c: block_into_span for each block. For a device, device_task.c
 * decodes there the blocks that suit it. The host decodes the rest, and everything if the device fails.
 */
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/load/load.h"

/* ---- the blocks of a task ---- */

ckd_status load_each_block(const view_tensor *t, const region_span *span, load_block_fn visit, void *context,
                           ckd_error *err) {
    ckd_status status = CKD_OK;
    size_t s, last;
    for (view_shards_for(&s, &last, t, span); s < last && status == CKD_OK; s++) {
        size_t first, end;
        view_shard_range(&first, &end, &t->shards[s], t->shape, span);
        for (; first < end && status == CKD_OK; first++) {
            status = visit(context, &t->shards[s].blocks[first], err);
        }
    }
    return status;
}

static ckd_status add_block(void *context, const view_block *b, ckd_error *err) {
    load_task *task = context;
    if (ARRAY_GROW(task->blocks, task->capacity, task->count + 1, "a load's blocks", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    task->blocks[task->count++] = b;
    return CKD_OK;
}

ckd_status load_task_list(load_task *task, ckd_error *err) {
    return load_each_block(task->tensor, &task->span, add_block, task, err);
}

/* ---- in host memory ---- */

ckd_status load_decode_block(ckd_load *load, uint32_t worker, const view_block *b, const span_target *target,
                             uint64_t *copied, ckd_error *err) {
    decoder *d = &load->decoders[worker];
    return load->shared.view && !d->plan ? sibling_cache_scatter(&load->shared, d, b, target, copied, err)
                                         : block_into_span(d, load->view, b, target, copied, err);
}

typedef struct placement {
    ckd_load *load;
    span_target target;
    const view_block *const *blocks;
    uint64_t *copied; /* by block */
} placement;

static ckd_status decode_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    placement *p = context;
    return load_decode_block(p->load, worker, p->blocks[index], &p->target, &p->copied[index], err);
}

/* Decodes the task's blocks from `first` on, up to those done. */
static ckd_status decode_on_host(ckd_load *load, load_task *task, size_t first, ckd_error *err) {
    size_t count = task->done - first;
    placement p = {load, {task->tensor, &task->span, task->to}, task->blocks + first, NULL};
    p.copied = calloc(count + 1, sizeof(*p.copied));
    if (!p.copied) {
        return err_nomem(err, count * sizeof(*p.copied), "a load's blocks");
    }
    float_mode mode = float_mode_enter();
    ckd_status status = pool_run(load->store->pool, count, decode_one, &p, err);
    float_mode_leave(mode);
    for (size_t i = 0; status == CKD_OK && i < count; i++) {
        task->copied += p.copied[i];
    }
    free(p.copied);
    return status;
}

/* ---- tasks ---- */

ckd_status load_task_make(load_task *out, ckd_load *load, const ckd_load_request *q, const view_tensor *t,
                          ckd_error *err) {
    *out = (load_task){.tensor = t};
    ckd_status status = load_span(&out->span, &out->region, q, t, true, err);
    if (status != CKD_OK || out->span.count == 0) {
        return status;
    }
    out->to = q->device ? NULL : q->data;
    status = load_task_list(out, err);
    return status == CKD_OK && q->device ? load_task_find_device(out, load, q, err) : status;
}

ckd_status load_task_check(const load_task *task, ckd_error *err) {
    if (task->done < task->count || task->copied == task->span.count) {
        return CKD_OK;
    }
    return err_set(err, CKD_E_CORRUPT, "the checkpoint holds only %llu of the %llu requested elements",
                   (unsigned long long)task->copied, (unsigned long long)task->span.count);
}

ckd_status load_task_execute(ckd_load *load, load_task *task, size_t count, ckd_error *err) {
    size_t first = task->done;
    device_attempt attempt = {.done = false};
    task->done += count;
    if (count && task->device && !task->to) {
        load_decode_on_device(&attempt, load, task, first);
        return load_task_after_device(load, task, &attempt, err);
    }
    ckd_status status = count ? decode_on_host(load, task, first, err) : CKD_OK;
    return status == CKD_OK ? load_task_check(task, err) : status;
}

ckd_status load_task_after_device(ckd_load *load, load_task *task, const device_attempt *attempt,
                                  ckd_error *err) {
    if (!attempt->done) {
        ckd_status status = load_task_use_host(task, err);
        THEN(status, decode_on_host(load, task, 0, err)); /* earlier blocks included */
        if (status != CKD_OK) {
            return status;
        }
        load_report_attempt(load, task->tensor, attempt);
    }
    return load_task_check(task, err);
}

ckd_status load_task_finish(ckd_load *load, const load_task *task, ckd_error *err) {
    uint64_t size = task->span.count * ckd_dtype_size(task->tensor->tensor->dtype);
    return task->device && task->to
               ? device_write_once(load->store, task->device, task->on_device, task->to, size, err)
               : CKD_OK;
}

void load_task_free(load_task *task) {
    free(task->device ? task->to : NULL);
    free((void *)task->blocks);
    *task = (load_task){.tensor = NULL};
}
