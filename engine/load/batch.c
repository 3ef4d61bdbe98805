/* Loads several tensors at once. All differences are found before anything is written. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/load/load.h"

/* ---- differences ---- */

void load_differences_free(load_differences *d) {
    for (size_t i = 0; i < d->count; i++) {
        free((char *)d->items[i].tensor);
        free((char *)d->items[i].what);
    }
    free(d->items);
    *d = (load_differences){NULL, 0, 0};
}

static ckd_status add_difference(load_differences *d, ckd_difference kind, const char *tensor,
                                 const ckd_load_request *q, const view_tensor *t, ckd_error *err) {
    if (ARRAY_GROW(d->items, d->capacity, d->count + 1, "a list of differences", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    char description[256];
    load_describe_difference(description, sizeof(description), kind, q, t);
    ckd_load_difference *to = &d->items[d->count++];
    *to = (ckd_load_difference){kind, strdup(tensor), strdup(description)};
    return to->tensor && to->what ? CKD_OK : err_nomem(err, sizeof(description), "a difference");
}

ckd_status load_find_unexpected(load_differences *out, const ckd_load *load, const bool *requested,
                                ckd_error *err) {
    const view *v = load->view;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < v->tensor_count && status == CKD_OK; i++) {
        if (!requested[i]) {
            status = add_difference(out, CKD_DIFFERS_UNEXPECTED, v->tensors[i].tensor->name, NULL, NULL, err);
        }
    }
    return status;
}

ckd_status load_find_differences(load_differences *out, const ckd_load *load,
                                 const ckd_load_request *requests, size_t count, unsigned ignored,
                                 ckd_error *err) {
    const view *v = load->view;
    bool *requested = calloc(v->tensor_count + 1, sizeof(*requested));
    ckd_status status = requested ? CKD_OK : err_nomem(err, v->tensor_count, "a list of tensors");
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        ckd_load_request q = load_request(&requests[i]);
        const view_tensor *t = q.name ? view_find(v, q.name) : NULL;
        ckd_difference kind = load_difference(&q, t);
        if (t) {
            requested[t - v->tensors] = true;
        }
        if (kind) {
            status = add_difference(out, kind, q.name ? q.name : "", &q, t, err);
        }
    }
    if (status == CKD_OK && !(ignored & CKD_DIFFERS_UNEXPECTED)) {
        status = load_find_unexpected(out, load, requested, err);
    }
    free(requested);
    return status;
}

/* ---- all or nothing ---- */

ckd_status load_refuse(const load_differences *d, unsigned allowed, ckd_error *err) {
    const ckd_load_difference *first = NULL;
    size_t count = 0;
    for (size_t i = 0; i < d->count; i++) {
        if (!(d->items[i].kind & allowed)) {
            first = first ? first : &d->items[i];
            count++;
        }
    }
    if (!first) {
        return CKD_OK;
    }
    char more[64] = "";
    if (count > 1) {
        snprintf(more, sizeof(more), "; %zu more tensor%s differ%s", count - 1, count == 2 ? "" : "s",
                 count == 2 ? "s" : "");
    }
    return err_in_tensor(err, err_set(err, CKD_E_MISMATCH, "%s%s", first->what, more), first->tensor);
}

static ckd_status check_sizes(const ckd_load *load, const ckd_load_request *requests, size_t count,
                              ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        ckd_load_request q;
        const view_tensor *t = load_match(&q, load, &requests[i]);
        region_span span;
        ckd_region region;
        ckd_status status = t ? load_span(&span, &region, &q, t, true, err) : CKD_OK;
        if (status != CKD_OK) {
            return err_in_tensor(err, status, q.name);
        }
    }
    return CKD_OK;
}

ckd_status load_check(const ckd_load *load, const ckd_load_request *requests, size_t count, unsigned allowed,
                      ckd_error *err) {
    load_differences differences = {NULL, 0, 0};
    ckd_status status = load_check_requests(load, requests, count, err);
    if (status != CKD_OK) {
        return status;
    }
    status = load_find_differences(&differences, load, requests, count, allowed, err);
    THEN(status, load_refuse(&differences, allowed, err));
    load_differences_free(&differences);
    return status == CKD_OK ? check_sizes(load, requests, count, err) : status;
}

void load_set_plan(ckd_load *load, const load_plan *plan, const payloads *in_memory) {
    for (uint32_t i = 0; i < load->decoder_count; i++) {
        load->decoders[i].plan = plan;
        load->decoders[i].payloads = in_memory;
    }
}

void load_set_known(ckd_load *load, const known_values *known) {
    for (uint32_t i = 0; i < load->decoder_count; i++) {
        load->decoders[i].known = known;
    }
}

/* ---- all tensors ---- */

#define BATCH_TASKS  1024u  /* tensors that are decoded together */
#define BATCH_BLOCKS 16384u /* no tensor is added to a batch that has so many blocks */

typedef struct load_batch {
    ckd_load *load;
    load_task *tasks;
    size_t count, blocks;
    load_devices *devices; /* NULL: no tensor is for a device */
} load_batch;

static ckd_status execute_batch(load_batch *b, ckd_error *err) {
    ckd_status status = load_tasks_execute(b->load, b->tasks, b->count, err);
    for (size_t i = 0; i < b->count; i++) {
        load_task_free(&b->tasks[i]);
    }
    b->count = b->blocks = 0;
    return status;
}

/* Adds a tensor to the batch, or to the tensors for devices. */
static ckd_status add_to_batch(load_batch *b, const ckd_load_request *q, const view_tensor *t,
                               ckd_error *err) {
    if (q->device) {
        ckd_status made = b->devices ? CKD_OK : load_devices_begin(&b->devices, b->load, err);
        return made == CKD_OK ? load_devices_add(b->devices, q, t, err) : made;
    }
    ckd_status status = b->count == BATCH_TASKS || b->blocks >= BATCH_BLOCKS ? execute_batch(b, err) : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    load_task *task = &b->tasks[b->count++];
    status = load_task_make(task, b->load, q, t, err);
    b->blocks += task->count;
    return err_in_tensor(err, status, q->name);
}

static ckd_status load_batches(ckd_load *load, const ckd_load_request *requests, size_t count,
                               ckd_error *err) {
    size_t room = count < BATCH_TASKS ? count : BATCH_TASKS;
    load_batch b = {load, calloc(room + 1, sizeof(*b.tasks)), 0, 0, NULL};
    ckd_status status = b.tasks ? CKD_OK : err_nomem(err, room * sizeof(*b.tasks), "a load's plan");
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        ckd_load_request q;
        const view_tensor *t = load_match(&q, load, &requests[i]);
        q.struct_size = sizeof(q);
        status = t ? add_to_batch(&b, &q, t, err) : CKD_OK;
    }
    THEN(status, execute_batch(&b, err));
    if (b.devices) {
        THEN(status, load_devices_wait(b.devices, err));
    }
    load_devices_end(b.devices);
    for (size_t i = 0; i < b.count; i++) {
        load_task_free(&b.tasks[i]);
    }
    free(b.tasks);
    return status;
}

/* Keeps only values that the plan needs several times. */
static ckd_status load_planned(ckd_load *load, const ckd_load_request *requests, size_t count,
                               ckd_error *err) {
    load_plan *plan;
    ckd_status status = load_plan_make(&plan, load, requests, count, err);
    if (status == CKD_OK) {
        load_plan_announce(plan);
    }
    load_set_plan(load, plan, NULL);
    load_divide_staging(load, load->staging, true);
    THEN(status, load_batches(load, requests, count, err));
    load_set_plan(load, NULL, NULL);
    load_divide_staging(load, load->staging, false);
    load_plan_free(plan);
    return status;
}

ckd_status ckd_load_all(ckd_load *load, const ckd_load_request *requests, size_t count, unsigned allowed,
                        ckd_error *err) {
    ckd_status status = load_check(load, requests, count, allowed, err);
    return status == CKD_OK ? load_planned(load, requests, count, err) : status;
}
