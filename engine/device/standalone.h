/*
 * Standalone exact blocks, coded in batches in device memory. Integers have their signs rotated to the end.
 * The host chooses the levels of rows and columns from sums. stream.h writes the streams, byte for byte as
 * the codec does. Internal to engine/.
 */
#ifndef ENGINE_DEVICE_STANDALONE_H
#define ENGINE_DEVICE_STANDALONE_H

#include "engine/device/stream.h"

typedef struct device_standalone {
    uint64_t first, count; /* elements of the reader; the caller sets them and the grid */
    symbols_grid grid;
    device_stream *stream;
    const uint8_t *now;
    uint8_t *integers, *contexts;
    symbols_splitting split;
    symbols_lines lines;
    size_t sums, levels; /* offsets of its lines in the batch's arrays */
    bool chosen;         /* levels are used */
} device_standalone;

/* Zero-initialise; release with device_standalones_free. */
typedef struct device_standalones {
    device_reader *r; /* f32, bf16 or f16 */
    ckd_dtype dtype;
    stream_batch *streams; /* the caller's; stream i belongs to block i */
    device_standalone *blocks;
    uint32_t count, max;
    bytes sums, levels;
} device_standalones;

void device_standalones_free(device_standalones *b);
/* Empties the batch, and sets its reader. Errors: NOMEM. */
ckd_status device_standalones_clear(device_standalones *b, stream_batch *streams, device_reader *r,
                                    ckd_dtype dtype, uint32_t max, ckd_error *err);
/*
 * Adds a block if all blocks then take at most `max` bytes of device memory; always accepts the first one.
 * NULL: refused.
 */
device_standalone *device_standalones_add(device_standalones *b, uint64_t first, uint64_t count,
                                          uint64_t max);
/* Goes from values to counts of symbols. Errors: DEVICE, NOMEM. */
ckd_status device_standalones_count(device_standalones *b, symbols_workspace *w, ckd_error *err);
/* Plans the stream of one block; any thread may call it. */
void device_standalones_plan(const device_standalones *b, device_standalone *d, symbols_workspace *w);

#endif
