/*
 * Tasks whose destination is a device. The host prepares the data to send for each block: its chain, or values that the
 * host decoded. The device makes the values of all blocks in their place. If it cannot, the host decodes them all.
 *
 * The tasks of a call are handled in groups. The pool prepares the data of one group while a separate thread has the
 * device work on the previous group, so neither waits for the other.
 */
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/device/device.h"
#include "engine/load/load.h"

/* ---- one task ---- */

typedef struct device_task {
    ckd_load *load;
    span_decode span;
} device_task;

/* Whether the device decodes the block, because nothing else needs its values. */
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
    ckd_status status =
        target.to ? load_decode_block(w->load, worker, b, &target, &copied, err) : CKD_E_NOMEM;
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

/* Records the result for the span. */
static void take_results(ckd_load *load, load_task *task, const span_decode *s, device_attempt *out) {
    out->mismatch = s->mismatch;
    out->done = out->status == CKD_OK && !s->mismatch;
    task->copied += out->done ? s->copied : 0;
    load->device.decoded += out->done ? s->decoded : 0;
    load->device.sent += out->done ? s->sent : 0;
}

void load_decode_on_device(device_attempt *out, ckd_load *load, load_task *task, size_t first) {
    device_task *w = device_task_of(load, task);
    *out = (device_attempt){.status = CKD_OK};
    if (!w) {
        return;
    }
    span_decode *s = &w->span;
    out->status = device_acquire(&s->lease, load->store, task->device, task->on_device, &out->why);
    if (out->status == CKD_OK) {
        out->status = device_decode_span(s, task->blocks + first, task->done - first, &out->why);
        out->status = end_lease(load, s->lease, s->mismatch ? CKD_E_DEVICE : out->status, &out->why);
    }
    take_results(load, task, s, out);
    free(w);
}

void load_report_attempt(ckd_load *load, const view_tensor *t, const device_attempt *a) {
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

ckd_status load_task_use_host(load_task *task, ckd_error *err) {
    uint64_t size = task->span.count * ckd_dtype_size(task->tensor->tensor->dtype);
    task->to = malloc(size);
    task->copied = 0;
    return task->to ? CKD_OK : err_nomem(err, size, "what is loaded to a device");
}

ckd_status load_task_find_device(load_task *task, ckd_load *load, const ckd_load_request *q, ckd_error *err) {
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
    return suits ? CKD_OK : load_task_use_host(task, err);
}

/* ---- groups of tasks ---- */

#define GROUP_TASKS 256u /* at most */

/* A task of a group. It must not move, because its span points into it. */
typedef struct group_task {
    load_task task;
    device_task *work;
    device_attempt attempt;
    pthread_mutex_t mutex; /* guards `attempt` while threads prepare data */
} group_task;

typedef struct device_group {
    group_task *tasks[GROUP_TASKS];
    size_t count, blocks;
    uint64_t size; /* of host memory for what is sent */
} device_group;

/* `filling`: the group that takes tasks. `running`: the group that the device works on, in `thread`. */
struct load_devices {
    ckd_load *load;
    device_group *filling, *running;
    pthread_t thread;
    bool started;
};

static void task_free(group_task *t) {
    if (t->work) {
        span_decode_end(&t->work->span);
    }
    free(t->work);
    load_task_free(&t->task);
    pthread_mutex_destroy(&t->mutex);
    free(t);
}

static void group_clear(device_group *g) {
    for (size_t i = 0; i < g->count; i++) {
        task_free(g->tasks[i]);
    }
    g->count = g->blocks = 0;
    g->size = 0;
}

static void *run_group(void *context) {
    device_group *g = context;
    for (size_t i = 0; i < g->count; i++) {
        group_task *t = g->tasks[i];
        device_attempt *a = &t->attempt;
        span_decode *s = &t->work->span;
        if (a->status == CKD_OK) {
            a->status =
                device_acquire(&s->lease, t->work->load->store, t->task.device, t->task.on_device, &a->why);
            if (a->status == CKD_OK) {
                a->status = span_decode_run(s, &a->why);
                a->status =
                    end_lease(t->work->load, s->lease, s->mismatch ? CKD_E_DEVICE : a->status, &a->why);
            }
        }
        span_decode_end(s);
    }
    return NULL;
}

/* Waits for the group that the device works on. The host takes over tasks that the device could not do. */
static ckd_status end_running(load_devices *d, ckd_error *err) {
    device_group *g = d->running;
    ckd_status status = CKD_OK;
    if (d->started) {
        pthread_join(d->thread, NULL);
    }
    d->started = false;
    for (size_t i = 0; i < g->count && status == CKD_OK; i++) {
        group_task *t = g->tasks[i];
        t->task.done = t->task.count;
        take_results(d->load, &t->task, &t->work->span, &t->attempt);
        status = load_task_after_device(d->load, &t->task, &t->attempt, err);
        THEN(status, load_task_finish(d->load, &t->task, err));
        err_in_tensor(err, status, t->task.tensor->tensor->name);
    }
    group_clear(g);
    return status;
}

/*
 * Prepares a block of the group. A failure fails only the device's attempt: the host then decodes the task's blocks and
 * reports the cause.
 */
static ckd_status make_block(void *context, size_t index, uint32_t worker, ckd_error *err) {
    const device_group *g = context;
    size_t i = 0;
    while (index >= g->tasks[i]->task.count) {
        index -= g->tasks[i++]->task.count;
    }
    group_task *t = g->tasks[i];
    ckd_status status = span_decode_make(&t->work->span, index, worker, err);
    if (status != CKD_OK) {
        pthread_mutex_lock(&t->mutex);
        t->attempt.status = status;
        t->attempt.why = *err;
        pthread_mutex_unlock(&t->mutex);
    }
    return CKD_OK;
}

/* Prepares the data of the group, and hands it to the device once that has finished the previous group. */
static ckd_status start_group(load_devices *d, ckd_error *err) {
    device_group *g = d->filling;
    float_mode mode = float_mode_enter();
    ckd_status status = pool_run(d->load->store->pool, g->blocks, make_block, g, err);
    float_mode_leave(mode);
    THEN(status, end_running(d, err));
    if (status != CKD_OK) {
        return status;
    }
    ckd_error no_thread;
    d->filling = d->running;
    d->running = g;
    d->started = thread_start(&d->thread, run_group, g, &no_thread) == CKD_OK;
    if (!d->started) {
        run_group(g);
    }
    return CKD_OK;
}

ckd_status load_devices_begin(load_devices **out, ckd_load *load, ckd_error *err) {
    load_devices *d = calloc(1, sizeof(*d));
    *out = d;
    if (d) {
        d->load = load;
        d->filling = calloc(1, sizeof(*d->filling));
        d->running = calloc(1, sizeof(*d->running));
    }
    if (!d || !d->filling || !d->running) {
        load_devices_end(d);
        *out = NULL;
        return err_nomem(err, 2 * sizeof(device_group), "a load's blocks");
    }
    return CKD_OK;
}

static uint64_t size_of(const load_task *task) {
    uint64_t size = 0;
    for (size_t i = 0; i < task->count; i++) {
        size += span_decode_size(task->blocks[i]);
    }
    return size;
}

static ckd_status execute_alone(ckd_load *load, load_task *task, ckd_error *err) {
    ckd_status status = load_task_execute(load, task, task->count, err);
    return status == CKD_OK ? load_task_finish(load, task, err) : status;
}

/* Adds the task to the group, which then owns it. */
static ckd_status add_to_group(load_devices *d, group_task *t, ckd_error *err) {
    device_group *g = d->filling;
    uint64_t size = size_of(&t->task), room = d->load->staging / 2;
    ckd_status status = CKD_OK;
    if (g->count == GROUP_TASKS || (g->count && g->size + size > room)) {
        status = start_group(d, err);
        g = d->filling;
    }
    t->work = status == CKD_OK ? device_task_of(d->load, &t->task) : NULL;
    if (status == CKD_OK && !t->work) {
        status = err_nomem(err, sizeof(*t->work), "a load's blocks");
    }
    THEN(status, span_decode_begin(&t->work->span, t->task.blocks, t->task.count, err));
    if (status != CKD_OK) {
        task_free(t);
        return status;
    }
    g->tasks[g->count++] = t;
    g->blocks += t->task.count;
    g->size += size;
    return CKD_OK;
}

ckd_status load_devices_add(load_devices *d, const ckd_load_request *q, const view_tensor *tensor,
                            ckd_error *err) {
    group_task *t = calloc(1, sizeof(*t));
    if (!t) {
        return err_nomem(err, sizeof(*t), "a load's blocks");
    }
    pthread_mutex_init(&t->mutex, NULL);
    ckd_status status = load_task_make(&t->task, d->load, q, tensor, err);
    bool grouped = status == CKD_OK && t->task.count && t->task.device && !t->task.to &&
                   size_of(&t->task) <= d->load->staging / 2;
    if (grouped) {
        return err_in_tensor(err, add_to_group(d, t, err), q->name);
    }
    THEN(status, execute_alone(d->load, &t->task, err));
    task_free(t);
    return err_in_tensor(err, status, q->name);
}

ckd_status load_devices_wait(load_devices *d, ckd_error *err) {
    ckd_status status = d->filling->count ? start_group(d, err) : CKD_OK;
    return status == CKD_OK ? end_running(d, err) : status;
}

void load_devices_end(load_devices *d) {
    if (!d) {
        return;
    }
    if (d->started) {
        pthread_join(d->thread, NULL);
    }
    device_group *const groups[2] = {d->filling, d->running};
    for (int i = 0; i < 2; i++) {
        if (groups[i]) {
            group_clear(groups[i]);
        }
        free(groups[i]);
    }
    free(d);
}
