/* What both kinds of places need: limits of a call, bytes of a source, pages of keys. */
#include "objects/backend.h"

#include <stdlib.h>

ckd_status object_call_check(const object_call *call, const char *what, ckd_error *err) {
    if (call->deadline_ns && clock_monotonic_ns() >= call->deadline_ns) {
        return err_set(err, CKD_E_BUSY, "%s did not end before its deadline", what);
    }
    return call->poll ? call->poll(call->context, err) : CKD_OK;
}

const void *object_source_bytes(const object_source *from, uint64_t at, size_t size, bytes *scratch,
                                ckd_error *err) {
    if (!from->file) {
        return size > 0 ? (const uint8_t *)from->data + at : (const uint8_t *)"";
    }
    void *to = bytes_scratch(scratch, size > 0 ? size : 1, "a part of an object", err);
    if (!to || file_read_at(from->file, from->offset + at, to, size, err) != CKD_OK) {
        return NULL;
    }
    return to;
}

ckd_status object_page_add(object_page *page, const char *key, uint64_t size, ckd_error *err) {
    ckd_status status = ARRAY_GROW(page->items, page->capacity, page->count + 1, "keys of objects", err);
    if (status != CKD_OK) {
        return status;
    }
    char *copy = strdup(key);
    if (!copy) {
        return err_nomem(err, strlen(key), "the key of an object");
    }
    page->items[page->count++] = (object_item){copy, size};
    return CKD_OK;
}

void object_page_free(object_page *page) {
    for (size_t i = 0; i < page->count; i++) {
        free(page->items[i].key);
    }
    free(page->items);
    free(page->next);
    *page = (object_page){0};
}
