/*
 * A copy of the trainer's data in device memory. The devices make it, in the order of the trainer's streams, so no
 * thread waits for it. It goes to memory of the device as far as it fits, and otherwise to pinned host memory. Small
 * sources (DEVICE_SMALL) go to the host through the device's memory, all in one transfer. Internal to engine/.
 *
 *   start    puts the copies on their own queue, behind what the trainer's streams have
 *   before   makes later work on the trainer's streams wait for the copies, of all groups or of one
 *   read     returns the location of the copy of one source
 *   sample   copies some bytes of some sources to the host
 *
 * One thread calls start and before; another one reads. Nobody may be reading when the next snapshot is started.
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
 * Bytes that a snapshot needs if it may take `room` bytes of each device's memory. on_one_device: the largest need of
 * any device. on_host: sources that do not fit on their device. carried: small sources, which also need host memory.
 */
typedef struct device_snapshot_bytes {
    uint64_t on_one_device, on_host, carried;
} device_snapshot_bytes;
device_snapshot_bytes device_snapshot_bytes_of(const device_source *sources, size_t count, uint64_t limit);

/*
 * Makes a snapshot. The caller owns the sources, which must outlive it. limit: bytes that may be taken of each device's
 * memory. Sources that do not fit go to host memory, and so do all sources of a device that has too little memory.
 * Errors: NOMEM, DEVICE.
 */
ckd_status device_snapshot_new(device_snapshot **out, const device_source *sources, size_t count,
                               uint64_t limit, ckd_error *err);
/*
 * Accepts NULL. Waits for copies in progress. In a child of the process that made it, frees only the child's own
 * memory.
 */
void device_snapshot_free(device_snapshot *s, bool in_child);
/*
 * Bytes held on devices and on the host. Small sources count in both. refused: bytes that fell back to the host because
 * a device had too little memory.
 */
typedef struct device_snapshot_size {
    uint64_t on_devices, on_host, refused;
} device_snapshot_size;
device_snapshot_size device_snapshot_sizes(const device_snapshot *s);

/* Starts copying all sources (again). Errors: DEVICE; then nothing of the snapshot may be read. */
ckd_status device_snapshot_start(device_snapshot *s, ckd_error *err);
/*
 * Makes the trainer's streams wait for the pending copies of a group, or of SNAPSHOT_ALL. If that fails, this thread
 * waits. Later work on these streams may then change the sources. Errors: DEVICE.
 */
ckd_status device_snapshot_fence(device_snapshot *s, uint32_t group, ckd_error *err);
/* Waits until all sources are copied and the small ones are on the host. Errors: DEVICE. */
ckd_status device_snapshot_wait(device_snapshot *s, ckd_error *err);

/*
 * Returns the copy of source i. It is complete in host memory (device->struct_size = 0), or on a device, in the order
 * of *device's stream. Valid until the next device_snapshot_start. Errors: DEVICE.
 */
ckd_status device_snapshot_read(const void **data, ckd_device *device, device_snapshot *s, size_t i,
                                ckd_error *err);

#define DEVICE_SAMPLE_MAX 4096u
/* Bytes of one source: `bytes` of them, at most DEVICE_SAMPLE_MAX, from byte `at` on. */
typedef struct device_sample {
    size_t source;
    uint64_t at;
    size_t bytes;
    void *to; /* host memory */
} device_sample;
/* Copies samples to the host, and waits for them. The thread that reads calls it. Errors: NOMEM, DEVICE. */
ckd_status device_snapshot_sample(device_snapshot *s, const device_sample *samples, size_t count,
                                  ckd_error *err);

#endif
