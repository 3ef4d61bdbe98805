/*
 * Values of blocks that a load will need again. A block qualifies if the caller, or a block that was cut differently,
 * needed only a part of it. It also qualifies if other tensors of the checkpoint are built from it. An entry is dropped
 * after its last use, and its memory serves the next one. Beyond the budget, the least recently used are evicted. While
 * one worker decodes a block, the others wait for it. Internal to engine/; thread-safe.
 */
#ifndef ENGINE_VALUES_STORE_H
#define ENGINE_VALUES_STORE_H

#include <pthread.h>
#include <stdbool.h>

#include "codec/chunk/chunk.h"

#define VALUES_STORE_BUCKETS 4096u
#define VALUES_USES_UNKNOWN  UINT32_MAX

typedef struct stored_values {
    const record *record;
    void *values;
    uint64_t size;              /* of its memory: the values, or more */
    uint32_t pins;              /* current uses; only unpinned entries are evicted */
    uint32_t uses;              /* uses that are left; VALUES_USES_UNKNOWN: it stays until it is evicted */
    bool filling;               /* a worker is decoding it */
    struct stored_values *next; /* in its bucket */
    struct stored_values *newer, *older; /* by last use */
} stored_values;

typedef struct values_store {
    pthread_mutex_t mutex;
    pthread_cond_t filled;
    uint64_t bytes, limit;
    stored_values *buckets[VALUES_STORE_BUCKETS];
    stored_values *newest, *oldest;
    stored_values *spare; /* dropped entries, whose memory serves new ones; their sizes count in `bytes` */
} values_store;

void values_store_init(values_store *s, uint64_t limit);
/* Changes the limit. Lowering it evicts unpinned entries. */
void values_store_set_limit(values_store *s, uint64_t limit);
void values_store_free(values_store *s);

/*
 * Pins a block's entry until values_store_release. NULL: it is not here, and there is no space for it. *must_fill: the
 * caller must fill in the values (r->raw_size bytes) and call values_store_filled first. uses: how often the block will
 * be claimed, this time included, or VALUES_USES_UNKNOWN.
 *
 * floor: the first, in the order of values_store_before, of the blocks that the caller is filling now; NULL: none. The
 * call waits for a block that another worker is filling only if that block comes before it. So waits cannot form a
 * circle, even if damaged files state wrong depths.
 */
stored_values *values_store_claim(values_store *s, bool *must_fill, const record *r, uint32_t uses,
                                  const record *floor);
/* A total order in which a block comes after those that it builds on: deltas have a greater depth, copies the same. */
bool values_store_before(const record *a, const record *b);
/* good: false if decoding failed; the entry is then released and removed. */
void values_store_filled(values_store *s, stored_values *v, bool good);
void values_store_release(values_store *s, stored_values *v);

#endif
