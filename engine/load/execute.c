/*
 * Executes a task of a load: decodes its blocks, in parallel, into host memory or on the device that they are for. A
 * device decodes what suits it. The host decodes the rest, and everything if the device fails.
 */
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/device/device.h"
#include "engine/load/load.h"

/* ---- the blocks of a task ---- */

ckd_status load_each_block(const view_tensor *t, const region_span *span, load_block_fn visit, void *context,
                           ckd_error *err) {
    ckd_status status = CKD_OK;
    size_t s, last;
    for (view_shards_for(&s, &last, t, span); s < last && status == CKD_OK; s++) {
        size_t first, end;
        view_shard_range(&first, &end, &t->shards[s], &t->shape, span);
        for (; first < end && status == CKD_OK; first++) {
            status = visit(context, &t->shards[s].blocks[first], err);
        }
    }
    return status;
}

static ckd_status add_block(void *context, const view_block *b, ckd_error *err) {
    load_task *task = context;
    if (ARRAY_GROW(task->blocks, task->capacity, task->count + 1, "a load's plan", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    task->blocks[task->count++] = b;
    return CKD_OK;
}

ckd_status load_task_list(load_task *task, ckd_error *err) {
    return load_each_block(task->tensor, &task->span, add_block, task, err);
}

/* ---- in host memory ---- */

ckd_status load_place_block(ckd_load *load, uint32_t worker, const view_block *b, const span_target *target,
                            uint64_t *copied, ckd_error *err) {
    decoder *d = &load->decoders[worker];
    return load->shared.view ? sibling_cache_scatter(&load->shared, d, b, target, copied, err)
                             : block_into_span(d, load->view, b, target, copied, err);
}

typedef struct placement {
    ckd_load *load;
    span_target target;
    const view_block *const *blocks;
    uint64_t *copied; /* by block */
} placement;

static ckd_status place_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    placement *p = context;
    return load_place_block(p->load, worker, p->blocks[index], &p->target, &p->copied[index], err);
}

/* Decodes the task's blocks from `first` on, up to those done. */
static ckd_status decode_on_host(ckd_load *load, load_task *task, size_t first, ckd_error *err) {
    size_t count = task->done - first;
    placement p = {load, {task->tensor, &task->span, task->to}, task->blocks + first, NULL};
    p.copied = calloc(count + 1, sizeof(*p.copied));
    if (!p.copied) {
        return err_nomem(err, count * sizeof(*p.copied), "a load's plan");
    }
    float_mode mode = float_mode_enter();
    ckd_status status = pool_run(load->store->pool, count, place_one, &p, err);
    float_mode_leave(mode);
    for (size_t i = 0; status == CKD_OK && i < count; i++) {
        task->copied += p.copied[i];
    }
    free(p.copied);
    return status;
}

/* ---- on a device ---- */

typedef struct device_task {
    ckd_load *load;
    span_decode span;
} device_task;

/* Whether the device decodes the block, as nothing else needs its values. */
static bool for_device(const device_task *w, const decoder *d, const view_block *b) {
    const ckd_load *load = w->load;
    /* the rounded copy, which the device computes itself */
    uint32_t rounded = load->has_derived[w->span.tensor - load->view->tensors];
    bool once =
        !d->plan || load_plan_uses(d->plan, b->materialized ? b->materialized : b->record) <= 1 + rounded;
    return b->record->count >= DEVICE_MIN_ELEMENTS && once &&
           !(load->shared.view && sibling_cache_has(&load->shared, b));
}

static ckd_status make_chain(void *context, device_chain *c, chain_sides *sides, bool values, uint32_t worker,
                             ckd_error *err) {
    device_task *w = context;
    const view_block *b = c->block;
    decoder *d = &w->load->decoders[worker];
    if (!values && for_device(w, d, b)) {
        ckd_status status = device_chain_make(c, sides, d, w->load->view, err);
        if (status != CKD_OK || c->count) {
            return status;
        }
    }
    uint64_t copied = 0;
    const region_span whole = {b->record->region, b->record->first, b->record->count};
    const span_target target = {w->span.tensor, &whole, device_chain_values(c, err)};
    ckd_status status = target.to ? load_place_block(w->load, worker, b, &target, &copied, err) : CKD_E_NOMEM;
    return status == CKD_OK ? device_chain_filled(c, err) : status;
}

/* NULL: out of memory. The caller frees it. */
static device_task *device_task_of(ckd_load *load, const load_task *task) {
    device_task *w = calloc(1, sizeof(*w));
    if (w) {
        w->load = load;
        w->span.pool = load->store->pool;
        w->span.tensor = task->tensor;
        w->span.span = &task->span;
        w->span.data = task->on_device;
        w->span.make = make_chain;
        w->span.context = w;
        w->span.staging = load->staging;
    }
    return w;
}

/* The outcome on a device. If it is not done, the host decodes instead and reports the error, if there is one. */
typedef struct device_attempt {
    bool done, mismatch; /* mismatch: the device's values are not the ones that were saved */
    ckd_status status;
    ckd_error why;
} device_attempt;

/* Orders the lease's work before later work of the caller's stream, and returns the lease. */
static ckd_status end_lease(ckd_load *load, device_lease *lease, ckd_status status, ckd_error *err) {
    device_failure after = {DEVICE_DONE, "", ""};
    if (status == CKD_OK) {
        lease->backend->stream_after_queue(&lease->queue, lease->stream, &after);
        status = device_status(&after, lease->queue.device, err);
    }
    device_release(load->store, lease);
    return status;
}

/* Decodes the task's blocks from `first` on, up to those done. */
static void decode_on_device(device_attempt *out, ckd_load *load, load_task *task, size_t first) {
    device_task *w = device_task_of(load, task);
    *out = (device_attempt){.status = CKD_OK};
    if (!w) {
        return;
    }
    span_decode *s = &w->span;
    out->status = device_acquire(&s->lease, load->store, task->device, task->on_device, &out->why);
    if (out->status == CKD_OK) {
        out->status = device_decode_span(s, task->blocks + first, task->done - first, &out->why);
        out->mismatch = s->mismatch;
        out->status = end_lease(load, s->lease, s->mismatch ? CKD_E_DEVICE : out->status, &out->why);
    }
    out->done = out->status == CKD_OK;
    task->copied += out->done ? s->copied : 0;
    load->device.decoded += out->done ? s->decoded : 0;
    load->device.sent += out->done ? s->sent : 0;
    free(w);
}

/* Counts and reports that the host decoded after the device failed. */
static void report_attempt(ckd_load *load, const view_tensor *t, const device_attempt *a) {
    load->device.given_up += a->status != CKD_OK;
    if (a->mismatch) {
        store_message(
            load->store,
            "tensor '%s' is decoded on the host, as the device's result does not match its content hash",
            t->tensor->name);
    } else if (a->status == CKD_E_DEVICE || a->status == CKD_E_NOMEM || a->status == CKD_E_UNSUPPORTED) {
        store_message(load->store, "tensor '%s' is decoded on the host, as the device failed: %s",
                      t->tensor->name, a->why.message);
    }
}

/* ---- tasks ---- */

/* Allocates host memory for the whole task, which is finally copied to its device. */
static ckd_status use_host_memory(load_task *task, ckd_error *err) {
    uint64_t size = task->span.count * ckd_dtype_size(task->tensor->tensor->dtype);
    task->to = malloc(size);
    task->copied = 0;
    return task->to ? CKD_OK : err_nomem(err, size, "what is loaded to a device");
}

/* Sets the destination. If no block is better decoded on the device, that is host memory first. */
static ckd_status find_device(load_task *task, ckd_load *load, const ckd_load_request *q, ckd_error *err) {
    ckd_device d = CKD_DEVICE_INIT;
    ckd_status status =
        struct_copy(&d, sizeof(d), q->device, SIZE_UP_TO(ckd_device, stream), "ckd_device", err);
    const device_backend *backend = status == CKD_OK ? device_backend_open(err) : NULL;
    if (!backend) {
        return status == CKD_OK ? CKD_E_DEVICE : status;
    }
    status = device_check_address(backend, d.device, q->data, err);
    if (status != CKD_OK) {
        return status;
    }
    task->device = q->device;
    task->on_device = q->data;
    device_task *w = device_task_of(load, task);
    bool suits = w && device_can_decode_span(&w->span, task->blocks, &task->count);
    free(w);
    return suits ? CKD_OK : use_host_memory(task, err);
}

ckd_status load_task_make(load_task *out, ckd_load *load, const ckd_load_request *q, const view_tensor *t,
                          ckd_error *err) {
    *out = (load_task){.tensor = t};
    ckd_status status = load_span(&out->span, &out->region, q, t, true, err);
    if (status != CKD_OK || out->span.count == 0) {
        return status;
    }
    out->to = q->device ? NULL : q->data;
    status = load_task_list(out, err);
    return status == CKD_OK && q->device ? find_device(out, load, q, err) : status;
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
    ckd_status status = CKD_OK;
    task->done += count;
    if (count && task->device && !task->to) {
        decode_on_device(&attempt, load, task, first);
        if (!attempt.done) { /* the host decodes the whole task, earlier blocks included */
            status = use_host_memory(task, err);
            first = 0;
        }
    }
    if (count && !attempt.done) {
        THEN(status, decode_on_host(load, task, first, err));
    }
    if (status == CKD_OK && !attempt.done) {
        report_attempt(load, task->tensor, &attempt);
    }
    return status == CKD_OK ? load_task_check(task, err) : status;
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
