/*
 * One-shot zstd frames: indexes, heads, measures. The contexts (100 KiB to a few MiB each) belong to the process. One
 * of each kind is kept for the next caller, so successive saves allocate none. Thread-safe and lock-free, so a forked
 * child may continue to use it. Internal to codec/.
 */
#ifndef CODEC_ZSTD_ONCE_H
#define CODEC_ZSTD_ONCE_H

#include <stddef.h>

#include "base/error.h"

/* Largest size of a frame of `size` bytes. */
size_t zstd_once_bound(size_t size);
/*
 * Compresses into one frame in `to`, which has capacity for the bound. Returns its size; 0: out of memory, the only
 * possible error.
 */
size_t zstd_once_pack(void *to, size_t capacity, const void *from, size_t size, int level);
/*
 * Decompresses exactly one frame, which must state the size `size` and have no bytes behind it. Errors: CORRUPT, NOMEM;
 * the caller writes the message.
 */
ckd_status zstd_once_unpack(void *to, size_t size, const void *from, size_t packed);

#endif
