/* Declarations that only the files of engine/device/ use. */
#ifndef ENGINE_DEVICE_INTERNAL_H
#define ENGINE_DEVICE_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/device/device.h"

/* Waits for all work on the queue. */
ckd_status device_finish(const device_lease *lease, ckd_error *err);

void dense_batch_free(dense_batch *b);
void dense_batch_clear(dense_batch *b);

/* The integers of a stream, in device memory. */
typedef struct dense_integers {
    void *integers;          /* aligned to their width */
    const uint8_t *symbols;  /* for writing: finest symbols */
    const uint8_t *contexts; /* NULL: none */
    uint32_t n, shift;       /* shift: number of lowest bits that are not in the stream */
    uint64_t shared;         /* for reading: the value of those bits */
} dense_integers;

/* Adds a stream to be written, whose payload takes at most `max` bytes. Errors: NOMEM. */
ckd_status dense_add_writing(dense_batch *b, const symbols_parts *parts, const dense_integers *integers,
                             uint64_t max, ckd_error *err);
/*
 * Adds a stream to be read from `payload` in host memory, with `bits` bits below its mark. Errors: NOMEM;
 * CORRUPT (the stream needs contexts, and there are none).
 */
ckd_status dense_add_reading(dense_batch *b, const symbols_parts *parts, const dense_integers *integers,
                             const void *payload, uint32_t bits, ckd_error *err);

/* Returns the most that a stream to be read adds to dense_batch_memory. */
uint64_t dense_reading_memory(const symbols_parts *parts, uint32_t bits);

/* Returns the device memory that the batch takes, aligned to 256 bytes. */
uint64_t dense_batch_memory(const dense_batch *b);
/* Write or read all streams; done when they return. Errors: DEVICE, NOMEM. */
ckd_status dense_write(dense_batch *b, device_lease *lease, void *memory, ckd_error *err);
ckd_status dense_read(dense_batch *b, device_lease *lease, void *memory, ckd_error *err);

/* Returns the payload of written stream i, in device memory. *size 0: it exceeds the announced maximum. */
const void *dense_payload(const dense_batch *b, uint32_t i, uint64_t *size);
/* Tells whether stream i, which was read, ended where it should. */
bool dense_read_ok(const dense_batch *b, uint32_t i);

#define CHAIN_LINKS      64u  /* largest length of a chain; the host decodes the links below */
#define CHAIN_EXCEPTIONS 256u /* largest number of exceptions of a lossy block */

/* Returns the device memory that these chains take, hashes included. */
uint64_t device_chains_memory(const device_chain *chains, size_t count, const chain_sides *sides);
/*
 * Makes the values of all chains in their `to`, and compares their hashes. Sets `mismatch` of a chain if a hash differs
 * or a stream does not end where it should; its values are then undefined. memory: device_chains_memory bytes of device
 * memory, aligned to 256 bytes. Done when it returns. Errors: NOMEM, DEVICE; UNSUPPORTED (the backend lacks an
 * operation).
 */
ckd_status device_chains_run(device_lease *lease, void *memory, device_chain *chains, size_t count,
                             chain_sides *sides, ckd_error *err);

/*
 * Integers of lossy tiles, packed for the transfer to a device: each group takes as many bits per integer as its
 * largest (kernels/device.h). On loads the host packs after entropy decoding, which takes much longer. Internal to
 * engine/: chain.c. Thread-safe.
 */

/* Integers as a decoded block has them: int32, or bytes. No byte is -128. */
typedef struct pack_integers {
    const int32_t *q; /* NULL: use q8 */
    const int8_t *q8;
    uint64_t count;
    bool levels; /* second moments: LEVEL_ZERO may occur */
    const kernels *kernels;
} pack_integers;

/* Returns the size of the groups' heads in bytes. */
uint64_t device_pack_heads(uint64_t count);
/*
 * Writes the heads, device_pack_heads(count) bytes. Returns the bytes of heads and groups together, a
 * multiple of 16. 0: an integer takes more bits than a group may have, or there are too many integers.
 */
uint64_t device_pack_measure(uint32_t *heads, const pack_integers *from);
/* Writes the groups where the heads from device_pack_measure say. heads: aligned to 16 bytes. */
void device_pack(uint32_t *heads, const pack_integers *from);

#endif
