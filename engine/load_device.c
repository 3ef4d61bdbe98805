/* What is to lie on a device: decoded there where that is worth it, or put together in host memory. */
#include <stdlib.h>

#include "engine/device_fill.h"
#include "engine/load.h"

typedef struct filling {
    ckd_load *load;
    const view_tensor *tensor;
    device_fill fill;
} filling;

static bool for_device(const filling *w, const decoder *d, const view_block *b) {
    const ckd_load *load = w->load;
    uint32_t rounded = load->again[w->tensor - load->view->tensors]; /* from it: that is made anew there */
    bool once = !d->plan || load_plan_uses(d->plan, b->ready ? b->ready : b->record) <= 1 + rounded;
    return b->record->count >= DEVICE_FEWEST && once &&
           !(load->shared.view && load_shared_has(&load->shared, b));
}

static ckd_status make_one(void *context, device_chain *c, chain_sides *sides, const view_block *b,
                           bool streams, bool values, uint32_t worker, ckd_error *err) {
    filling *w = context;
    decoder *d = &w->load->decoders[worker];
    if (!values && for_device(w, d, b)) {
        ckd_status status = device_chain_make(c, sides, d, &w->load->views, w->load->view, b, streams, err);
        if (status != CKD_OK || c->count) {
            return status;
        }
    }
    uint64_t copied = 0;
    span own = {b->record->region, b->record->first, b->record->count};
    void *room = device_chain_values(c, b, err);
    if (!room) {
        return CKD_E_NOMEM;
    }
    ckd_status status = load_place_one(w->load, worker, w->tensor, b, &own, room, &copied, err);
    return status == CKD_OK ? device_chain_filled(c, err) : status;
}

/* false in *done: the host is to do it, which says what is wrong, if anything is. */
static ckd_status decode_there(bool *done, filling *w, ckd_error *err) {
    device_fill *f = &w->fill;
    load_blocks list = {NULL, 0, 0};
    ckd_status status = load_list(&list, w->tensor, f->want, err);
    *done = status == CKD_OK && device_fill_suits(f, list.items, &list.count);
    if (*done) {
        status = device_fill_run(f, list.items, list.count, err);
        status = status == CKD_OK && !f->bad ? load_check_complete(f->copied, f->want, err) : status;
        *done = status == CKD_OK && !f->bad;
    }
    free(list.items);
    return status;
}

static ckd_status put_together(ckd_load *load, device_line *line, const view_tensor *t, const span *want,
                               const ckd_load_request *q, ckd_error *err) {
    void *host = malloc(q->size);
    ckd_status status = host ? load_place_all(load, t, want, host, err)
                             : err_nomem(err, q->size, "what is loaded to a device");
    status = status == CKD_OK ? device_put(line, q->data, host, q->size, err) : status;
    free(host);
    return status;
}

/* What the host did instead of the device is told, unless it fails as well: then that is. */
static void tell(ckd_load *load, const view_tensor *t, ckd_status failed, bool bad, const ckd_error *why) {
    load->device.given_up++;
    if (failed == CKD_E_DEVICE || failed == CKD_E_NOMEM || failed == CKD_E_UNSUPPORTED) {
        store_message(load->store, "tensor '%s' is decoded on the host, as its device cannot: %s",
                      t->tensor->name, why->message);
    } else if (bad) {
        store_message(load->store,
                      "tensor '%s' is decoded on the host, as its device made of it what was not saved",
                      t->tensor->name);
    }
}

ckd_status load_place_on_device(ckd_load *load, const view_tensor *t, const span *want,
                                const ckd_load_request *q, ckd_error *err) {
    device_line *line;
    ckd_status status = device_take(&line, load->store, q->device, q->data, err);
    if (status != CKD_OK) {
        return status;
    }
    filling *w = calloc(1, sizeof(*w));
    bool done = false, bad = false;
    ckd_error why = {.status = CKD_OK};
    ckd_status failed = CKD_OK;
    if (w) {
        *w = (filling){.load = load, .tensor = t};
        w->fill = (device_fill){.pool = load->store->pool,
                                .line = line,
                                .tensor = t,
                                .want = want,
                                .data = q->data,
                                .make = make_one,
                                .context = w,
                                .staging = load->staging};
        failed = decode_there(&done, w, &why);
        bad = w->fill.bad;
        load->device.decoded += done ? w->fill.decoded : 0;
        load->device.sent += done ? w->fill.sent : 0;
        free(w);
    }
    if (!done) {
        status = put_together(load, line, t, want, q, err);
        if (status == CKD_OK && (failed != CKD_OK || bad)) {
            tell(load, t, failed, bad, &why);
        }
    }
    device_failure after = {DEVICE_DONE, "", ""};
    if (status == CKD_OK) {
        line->backend->queue_before(&line->queue, line->stream, &after);
        status = device_status(&after, line->queue.device, err);
    }
    device_give_back(load->store, line);
    return status;
}
