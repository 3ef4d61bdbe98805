/*
 * Deltas of exact blocks, many at a time, made in the memory of a device: differences to the parent's values, whose streams stream.h writes byte for byte
 * as the codec does. Internal to engine/.
 *
 *   begin     places in the line's memory; which of the parent's values are there already
 *   put       those that are not
 *   count     differences to classes, and how many there are of each
 *   plan      (of each block by itself, on any thread) tables
 */
#ifndef ENGINE_DEVICE_DELTA_H
#define ENGINE_DEVICE_DELTA_H

#include "engine/device/stream.h"

typedef struct device_delta {
    uint64_t first, count; /* elements of the reader; the caller's, as is: */
    hash128 before;        /* what the parent's values have */
    device_stream *stream; /* left: the caller's as well; or another kind of stream may be better */
    bool there;            /* the parent's values are on the device */
    const uint8_t *now, *previous;
    uint8_t *room, *residual, *contexts; /* room: for previous */
} device_delta;

/* Zero-initialise; release with device_deltas_free. */
typedef struct device_deltas {
    device_reader *r; /* f32, bf16 or f16 */
    ckd_dtype dtype;
    stream_batch *streams; /* the caller's; block i's is the i-th */
    device_delta *blocks;
    uint32_t count, max;
} device_deltas;

void device_deltas_free(device_deltas *b);
/* No blocks, of this reader. Errors: NOMEM. */
ckd_status device_deltas_clear(device_deltas *b, stream_batch *streams, device_reader *r, ckd_dtype dtype,
                               uint32_t max, ckd_error *err);
/* Another one, if all of them then take at most so many bytes of the device's memory; the first one is always taken. NULL: it is not. */
device_delta *device_deltas_add(device_deltas *b, uint64_t first, uint64_t count, uint64_t max);

/* Errors, of all of these: DEVICE, NOMEM. */
ckd_status device_deltas_begin(device_deltas *b, ckd_error *err);
ckd_status device_deltas_put(device_deltas *b, device_delta *d, const void *previous, ckd_error *err);
ckd_status device_deltas_count(device_deltas *b, ckd_error *err);
void device_deltas_plan(const device_deltas *b, device_delta *d, symbols_workspace *w);
/* Some of the block's differences: `size` bytes, `at` bytes from the first. */
ckd_status device_deltas_residual(const device_deltas *b, const device_delta *d, void *to, uint64_t at,
                                  uint64_t size, ckd_error *err);

#endif
