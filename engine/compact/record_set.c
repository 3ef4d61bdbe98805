/* A set of shared records, which readers find by kind and content. */
#include <stdlib.h>

#include "engine/compact/compact.h"

static written_record key_of(const record *r) {
    return (written_record){r->content, r->kind};
}

static bool same(const written_record *a, const written_record *b) {
    return a->kind == b->kind && hash128_equal(&a->content, &b->content);
}

/* The slot of the key, or a free one for it. There is always a free slot. */
static written_record *slot_of(const compact_written *w, const written_record *key) {
    uint64_t at;
    memcpy(&at, &key->content, sizeof(at));
    for (;; at++) {
        written_record *slot = &w->slots[at & (w->capacity - 1)];
        if (!slot->kind || same(slot, key)) {
            return slot;
        }
    }
}

bool compact_written_has(const compact_written *w, const record *r) {
    written_record key = key_of(r);
    return w->count && slot_of(w, &key)->kind;
}

static ckd_status grow(compact_written *w, ckd_error *err) {
    compact_written wider = {.capacity = w->capacity ? 2 * w->capacity : 256, .count = w->count};
    wider.slots = calloc(wider.capacity, sizeof(*wider.slots));
    if (!wider.slots) {
        return err_nomem(err, wider.capacity * sizeof(*wider.slots), "what was written");
    }
    for (size_t i = 0; i < w->capacity; i++) {
        if (w->slots[i].kind) {
            *slot_of(&wider, &w->slots[i]) = w->slots[i];
        }
    }
    free(w->slots);
    *w = wider;
    return CKD_OK;
}

ckd_status compact_written_add(compact_written *w, const record *r, ckd_error *err) {
    written_record key = key_of(r);
    ckd_status status = 2 * (w->count + 1) > w->capacity ? grow(w, err) : CKD_OK;
    if (status == CKD_OK) {
        written_record *slot = slot_of(w, &key);
        w->count += !slot->kind;
        *slot = key;
    }
    return status;
}

void compact_written_free(compact_written *w) {
    free(w->slots);
    *w = (compact_written){.slots = NULL};
}
