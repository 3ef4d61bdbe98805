/*
 * Decodes the values of a span of a tensor in their place in device memory, from blocks' chains, as many at a
 * time as memory allows. Blocks whose values lie scattered there are made elsewhere, and copied in stretches.
 * Internal to engine/: load/execute.c, save/parent.c.
 */
#ifndef ENGINE_DEVICE_SPAN_DECODE_H
#define ENGINE_DEVICE_SPAN_DECODE_H

#include "base/threads.h"
#include "engine/device/chain.h"

#define DEVICE_FILL_RUNS \
    1024u /* largest number of wanted stretches of a block, for regions that are cut in another way */

/*
 * Makes what to send for the block of `c`, with the worker's decoder: its chain (device_chain_make), or its values
 * (device_chain_values). values: it must be the values. Several threads call it.
 */
typedef ckd_status (*span_decode_fn)(void *context, device_chain *c, chain_sides *sides, bool values,
                                     uint32_t worker, ckd_error *err);

/* Zero-initialise; the caller sets the fields up to memory_size. */
typedef struct span_decode {
    thread_pool *pool;
    device_lease *lease;
    const view_tensor *tensor;
    const span *want;
    uint8_t *data; /* in device memory; aligned to the element's size */
    span_decode_fn make;
    void *context;
    /* Host memory that blocks may take on their way, in bytes, about; at least one block is. */
    uint64_t staging;
    /* Device memory for what is sent and for scratch. NULL: the lease's memory, as much as it takes. */
    void *memory;
    uint64_t memory_size;
    /* Results: numbers of blocks that the device made, and of blocks whose values the host sent. */
    uint64_t decoded, sent;
    uint64_t copied; /* elements of the span that the blocks have */
    bool bad;        /* something is not as it was saved; `data` is undefined */
    /* Private: */
    const view_block **blocks; /* of the current batch */
    device_chain *chains;
    size_t count;
    chain_sides sides;
    span_run runs[DEVICE_FILL_RUNS];
} span_decode;

/*
 * Tells whether a device decodes blocks of the span faster than the host. Removes blocks that have no part of
 * the span from the list. Also false if a block has too many stretches.
 */
bool device_can_decode_span(span_decode *f, const view_block **blocks, size_t *count);
/*
 * Decodes the span; done when it returns. Errors: those of `make`; NOMEM, DEVICE, UNSUPPORTED (the backend
 * lacks an operation).
 */
ckd_status device_decode_span(span_decode *f, const view_block **blocks, size_t count, ckd_error *err);

#endif
