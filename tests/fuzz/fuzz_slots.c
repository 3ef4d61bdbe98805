/*
 * An agent reads a session's layout and its slot, from any bytes. The input has the length of the layout, the layout,
 * and the slot. Items of an accepted layout lie in order in the slot, and do not overlap.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/slots/slots.h"
#include "tests/support/fuzz.h"

enum { SLOT_MAX = 1 << 20 };

static void check_places(const slot_layout *l) {
    uint64_t data = 0, pages = 0;
    for (size_t i = 0; i < l->count; i++) {
        const slot_item *item = &l->items[i];
        if (item->place < data || item->page != pages || item->bytes > l->data_bytes - item->place) {
            abort();
        }
        data = item->place + item->bytes;
        pages += (item->bytes + SLOT_PAGE - 1) / SLOT_PAGE;
        if (slot_layout_find(l, item, i) != item) {
            abort();
        }
    }
    if (pages != l->pages || l->optimizers_at + l->count * sizeof(ckd_optimizer) > l->hashes_at ||
        l->hashes_at + pages * sizeof(uint64_t) > l->data_at || l->data_at + l->data_bytes > l->size) {
        abort();
    }
}

/* Only what has all its hashes is accepted. */
static void try_slot(const slot_layout *l, const uint8_t *data, size_t size) {
    shared_slot s = {.memory = {.fd = -1, .size = l->size}, .layout = l};
    slot_content c;
    s.memory.at = aligned_alloc(4096, (l->size + 4095) / 4096 * 4096);
    if (!s.memory.at) {
        return;
    }
    memset(s.memory.at, 0, l->size);
    memcpy(s.memory.at, data, size < l->size ? size : l->size);
    (void)slot_doubts(&s, &(ckd_id){{0}});
    if (slot_read(&c, &s, NULL) == CKD_OK) {
        (void)slot_verify(&s, &c, NULL);
        slot_content_free(&c);
    }
    free(s.memory.at);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    slot_layout l, again;
    bytes encoded = {.size = 0};
    if (size < 4) {
        return 0;
    }
    size_t length = load_le32(data) < size - 4 ? load_le32(data) : size - 4;
    bytes_put(&encoded, data + 4, length);
    if (slot_layout_read(&l, &encoded, NULL) == CKD_OK) {
        check_places(&l);
        if (l.size <= SLOT_MAX) {
            try_slot(&l, data + 4 + length, size - 4 - length);
        }
        if (slot_layout_make(&again, l.items, l.count, NULL) != CKD_OK || again.data_bytes != l.data_bytes ||
            again.pages != l.pages) {
            abort();
        }
        slot_layout_free(&again);
        slot_layout_free(&l);
    }
    bytes_free(&encoded);
    return 0;
}
