/* Finds out which checkpoints read the records of their chains from the same files. Reads indexes, and no payload. */
#include <stdlib.h>

#include "engine/integrity/verify_values.h"

void record_places_free(record_places *p) {
    free(p->records.slots);
    free(p->places.slots);
    *p = (record_places){.records = {0}};
}

typedef struct agreement {
    record_places *known;
    bytes hashes; /* pairs: of a record, and of its place */
    bool agree;
} agreement;

/* A hash of everything by which other records refer to this one. */
static uint64_t identity_hash(const record *r) {
    struct {
        ckd_id checkpoint;
        hash128 content;
        uint64_t name, first, count, kind;
        ckd_region region;
    } key;
    memset(&key, 0, sizeof(key));
    key.checkpoint = r->tensor->checkpoint;
    key.content = r->content;
    key.name = r->tensor->name ? hash64(r->tensor->name, strlen(r->tensor->name)) : 0;
    key.first = r->first;
    key.count = r->count;
    key.kind = r->kind;
    if (r->region) {
        key.region = *r->region;
    }
    return hash64(&key, sizeof(key));
}

static ckd_status look_at(void *context, const view *in, const view_block *b, ckd_error *err) {
    agreement *a = context;
    struct {
        uint64_t record;
        ckd_id file;
    } key;
    memset(&key, 0, sizeof(key));
    key.record = identity_hash(b->record);
    key.file = b->chunk->identity.file;
    const uint64_t hashes[2] = {key.record, hash64(&key, sizeof(key))};
    a->agree = a->agree && in->duplicate_count == 0 && b->record->depth < MAX_SAVE_DEPTH &&
               (!hash_set_has(&a->known->records, hashes[0]) || hash_set_has(&a->known->places, hashes[1]));
    bytes_put(&a->hashes, hashes, sizeof(hashes));
    return a->hashes.failed ? err_nomem(err, a->hashes.size, "the records of a load") : CKD_OK;
}

static ckd_status add_all(record_places *p, const bytes *hashes, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t at = 0; at < hashes->size && status == CKD_OK; at += 2 * sizeof(uint64_t)) {
        uint64_t pair[2];
        memcpy(pair, hashes->data + at, sizeof(pair));
        status = hash_set_add(&p->records, pair[0], err);
        THEN(status, hash_set_add(&p->places, pair[1], err));
    }
    return status;
}

ckd_status record_places_agree(bool *agree, record_places *p, view_cache *views, const ckd_id *checkpoint,
                               ckd_error *err) {
    agreement a = {.known = p, .agree = true};
    const view *root;
    ckd_error why = {.offset = CKD_NO_OFFSET}; /* decoding will find damage and report its place */
    ckd_status status = views_get(&root, views, checkpoint, &why);
    THEN(status, closure_visit(views, root, look_at, &a, &why));
    *agree = status == CKD_OK && a.agree;
    status = status == CKD_E_NOMEM ? err_from(err, status, &why) : CKD_OK;
    if (status == CKD_OK && *agree) {
        status = add_all(p, &a.hashes, err);
    }
    bytes_free(&a.hashes);
    return status;
}
