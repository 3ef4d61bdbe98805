/*
 * Integers of lossy tiles, packed for their way to a device: groups of as many bits as their largest takes (kernels/device.h). A load's host does
 * so behind its entropy decoder, in much less time than that takes. Internal to engine/: chain.c. Thread-safe.
 */
#ifndef ENGINE_DEVICE_PACK_H
#define ENGINE_DEVICE_PACK_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/device.h"

/* As a decoded block has them: int32, or bytes, of which no -128 is more than itself. */
typedef struct pack_integers {
    const int32_t *q; /* NULL: see few */
    const int8_t *few;
    uint64_t count;
    bool levels; /* of second moments: LEVEL_ZERO may be among them */
    const kernels *kernels;
} pack_integers;

/* Bytes of the groups' heads. */
uint64_t device_pack_heads(uint64_t count);
/*
 * The heads, of device_pack_heads(count) bytes. Returns how many bytes heads and groups have together, a multiple of 16; 0: an integer takes more bits than a
 * group may have, or there are too many.
 */
uint64_t device_pack_measure(uint32_t *heads, const pack_integers *from);
/* The groups, where the heads, made before, say. Aligned to 16 bytes. */
void device_pack(uint32_t *heads, const pack_integers *from);

#endif
