/*
 * Batches of dense symbol streams, written or read in device memory. The batch carries the tables that codec/
 * makes to the kernels. Internal to engine/.
 *
 * The caller fills a batch stream by stream, gives it device memory and runs it. Results stay until the batch
 * is filled again. Not thread-safe.
 */
#ifndef ENGINE_DEVICE_DENSE_H
#define ENGINE_DEVICE_DENSE_H

#include "codec/entropy/symbols_parts.h"
#include "engine/device/device.h"

/* Zero-initialise; release with dense_batch_free. */
typedef struct dense_batch {
    bytes sent;       /* sent to the device: tables, payloads to be read, descriptions at the end */
    bytes streams;    /* a device_encoding or device_decoding each; addresses are offsets in device memory */
    bytes results;    /* uint32_t each: bits of the payload written, or whether reading failed */
    uint64_t scratch; /* bytes behind `sent` */
    uint32_t count, max;
} dense_batch;

void dense_batch_free(dense_batch *b);
void dense_batch_clear(dense_batch *b);

/* The integers of a stream, in device memory. */
typedef struct dense_integers {
    void *integers;          /* aligned to their width */
    const uint8_t *symbols;  /* for writing: finest symbols */
    const uint8_t *contexts; /* NULL: none */
    uint32_t n, shift;       /* shift: number of lowest bits that are not in the stream */
    uint64_t shared;         /* for reading: these bits */
} dense_integers;

/* Adds a stream to be written, whose payload takes at most `max` bytes. Errors: NOMEM. */
ckd_status dense_add_writing(dense_batch *b, const symbols_parts *parts, const dense_integers *of,
                             uint64_t max, ckd_error *err);
/*
 * Adds a stream to be read from `payload` in host memory, with `bits` bits below its mark. Errors: NOMEM;
 * CORRUPT (the stream needs contexts, and there are none).
 */
ckd_status dense_add_reading(dense_batch *b, const symbols_parts *parts, const dense_integers *of,
                             const void *payload, uint32_t bits, ckd_error *err);

/* Returns the most that such a stream adds to dense_batch_memory. */
uint64_t dense_reading_memory(const symbols_parts *parts, uint32_t bits);

/* Returns the device memory that the batch takes, aligned to 256 bytes. */
uint64_t dense_batch_memory(const dense_batch *b);
/* Write or read all streams; done when they return. Errors: DEVICE, NOMEM. */
ckd_status dense_write(dense_batch *b, device_lease *lease, void *memory, ckd_error *err);
ckd_status dense_read(dense_batch *b, device_lease *lease, void *memory, ckd_error *err);

/* Returns the payload of written stream i, in device memory. *size 0: it exceeds the announced maximum. */
const void *dense_payload(const dense_batch *b, uint32_t i, uint64_t *size);
/* Did stream i, which was read, end where it should? */
bool dense_read_well(const dense_batch *b, uint32_t i);

#endif
