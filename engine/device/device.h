/*
 * Devices as the engine uses them. A lease is a queue, ordered after and before the work on the caller's
 * stream, with two pieces of pinned memory. Values travel through one piece while the other is worked on.
 * Internal to engine/.
 */
#ifndef ENGINE_DEVICE_H
#define ENGINE_DEVICE_H

#include "engine/store/store.h"
#include "kernels/device_open.h"

#define DEVICE_STAGE (UINT64_C(8) << 20) /* bytes of a piece of pinned memory */
#define DEVICE_MIN_ELEMENTS \
    (UINT64_C(1) << 14) /* elements: the host finishes fewer before a device has even started */

typedef struct device_lease {
    struct device_lease *next;
    const device_backend *backend;
    device_queue queue;
    void *stream; /* the stream of the lease's current user */
    void *pinned[2];
    const void *reader; /* whose elements are in `pinned`; NULL: nobody's */
    void *memory;       /* device memory for the current user; kept for the next one */
    uint64_t memory_size;
} device_lease;

/*
 * Takes an unused lease or opens a new one; device_give_back returns it. `device` names the device. Work that
 * is on its stream now comes before all work on the lease's queue. address: memory to be read or written,
 * which must belong to the device. Errors: INVALID (the address belongs to the host, or to another device),
 * DEVICE, NOMEM.
 */
ckd_status device_take(device_lease **out, ckd_store *store, const ckd_device *device, const void *address,
                       ckd_error *err);
/*
 * Checks that the address belongs to the device. Errors: INVALID (it belongs to the host, or to another
 * device), DEVICE.
 */
ckd_status device_check_address(const device_backend *backend, int device, const void *address,
                                ckd_error *err);
void device_give_back(ckd_store *store, device_lease *lease);
/* Gives back a lease whose queue holds no work that was not waited for. */
void device_give_back_idle(ckd_store *store, device_lease *lease);
/* Closes the leases of a store that is being closed. */
void device_leases_close(ckd_store *store);

/* Waits for all work on the queue. */
ckd_status device_finish(const device_lease *lease, ckd_error *err);

/* Reads a tensor's region in device memory from beginning to end. The next piece is always on its way. */
typedef struct device_reader {
    device_lease *lease;
    const uint8_t *data;
    /* The same elements of the parent, in the same layout, if the device may have them; else NULL. */
    const uint8_t *before;
    size_t element;
    uint64_t elements; /* of the region, or of some of its columns */
    uint64_t end;      /* limit of reading ahead; no read goes beyond it */
    /* A row has `width` elements, and rows begin `stride` elements apart. width = elements: contiguous. */
    uint64_t width, stride;
    struct {
        uint64_t first, count;
    } piece[2]; /* contents of lease->pinned; the piece that is not current may be on its way */
    int current;
} device_reader;
device_reader device_reader_of(device_lease *lease, const void *data, size_t element, uint64_t elements);
/* Makes a reader of `width` columns from `first` on, in rows of `columns`, for all rows of `whole`. */
device_reader device_reader_columns(const device_reader *whole, uint64_t first, uint64_t width,
                                    uint64_t columns);
/* Queues a copy of `count` elements from `first` on to contiguous memory elsewhere on the device. */
ckd_status device_gather(const device_reader *r, void *to, uint64_t first, uint64_t count, ckd_error *err);
/* Like device_gather, but copies the parent's elements (`before`). */
ckd_status device_gather_before(const device_reader *r, void *to, uint64_t first, uint64_t count,
                                ckd_error *err);
/* Are the reader's elements at `data` contiguous, and aligned to their size, as kernels need them? */
static inline bool device_lies_well(const device_reader *r, const void *data) {
    return r->width == r->stride && (uintptr_t)data % r->element == 0;
}
/* A ckd_read_fn whose context is a device_reader. */
ckd_status device_read(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err);

/*
 * Reads at most DEVICE_STAGE bytes with one copy and one wait, through a lease just taken. *values stays
 * valid until the lease is used again. Errors: DEVICE.
 */
ckd_status device_read_small(const void **values, device_lease *lease, const void *from, uint64_t size,
                             ckd_error *err);

/*
 * Returns `size` bytes of device memory. Calls share one allocation, and its earlier contents are lost.
 * Errors: NOMEM, DEVICE.
 */
ckd_status device_memory(void **out, device_lease *lease, uint64_t size, ckd_error *err);

/* Returns the number of pieces in `size` bytes, which are hashed separately. */
static inline uint64_t device_hash_pages_of(uint64_t size) {
    return (size + DEVICE_HASH_PAGE - 1) / DEVICE_HASH_PAGE;
}
/*
 * Computes content hashes of stretches of device memory, and sets `to` in each of them. to: device memory for
 * one u64 per piece of all stretches. Errors: NOMEM, DEVICE.
 */
ckd_status device_hash(hash128 *out, device_lease *lease, device_pieces *of, size_t count, uint64_t *to,
                       ckd_error *err);

/* Copy between host and device memory by way of the pinned memory. Done when they return. */
ckd_status device_put(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err);
ckd_status device_get(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err);
/* Like device_put; work put on the caller's stream from then on comes after it. */
ckd_status device_write(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err);
/* Like device_write, with a lease of its own. Errors: those of device_take. */
ckd_status device_load(ckd_store *store, const ckd_device *device, void *to, const void *from, uint64_t size,
                       ckd_error *err);

#endif
