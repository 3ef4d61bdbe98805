/* Copies records unchanged from one chunk file to another. */
#include "engine/store/record_copy.h"

#include "engine/store/file_scan.h"

ckd_status chunk_each_record(chunk *c, record_fn each, void *context, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->outer_count && status == CKD_OK; i++) {
        const ckd_id *id = &c->outer[i].tensor->checkpoint;
        const chunk_part *held = NULL;
        bool seen = false;
        for (size_t k = 0; k < i && !seen; k++) {
            seen = id_equal(&c->outer[k].tensor->checkpoint, id);
        }
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status unpacked = seen ? CKD_E_CORRUPT : chunk_part_of(&held, c, id, &why);
        if (unpacked != CKD_OK && unpacked != CKD_E_CORRUPT && unpacked != CKD_E_UNSUPPORTED) {
            status = err_from(err, unpacked, &why);
        }
        for (size_t k = 0; unpacked == CKD_OK && k < held->count && status == CKD_OK; k++) {
            status = each(context, c, &held->records[k], err);
        }
    }
    return status;
}

ckd_status record_copy(record_copier *k, chunk_writer *to, const chunk *c, const record *r, ckd_error *err) {
    record copy = *r;
    ckd_status status = CKD_OK;
    /* Members of a bundle have no checksum of their own, so verify the bundle first. */
    if (r->bundle && r->bundle != k->checked) {
        status = record_read_through(&k->payload, c, r->bundle, err);
        k->checked = status == CKD_OK ? r->bundle : NULL;
    }
    void *room = NULL;
    if (status == CKD_OK) {
        room = bytes_scratch(&k->payload, r->stored_size + 1, "a payload", err);
        status = room ? chunk_read_payload(c, r, room, err) : CKD_E_NOMEM;
    }
    copy.bundle = NULL;
    return status == CKD_OK ? chunk_writer_append(to, &copy, room, err) : status;
}

uint64_t record_hash(const record *r) {
    struct {
        ckd_id checkpoint;
        hash128 content;
        uint64_t name, first, count, stored, kind, coding;
    } key = {r->tensor->checkpoint,
             r->content,
             hash64(r->tensor->name, strlen(r->tensor->name)),
             r->first,
             r->count,
             r->stored_size,
             r->kind,
             (uint64_t)r->predictor << 32 | r->coding};
    return hash64(&key, sizeof(key));
}
