/*
 * Integers of lossy tiles, packed for the way to a device: each group takes as many bits per integer as its
 * largest (kernels/device.h). On loads the host packs after entropy decoding, in much less time than that
 * takes. Internal to engine/: chain.c. Thread-safe.
 */
#ifndef ENGINE_DEVICE_PACK_H
#define ENGINE_DEVICE_PACK_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/device.h"

/* Integers as a decoded block has them: int32, or bytes. No byte is -128. */
typedef struct pack_integers {
    const int32_t *q; /* NULL: use few */
    const int8_t *few;
    uint64_t count;
    bool levels; /* second moments: LEVEL_ZERO may occur */
    const kernels *kernels;
} pack_integers;

/* Returns the bytes of the groups' heads. */
uint64_t device_pack_heads(uint64_t count);
/*
 * Writes the heads, device_pack_heads(count) bytes. Returns the bytes of heads and groups together, a
 * multiple of 16. 0: an integer takes more bits than a group may have, or there are too many integers.
 */
uint64_t device_pack_measure(uint32_t *heads, const pack_integers *from);
/* Writes the groups where the heads, made before, say. Aligned to 16 bytes. */
void device_pack(uint32_t *heads, const pack_integers *from);

#endif
