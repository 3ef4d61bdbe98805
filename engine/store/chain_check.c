/* Checks the stored bytes of a chain without decoding it. */
#include <stdlib.h>

#include "engine/store/view.h"

#define CHECK_AGAIN_NS (UINT64_C(3600) * 1000000000)

/* Whether the record was read and intact within the last hour. */
static bool is_known(intact_records *all, uint64_t key) {
    pthread_mutex_lock(&all->mutex);
    uint64_t now = clock_monotonic_ns();
    if (now - all->since_ns > CHECK_AGAIN_NS) {
        free(all->records.slots);
        all->records = (hash_set){.slots = NULL};
        all->since_ns = now;
    }
    bool known = hash_set_has(&all->records, key);
    pthread_mutex_unlock(&all->mutex);
    return known;
}

static ckd_status record_known(intact_records *all, uint64_t key, ckd_error *err) {
    pthread_mutex_lock(&all->mutex);
    ckd_status status = hash_set_add(&all->records, key, err);
    pthread_mutex_unlock(&all->mutex);
    return status;
}

typedef struct chain_reading {
    intact_records *known;
    bytes *payload;
} chain_reading;

/* Reads a record's payload. The payload of a bundled one is covered by its bundle's checksum, not by its own. */
static ckd_status check_payload(void *context, const view *in, const view_block *b, ckd_error *err) {
    const chain_reading *reading = context;
    const chunk *c = b->chunk;
    const record *r = b->record->bundle ? b->record->bundle : b->record;
    uint64_t place[3] = {0, 0, r->offset};
    memcpy(place, c->identity.file.bytes, sizeof(c->identity.file.bytes));
    uint64_t key = hash64(place, sizeof(place));
    (void)in;
    if (r->stored_size == 0 || is_known(reading->known, key)) {
        return CKD_OK;
    }
    void *to = bytes_scratch(reading->payload, r->stored_size, "a payload", err);
    ckd_status status = to ? chunk_read_payload(c, r, to, err) : CKD_E_NOMEM;
    return status == CKD_OK ? record_known(reading->known, key, err) : status;
}

bool chain_is_intact(view_cache *cache, const view_source *from, bytes *scratch) {
    chain_reading reading = {&cache->store->intact, scratch};
    return closure_visit_source(cache, from, check_payload, &reading, NULL) == CKD_OK;
}

bool copy_counts(view_cache *cache, const view *v, const view_block *b, bytes *scratch) {
    chain_reading reading = {&cache->store->intact, scratch};
    return b->materialized && (!cache->copies_need_chains ||
                               closure_visit_block(cache, v, b, check_payload, &reading, NULL) == CKD_OK);
}

bool cached_record_counts(view_cache *cache, const view *v, const view_block *b, bytes *scratch) {
    chain_reading reading = {&cache->store->intact, scratch};
    return !cache->copies_need_chains || check_payload(&reading, v, b, NULL) == CKD_OK;
}
