/*
 * Symbol streams of many blocks, planned from counts of a device and written there: the common part of deltas
 * (delta.h) and standalone blocks (standalone.h). Only counters that are not 0, and payloads, come to the
 * host. Internal to engine/.
 *
 * Device memory has two parts. The first holds integers, contexts and symbols, which stay. The second holds
 * the rest, which is needed until all streams are planned. Payloads then take its place.
 */
#ifndef ENGINE_DEVICE_STREAM_H
#define ENGINE_DEVICE_STREAM_H

#include "engine/device/dense.h"

typedef struct device_stream {
    bool left; /* not to be written, or no longer */
    uint64_t count;
    const uint8_t *integers, *contexts; /* contexts NULL: all are 0 */
    uint8_t *symbols;
    bool split;      /* SPLIT instead of CLASS; then: */
    unsigned bits;   /* number of bits below the symbols */
    uint64_t centre; /* of SPLIT: the bias */

    size_t counted;   /* offset of its counters in the batch's: device_classes.entries */
    uint32_t entries; /* number of these counters */
    symbols_parts *parts;
    bytes head;      /* bytes before the payload */
    size_t planned;  /* size of the stream, in bytes, as the codec estimates it */
    uint32_t number; /* in the dense batch */
} device_stream;

/* Zero-initialise; release with stream_batch_free. Not thread-safe, except for planning. */
typedef struct stream_batch {
    device_lease *lease;
    unsigned width;
    device_stream *streams;
    uint32_t count, max;
    /*
     * Bytes of all streams: `stays` in the first part of memory; in the second part `first` until they are
     * planned, and `then` while payloads are written.
     */
    uint64_t stays, first, then;
    uint8_t *memory, *next; /* next: free memory, for what is not needed once payloads are written */
    bytes counted;
    dense_batch dense;
} stream_batch;

void stream_batch_free(stream_batch *b);
/* Empties the batch, for at most `max` streams of integers of `width` bytes. Errors: NOMEM. */
ckd_status stream_batch_clear(stream_batch *b, device_lease *lease, unsigned width, uint32_t max,
                              ckd_error *err);
/*
 * Adds a stream of `count` integers. stays, first: bytes that its owner takes besides. NULL: the batch is
 * full, or all would take more than `limit` bytes of device memory. The first stream is always accepted.
 */
device_stream *stream_batch_add(stream_batch *b, uint64_t count, uint64_t stays, uint64_t first,
                                uint64_t limit);
/* Errors of all these: DEVICE, NOMEM. The second part of memory begins at b->next. */
ckd_status stream_batch_begin(stream_batch *b, ckd_error *err);
/* Takes memory at *at, and advances *at. Sizes are rounded up by stream_aligned. */
uint8_t *stream_take(uint8_t **at, uint64_t size);
uint64_t stream_aligned(uint64_t size);
/*
 * Finds `count` elements of the reader as an aligned contiguous array: in place, or else gathered at *next,
 * which it advances.
 */
ckd_status device_batch(const uint8_t **out, const device_reader *r, uint8_t **next, uint64_t first,
                        uint64_t count, ckd_error *err);
/* Makes and counts symbols. Drops streams with far too many different ones (`left`). */
ckd_status stream_batch_count(stream_batch *b, ckd_error *err);
/* Returns the counters as a table, which the caller frees. NULL: out of memory. */
uint32_t *stream_counts(symbols_counts *c, const stream_batch *b, const device_stream *s);
/* Keeps the tables and the head planned in the workspace's slot. Drops the stream if memory is short. */
void stream_keep_plan(device_stream *s, symbols_workspace *w, int slot);
ckd_status stream_batch_write(stream_batch *b, ckd_error *err);
/* Fetches a whole stream; empty if it takes more than its integers. */
ckd_status stream_batch_read(stream_batch *b, const device_stream *s, bytes *to, ckd_error *err);

#endif
