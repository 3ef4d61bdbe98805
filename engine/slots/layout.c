/* The layout of slots: one process encodes it, and another one decodes it without trusting it. */
#include "engine/slots/slots.h"

#include <stdlib.h>

#include "engine/common/common.h"

#define PLACE_ALIGN 64u /* as in snapshots */
#define PAGE        4096u
#define NO_TEXT     UINT32_MAX

/* Room for the head of a slot. */
#define HEAD_BYTES 8192u

/* One item on the wire. Both ends are of one version, on one machine. */
typedef struct wire_item {
    uint32_t name, weight; /* offsets in the texts; NO_TEXT: no weight */
    uint32_t role, dtype, ndim, is_bytes;
    uint64_t bytes; /* only if is_bytes */
    uint64_t shape[CKD_MAX_DIMS];
    ckd_region region;
} wire_item;

typedef struct wire_head {
    uint64_t count, text_bytes;
} wire_head;

void slot_layout_free(slot_layout *l) {
    bytes_free(&l->encoded);
    free(l->items);
    *l = (slot_layout){.count = 0};
}

static uint64_t aligned(uint64_t at, uint64_t to) {
    return (at + to - 1) & ~(to - 1);
}

/* Gives each item its place. Sums cannot overflow: all sizes together are below SLOT_BYTES_MAX. */
static ckd_status place_items(slot_layout *l, ckd_error *err) {
    l->pages = l->data_bytes = 0;
    for (size_t i = 0; i < l->count; i++) {
        slot_item *item = &l->items[i];
        if (item->bytes > SLOT_BYTES_MAX - l->data_bytes) {
            return err_set(err, CKD_E_INVALID, "a state of more than 2^50 bytes does not fit into an agent");
        }
        item->place = l->data_bytes;
        item->page = l->pages;
        l->data_bytes = aligned(l->data_bytes + item->bytes, PLACE_ALIGN);
        l->pages += (item->bytes + SLOT_PAGE - 1) / SLOT_PAGE;
    }
    l->optimizers_at = HEAD_BYTES;
    l->hashes_at = aligned(l->optimizers_at + l->count * sizeof(ckd_optimizer), PLACE_ALIGN);
    l->data_at = aligned(l->hashes_at + l->pages * sizeof(uint64_t), PAGE);
    l->size = l->data_at + (l->data_bytes ? l->data_bytes : 1);
    return CKD_OK;
}

static uint32_t put_text(bytes *texts, const char *text) {
    uint32_t at = (uint32_t)texts->size;
    bytes_put(texts, text, strlen(text) + 1);
    return at;
}

static void put_item(bytes *to, bytes *texts, const slot_item *item) {
    const ckd_tensor *t = &item->tensor;
    wire_item w;
    memset(&w, 0, sizeof(w)); /* with the padding: equal layouts must have equal bytes */
    w.name = put_text(texts, t->name);
    w.weight = t->weight ? put_text(texts, t->weight) : NO_TEXT;
    w.is_bytes = item->is_bytes;
    if (item->is_bytes) {
        w.bytes = item->bytes;
    } else {
        geometry g;
        w.role = t->role;
        w.dtype = t->dtype;
        w.ndim = t->ndim;
        for (uint32_t d = 0; d < t->ndim; d++) {
            w.shape[d] = t->shape[d];
        }
        if (geometry_init(&g, t->ndim, t->shape)) {
            ckd_region region = region_canonical(&g, &t->region);
            w.region.kind = region.kind;
            memcpy(w.region.offsets, region.offsets, sizeof(region.offsets));
            memcpy(w.region.lengths, region.lengths, sizeof(region.lengths));
            w.region.start = region.start;
            w.region.count = region.count;
        }
    }
    bytes_put(to, &w, sizeof(w));
}

ckd_status slot_layout_make(slot_layout *out, const slot_item *items, size_t count, ckd_error *err) {
    bytes encoded = {.size = 0}, texts = {.size = 0};
    wire_head head = {.count = count};
    *out = (slot_layout){.count = 0};
    if (count > SLOT_ITEMS_MAX) {
        return err_set(err, CKD_E_INVALID, "an agent takes at most %u tensors", SLOT_ITEMS_MAX);
    }
    bytes_put(&encoded, &head, sizeof(head));
    for (size_t i = 0; i < count; i++) {
        put_item(&encoded, &texts, &items[i]);
    }
    head.text_bytes = texts.size;
    bytes_put(&encoded, texts.data, texts.size);
    bool failed = encoded.failed || texts.failed;
    bytes_free(&texts);
    if (failed) {
        bytes_free(&encoded);
        return err_nomem(err, encoded.size, "the description of the state");
    }
    memcpy(encoded.data, &head, sizeof(head));
    return slot_layout_read(out, &encoded, err);
}

static ckd_status malformed(ckd_error *err) {
    return err_set(err, CKD_E_INVALID, "the description of the state is malformed");
}

/* The texts end with a NUL, so a text that begins inside them also ends there. */
static const char *text_at(const char *texts, uint64_t size, uint32_t at) {
    return at < size ? texts + at : NULL;
}

/* The item's texts and shape stay in the encoded bytes. */
static ckd_status read_item(slot_item *out, const wire_item *w, const char *texts, uint64_t text_bytes,
                            ckd_error *err) {
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = text_at(texts, text_bytes, w->name);
    t.weight = w->weight == NO_TEXT ? NULL : text_at(texts, text_bytes, w->weight);
    if (!t.name || (w->weight != NO_TEXT && !t.weight) || w->ndim > CKD_MAX_DIMS ||
        w->role > CKD_ROLE_OTHER || w->is_bytes > 1 || (t.weight && strlen(t.weight) > CKD_NAME_MAX)) {
        return malformed(err);
    }
    *out = (slot_item){.is_bytes = w->is_bytes != 0, .bytes = w->bytes};
    size_t length = strlen(t.name);
    if (w->is_bytes) {
        out->tensor = t;
        return length >= 1 && length <= CKD_NAME_MAX && w->bytes <= CKD_BLOB_MAX ? CKD_OK : malformed(err);
    }
    uint64_t elements;
    t.role = (ckd_role)w->role;
    t.dtype = (ckd_dtype)w->dtype;
    t.ndim = w->ndim;
    t.shape = w->shape;
    t.region = w->region;
    ckd_status status = tensor_check(&elements, &t, err);
    out->tensor = t;
    out->bytes = status == CKD_OK ? elements * ckd_dtype_size(t.dtype) : 0; /* at most 2^43 */
    return status;
}

static ckd_status read_items(slot_layout *l, ckd_error *err) {
    wire_head head;
    uint64_t size = l->encoded.size;
    if (size < sizeof(head)) {
        return malformed(err);
    }
    memcpy(&head, l->encoded.data, sizeof(head));
    size -= sizeof(head);
    if (head.count > SLOT_ITEMS_MAX || head.count * sizeof(wire_item) > size ||
        head.text_bytes != size - head.count * sizeof(wire_item) ||
        (head.count > 0 && (head.text_bytes == 0 || l->encoded.data[l->encoded.size - 1] != 0))) {
        return malformed(err);
    }
    const wire_item *wire = (const wire_item *)(const void *)(l->encoded.data + sizeof(head));
    const char *texts = (const char *)(wire + head.count);
    l->items = calloc((size_t)head.count + 1, sizeof(*l->items));
    if (!l->items) {
        return err_nomem(err, (size_t)head.count * sizeof(*l->items), "the description of the state");
    }
    l->count = (size_t)head.count;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < l->count && status == CKD_OK; i++) {
        status = read_item(&l->items[i], &wire[i], texts, head.text_bytes, err);
    }
    return status;
}

ckd_status slot_layout_read(slot_layout *out, bytes *encoded, ckd_error *err) {
    *out = (slot_layout){.encoded = *encoded};
    *encoded = (bytes){.size = 0};
    ckd_status status = read_items(out, err);
    THEN(status, place_items(out, err));
    if (status != CKD_OK) {
        slot_layout_free(out);
    }
    return status;
}

bool slot_layout_equal(const slot_layout *a, const slot_layout *b) {
    return a->encoded.size == b->encoded.size &&
           memcmp(a->encoded.data, b->encoded.data, a->encoded.size) == 0;
}

static bool same_item(const slot_item *a, const slot_item *b) {
    const ckd_tensor *t = &a->tensor, *u = &b->tensor;
    if (a->is_bytes != b->is_bytes || a->bytes != b->bytes || strcmp(t->name, u->name) != 0) {
        return false;
    }
    if (a->is_bytes) {
        return true;
    }
    geometry g;
    if (t->dtype != u->dtype || t->ndim != u->ndim || !geometry_init(&g, t->ndim, t->shape) ||
        (t->ndim > 0 && memcmp(t->shape, u->shape, t->ndim * sizeof(t->shape[0])) != 0)) {
        return false;
    }
    ckd_region first = region_canonical(&g, &t->region), second = region_canonical(&g, &u->region);
    return region_equal(&first, &second, t->ndim);
}

const slot_item *slot_layout_find(const slot_layout *l, const slot_item *wanted, size_t hint) {
    if (hint < l->count && same_item(&l->items[hint], wanted)) {
        return &l->items[hint];
    }
    for (size_t i = 0; i < l->count; i++) {
        if (same_item(&l->items[i], wanted)) {
            return &l->items[i];
        }
    }
    return NULL;
}
