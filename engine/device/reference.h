/*
 * What a decoder gives for weights that a device has coded, kept in its memory: the next save is a delta on them, and needs neither to decode
 * them nor to send them there. Whoever uses them compares their content hashes with the parent's before, so that what is kept here may be old, but never wrong.
 * Internal to engine/.
 */
#ifndef ENGINE_DEVICE_REFERENCE_H
#define ENGINE_DEVICE_REFERENCE_H

#include "engine/device/device.h"
#include "engine/common/region.h"

typedef struct device_reference {
    struct device_reference *next;
    int device;
    ckd_dtype dtype;
    char *tensor;
    ckd_region region;
    uint64_t first, count; /* of the region, in elements */
    void *memory;          /* the device's */
} device_reference;

/* Of which tensor, and where in it. The region is canonical. */
typedef struct device_reference_key {
    const char *tensor;
    ckd_dtype dtype;
    uint32_t ndim;
    span of;
} device_reference_key;

/* What is kept of it, for the caller alone; NULL: nothing. device_reference_give. */
device_reference *device_reference_take(ckd_store *store, int device, const device_reference_key *key);
void device_reference_give(ckd_store *store, device_reference *reference);
/*
 * Values in the line's device's memory, as they are behind all that is on the line's queue, become what is kept: in `reference`, if the caller has taken that, else in memory that is
 * allocated now, if the store's room for such (device_reference_bytes) has some left. Returns when they are copied. NULL: there is no room.
 */
ckd_status device_reference_keep(device_reference **reference, ckd_store *store, device_lease *lease,
                                 const device_reference_key *key, const void *values, ckd_error *err);
/* Of a store that is closed. */
void device_references_close(ckd_store *store);

#endif
