/* Packs four lanes at a time, each with every fourth integer: one vector on the host, 16 bytes on a device. */
#include "engine/device/internal.h"

#include <string.h>

#include "kernels/scalar_lattice.h"

#define LANES     4u
#define COUNT_MAX (UINT64_C(1) << 26) /* integers; heads have no bits for larger offsets */

typedef int32_t four_integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t four_words __attribute__((vector_size(4 * LANES)));
#define BYTES 16u
typedef int8_t some_bytes __attribute__((vector_size(BYTES)));

/* Returns a group's integers as bytes; copies to `scratch` if the group is not full. */
static const int8_t *bytes_of(int8_t *scratch, const pack_integers *from, uint64_t first) {
    uint64_t left = from->count - first;
    if (left >= DEVICE_GROUP) {
        return from->q8 + first;
    }
    memset(scratch, 0, DEVICE_GROUP);
    memcpy(scratch, from->q8 + first, (size_t)left);
    return scratch;
}

/*
 * Returns a group's integers; copies to `scratch` if they are not an array of int32, or not a full group.
 * Missing ones are 0.
 */
static const int32_t *group_of(int32_t *scratch, const pack_integers *from, uint64_t first) {
    uint64_t left = from->count - first;
    size_t n = left < DEVICE_GROUP ? (size_t)left : DEVICE_GROUP;
    if (from->q && n == DEVICE_GROUP) {
        return from->q + first;
    }
    if (from->q) {
        memset(scratch, 0, DEVICE_GROUP * sizeof(*scratch));
        memcpy(scratch, from->q + first, n * sizeof(*scratch));
        return scratch;
    }
    int8_t narrow[DEVICE_GROUP];
    from->kernels->widen_integers(scratch, bytes_of(narrow, from, first), DEVICE_GROUP);
    return scratch;
}

static uint32_t any_of(four_words v) {
    return v[0] | v[1] | v[2] | v[3];
}

/*
 * Returns the bits of the largest magnitude, plus one for the sign; 0: all are 0. With `levels`, LEVEL_ZERO fits any
 * width, as it is packed as the smallest number; else it counts as its value.
 */
static uint32_t width_of(const int32_t *q, bool levels) {
    const four_words may = (four_words){0} - (uint32_t)levels;
    four_words any = {0}, zeros = {0};
    for (size_t i = 0; i < DEVICE_GROUP; i += LANES) {
        four_words v;
        memcpy(&v, q + i, sizeof(v));
        four_words negative = (four_words)((four_integers)v >> 31),
                   zero = (four_words)(v == (uint32_t)LEVEL_ZERO) & may;
        any |= ((v ^ negative) - negative) & ~zero;
        zeros |= zero;
    }
    uint32_t largest = any_of(any);
    return largest ? scalar_bit_length(largest) + 1 : (any_of(zeros) ? 1 : 0);
}

static uint32_t width_of_bytes(const int8_t *q8) {
    some_bytes any = {0};
    uint64_t both[2];
    for (size_t i = 0; i < DEVICE_GROUP; i += BYTES) {
        some_bytes v;
        memcpy(&v, q8 + i, sizeof(v));
        some_bytes negative = v < 0;
        any |= (v ^ negative) - negative;
    }
    memcpy(both, &any, sizeof(both));
    uint64_t all = both[0] | both[1];
    all |= all >> 32;
    all |= all >> 16;
    uint32_t largest = (all | all >> 8) & UINT8_MAX;
    return largest ? scalar_bit_length(largest) + 1 : 0;
}

uint64_t device_pack_heads(uint64_t count) {
    uint64_t groups = (count + DEVICE_GROUP - 1) / DEVICE_GROUP;
    return (groups * sizeof(uint32_t) + 15) / 16 * 16;
}

uint64_t device_pack_measure(uint32_t *heads, const pack_integers *from) {
    int32_t scratch[DEVICE_GROUP];
    int8_t narrow[DEVICE_GROUP];
    uint64_t size = device_pack_heads(from->count);
    if (from->count > COUNT_MAX) {
        return 0;
    }
    memset(heads, 0, (size_t)size);
    for (uint64_t first = 0; first < from->count; first += DEVICE_GROUP) {
        uint32_t width = from->q ? width_of(group_of(scratch, from, first), from->levels)
                                 : width_of_bytes(bytes_of(narrow, from, first));
        if (width > DEVICE_WIDTH_MAX) {
            return 0;
        }
        heads[first / DEVICE_GROUP] = (uint32_t)(size / 16) << DEVICE_WIDTH_BITS | width;
        size += width * DEVICE_GROUP / 8;
    }
    return size;
}

static void pack_group(uint32_t *to, const int32_t *q, uint32_t width, bool levels) {
    const four_words mask = (four_words){0} + ((UINT32_C(1) << width) - 1);
    const four_words min = levels ? (mask >> 1) + 1 : (four_words){0};
    four_words word = {0};
    uint32_t used = 0;
    for (size_t i = 0; i < DEVICE_GROUP; i += LANES) {
        four_words v;
        memcpy(&v, q + i, sizeof(v));
        v = (v & mask) | (min & (four_words)(v == (uint32_t)LEVEL_ZERO));
        word |= v << used;
        used += width;
        if (used >= 32) {
            memcpy(to, &word, sizeof(word));
            to += LANES;
            used -= 32;
            word = v >> (width - used); /* bits that had no room; if there are none, the shift clears all */
        }
    }
}

void device_pack(uint32_t *heads, const pack_integers *from) {
    int32_t scratch[DEVICE_GROUP];
    for (uint64_t first = 0; first < from->count; first += DEVICE_GROUP) {
        uint32_t head = heads[first / DEVICE_GROUP], width = head & ((1u << DEVICE_WIDTH_BITS) - 1);
        if (width) {
            pack_group(heads + LANES * (head >> DEVICE_WIDTH_BITS), group_of(scratch, from, first), width,
                       from->levels);
        }
    }
}
