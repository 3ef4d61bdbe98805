/*
 * A copy of what a trainer holds in the memory of devices, made by the devices themselves: in the order of the trainer's streams, so that no thread waits
 * for it. It goes to memory of the device, as much of it as there is room for, and else to pinned memory of the host. What is small (DEVICE_SMALL) goes to the host by way of the device's
 * memory, all of it in one transfer. Internal to engine/.
 *
 *   start    the copies are put on a queue of their own, behind what the trainer's streams have
 *   before   what the trainer puts on its streams from then on waits for the copies, of all or of one group
 *   read     where the copy of one source is
 *
 * One thread starts, and calls before; another one reads. Nobody reads while the next one is started.
 */
#ifndef ENGINE_DEVICE_SNAPSHOT_H
#define ENGINE_DEVICE_SNAPSHOT_H

#include <stdbool.h>
#include <stddef.h>

#include "include/ckptdelta.h"

typedef struct device_source {
    const void *data; /* the trainer's, on the device; valid as long as the snapshot */
    uint64_t bytes;
    uint32_t group; /* below SNAPSHOT_AT_ONCE; SNAPSHOT_ALL means all */
    int device;
    void *stream; /* the trainer's */
} device_source;

typedef struct device_snapshot device_snapshot;

/*
 * What a snapshot of these takes if so much of each device's memory may be taken: of the device of which it takes most; of host memory, for what has no room there, and for what is small and
 * carried from there.
 */
typedef struct device_snapshot_bytes {
    uint64_t on_one_device, on_host, carried;
} device_snapshot_bytes;
device_snapshot_bytes device_snapshot_bytes_of(const device_source *sources, size_t count, uint64_t room);

/*
 * The sources are the caller's, and outlive it. room: bytes that may be taken of each device's memory. What does not fit there, and if the device has too little memory all of it, lies
 * in host memory. Errors: NOMEM, DEVICE.
 */
ckd_status device_snapshot_new(device_snapshot **out, const device_source *sources, size_t count,
                               uint64_t room, ckd_error *err);
/* Accepts NULL. Waits for copies under way; in a child of the process that made it, only memory is given back that is the child's. */
void device_snapshot_free(device_snapshot *s, bool in_child);
/* Bytes held on all devices, and in host memory (of what is small in both); the latter with what was to lie on a device that had too little memory (refused). */
typedef struct device_snapshot_size {
    uint64_t on_devices, on_host, refused;
} device_snapshot_size;
device_snapshot_size device_snapshot_sizes(const device_snapshot *s);

/* From now on all sources are copied (again). Errors: DEVICE; then nothing of it may be read. */
ckd_status device_snapshot_start(device_snapshot *s, ckd_error *err);
/*
 * The trainer's streams wait for what is still to be copied of a group, or of SNAPSHOT_ALL; where that fails, this thread does. Then their sources may be changed by what is put on
 * these streams. Errors: DEVICE.
 */
ckd_status device_snapshot_before(device_snapshot *s, uint32_t group, ckd_error *err);
/* Returns when all sources are copied, and small ones are on the host. Errors: DEVICE. */
ckd_status device_snapshot_wait(device_snapshot *s, ckd_error *err);

/*
 * What source i was: in host memory, and whole (device->struct_size = 0), or on a device, behind what is on *device's stream. Valid until the next
 * device_snapshot_start. Errors: DEVICE.
 */
ckd_status device_snapshot_read(const void **data, ckd_device *device, device_snapshot *s, size_t i,
                                ckd_error *err);

#endif
