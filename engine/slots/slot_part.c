/* Stores a rank's part of a state as a checkpoint in a store in memory, and makes a slot from it again. */
#include "engine/slots/slots.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/hash.h"
#include "engine/common/common.h"

/* Blobs of a part, besides the blobs of the session, which are stored under a prefix. */
#define HEAD_BLOB   "ckptdelta.part"
#define LAYOUT_BLOB "ckptdelta.part.layout"
#define BYTES_BLOB  "ckptdelta.part.bytes."

/* ---- names ---- */

void slot_part_run(char out[CKD_RUN_MAX + 1], const char *run, uint32_t rank) {
    char text[2 * sizeof(((hash128 *)0)->bytes) + 1];
    hash128 hash = hash128_of(run, strlen(run));
    for (size_t i = 0; i < sizeof(hash.bytes); i++) {
        snprintf(text + 2 * i, 3, "%02x", hash.bytes[i]);
    }
    snprintf(out, CKD_RUN_MAX + 1, SLOT_PART_PREFIX "%s.%u", text, (unsigned)rank);
}

ckd_id slot_part_id(const ckd_id *checkpoint, uint32_t rank) {
    struct {
        ckd_id checkpoint;
        uint32_t rank;
    } seed;
    ckd_id out;
    memset(&seed, 0, sizeof(seed));
    seed.checkpoint = *checkpoint;
    seed.rank = rank;
    hash128 hash = hash128_of(&seed, sizeof(seed));
    _Static_assert(sizeof(hash.bytes) == sizeof(out.bytes), "an id is as long as a hash");
    memcpy(out.bytes, hash.bytes, sizeof(out.bytes));
    return out;
}

typedef struct name_entry {
    uint64_t hash;
    size_t item;
} name_entry;

static int by_name(const void *a, const void *b) {
    const name_entry *x = a, *y = b;
    return x->hash != y->hash ? (x->hash < y->hash ? -1 : 1) : (x->item > y->item) - (x->item < y->item);
}

/*
 * A rank may have several regions of one tensor. Returns, by item, how many items before it have the same hash of the
 * name; NULL: no memory.
 */
static uint32_t *count_namesakes(const slot_layout *l) {
    uint32_t *out = calloc(l->count + 1, sizeof(*out));
    name_entry *entries = calloc(l->count + 1, sizeof(*entries));
    for (size_t i = 0; out && entries && i < l->count; i++) {
        const char *name = l->items[i].tensor.name;
        entries[i] = (name_entry){hash64(name, strlen(name)), i};
    }
    if (!out || !entries) {
        free(out);
        free(entries);
        return NULL;
    }
    qsort(entries, l->count, sizeof(*entries), by_name);
    for (size_t i = 1; i < l->count; i++) {
        out[entries[i].item] = entries[i].hash == entries[i - 1].hash ? out[entries[i - 1].item] + 1 : 0;
    }
    free(entries);
    return out;
}

/* An item in a part: its region becomes a whole tensor. */
typedef struct part_item {
    char name[CKD_NAME_MAX + 32];
    uint64_t shape[CKD_MAX_DIMS];
    ckd_tensor tensor;
} part_item;

static void describe_item(part_item *out, const slot_layout *l, size_t i, const uint32_t *namesakes) {
    const slot_item *item = &l->items[i];
    const ckd_region *region = &item->tensor.region;
    if (item->is_bytes) {
        snprintf(out->name, sizeof(out->name), BYTES_BLOB "%zu", i);
        return;
    }
    snprintf(out->name, sizeof(out->name), namesakes[i] ? "%s#%u" : "%s", item->tensor.name,
             (unsigned)namesakes[i]);
    out->tensor = item->tensor;
    out->tensor.name = out->name;
    out->tensor.region = (ckd_region){.kind = CKD_REGION_WHOLE};
    if (region->kind == CKD_REGION_BOX) {
        memcpy(out->shape, region->lengths, sizeof(out->shape));
        out->tensor.shape = out->shape;
    } else if (region->kind == CKD_REGION_FLAT) {
        out->tensor.ndim = 1;
        out->shape[0] = region->count;
        out->tensor.shape = out->shape;
    }
}

/* ---- from a slot to a part ---- */

typedef struct part {
    slot_layout layout;
    size_t *from; /* by item: its index in the slot */
    uint32_t *namesakes;
} part;

static void free_part(part *p) {
    slot_layout_free(&p->layout);
    free(p->from);
    free(p->namesakes);
}

/* Chooses the items that this rank writes to a joint checkpoint, in order. */
static ckd_status choose_items(part *out, const slot_layout *whole, const ckd_plan *plan, uint32_t rank,
                               ckd_error *err) {
    slot_item *items = calloc(whole->count + 1, sizeof(*items));
    *out = (part){.from = calloc(whole->count + 1, sizeof(*out->from))};
    size_t count = 0, tensors = 0;
    for (size_t i = 0; items && out->from && i < whole->count; i++) {
        const slot_item *item = &whole->items[i];
        bool mine = item->is_bytes ? rank == 0 : ckd_plan_writes(plan, rank, tensors++) != 0;
        if (mine) {
            out->from[count] = i;
            items[count++] = *item;
        }
    }
    ckd_status status = items && out->from ? slot_layout_make(&out->layout, items, count, err) : CKD_E_NOMEM;
    out->namesakes = status == CKD_OK ? count_namesakes(&out->layout) : NULL;
    free(items);
    return status == CKD_OK && out->namesakes
               ? CKD_OK
               : err_nomem(err, whole->count * sizeof(*items), "a rank's part of a state");
}

static ckd_status save_head(ckd_save *save, const part *p, const slot_peer *who, const slot_content *c,
                            ckd_error *err) {
    bytes head = {.size = 0};
    bytes_put_string(&head, ckd_version());
    bytes_put_u32(&head, SLOT_PROTOCOL);
    bytes_put_u32(&head, who->rank);
    bytes_put_u32(&head, who->world);
    bytes_put_u64(&head, p->layout.count);
    bytes_put(&head, &c->request, sizeof(c->request));
    for (size_t i = 0; i < p->layout.count; i++) {
        bytes_put(&head, &c->optimizers[p->from[i]], sizeof(*c->optimizers));
    }
    ckd_status status = head.failed ? err_nomem(err, head.size, "a rank's part of a state")
                                    : ckd_save_blob(save, HEAD_BLOB, head.data, head.size, err);
    bytes_free(&head);
    THEN(status, ckd_save_blob(save, LAYOUT_BLOB, p->layout.encoded.data, p->layout.encoded.size, err));
    return status;
}

static ckd_status save_items(ckd_save *save, const part *p, const shared_slot *s, const slot_content *c,
                             ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < p->layout.count && status == CKD_OK; i++) {
        part_item as = {.name = ""};
        const slot_item *item = &s->layout->items[p->from[i]];
        const uint8_t *data = slot_data(s) + item->place;
        const ckd_optimizer *optimizer = &c->optimizers[p->from[i]];
        describe_item(&as, &p->layout, i, p->namesakes);
        as.tensor.data = data;
        as.tensor.optimizer =
            c->request.one_step && optimizer->struct_size == sizeof(*optimizer) ? optimizer : NULL;
        status = item->is_bytes ? ckd_save_blob(save, as.name, data, (size_t)item->bytes, err)
                                : ckd_save_tensor(save, &as.tensor, err);
    }
    return status;
}

static ckd_status save_part(ckd_checkpoint *out, ckd_store *store, const slot_part *p, const part *chosen,
                            ckd_error *err) {
    const slot_request *r = &p->content->request;
    char run[CKD_RUN_MAX + 1];
    ckd_save *save = NULL;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    slot_part_run(run, r->run, p->who.rank);
    o.run = run;
    o.step = r->options.step;
    o.checkpoint_id = slot_part_id(&r->options.checkpoint_id, p->who.rank);
    o.codec = r->options.codec;
    o.level = r->options.level;
    o.base = p->base;
    o.max_load_cost = p->max_load_cost;
    store->launch = NULL;
    ckd_status status = ckd_save_begin(&save, store, &o, err);
    if (status != CKD_OK) {
        return status;
    }
    status = save_head(save, chosen, &p->who, p->content, err);
    THEN(status, save_items(save, chosen, p->slot, p->content, err));
    THEN(status, slot_verify(p->slot, p->content, err));
    if (status == CKD_OK) {
        return ckd_save_commit(out, save, err);
    }
    ckd_save_abort(save);
    return status;
}

ckd_status slot_part_save(ckd_checkpoint *out, ckd_store *store, const slot_part *p, ckd_error *err) {
    const slot_request *r = &p->content->request;
    part chosen;
    ckd_id id = slot_part_id(&r->options.checkpoint_id, p->who.rank);
    ckd_status status = store_find_id(out, store, &id, NULL);
    if (status != CKD_OK) {
        status = choose_items(&chosen, p->slot->layout, p->plan, p->who.rank, err);
        THEN(status, save_part(out, store, p, &chosen, err));
        free_part(&chosen);
    }
    if (status == CKD_OK) {
        out->id = r->options.checkpoint_id;
        snprintf(out->run, sizeof(out->run), "%s", r->run);
    }
    return status;
}

uint64_t slot_part_bytes(const slot_part *p) {
    uint64_t sum = 0;
    size_t tensors = 0;
    const slot_layout *l = p->slot->layout;
    for (size_t i = 0; p->plan && i < l->count; i++) {
        bool mine =
            l->items[i].is_bytes ? p->who.rank == 0 : ckd_plan_writes(p->plan, p->who.rank, tensors++) != 0;
        sum += mine ? l->items[i].bytes : 0;
    }
    return p->plan ? sum : l->data_bytes;
}

/* ---- from a part to a slot ---- */

typedef struct part_head {
    uint32_t rank, world;
    uint64_t count;
    slot_request request;
    reader rest; /* the optimizers */
} part_head;

/* *data: the blob that *out points into; the caller frees it. Errors: NOT_FOUND (the checkpoint is no part). */
static ckd_status load_head(part_head *out, void **data, ckd_load *load, ckd_error *err) {
    size_t size;
    char version[32];
    *data = NULL;
    ckd_status status = ckd_load_blob(data, &size, load, HEAD_BLOB, err);
    if (status != CKD_OK) {
        return status;
    }
    reader r = reader_of(*data, size);
    reader_string(&r, version, sizeof(version));
    uint32_t protocol = reader_u32(&r);
    if (r.failed || strcmp(version, ckd_version()) != 0 || protocol != SLOT_PROTOCOL) {
        return err_set(err, CKD_E_UNSUPPORTED, "a part of a state is from another version of ckptdelta");
    }
    out->rank = reader_u32(&r);
    out->world = reader_u32(&r);
    out->count = reader_u64(&r);
    const void *request = reader_take(&r, sizeof(out->request));
    if (!request || out->rank >= out->world || out->world > CKD_WORLD_MAX) {
        return err_set(err, CKD_E_CORRUPT, "a part of a state is malformed");
    }
    memcpy(&out->request, request, sizeof(out->request));
    if (out->request.options.rank != out->rank) {
        return err_set(err, CKD_E_CORRUPT, "a part of a state is malformed");
    }
    out->request.run[sizeof(out->request.run) - 1] = '\0';
    out->rest = r;
    return CKD_OK;
}

ckd_status slot_part_describe(slot_part_info *out, ckd_store *store, const ckd_id *id, ckd_error *err) {
    ckd_load *load = NULL;
    void *data = NULL;
    part_head head;
    ckd_status status = ckd_load_begin(&load, store, id, err);
    if (status != CKD_OK) {
        return status;
    }
    status = load_head(&head, &data, load, err);
    if (status == CKD_OK) {
        *out = (slot_part_info){head.rank, head.world, head.request.options.checkpoint_id, ""};
        snprintf(out->run, sizeof(out->run), "%s", head.request.run);
    }
    ckd_blob_free(data);
    ckd_load_end(load);
    return status;
}

static ckd_status load_layout(slot_layout *out, ckd_load *load, ckd_error *err) {
    void *data;
    size_t size;
    bytes encoded = {.size = 0};
    ckd_status status = ckd_load_blob(&data, &size, load, LAYOUT_BLOB, err);
    if (status != CKD_OK) {
        return status;
    }
    bytes_put(&encoded, data, size);
    ckd_blob_free(data);
    status = encoded.failed ? err_nomem(err, size, "a rank's part of a state")
                            : slot_layout_read(out, &encoded, err);
    bytes_free(&encoded);
    return status;
}

static ckd_status load_bytes(uint8_t *to, uint64_t expected, ckd_load *load, const char *name,
                             ckd_error *err) {
    void *data;
    size_t size;
    ckd_status status = ckd_load_blob(&data, &size, load, name, err);
    if (status != CKD_OK) {
        return status;
    }
    if (size == expected) {
        memcpy(to, data, size);
    } else {
        status =
            err_set(err, CKD_E_CORRUPT, "a part of a state has %zu bytes of '%.100s' instead of %" PRIu64,
                    size, name, expected);
    }
    ckd_blob_free(data);
    return status;
}

static ckd_status load_items(const shared_slot *to, ckd_load *load, ckd_error *err) {
    uint32_t *namesakes = count_namesakes(to->layout);
    ckd_status status =
        namesakes ? CKD_OK
                  : err_nomem(err, to->layout->count * sizeof(*namesakes), "a rank's part of a state");
    for (size_t i = 0; i < to->layout->count && status == CKD_OK; i++) {
        part_item as = {.name = ""};
        const slot_item *item = &to->layout->items[i];
        describe_item(&as, to->layout, i, namesakes);
        if (item->is_bytes) {
            status = load_bytes(slot_data(to) + item->place, item->bytes, load, as.name, err);
            continue;
        }
        ckd_load_request request = CKD_LOAD_REQUEST_INIT;
        request.name = as.name;
        request.dtype = as.tensor.dtype;
        request.ndim = as.tensor.ndim;
        request.shape = as.tensor.shape;
        request.data = slot_data(to) + item->place;
        request.size = (size_t)item->bytes;
        status = ckd_load_tensor(load, &request, err);
    }
    free(namesakes);
    return status;
}

/* Gives the slot its request and optimizers. */
static ckd_status publish(shared_slot *to, part_head *head, ckd_error *err) {
    size_t count = to->layout->count;
    const void *numbers =
        head->count == count ? reader_take(&head->rest, count * sizeof(ckd_optimizer)) : NULL;
    ckd_optimizer *optimizers = calloc(count + 1, sizeof(*optimizers));
    if (!numbers || !optimizers) {
        free(optimizers);
        return numbers ? err_nomem(err, count * sizeof(*optimizers), "a rank's part of a state")
                       : err_set(err, CKD_E_CORRUPT, "a part of a state is malformed");
    }
    memcpy(optimizers, numbers, count * sizeof(*optimizers));
    head->request.newest_ns = 0; /* the store may have changed since */
    slot_publish(to, &head->request, optimizers);
    free(optimizers);
    return CKD_OK;
}

/* Makes memory as an agent does for a session, but mapped with the right to write. */
static ckd_status make_memory(shared_memory *out, uint64_t size, ckd_error *err) {
    shared_memory made = {.at = NULL};
    ckd_status status = shared_memory_make(&made, size, HUGE_PAGES_OFF, err);
    if (status == CKD_OK) {
        status = shared_memory_map(out, local_copy(made.fd), size, true, err);
    }
    shared_memory_release(&made, false);
    return status;
}

ckd_status slot_part_load(shared_slot *out, slot_layout *layout, ckd_store *store, const ckd_id *id,
                          ckd_error *err) {
    ckd_load *load = NULL;
    void *data = NULL;
    part_head head;
    *layout = (slot_layout){.count = 0};
    *out = (shared_slot){.layout = layout};
    ckd_status status = ckd_load_begin(&load, store, id, err);
    if (status != CKD_OK) {
        return status;
    }
    status = load_head(&head, &data, load, err);
    THEN(status, load_layout(layout, load, err));
    THEN(status, make_memory(&out->memory, layout->size, err));
    THEN(status, load_items(out, load, err));
    THEN(status, publish(out, &head, err));
    ckd_blob_free(data);
    ckd_load_end(load);
    if (status != CKD_OK) {
        slot_part_free(out, layout);
    }
    return status;
}

void slot_part_free(shared_slot *slot, slot_layout *layout) {
    shared_memory_release(&slot->memory, false);
    slot_layout_free(layout);
}
