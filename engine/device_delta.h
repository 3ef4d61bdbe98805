/*
 * Deltas of exact blocks, many at a time, made in the memory of a device: differences to the parent's values, their classes, and, once the codec has planned them from
 * counts, payloads byte for byte as the codec writes them. To the host come hashes, samples, counts and payloads. Internal to engine/.
 *
 *   begin     places in the line's memory; which of the parent's values are there already
 *   put       those that are not
 *   count     differences to classes, and how many there are of each
 *   plan      (of each block by itself, on any thread) tables
 *   write     payloads, which are there until the next batch begins
 */
#ifndef ENGINE_DEVICE_DELTA_H
#define ENGINE_DEVICE_DELTA_H

#include "codec/symbols_format.h"
#include "engine/device_dense.h"

typedef struct device_delta {
    uint64_t first, count; /* elements of the reader; the caller's, as are: */
    hash128 before;        /* what the parent's values have */
    bool left;             /* it is not (or no longer) to be coded; set by the caller or by plan */
    bool there;            /* the parent's values are on the device */

    const uint8_t *now, *previous;
    uint8_t *room, *residual, *contexts, *symbols; /* room: for previous */
    uint32_t *counts;
    uint64_t centre;
    size_t counted;   /* where its counters begin, in the batch's: device_classes.entries */
    uint32_t entries; /* so many of them */
    symbols_parts *parts;
    uint8_t header[SYMBOLS_MAX_HEADER];
    uint64_t bound; /* bytes that the payload may take */
    size_t planned; /* bytes of the stream, as the codec expects them */
    uint32_t stream;
} device_delta;

/* Zero-initialise; release with device_deltas_free. Not for several threads at a time, but for planning. */
typedef struct device_deltas {
    device_reader *r; /* f32, bf16 or f16 */
    ckd_dtype dtype;
    device_delta *blocks;
    uint32_t count, most;
    uint8_t *memory, *next; /* next: where what is not needed any more once payloads are written goes */
    uint64_t room;          /* bytes for that, and then for payloads */
    dense_batch dense;
    bytes counted;
} device_deltas;

void device_deltas_free(device_deltas *b);
/* No blocks, of this reader. Errors: NOMEM. */
ckd_status device_deltas_clear(device_deltas *b, device_reader *r, ckd_dtype dtype, uint32_t most,
                               ckd_error *err);
/* Another one, if all of them then take at most so many bytes of the device's memory; the first one is always taken. NULL: it is not. */
device_delta *device_deltas_add(device_deltas *b, uint64_t first, uint64_t count, uint64_t most);

/* Errors, of all of these: DEVICE, NOMEM. */
ckd_status device_deltas_begin(device_deltas *b, ckd_error *err);
ckd_status device_deltas_put(device_deltas *b, device_delta *d, const void *previous, ckd_error *err);
ckd_status device_deltas_count(device_deltas *b, ckd_error *err);
/* Sets planned; or left, if another kind of stream may be better. */
void device_deltas_plan(const device_deltas *b, device_delta *d, symbols_workspace *w);
ckd_status device_deltas_write(device_deltas *b, ckd_error *err);
/* The block's whole stream; empty if it takes more than its values. */
ckd_status device_deltas_stream(device_deltas *b, const device_delta *d, bytes *to, ckd_error *err);
/* Some of the block's differences: `size` bytes, `at` bytes from the first. */
ckd_status device_deltas_residual(const device_deltas *b, const device_delta *d, void *to, uint64_t at,
                                  uint64_t size, ckd_error *err);

#endif
