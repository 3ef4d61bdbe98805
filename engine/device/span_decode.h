/*
 * The values of a span of a tensor, made where they are to lie in the memory of a device: from blocks' chains, as many at a time as memory allows; blocks that lie
 * scattered there are made apart, and their stretches copied. Internal to engine/: load/device.c, save/parent.c.
 */
#ifndef ENGINE_DEVICE_SPAN_DECODE_H
#define ENGINE_DEVICE_SPAN_DECODE_H

#include "base/threads.h"
#include "engine/device/chain.h"

#define DEVICE_FILL_RUNS \
    1024u /* stretches of a block that are wanted, of a region that is cut in another way */

/*
 * What is sent of block `b`, by the worker's decoder: its chain (device_chain_make, with `sides` and `streams`), or its values (device_chain_values). values: these it has to be.
 * Called by several threads.
 */
typedef ckd_status (*span_decode_fn)(void *context, device_chain *c, chain_sides *sides, const view_block *b,
                                     bool streams, bool values, uint32_t worker, ckd_error *err);

/* Zero-initialise, and set: */
typedef struct span_decode {
    thread_pool *pool;
    device_lease *lease;
    const view_tensor *tensor;
    const span *want;
    uint8_t *data; /* the device's; a multiple of the element's size */
    span_decode_fn make;
    void *context;
    uint64_t
        staging; /* bytes that blocks on their way may take of the host's memory, about; at least one is */
    void *
        memory; /* of the device, for what is sent and worked with; NULL: the line's own, as much as it takes */
    uint64_t memory_size;
    /* What came of it: blocks that were made there, from the root of what was sent on, and those whose values the host sent. */
    uint64_t decoded, sent;
    uint64_t copied; /* elements of the span that the blocks have */
    bool bad;        /* something is not as it was saved, so that `data` is anything */
    /* its own: */
    const view_block **blocks; /* of this batch */
    device_chain *chains;
    size_t count;
    chain_sides sides;
    bool streams;
    span_run runs[DEVICE_FILL_RUNS];
} span_decode;

/*
 * Is there anything among the blocks of the tensor that may have a part of the span that a device does better? Those that have none leave the list. false, too, if one
 * has too many stretches.
 */
bool device_can_decode_span(span_decode *f, const view_block **blocks, size_t *count);
/* Done when it returns. Errors: those of `make`; NOMEM, DEVICE, UNSUPPORTED (the backend lacks an operation). */
ckd_status device_decode_span(span_decode *f, const view_block **blocks, size_t count, ckd_error *err);

#endif
