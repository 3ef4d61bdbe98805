/*
 * References: the last save's values, kept on the device for the next save. They share one limit per store. If the
 * device is short of memory, the limit becomes lower.
 */
#include "engine/device/internal.h"

#include <stdlib.h>

static void reference_free(device_reference *r) {
    const device_backend *backend = device_backend_open(NULL);
    if (backend && r->memory) {
        backend->release(r->device, r->memory);
    }
    free(r->tensor);
    free(r);
}

static bool is_of(const device_reference *r, int device, const device_reference_key *key) {
    return r->device == device && r->dtype == key->dtype && r->first == key->span.first &&
           r->count == key->span.count && region_equal(&r->region, key->span.region, key->ndim) &&
           strcmp(r->tensor, key->tensor) == 0;
}

static uint64_t size_of(const device_reference *r) {
    return r->count * ckd_dtype_size(r->dtype);
}

device_reference *device_reference_acquire(ckd_store *store, int device, const device_reference_key *key) {
    pthread_mutex_lock(&store->mutex);
    device_reference **at = &store->references;
    while (*at && !is_of(*at, device, key)) {
        at = &(*at)->next;
    }
    device_reference *found = *at;
    if (found) {
        *at = found->next;
    }
    pthread_mutex_unlock(&store->mutex);
    return found;
}

void device_reference_release(ckd_store *store, device_reference *reference) {
    if (reference) {
        pthread_mutex_lock(&store->mutex);
        reference->next = store->references;
        store->references = reference;
        pthread_mutex_unlock(&store->mutex);
    }
}

/* Takes `size` bytes of the store's limit, if that many are left. */
static bool reserve(ckd_store *store, uint64_t size) {
    pthread_mutex_lock(&store->mutex);
    uint64_t used = store->device_references_held + store->device_references_refused;
    bool fits = size <= store->device_reference_bytes && used <= store->device_reference_bytes - size;
    store->device_references_held += fits ? size : 0;
    pthread_mutex_unlock(&store->mutex);
    return fits;
}

/*
 * Returns `size` bytes to the store's limit. refused: the device does not have them. Then the limit becomes lower by as
 * much, so that later saves do not try them again.
 */
static void unreserve(ckd_store *store, uint64_t size, bool refused) {
    pthread_mutex_lock(&store->mutex);
    store->device_references_held -= size;
    store->device_references_refused += refused ? size : 0;
    pthread_mutex_unlock(&store->mutex);
}

/* Returns NULL without memory; *refused if it is the device that has none. */
static device_reference *reference_new(bool *refused, const device_lease *lease,
                                       const device_reference_key *key) {
    device_failure why = {DEVICE_DONE, "", ""};
    device_reference *r = calloc(1, sizeof(*r));
    *refused = false;
    if (!r) {
        return NULL;
    }
    *r = (device_reference){.device = lease->queue.device,
                            .dtype = key->dtype,
                            .tensor = strdup(key->tensor),
                            .region = *key->span.region,
                            .first = key->span.first,
                            .count = key->span.count};
    *refused = r->tensor && lease->backend->allocate(&r->memory, r->device, size_of(r), &why) != DEVICE_DONE;
    if (!r->tensor || *refused) {
        r->memory = NULL;
        reference_free(r);
        return NULL;
    }
    return r;
}

ckd_status device_reference_keep(device_reference **reference, ckd_store *store, device_lease *lease,
                                 const device_reference_key *key, const void *values, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    uint64_t size = key->span.count * ckd_dtype_size(key->dtype);
    if (!*reference) {
        *reference = device_reference_acquire(store, lease->queue.device, key); /* replaces an older one */
    }
    if (!*reference && reserve(store, size)) {
        bool refused;
        *reference = reference_new(&refused, lease, key);
        if (!*reference) {
            unreserve(store, size, refused);
        }
    }
    if (!*reference) {
        return CKD_OK;
    }
    lease->backend->copy(&lease->queue, (*reference)->memory, values, size, DEVICE_ON_DEVICE, &why);
    ckd_status status = device_status(&why, lease->queue.device, err);
    return status == CKD_OK ? device_finish(lease, err) : status;
}

void device_references_close(ckd_store *store) {
    while (store->references) {
        device_reference *r = store->references;
        store->references = r->next;
        reference_free(r);
    }
}
