/* What a store is told to keep: pins and tags. codec/FORMAT.md, "Pin", "Tag". */
#include "codec/note_wire.h"

void pin_encode(bytes *to, const ckd_id *store, const pin_note *p) {
    size_t start = note_begin(to, NOTE_PIN, store, p->generation, 0);
    wire_put_id(to, &p->checkpoint);
    bytes_put_u64(to, p->pinned_ns);
    bytes_put_string(to, p->reason);
    note_end(to, start);
}

ckd_status pin_decode(pin_note *out, const ckd_id *store, const void *data, size_t size, const char *path,
                      ckd_error *err) {
    note_in n;
    *out = (pin_note){0};
    ckd_status status = note_open(&n, NOTE_PIN, store, data, size, path, err);
    if (status != CKD_OK) {
        return status;
    }
    out->generation = n.generation;
    out->checkpoint = note_take_id(&n);
    out->pinned_ns = reader_u64(&n.in);
    reader_string(&n.in, out->reason, sizeof(out->reason));
    status = note_close(&n);
    if (status != CKD_OK) {
        *out = (pin_note){0};
    }
    return status;
}

void tag_encode(bytes *to, const ckd_id *store, const tag_note *t) {
    size_t start = note_begin(to, NOTE_TAG, store, t->generation, 0);
    bytes_put_string(to, t->tag);
    wire_put_id(to, &t->checkpoint);
    bytes_put_u64(to, t->tagged_ns);
    note_end(to, start);
}

ckd_status tag_decode(tag_note *out, const ckd_id *store, const void *data, size_t size, const char *path,
                      ckd_error *err) {
    note_in n;
    *out = (tag_note){0};
    ckd_status status = note_open(&n, NOTE_TAG, store, data, size, path, err);
    if (status != CKD_OK) {
        return status;
    }
    out->generation = n.generation;
    note_take_tag(&n, out->tag);
    out->checkpoint = note_take_id(&n);
    out->tagged_ns = reader_u64(&n.in);
    status = note_close(&n);
    if (status != CKD_OK) {
        *out = (tag_note){0};
    }
    return status;
}
