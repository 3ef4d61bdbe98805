/* Hashes: XXH3 from the xxHash library. They detect damage, not adversaries. data may be NULL if size is 0. */
#ifndef BASE_HASH_H
#define BASE_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hash128 {
    uint8_t bytes[16]; /* canonical XXH128: big-endian high half first, as xxhsum -H2 prints it */
} hash128;

/* XXH3-64, seed 0. */
uint64_t hash64(const void *data, size_t size);
/* XXH3-128, seed 0, canonical. */
hash128 hash128_of(const void *data, size_t size);
bool hash128_equal(const hash128 *a, const hash128 *b);

#define CONTENT_PAGE 4096
/*
 * Returns the content hash of a block's values: XXH3-128 over the little-endian XXH3-64 values of its consecutive 4 KiB
 * pages. The last page may be shorter. For size 0 it is the XXH3-128 of nothing. A device can hash the pages in
 * parallel.
 */
hash128 content_hash(const void *data, size_t size);

#endif
