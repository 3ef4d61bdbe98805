/*
 * Exact blocks on their own, many at a time, made in the memory of a device: integers with their signs turned to the end, levels of rows and columns as the host chooses
 * them from sums, and streams byte for byte as the codec writes them (device_stream.h). Internal to engine/.
 */
#ifndef ENGINE_DEVICE_ALONE_H
#define ENGINE_DEVICE_ALONE_H

#include "engine/device/device_stream.h"

typedef struct device_alone {
    uint64_t first, count; /* elements of the reader; the caller's, as is: */
    symbols_grid grid;
    device_stream *stream;
    const uint8_t *now;
    uint8_t *integers, *contexts;
    symbols_splitting split;
    symbols_lines lines;
    size_t sums, levels; /* in the batch's: of lines */
    bool chosen;         /* levels */
} device_alone;

/* Zero-initialise; release with device_alones_free. */
typedef struct device_alones {
    device_reader *r; /* f32, bf16 or f16 */
    ckd_dtype dtype;
    stream_batch *streams; /* the caller's; block i's is the i-th */
    device_alone *blocks;
    uint32_t count, most;
    bytes sums, levels;
} device_alones;

void device_alones_free(device_alones *b);
/* No blocks, of this reader. Errors: NOMEM. */
ckd_status device_alones_clear(device_alones *b, stream_batch *streams, device_reader *r, ckd_dtype dtype,
                               uint32_t most, ckd_error *err);
/* Another one, if all of them then take at most so many bytes of the device's memory; the first one is always taken. NULL: it is not. */
device_alone *device_alones_add(device_alones *b, uint64_t first, uint64_t count, uint64_t most);
/* From values to counts. Errors: DEVICE, NOMEM. */
ckd_status device_alones_count(device_alones *b, symbols_workspace *w, ckd_error *err);
/* Of each block by itself, on any thread. */
void device_alones_plan(const device_alones *b, device_alone *d, symbols_workspace *w);

#endif
