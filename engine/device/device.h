/*
 * Devices as the engine uses them: a queue of its own, behind and before what the caller's stream has, and two pieces of pinned memory through which
 * values travel, one while the other is worked on. Internal to engine/.
 */
#ifndef ENGINE_DEVICE_H
#define ENGINE_DEVICE_H

#include "engine/store/store.h"
#include "kernels/device_open.h"

#define DEVICE_STAGE (UINT64_C(8) << 20) /* bytes of a piece of pinned memory */
#define DEVICE_MIN_ELEMENTS \
    (UINT64_C(1) << 14) /* elements: a host has done with fewer before a device has begun */

typedef struct device_lease {
    struct device_lease *next;
    const device_backend *backend;
    device_queue queue;
    void *stream; /* the caller's, of whoever has taken the line */
    void *pinned[2];
    const void *reader; /* whose elements are in there; NULL: nobody's any more */
    void *memory;       /* of the device, for those who have taken the line; kept for the next ones */
    uint64_t memory_size;
} device_lease;

/*
 * One that nobody uses, or a new one: device_give_back. The caller's description says which device, and what is on its stream now comes before all that
 * is put on the line's queue. address: what will be read or written, which must be the device's. Errors: INVALID (it is the host's, or another
 * device's), DEVICE, NOMEM.
 */
ckd_status device_take(device_lease **out, ckd_store *store, const ckd_device *device, const void *address,
                       ckd_error *err);
/* INVALID: the address is the host's, or another device's. Errors: DEVICE. */
ckd_status device_check_address(const device_backend *backend, int device, const void *address,
                                ckd_error *err);
void device_give_back(ckd_store *store, device_lease *lease);
/* The same where nothing was put on its queue since that was waited for. */
void device_give_back_idle(ckd_store *store, device_lease *lease);
/* Of a store that is closed. */
void device_leases_close(ckd_store *store);

/* Waits for all on the queue. */
ckd_status device_finish(const device_lease *lease, ckd_error *err);

/* A tensor's region in the memory of a device, read from the beginning to the end: what comes next is already on its way. */
typedef struct device_reader {
    device_lease *lease;
    const uint8_t *data;
    const uint8_t *before; /* what the parent may have of the same elements, lying alike; NULL: not there */
    size_t element;
    uint64_t elements; /* of the region, or of some of its columns: */
    uint64_t end;      /* nothing from there on is to be read soon; at least what is asked for */
    uint64_t width,
        stride; /* so many elements of each row, which begin so many apart; width = elements: all */
    struct {
        uint64_t first, count;
    } piece[2]; /* what is in lease->pinned; of the one that is not current: or on its way there */
    int current;
} device_reader;
device_reader device_reader_of(device_lease *lease, const void *data, size_t element, uint64_t elements);
/* Of `width` columns from `first` on, in rows of `columns`; ends when `whole` does. */
device_reader device_reader_columns(const device_reader *whole, uint64_t first, uint64_t width,
                                    uint64_t columns);
/* So many elements from `first` on, one after the other, to another place in the device's memory: put on the queue. */
ckd_status device_gather(const device_reader *r, void *to, uint64_t first, uint64_t count, ckd_error *err);
/* The same of what lies there of the parent. */
ckd_status device_gather_before(const device_reader *r, void *to, uint64_t first, uint64_t count,
                                ckd_error *err);
/* Do the reader's elements, at `data`, lie one after the other, and at multiples of their size, as kernels want them? */
static inline bool device_lies_well(const device_reader *r, const void *data) {
    return r->width == r->stride && (uintptr_t)data % r->element == 0;
}
/* A ckd_read_fn, whose context is a device_reader. */
ckd_status device_read(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err);

/* At most DEVICE_STAGE bytes, by one copy and one wait, of a line just taken: valid until it is used for anything else. Errors: DEVICE. */
ckd_status device_read_small(const void **values, device_lease *lease, const void *from, uint64_t size,
                             ckd_error *err);

/* So much of the device's memory, the same for each call: what was in it is lost. Errors: NOMEM, DEVICE. */
ckd_status device_memory(void **out, device_lease *lease, uint64_t size, ckd_error *err);

/* Of so many bytes, hashes of pieces. */
static inline uint64_t device_hash_pages_of(uint64_t size) {
    return (size + DEVICE_HASH_PAGE - 1) / DEVICE_HASH_PAGE;
}
/* Content hashes of stretches of the device's memory (of each, `to` is set here). to: room there for as many u64 as all of them have pieces. Errors: NOMEM, DEVICE. */
ckd_status device_hash(hash128 *out, device_lease *lease, device_pieces *of, size_t count, uint64_t *to,
                       ckd_error *err);

/* Between host memory and the device's, by way of the pinned one; done when they return. */
ckd_status device_put(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err);
ckd_status device_get(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err);
/* device_put; what is put on the caller's stream from then on comes behind it. */
ckd_status device_write(device_lease *lease, void *to, const void *from, uint64_t size, ckd_error *err);
/* The same, by a line of its own. Errors: those of device_take. */
ckd_status device_load(ckd_store *store, const ckd_device *device, void *to, const void *from, uint64_t size,
                       ckd_error *err);

#endif
