/* Tensors for device memory: decoded on the device if that pays, else assembled in host memory. */
#include <stdlib.h>

#include "engine/device/span_decode.h"
#include "engine/load/load.h"

typedef struct filling {
    ckd_load *load;
    const view_tensor *tensor;
    span_decode fill;
} filling;

static bool for_device(const filling *w, const decoder *d, const view_block *b) {
    const ckd_load *load = w->load;
    /* the rounded copy, which the device computes itself */
    uint32_t rounded = load->again[w->tensor - load->view->tensors];
    bool once =
        !d->plan || load_plan_uses(d->plan, b->materialized ? b->materialized : b->record) <= 1 + rounded;
    return b->record->count >= DEVICE_MIN_ELEMENTS && once &&
           !(load->shared.view && sibling_cache_has(&load->shared, b));
}

static ckd_status make_one(void *context, device_chain *c, chain_sides *sides, bool values, uint32_t worker,
                           ckd_error *err) {
    filling *w = context;
    const view_block *b = c->block;
    decoder *d = &w->load->decoders[worker];
    if (!values && for_device(w, d, b)) {
        ckd_status status = device_chain_make(c, sides, d, w->load->view, err);
        if (status != CKD_OK || c->count) {
            return status;
        }
    }
    uint64_t copied = 0;
    span own = {b->record->region, b->record->first, b->record->count};
    void *room = device_chain_values(c, err);
    if (!room) {
        return CKD_E_NOMEM;
    }
    ckd_status status = load_scatter_one(w->load, worker, w->tensor, b, &own, room, &copied, err);
    return status == CKD_OK ? device_chain_filled(c, err) : status;
}

bool load_suits_device(const view_tensor *t, const span *want, void *data, load_blocks *list) {
    span_decode *f = calloc(1, sizeof(*f));
    bool suits = false;
    if (f) {
        f->tensor = t;
        f->want = want;
        f->data = data;
        suits = device_can_decode_span(f, list->items, &list->count);
    }
    free(f);
    return suits;
}

void load_decode_there(load_attempt *out, ckd_load *load, device_lease *lease,
                       const load_device_target *there, const view_block **blocks, size_t count,
                       uint64_t *copied) {
    filling *w = calloc(1, sizeof(*w));
    *out = (load_attempt){.status = CKD_OK};
    if (!w) {
        return;
    }
    span_decode *f = &w->fill;
    w->load = load;
    w->tensor = f->tensor = there->tensor;
    f->want = there->want;
    f->data = there->data;
    f->pool = load->store->pool;
    f->lease = lease;
    f->make = make_one;
    f->context = w;
    f->staging = load->staging;
    out->status = device_decode_span(f, blocks, count, &out->why);
    out->bad = f->bad;
    out->done = out->status == CKD_OK && !f->bad;
    *copied += out->done ? f->copied : 0;
    load->device.decoded += out->done ? f->decoded : 0;
    load->device.sent += out->done ? f->sent : 0;
    free(w);
}

static ckd_status assemble_on_host(ckd_load *load, device_lease *lease, const view_tensor *t,
                                   const span *want, const ckd_load_request *q, ckd_error *err) {
    void *host = malloc(q->size);
    ckd_status status = host ? load_scatter_all(load, t, want, host, err)
                             : err_nomem(err, q->size, "what is loaded to a device");
    THEN(status, device_put(lease, q->data, host, q->size, err));
    free(host);
    return status;
}

void load_report_attempt(ckd_load *load, const view_tensor *t, const load_attempt *a) {
    load->device.given_up += a->bad || a->status != CKD_OK;
    if (a->status == CKD_E_DEVICE || a->status == CKD_E_NOMEM || a->status == CKD_E_UNSUPPORTED) {
        store_message(load->store, "tensor '%s' is decoded on the host, as its device cannot: %s",
                      t->tensor->name, a->why.message);
    } else if (a->bad) {
        store_message(load->store,
                      "tensor '%s' is decoded on the host, as its device made of it what was not saved",
                      t->tensor->name);
    }
}

/* If it is not done, the host decodes instead and reports the error, if there is one. */
static void try_there(load_attempt *a, ckd_load *load, device_lease *lease, const load_device_target *there) {
    load_blocks list;
    uint64_t copied = 0;
    *a = (load_attempt){.status = load_list(&list, there->tensor, there->want, &a->why)};
    if (a->status == CKD_OK && load_suits_device(there->tensor, there->want, there->data, &list)) {
        load_decode_there(a, load, lease, there, list.items, list.count, &copied);
        a->status = a->done ? load_check_complete(copied, there->want, &a->why) : a->status;
        a->done = a->done && a->status == CKD_OK;
    }
    free(list.items);
}

ckd_status load_lease_done(ckd_load *load, device_lease *lease, ckd_status status, ckd_error *err) {
    device_failure after = {DEVICE_DONE, "", ""};
    if (status == CKD_OK) {
        lease->backend->queue_before(&lease->queue, lease->stream, &after);
        status = device_status(&after, lease->queue.device, err);
    }
    device_give_back(load->store, lease);
    return status;
}

ckd_status load_scatter_on_device(ckd_load *load, const view_tensor *t, const span *want,
                                  const ckd_load_request *q, ckd_error *err) {
    const load_device_target there = {t, want, q->data};
    device_lease *lease;
    ckd_status status = device_take(&lease, load->store, q->device, q->data, err);
    if (status != CKD_OK) {
        return status;
    }
    load_attempt attempt;
    try_there(&attempt, load, lease, &there);
    if (!attempt.done) {
        status = assemble_on_host(load, lease, t, want, q, err);
        if (status == CKD_OK) {
            load_report_attempt(load, t, &attempt);
        }
    }
    return load_lease_done(load, lease, status, err);
}
