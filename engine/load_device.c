/* What is to lie on a device: decoded there where that is worth it, or put together in host memory. */
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/device_chain.h"
#include "engine/load.h"

#define FEWEST \
    (UINT64_C(1) << 14) /* elements of a block: a host has done with fewer before a device has begun */
#define STREAMS_WORTH \
    32u /* dense streams: a device takes as long for one as for many, a host with some threads for about so many */
#define MOST_RUNS 1024u /* stretches of a block that are wanted, of a region that is cut in another way */

typedef struct walk {
    ckd_load *load;
    const view_tensor *tensor;
    const span *want;
    uint8_t *data; /* the device's */
    device_line *line;
    const view_block **blocks; /* of this batch */
    device_chain *chains;
    size_t count;
    chain_sides sides;
    bool streams;
    span_run runs[MOST_RUNS];
    uint64_t copied, decoded, sent; /* elements; blocks */
    bool bad;
} walk;

/* ---- on the host ---- */

static bool for_device(const walk *w, const decoder *d, const view_block *b) {
    const ckd_load *load = w->load;
    uint32_t rounded = load->again[w->tensor - load->view->tensors]; /* from it: that is made anew there */
    bool once = !d->plan || load_plan_uses(d->plan, b->ready ? b->ready : b->record) <= 1 + rounded;
    return b->record->count >= FEWEST && once && !(load->shared.view && load_shared_has(&load->shared, b));
}

static ckd_status make_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    walk *w = context;
    decoder *d = &w->load->decoders[worker];
    device_chain *c = &w->chains[index];
    const view_block *b = w->blocks[index];
    if (for_device(w, d, b)) {
        ckd_status status =
            device_chain_make(c, &w->sides, d, &w->load->views, w->load->view, b, w->streams, err);
        if (status != CKD_OK || c->count) {
            return status;
        }
    }
    uint64_t copied = 0;
    span own = {b->record->region, b->record->first, b->record->count};
    void *values = device_chain_values(c, b, err);
    if (!values) {
        return CKD_E_NOMEM;
    }
    ckd_status status = load_place_one(w->load, worker, w->tensor, b, &own, values, &copied, err);
    return status == CKD_OK ? device_chain_filled(c, err) : status;
}

static ckd_status make_chains(walk *w, ckd_error *err) {
    uint64_t large = 0;
    w->chains = calloc(w->count, sizeof(*w->chains));
    if (!w->chains) {
        return err_nomem(err, w->count * sizeof(*w->chains), "blocks for a device");
    }
    for (size_t i = 0; i < w->count; i++) {
        large += w->blocks[i]->record->count >= FEWEST;
    }
    w->streams = large >= STREAMS_WORTH;
    chain_sides_init(&w->sides);
    float_mode mode = float_mode_enter();
    ckd_status status = pool_run(w->load->store->pool, w->count, make_one, w, err);
    float_mode_leave(mode);
    return status;
}

/* ---- places ---- */

static size_t runs_of(walk *w, const view_block *b) {
    span have = {b->record->region, b->record->first, b->record->count};
    return span_runs(w->runs, MOST_RUNS, &w->tensor->shape, w->want, &have);
}

/* All of it, in one stretch. */
static bool lies_as_it_is(const walk *w, size_t runs, const view_block *b) {
    return runs == 1 && w->runs[0].count == b->record->count;
}

/* Values go to their place at once, or, if they are scattered there, to memory of their own first. */
static ckd_status find_places(walk *w, ckd_error *err) {
    size_t element = ckd_dtype_size(w->tensor->tensor->dtype);
    uint64_t chains = device_chains_memory(w->chains, w->count, &w->sides), apart = 0;
    chains = (chains + 255) / 256 * 256;
    for (int pass = 0; pass < 2; pass++) {
        uint64_t at = chains;
        void *memory = NULL;
        ckd_status status = pass ? device_memory(&memory, w->line, chains + apart, err) : CKD_OK;
        for (size_t i = 0; i < w->count && status == CKD_OK; i++) {
            const view_block *b = w->blocks[i];
            bool whole = lies_as_it_is(w, runs_of(w, b), b);
            w->chains[i].to = whole ? w->data + w->runs[0].to * element : (uint8_t *)memory + at;
            at += whole ? 0 : (b->record->raw_size + 255) / 256 * 256;
        }
        if (status != CKD_OK) {
            return status;
        }
        apart = at - chains;
    }
    return CKD_OK;
}

static ckd_status scatter(walk *w, ckd_error *err) {
    const device_backend *backend = w->line->backend;
    size_t element = ckd_dtype_size(w->tensor->tensor->dtype);
    device_failure why = {DEVICE_DONE, "", ""};
    const device_elements copy = {DEVICE_COPY, CKD_U8, CKD_DTYPE_NONE, NULL};
    bool known = true;
    for (size_t i = 0; i < w->count; i++) {
        size_t runs = runs_of(w, w->blocks[i]);
        bool whole = lies_as_it_is(w, runs, w->blocks[i]);
        device_span spans[DEVICE_SPANS];
        uint32_t n = 0;
        for (size_t j = 0; j < runs; j++) {
            const span_run *r = &w->runs[j];
            w->copied += r->count;
            spans[n++] = (device_span){.to = w->data + r->to * element,
                                       .from = (const uint8_t *)w->chains[i].to + r->from * element,
                                       .n = r->count * element};
            if (!whole && (n == DEVICE_SPANS || j + 1 == runs) && why.result == DEVICE_DONE && known) {
                backend->elements(&w->line->queue, &known, &copy, spans, n, &why);
            }
            n %= DEVICE_SPANS;
        }
    }
    return known ? device_status(&why, w->line->queue.device, err)
                 : err_set(err, CKD_E_UNSUPPORTED, "the device has no operation that copies");
}

/* ---- batches ---- */

static ckd_status run_chains(walk *w, ckd_error *err) {
    ckd_status status = find_places(w, err);
    if (status == CKD_OK) {
        status = device_chains_run(w->line, w->line->memory, w->chains, w->count, &w->sides, err);
    }
    for (size_t i = 0; i < w->count && status == CKD_OK; i++) {
        const device_chain *c = &w->chains[i];
        bool host = c->count == 1 && c->links[0].form == CHAIN_VALUES && !c->links[0].hashed;
        w->decoded += !host;
        w->sent += host;
        w->bad |= c->bad;
    }
    return status == CKD_OK && !w->bad ? scatter(w, err) : status;
}

static ckd_status walk_batch(walk *w, ckd_error *err) {
    ckd_status status = make_chains(w, err);
    status = status == CKD_OK ? run_chains(w, err) : status;
    for (size_t i = 0; w->chains && i < w->count; i++) {
        device_chain_free(&w->chains[i]);
    }
    if (w->chains) {
        chain_sides_free(&w->sides);
    }
    free(w->chains);
    w->chains = NULL;
    return status;
}

/* About what a block takes of the host's memory on its way. */
static uint64_t block_size(const view_block *b) {
    uint64_t raw = b->record->raw_size, most = 64 * raw; /* whatever a damaged file says */
    return raw + (b->record->chain_stored < most ? b->record->chain_stored : most);
}

static ckd_status walk_all(walk *w, const load_blocks *list, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t first = 0, end; first < list->count && status == CKD_OK && !w->bad; first = end) {
        uint64_t size = 0;
        end = first;
        do {
            size += block_size(list->items[end++]);
        } while (end < list->count && size + block_size(list->items[end]) <= w->load->staging);
        w->blocks = list->items + first;
        w->count = end - first;
        status = walk_batch(w, err);
    }
    status = status == CKD_OK && !w->bad ? load_check_complete(w->copied, w->want, err) : status;
    return status == CKD_OK ? device_finish(w->line, err) : status;
}

/* Is there anything that a device does better? Blocks that have nothing of what is wanted leave the list. */
static bool is_for_device(walk *w, load_blocks *list) {
    size_t kept = 0;
    bool any = false;
    for (size_t i = 0; i < list->count; i++) {
        size_t runs = runs_of(w, list->items[i]);
        if (runs > MOST_RUNS) {
            return false;
        }
        any |= runs && list->items[i]->record->count >= FEWEST;
        list->items[kept] = list->items[i];
        kept += runs > 0;
    }
    list->count = kept;
    return any && (uintptr_t)w->data % ckd_dtype_size(w->tensor->tensor->dtype) == 0;
}

/* false in *done: the host is to do it, which says what is wrong, if anything is. *why is set if the device failed. */
static ckd_status decode_there(bool *done, bool *bad, walk *w, ckd_error *err) {
    load_blocks list = {NULL, 0, 0};
    ckd_status status = load_list(&list, w->tensor, w->want, err);
    *done = status == CKD_OK && is_for_device(w, &list);
    if (*done) {
        status = walk_all(w, &list, err);
        *done = status == CKD_OK && !w->bad;
    }
    *bad = w->bad;
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
    walk *w = malloc(sizeof(*w));
    bool done = false, bad = false;
    ckd_error why = {.status = CKD_OK};
    ckd_status failed = CKD_OK;
    if (w) {
        *w = (walk){.load = load, .tensor = t, .want = want, .data = q->data, .line = line};
        failed = decode_there(&done, &bad, w, &why);
        load->device.decoded += done ? w->decoded : 0;
        load->device.sent += done ? w->sent : 0;
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
