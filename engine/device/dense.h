/*
 * Many dense symbol streams written or read at a time in the memory of a device: the tables that codec/ makes, carried to the kernels that go by them. Internal to
 * engine/.
 *
 * A batch is filled stream by stream, given memory of the device, and run; its results are there until it is filled anew. Not for several threads at a time.
 */
#ifndef ENGINE_DEVICE_DENSE_H
#define ENGINE_DEVICE_DENSE_H

#include "codec/entropy/symbols_parts.h"
#include "engine/device/device.h"

/* Zero-initialise; release with dense_batch_free. */
typedef struct dense_batch {
    bytes sent;    /* what goes to the device: tables, payloads to be read, and descriptions at the end */
    bytes streams; /* device_encoding or device_decoding each, places in memory counted from its beginning */
    bytes results; /* uint32_t each: bits of a payload written, or whether reading failed */
    uint64_t scratch; /* bytes behind what is sent */
    uint32_t count, max;
} dense_batch;

void dense_batch_free(dense_batch *b);
void dense_batch_clear(dense_batch *b);

/* A stream's integers in the device's memory. */
typedef struct dense_integers {
    void *integers;          /* aligned to their width */
    const uint8_t *symbols;  /* of writing: the finest */
    const uint8_t *contexts; /* NULL: none */
    uint32_t n, shift;       /* shift: lowest bits that are no part of the stream */
    uint64_t shared;         /* of reading: these bits */
} dense_integers;

/* Another stream to be written, whose payload takes at most `max` bytes. Errors: NOMEM. */
ckd_status dense_add_writing(dense_batch *b, const symbols_parts *parts, const dense_integers *of,
                             uint64_t max, ckd_error *err);
/* Another one to be read, from `payload` on the host, that has so many bits below its mark. Errors: NOMEM; INVALID (it needs contexts). */
ckd_status dense_add_reading(dense_batch *b, const symbols_parts *parts, const dense_integers *of,
                             const void *payload, uint32_t bits, ckd_error *err);

/* What such a stream adds to dense_batch_memory at most, wherever it stands. */
uint64_t dense_reading_memory(const symbols_parts *parts, uint32_t bits);

/* Of the device's memory, that the batch takes, aligned to 256 bytes. */
uint64_t dense_batch_memory(const dense_batch *b);
/* All streams; done when it returns. Errors: DEVICE, NOMEM. */
ckd_status dense_write(dense_batch *b, device_lease *lease, void *memory, ckd_error *err);
ckd_status dense_read(dense_batch *b, device_lease *lease, void *memory, ckd_error *err);

/* Of stream i that is written: its payload, in the device's memory, and its bytes; 0: more than was said. */
const void *dense_payload(const dense_batch *b, uint32_t i, uint64_t *size);
/* Of stream i that is read: did it end where it should? */
bool dense_read_well(const dense_batch *b, uint32_t i);

#endif
