/*
 * Leases of queues, and the bytes that pass between host and device: reads, writes, hashes. A released lease stays with
 * the store, so the next caller finds its queue and memory ready.
 */
#include "engine/device/internal.h"

#include <stdlib.h>

ckd_status ckd_device_check(int device, ckd_error *err) {
    const device_backend *backend = device_backend_open(err);
    if (!backend) {
        return CKD_E_DEVICE;
    }
    device_failure why = {DEVICE_DONE, "", ""};
    device_info about;
    int devices = 0;
    if (backend->count(&devices, &why) != DEVICE_DONE) {
        return device_status(&why, device, err);
    }
    if (device < 0 || device >= devices) {
        return err_set(err, CKD_E_DEVICE, "there is no device %d; the number of devices is %d", device,
                       devices);
    }
    backend->describe(&about, device, &why);
    return device_status(&why, device, err);
}

/* ---- leases ---- */

static void lease_free(device_lease *lease) {
    lease->backend->release(lease->queue.device, lease->memory);
    for (int i = 0; i < 2; i++) {
        lease->backend->release_pinned(lease->queue.device, lease->pinned[i]);
    }
    lease->backend->queue_close(&lease->queue);
    free(lease);
}

static ckd_status lease_new(device_lease **out, int device, ckd_error *err) {
    const device_backend *backend = device_backend_open(err);
    device_lease *lease = backend ? calloc(1, sizeof(*lease)) : NULL;
    if (!lease) {
        return backend ? err_nomem(err, sizeof(*lease), "a device's queue") : CKD_E_DEVICE;
    }
    lease->backend = backend;
    device_failure why = {DEVICE_DONE, "", ""};
    device_result result = backend->queue_open(&lease->queue, device, true, &why);
    if (result != DEVICE_DONE) {
        free(lease);
        return device_status(&why, device, err);
    }
    for (int i = 0; i < 2 && result == DEVICE_DONE; i++) {
        result = backend->allocate_pinned(&lease->pinned[i], device, DEVICE_STAGE, &why);
    }
    if (result != DEVICE_DONE) {
        lease_free(lease);
        return device_status(&why, device, err);
    }
    *out = lease;
    return CKD_OK;
}

static device_lease *idle_lease(ckd_store *store, int device) {
    pthread_mutex_lock(&store->mutex);
    device_lease **at = &store->devices;
    while (*at && (*at)->queue.device != device) {
        at = &(*at)->next;
    }
    device_lease *lease = *at;
    if (lease) {
        *at = lease->next;
    }
    pthread_mutex_unlock(&store->mutex);
    return lease;
}

ckd_status device_check_address(const device_backend *backend, int device, const void *address,
                                ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    int owner = -1;
    if (backend->owner(&owner, address, &why) != DEVICE_DONE) {
        return device_status(&why, device, err);
    }
    if (owner == device) {
        return CKD_OK;
    }
    return owner < 0 ? err_set(err, CKD_E_INVALID,
                               "data was declared to be on device %d, but is in host memory", device)
                     : err_set(err, CKD_E_INVALID,
                               "data was declared to be on device %d, but is on device %d", device, owner);
}

ckd_status device_acquire(device_lease **out, ckd_store *store, const ckd_device *device, const void *address,
                          ckd_error *err) {
    ckd_device d = CKD_DEVICE_INIT;
    ckd_status status = struct_copy(&d, sizeof(d), device, SIZE_UP_TO(ckd_device, stream), "ckd_device", err);
    if (status != CKD_OK) {
        return status;
    }
    device_lease *lease = idle_lease(store, d.device);
    status = lease ? CKD_OK : lease_new(&lease, d.device, err);
    if (status != CKD_OK) {
        return status;
    }
    lease->stream = d.stream;
    device_failure why = {DEVICE_DONE, "", ""};
    status = device_check_address(lease->backend, d.device, address, err);
    if (status == CKD_OK &&
        lease->backend->queue_after_stream(&lease->queue, d.stream, &why) != DEVICE_DONE) {
        status = device_status(&why, d.device, err);
    }
    if (status != CKD_OK) {
        lease_free(lease); /* not used again after a failure */
        return status;
    }
    *out = lease;
    return CKD_OK;
}

void device_release_idle(ckd_store *store, device_lease *lease) {
    pthread_mutex_lock(&store->mutex);
    lease->next = store->devices;
    store->devices = lease;
    pthread_mutex_unlock(&store->mutex);
}

void device_release(ckd_store *store, device_lease *lease) {
    ckd_error err;
    if (!lease) {
        return;
    }
    if (device_finish(lease, &err) != CKD_OK) {
        lease_free(lease); /* the next user gets a new lease */
        return;
    }
    device_release_idle(store, lease);
}

void device_leases_close(ckd_store *store) {
    while (store->devices) {
        device_lease *lease = store->devices;
        store->devices = lease->next;
        lease_free(lease);
    }
}

void device_leases_trim(ckd_store *store) {
    pthread_mutex_lock(&store->mutex);
    device_lease *idle = store->devices;
    store->devices = NULL;
    pthread_mutex_unlock(&store->mutex);
    while (idle) {
        device_lease *lease = idle;
        idle = lease->next;
        lease->backend->release(lease->queue.device, lease->memory);
        lease->memory = NULL;
        lease->memory_size = 0;
        device_release_idle(store, lease);
    }
}

ckd_status device_finish(const device_lease *lease, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    lease->backend->finish(&lease->queue, &why);
    return device_status(&why, lease->queue.device, err);
}

/* ---- from a device ---- */

device_reader device_reader_of(device_lease *lease, const void *data, size_t element, uint64_t elements) {
    return (device_reader){.lease = lease,
                           .data = data,
                           .element = element,
                           .elements = elements,
                           .end = elements,
                           .width = elements,
                           .stride = elements};
}

device_reader device_reader_columns(const device_reader *whole, uint64_t first, uint64_t width,
                                    uint64_t columns) {
    uint64_t elements = whole->elements / columns * width;
    return (device_reader){.lease = whole->lease,
                           .data = whole->data + first * whole->element,
                           .parent_values =
                               whole->parent_values ? whole->parent_values + first * whole->element : NULL,
                           .element = whole->element,
                           .elements = elements,
                           .end = elements,
                           .width = width,
                           .stride = columns};
}

/* The source of a reader's elements, and how they are copied. */
typedef struct element_copy {
    const uint8_t *data; /* the first element of the region */
    uint64_t first, count;
    device_direction direction;
} element_copy;

/* Copies whole rows at once. A part of a row takes a copy of its own. */
static ckd_status copy_elements(const device_reader *r, const element_copy *copy, uint8_t *to,
                                ckd_error *err) {
    const device_lease *lease = r->lease;
    uint64_t first = copy->first, count = copy->count;
    device_failure why = {DEVICE_DONE, "", ""};
    device_result result = DEVICE_DONE;
    while (count && result == DEVICE_DONE) {
        uint64_t row = first / r->width, column = first % r->width, left = r->width - column;
        uint64_t rows = column == 0 ? count / r->width : 0, n = rows           ? rows * r->width
                                                                : left < count ? left
                                                                               : count;
        const uint8_t *from = copy->data + (row * r->stride + column) * r->element;
        result =
            rows ? lease->backend->copy_rows(&lease->queue,
                                             &(device_rows){to, from, r->width * r->element,
                                                            r->stride * r->element, rows, copy->direction, 0},
                                             &why)
                 : lease->backend->copy(&lease->queue, to, from, n * r->element, copy->direction, &why);
        to += n * r->element;
        first += n;
        count -= n;
    }
    return device_status(&why, lease->queue.device, err);
}

ckd_status device_gather(const device_reader *r, void *to, uint64_t first, uint64_t count, ckd_error *err) {
    return copy_elements(r, &(element_copy){r->data, first, count, DEVICE_ON_DEVICE}, to, err);
}

ckd_status device_gather_before(const device_reader *r, void *to, uint64_t first, uint64_t count,
                                ckd_error *err) {
    return copy_elements(r, &(element_copy){r->parent_values, first, count, DEVICE_ON_DEVICE}, to, err);
}

/* Starts to read as much as fits from `first` on, into the buffer that is not current. */
static ckd_status prefetch(device_reader *r, uint64_t first, ckd_error *err) {
    uint64_t max = DEVICE_STAGE / r->element, left = r->end - first, n = left < max ? left : max;
    r->buffer[!r->current].first = first;
    r->buffer[!r->current].count = n;
    return copy_elements(r, &(element_copy){r->data, first, n, DEVICE_TO_HOST}, r->lease->pinned[!r->current],
                         err);
}

/* Makes the buffer that begins with element `first` current, and starts to read the next one. */
static ckd_status turn_to(device_reader *r, uint64_t first, ckd_error *err) {
    bool foreseen = r->buffer[!r->current].count && r->buffer[!r->current].first == first;
    ckd_status status = foreseen ? CKD_OK : prefetch(r, first, err);
    THEN(status, device_finish(r->lease, err));
    if (status != CKD_OK) {
        return status;
    }
    r->current = !r->current;
    uint64_t next = first + r->buffer[r->current].count;
    r->buffer[!r->current].count = 0;
    return next < r->end ? prefetch(r, next, err) : CKD_OK;
}

ckd_status device_read(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    device_reader *r = context;
    uint8_t *out = to;
    if (r->lease->reader != r) { /* another reader has used the pinned memory meanwhile */
        r->buffer[0].count = r->buffer[1].count = 0;
        r->lease->reader = r;
    }
    while (count) {
        uint64_t begin = r->buffer[r->current].first, n = r->buffer[r->current].count;
        if (first < begin || first >= begin + n) {
            ckd_status status = turn_to(r, first, err);
            if (status != CKD_OK) {
                return status;
            }
            begin = first;
            n = r->buffer[r->current].count;
        }
        n = begin + n - first < count ? begin + n - first : count;
        memcpy(out, (const uint8_t *)r->lease->pinned[r->current] + (first - begin) * r->element,
               n * r->element);
        out += n * r->element;
        first += n;
        count -= n;
    }
    return CKD_OK;
}

ckd_status device_read_small(const void **values, device_lease *lease, const void *from, uint64_t size,
                             ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    *values = lease->pinned[0];
    lease->reader = NULL;
    if (lease->backend->copy(&lease->queue, lease->pinned[0], from, size, DEVICE_TO_HOST, &why) ==
        DEVICE_DONE) {
        lease->backend->finish(&lease->queue, &why);
    }
    return device_status(&why, lease->queue.device, err);
}

/* ---- to a device, and back ---- */

device_putting device_put_begin(device_lease *lease, void *to) {
    device_putting p = {.lease = lease, .to = to, .why = {DEVICE_DONE, "", ""}};
    lease->backend->finish(&lease->queue, &p.why); /* reading ahead may be under way */
    lease->reader = NULL;
    return p;
}

/* Sends the filled buffer of pinned memory. The other one is then free. */
static void send_stage(device_putting *p) {
    const device_backend *backend = p->lease->backend;
    const device_queue *queue = &p->lease->queue;
    if (p->filled && p->why.result == DEVICE_DONE && backend->finish(queue, &p->why) == DEVICE_DONE) {
        backend->copy(queue, p->to, p->lease->pinned[p->stage], p->filled, DEVICE_TO_DEVICE, &p->why);
    }
    p->to += p->filled;
    p->filled = 0;
    p->stage = !p->stage;
}

void device_put_add(device_putting *p, const void *from, uint64_t size) {
    for (uint64_t n; size && p->why.result == DEVICE_DONE; size -= n) {
        n = size < DEVICE_STAGE - p->filled ? size : DEVICE_STAGE - p->filled;
        if (from) {
            memcpy((uint8_t *)p->lease->pinned[p->stage] + p->filled, from, n);
            from = (const uint8_t *)from + n;
        }
        p->filled += n;
        if (p->filled == DEVICE_STAGE) {
            send_stage(p);
        }
    }
}

ckd_status device_put_end(device_putting *p, ckd_error *err) {
    send_stage(p);
    if (p->why.result == DEVICE_DONE) {
        p->lease->backend->finish(&p->lease->queue, &p->why);
    }
    return device_status(&p->why, p->lease->queue.device, err);
}

ckd_status device_put(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err) {
    device_putting p = device_put_begin(lease, to);
    device_put_add(&p, from, size);
    return device_put_end(&p, err);
}

ckd_status device_get(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err) {
    device_reader all = device_reader_of(lease, from, 1, size);
    ckd_status status = device_read(&all, 0, size, to, err);
    lease->reader = NULL;
    return status;
}

/* ---- hashes ---- */

ckd_status device_hash(hash128 *out, device_lease *lease, device_hash_span *stretches, size_t count,
                       uint64_t *to, ckd_error *err) {
    uint64_t pages = 0;
    device_failure why = {DEVICE_DONE, "", ""};
    for (size_t i = 0; i < count; i++) {
        stretches[i].to = to + pages;
        pages += device_hash_pages_of(stretches[i].bytes);
    }
    uint64_t *host = malloc(pages * sizeof(*host) + 1);
    if (!host) {
        return err_nomem(err, pages * sizeof(*host), "hashes of what a device has");
    }
    for (size_t i = 0; i < count && why.result == DEVICE_DONE; i += DEVICE_SPANS) {
        uint32_t n = count - i < DEVICE_SPANS ? (uint32_t)(count - i) : DEVICE_SPANS;
        lease->backend->hash(&lease->queue, stretches + i, n, &why);
    }
    ckd_status status = device_status(&why, lease->queue.device, err);
    THEN(status, device_get(lease, host, to, pages * sizeof(*host), err));
    for (size_t i = 0, at = 0; i < count && status == CKD_OK; i++) {
        uint64_t n = device_hash_pages_of(stretches[i].bytes);
        out[i] = hash128_of(host + at, n * sizeof(*host)); /* little-endian, as on the device */
        at += n;
    }
    free(host);
    return status;
}

ckd_status device_write(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    ckd_status status = device_put(lease, to, from, size, err);
    if (status == CKD_OK) {
        lease->backend->stream_after_queue(&lease->queue, lease->stream, &why);
        status = device_status(&why, lease->queue.device, err);
    }
    return status;
}

ckd_status device_write_once(ckd_store *store, const ckd_device *device, void *to, const void *from,
                             uint64_t size, ckd_error *err) {
    device_lease *lease;
    ckd_status status = device_acquire(&lease, store, device, to, err);
    if (status == CKD_OK) {
        status = device_write(lease, to, from, size, err);
        device_release(store, lease);
    }
    return status;
}

/* ---- memory ---- */

ckd_status device_memory(void **out, device_lease *lease, uint64_t size, ckd_error *err) {
    device_failure why = {DEVICE_DONE, "", ""};
    if (lease->memory_size < size) {
        lease->backend->release(lease->queue.device, lease->memory);
        lease->memory = NULL;
        lease->memory_size = 0;
        if (lease->backend->allocate(&lease->memory, lease->queue.device, size, &why) == DEVICE_DONE) {
            lease->memory_size = size;
        }
    }
    *out = lease->memory;
    return device_status(&why, lease->queue.device, err);
}
