/*
 * Weights that a device coded, kept in its memory as a decoder will give them. The next save is a delta on
 * them, so it need not decode them, nor send them to the device. Every user first compares their content
 * hashes with the parent's, so a reference may be old, but never wrong. Internal to engine/.
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
    void *memory;          /* device memory */
} device_reference;

/* Identifies a tensor and a span of it. The region is canonical. */
typedef struct device_reference_key {
    const char *tensor;
    ckd_dtype dtype;
    uint32_t ndim;
    span of;
} device_reference_key;

/* Takes the reference for the caller alone; device_reference_give returns it. NULL: there is none. */
device_reference *device_reference_take(ckd_store *store, int device, const device_reference_key *key);
void device_reference_give(ckd_store *store, device_reference *reference);
/*
 * Copies values in device memory, as they are after all work on the lease's queue, into a reference. It uses
 * *reference if the caller has taken one. Else it allocates memory within the store's limit
 * (device_reference_bytes). Returns when they are copied. *reference NULL: there is no room.
 */
ckd_status device_reference_keep(device_reference **reference, ckd_store *store, device_lease *lease,
                                 const device_reference_key *key, const void *values, ckd_error *err);
/* Frees the references of a store that is being closed. */
void device_references_close(ckd_store *store);

#endif
