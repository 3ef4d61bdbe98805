/* Reads records through, and copies them unchanged from one chunk file to another. */
#include "engine/store/view.h"

#include <string.h>

#include "codec/common/common.h"

#define READ_AHEAD (256u << 10)

ckd_status chunk_read_in_order(const chunk *c, ckd_error *err) {
    return file_read_ahead(c->file, READ_AHEAD, err);
}

ckd_status record_read_through(bytes *payload, const chunk *c, const record *r, ckd_error *err) {
    ckd_status status = chunk_check_record(c, r, err);
    if (status != CKD_OK) {
        return status;
    }
    bytes_clear(payload);
    void *to = bytes_extend(payload, r->stored_size + 1);
    if (!to) {
        payload->failed = false;
        return err_nomem(err, r->stored_size, "a payload");
    }
    status = chunk_read_payload(c, r, to, err);
    if (status != CKD_OK || r->kind != RECORD_BUNDLE) {
        return status; /* values are verified by hash when they are decoded */
    }
    hash128 content = content_hash(to, r->stored_size);
    return wire_content_matches(&r->content, &content)
               ? CKD_OK
               : err_corrupt(err, file_path(c->file), r->offset,
                             "a bundle does not have the content hash it was written with");
}

ckd_status chunk_each_record(chunk *c, record_fn visit, void *context, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->outer_count && status == CKD_OK; i++) {
        const ckd_id *id = &c->outer[i].tensor->checkpoint;
        const chunk_records *records = NULL;
        bool done = false;
        for (size_t k = 0; k < i && !done; k++) {
            done = id_equal(&c->outer[k].tensor->checkpoint, id);
        }
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status unpacked = done ? CKD_E_CORRUPT : chunk_records_of(&records, c, id, &why);
        if (unpacked != CKD_OK && unpacked != CKD_E_CORRUPT && unpacked != CKD_E_UNSUPPORTED) {
            status = err_from(err, unpacked, &why);
        }
        for (size_t k = 0; unpacked == CKD_OK && k < records->count && status == CKD_OK; k++) {
            status = visit(context, c, &records->records[k], err);
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
    void *payload = NULL;
    if (status == CKD_OK) {
        payload = bytes_scratch(&k->payload, r->stored_size + 1, "a payload", err);
        status = payload ? chunk_read_payload(c, r, payload, err) : CKD_E_NOMEM;
    }
    copy.bundle = NULL;
    return status == CKD_OK ? chunk_writer_append(to, &copy, payload, err) : status;
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
