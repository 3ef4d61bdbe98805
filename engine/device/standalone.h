/*
 * Exact blocks on their own, many at a time, made in the memory of a device: integers with their signs turned to the end, levels of rows and columns as the host chooses
 * them from sums, and streams byte for byte as the codec writes them (stream.h). Internal to engine/.
 */
#ifndef ENGINE_DEVICE_STANDALONE_H
#define ENGINE_DEVICE_STANDALONE_H

#include "engine/device/stream.h"

typedef struct device_standalone {
    uint64_t first, count; /* elements of the reader; the caller's, as is: */
    symbols_grid grid;
    device_stream *stream;
    const uint8_t *now;
    uint8_t *integers, *contexts;
    symbols_splitting split;
    symbols_lines lines;
    size_t sums, levels; /* in the batch's: of lines */
    bool chosen;         /* levels */
} device_standalone;

/* Zero-initialise; release with device_standalones_free. */
typedef struct device_standalones {
    device_reader *r; /* f32, bf16 or f16 */
    ckd_dtype dtype;
    stream_batch *streams; /* the caller's; block i's is the i-th */
    device_standalone *blocks;
    uint32_t count, max;
    bytes sums, levels;
} device_standalones;

void device_standalones_free(device_standalones *b);
/* No blocks, of this reader. Errors: NOMEM. */
ckd_status device_standalones_clear(device_standalones *b, stream_batch *streams, device_reader *r,
                                    ckd_dtype dtype, uint32_t max, ckd_error *err);
/* Another one, if all of them then take at most so many bytes of the device's memory; the first one is always taken. NULL: it is not. */
device_standalone *device_standalones_add(device_standalones *b, uint64_t first, uint64_t count,
                                          uint64_t max);
/* From values to counts. Errors: DEVICE, NOMEM. */
ckd_status device_standalones_count(device_standalones *b, symbols_workspace *w, ckd_error *err);
/* Of each block by itself, on any thread. */
void device_standalones_plan(const device_standalones *b, device_standalone *d, symbols_workspace *w);

#endif
