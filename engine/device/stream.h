/*
 * Symbol streams of many blocks, planned from what a device counts and written there: what deltas (delta.h) and values on their own (standalone.h) have in
 * common. To the host come counters that are not 0, and payloads. Internal to engine/.
 *
 * Memory of the device has two parts: integers, contexts and symbols, which stay; and the rest, which is needed until all is planned, and whose place payloads
 * take then.
 */
#ifndef ENGINE_DEVICE_STREAM_H
#define ENGINE_DEVICE_STREAM_H

#include "engine/device/dense.h"

typedef struct device_stream {
    bool left; /* it is not (or no longer) to be written */
    uint64_t count;
    const uint8_t *integers, *contexts; /* contexts NULL: all are 0 */
    uint8_t *symbols;
    bool split;      /* SPLIT, not CLASS; then: */
    unsigned bits;   /* below the symbols */
    uint64_t centre; /* of SPLIT: the bias */

    size_t counted;   /* where its counters begin, in the batch's: device_classes.entries */
    uint32_t entries; /* so many of them */
    symbols_parts *parts;
    bytes head;      /* before the payload */
    size_t planned;  /* bytes of the stream, as the codec expects them */
    uint32_t number; /* in the dense batch */
} device_stream;

/* Zero-initialise; release with stream_batch_free. Not for several threads at a time, but for planning. */
typedef struct stream_batch {
    device_lease *lease;
    unsigned width;
    device_stream *streams;
    uint32_t count, max;
    uint64_t stays, first,
        then; /* bytes that all take, in the two parts of memory; of the second until and while payloads are written */
    uint8_t *memory, *next; /* next: where what is not needed any more once payloads are written goes */
    bytes counted;
    dense_batch dense;
} stream_batch;

void stream_batch_free(stream_batch *b);
/* Nothing in it, for at most so many streams of integers of `width` bytes. Errors: NOMEM. */
ckd_status stream_batch_clear(stream_batch *b, device_lease *lease, unsigned width, uint32_t max,
                              ckd_error *err);
/*
 * Another one, of so many integers; stays, first: what its owner takes besides. NULL: there are as many as there may be, or all would take more than `limit` bytes
 * of the device's memory; the first one is always taken.
 */
device_stream *stream_batch_add(stream_batch *b, uint64_t count, uint64_t stays, uint64_t first,
                                uint64_t limit);
/* Errors, of all of these: DEVICE, NOMEM. The second part of memory begins at b->next. */
ckd_status stream_batch_begin(stream_batch *b, ckd_error *err);
/* Some of it. Sizes are rounded up to these: */
uint8_t *stream_take(uint8_t **at, uint64_t size);
uint64_t stream_aligned(uint64_t size);
/* Where some of the reader's elements are together: where they lie, or else where *next is, which then is behind them. */
ckd_status device_batch(const uint8_t **out, const device_reader *r, uint8_t **next, uint64_t first,
                        uint64_t count, ckd_error *err);
/* Symbols, and how many there are. Streams with far too many different ones are left. */
ckd_status stream_batch_count(stream_batch *b, ckd_error *err);
/* The counters in a table, the caller's to free; NULL: no memory. */
uint32_t *stream_counts(symbols_counts *c, const stream_batch *b, const device_stream *s);
/* As planned in the workspace's slot, tables and head are kept; no memory: it is left. */
void stream_keep_plan(device_stream *s, symbols_workspace *w, int slot);
ckd_status stream_batch_write(stream_batch *b, ckd_error *err);
/* A whole stream; empty if it takes more than its integers. */
ckd_status stream_batch_read(stream_batch *b, const device_stream *s, bytes *to, ckd_error *err);

#endif
