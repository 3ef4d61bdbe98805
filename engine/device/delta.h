/*
 * Deltas of exact blocks, computed in batches in device memory: differences to the parent's values. stream.h
 * writes their streams, byte for byte as the codec does. Internal to engine/.
 *
 *   begin     takes device memory; finds which of the parent's values are there already
 *   put       sends the others
 *   count     turns differences into classes and counts them
 *   plan      (per block, on any thread) makes tables
 */
#ifndef ENGINE_DEVICE_DELTA_H
#define ENGINE_DEVICE_DELTA_H

#include "engine/device/stream.h"

typedef struct device_delta {
    uint64_t first, count; /* elements of the reader; set by the caller */
    hash128 before;        /* content hash of the parent's values; set by the caller */
    device_stream *stream; /* left: set by the caller, too, or because another kind of stream may be better */
    bool there;            /* the parent's values are on the device */
    const uint8_t *now, *previous;
    uint8_t *room, *residual, *contexts; /* room: memory for `previous` */
} device_delta;

/* Zero-initialise; release with device_deltas_free. */
typedef struct device_deltas {
    device_reader *r; /* f32, bf16 or f16 */
    ckd_dtype dtype;
    stream_batch *streams; /* the caller's; stream i belongs to block i */
    device_delta *blocks;
    uint32_t count, max;
} device_deltas;

void device_deltas_free(device_deltas *b);
/* Empties the batch, and sets its reader. Errors: NOMEM. */
ckd_status device_deltas_clear(device_deltas *b, stream_batch *streams, device_reader *r, ckd_dtype dtype,
                               uint32_t max, ckd_error *err);
/*
 * Adds a block if all blocks then take at most `max` bytes of device memory; always accepts the first one.
 * NULL: refused.
 */
device_delta *device_deltas_add(device_deltas *b, uint64_t first, uint64_t count, uint64_t max);

/* Errors of all these: DEVICE, NOMEM. */
ckd_status device_deltas_begin(device_deltas *b, ckd_error *err);
ckd_status device_deltas_put(device_deltas *b, device_delta *d, const void *previous, ckd_error *err);
ckd_status device_deltas_count(device_deltas *b, ckd_error *err);
void device_deltas_plan(const device_deltas *b, device_delta *d, symbols_workspace *w);
/* Fetches some of the block's differences: `size` bytes, `at` bytes from the first. */
ckd_status device_deltas_residual(const device_deltas *b, const device_delta *d, void *to, uint64_t at,
                                  uint64_t size, ckd_error *err);

#endif
