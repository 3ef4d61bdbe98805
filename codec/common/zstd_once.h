/*
 * Frames of zstd that are packed or unpacked at once: indexes, heads, measures. The contexts, 100 KiB to a few MiB each, are the process's: one of each kind waits
 * for the next one who needs it, whoever that is, so that saves that follow each other allocate none. Thread-safe; without locks, so that a forked child
 * may go on. Internal to codec/.
 */
#ifndef CODEC_ZSTD_ONCE_H
#define CODEC_ZSTD_ONCE_H

#include <stddef.h>

#include "base/error.h"

/* Bytes that packing so many may take. */
size_t zstd_once_bound(size_t size);
/* One frame, in `to`, which has room for the bound; returns its size. 0: out of memory, of what can be wrong. */
size_t zstd_once_pack(void *to, size_t room, const void *from, size_t size, int level);
/* Exactly one frame that states its size, `size`: no byte of it is without meaning. CORRUPT, NOMEM; the caller says what of. */
ckd_status zstd_once_unpack(void *to, size_t size, const void *from, size_t packed);

#endif
