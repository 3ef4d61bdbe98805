/* A set of 64-bit hashes: open addressing with linear probing. */
#include "engine/common/common.h"

#include <stdlib.h>

static uint64_t *slot_of(uint64_t *slots, size_t capacity, uint64_t hash) {
    for (size_t at = (size_t)hash;; at++) {
        uint64_t *slot = &slots[at & (capacity - 1)];
        if (*slot == 0 || *slot == hash) {
            return slot;
        }
    }
}

bool hash_set_has(const hash_set *s, uint64_t hash) {
    return s->count && *slot_of(s->slots, s->capacity, hash ? hash : 1) != 0;
}

ckd_status hash_set_add(hash_set *s, uint64_t hash, ckd_error *err) {
    if (2 * (s->count + 1) > s->capacity) {
        size_t capacity = s->capacity ? 2 * s->capacity : 256;
        uint64_t *slots = calloc(capacity, sizeof(*slots));
        if (!slots) {
            return err_nomem(err, capacity * sizeof(*slots), "a set of records");
        }
        for (size_t i = 0; i < s->capacity; i++) {
            if (s->slots[i]) {
                *slot_of(slots, capacity, s->slots[i]) = s->slots[i];
            }
        }
        free(s->slots);
        s->slots = slots;
        s->capacity = capacity;
    }
    uint64_t *slot = slot_of(s->slots, s->capacity, hash ? hash : 1);
    s->count += *slot == 0;
    *slot = hash ? hash : 1;
    return CKD_OK;
}
